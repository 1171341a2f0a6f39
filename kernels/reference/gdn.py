"""Gated delta net: short causal convolution, decay and write strength, the delta rule token by token.

Contract: `ops.Kernels.gdn`. The decay comes before the write, the read-out uses the updated state, the output gate is
a logistic. Cost: per token and value head four passes over a (D, D) matrix.
"""

from __future__ import annotations

import numpy as np

from strata.kernels.check import check, check_segments
from strata.kernels.ops import F32, I32, Gdn
from strata.kernels.reference.scalar import F64, rms, sigmoid, silu, softplus


def gdn(w: Gdn, p: F32, z: F32, b: F32, a: F32, segments: I32, conv: F32, state: F32, eps: float) -> F32:
    """p (n, 2*K*D + V*D), z (n, V*D), b and a (n, V) -> (n, V*D); `conv` and `state` advance in place."""
    size = check(
        w_a=(w.a, "V", np.float32),
        w_dt=(w.dt, "V", np.float32),
        w_norm=(w.norm, "D", np.float32),
        p=(p, "n channels", np.float32),
        w_conv=(w.conv, "channels kernel", np.float32),
        z=(z, "n V*D", np.float32),
        b=(b, "n V", np.float32),
        a=(a, "n V", np.float32),
        conv=(conv, "slots kept channels", np.float32),
        state=(state, "slots V D D", np.float32),
    )
    heads, d, n = size["V"], size["D"], size["n"]
    key_heads, rest = divmod(size["channels"] - heads * d, 2 * d)
    if rest or key_heads < 1 or heads % key_heads or size["kept"] != size["kernel"] - 1:
        raise ValueError(f"p {p.shape}, conv {conv.shape} do not fit {heads} value heads of {d}, w.conv {w.conv.shape}")
    check_segments(segments, n, size["slots"])
    decay = np.exp(w.a * softplus(a.astype(np.float64) + w.dt))
    beta = sigmoid(b.astype(np.float64))
    out = np.empty((n, heads, d))
    for slot, begin, end in segments:
        c = _convolve(w.conv, p[begin:end], conv[slot])
        q, k, v = np.split(c, [key_heads * d, 2 * key_heads * d], axis=1)
        # Value head j uses key head j mod K: the keys repeat as a whole, not each one V / K times.
        q = np.tile(_unit(q.reshape(-1, key_heads, d)) / np.sqrt(d), (1, heads // key_heads, 1))
        k = np.tile(_unit(k.reshape(-1, key_heads, d)), (1, heads // key_heads, 1))
        s = state[slot].astype(np.float64)
        out[begin:end] = _delta_rule(q, k, v.reshape(-1, heads, d), decay[begin:end], beta[begin:end], s)
        state[slot] = s
    y = rms(out, eps) * w.norm * sigmoid(z.astype(np.float64)).reshape(n, heads, d)
    return y.reshape(n, heads * d).astype(np.float32)


def _convolve(w: F32, p: F32, kept: F32) -> F64:
    """silu of the causal depthwise convolution of p (t, channels); `kept` holds the inputs before it, oldest first."""
    kernel, t = w.shape[1], len(p)
    inputs = np.concatenate([kept, p])
    kept[...] = inputs[t:]
    return silu(sum((inputs[j : j + t] * w[:, j].astype(np.float64) for j in range(kernel)), np.zeros(p.shape)))


def _unit(x: F64) -> F64:
    """x / |x| over the last axis; the epsilon is inside the root and under a sum, not a mean."""
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)


def _delta_rule(q: F64, k: F64, v: F64, decay: F64, beta: F64, s: F64) -> F64:
    """q, k, v (t, V, D), decay and beta (t, V) -> (t, V, D); the state s (V, D_k, D_v) advances in place."""
    out = np.empty_like(v)
    for t in range(len(q)):
        s *= decay[t, :, None, None]
        error = v[t] - (k[t, :, None, :] @ s)[:, 0]
        s += k[t, :, :, None] * (beta[t, :, None] * error)[:, None, :]
        out[t] = (q[t, :, None, :] @ s)[:, 0]
    return out

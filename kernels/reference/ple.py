"""Per-layer n-gram embedding: hash the last tokens to table rows, gate them by the residual, convolve, add.

Contracts: `ops.Kernels.ple_rows`, `ops.Kernels.ple`. The hash is 64-bit integer arithmetic: multipliers of 45 bits
times ids of 18 bits do not fit a float64. An eos cuts the n-grams; it does not clear the convolution.
"""

from __future__ import annotations

import numpy as np

from strata.kernels.check import check, check_segments
from strata.kernels.ops import F32, I32, I64, Ple
from strata.kernels.reference.linear import dequantize, linear
from strata.kernels.reference.norm import rms_norm
from strata.kernels.reference.scalar import F64, rms, sigmoid, silu


def ple_rows(w: Ple, tokens: I32, segments: I32, history: I32) -> I64:
    """Table rows of n tokens, int64 (n, heads): per order n = 2..N the hashes of one n-gram, orders ascending.

    `history` (slots, N - 1) holds the ids before the next token, oldest first, and advances in place.
    """
    size = check(
        multipliers=(w.multipliers, "N", np.uint64),
        sizes=(w.sizes, "heads", np.uint64),
        offsets=(w.offsets, "heads", np.uint64),
        tokens=(tokens, "n", np.int32),
        history=(history, "slots before", np.int32),
    )
    order = size["N"]
    if size["before"] != order - 1 or size["heads"] % (order - 1):
        raise ValueError(f"history must be (slots, {order - 1}), got {history.shape}; {size['heads']} heads")
    check_segments(segments, size["n"], size["slots"])
    per_order = size["heads"] // (order - 1)
    rows = np.empty((size["n"], size["heads"]), np.uint64)
    for slot, begin, end in segments:
        context = _context(np.concatenate([history[slot], tokens[begin:end]]), order, w.eos)
        history[slot] = np.concatenate([history[slot], tokens[begin:end]])[-(order - 1) :]
        hashed = context[:, 0].astype(np.uint64) * w.multipliers[0]
        for n in range(2, order + 1):
            hashed = hashed ^ (context[:, n - 1].astype(np.uint64) * w.multipliers[n - 1])
            heads = slice((n - 2) * per_order, (n - 1) * per_order)
            rows[begin:end, heads] = hashed[:, None] % w.sizes[heads] + w.offsets[heads]
    return rows.astype(np.int64)


def _context(ids: I32, order: int, eos: int) -> I32:
    """(order - 1) ids of history and t tokens -> (t, order): each token and the ids before it as the hash sees them."""
    t = len(ids) - (order - 1)
    context = np.empty((t, order), np.int32)
    context[:, 0] = ids[order - 1 :]
    cut = np.zeros(t, bool)
    for back in range(1, order):
        before = ids[order - 1 - back : order - 1 - back + t]
        cut |= before == eos
        context[:, back] = np.where(cut, eos, before)
    return context


def ple(w: Ple, x: F32, rows: I64, segments: I32, conv: F32, eps: float) -> None:
    """x (n, C, H) in place: x + p + d. `conv` (slots, (kernel - 1) * N, C*H) advances in place, oldest first."""
    size = check(
        x=(x, "n C H", np.float32),
        norm_key=(w.norm_key, "C H", np.float32),
        norm_query=(w.norm_query, "C H", np.float32),
        norm_conv=(w.norm_conv, "C H", np.float32),
        w_conv=(w.conv, "C*H kernel", np.float32),
        rows=(rows, "n heads", np.int64),
        conv=(conv, "slots kept C*H", np.float32),
    )
    n, dilation = size["n"], len(w.multipliers)
    if size["kept"] != (size["kernel"] - 1) * dilation:
        raise ValueError(f"conv must keep {(size['kernel'] - 1) * dilation} inputs, got {conv.shape}")
    check_segments(segments, n, size["slots"])
    e = dequantize(w.table, rows.reshape(-1)).reshape(n, -1)
    key, value = linear([w.key, w.value], e)
    query = rms_norm(x, w.norm_query, eps).astype(np.float64)
    s = (rms_norm(key.reshape(x.shape), w.norm_key, eps) * query).sum(-1) / np.sqrt(size["H"])
    gamma = sigmoid(np.sign(s) * np.sqrt(np.maximum(np.abs(s), 1e-6)))
    p = gamma[:, :, None] * value[:, None, :]
    f = (rms(p, eps) * w.norm_conv).reshape(n, -1).astype(np.float32)
    for slot, begin, end in segments:
        d = _convolve(w.conv, f[begin:end], conv[slot], dilation)
        x[begin:end] += (p[begin:end] + d.reshape(end - begin, *x.shape[1:])).astype(np.float32)


def _convolve(w: F32, f: F32, kept: F32, dilation: int) -> F64:
    """silu of the causal depthwise convolution of f (t, C*H) with gaps; `kept` holds the inputs before it."""
    kernel, t = w.shape[1], len(f)
    inputs = np.concatenate([kept, f])
    kept[...] = inputs[t:]
    taps = (inputs[j * dilation : j * dilation + t] * w[:, j].astype(np.float64) for j in range(kernel))
    return silu(sum(taps, np.zeros(f.shape)))

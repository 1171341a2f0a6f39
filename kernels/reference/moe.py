"""Mixture of experts: router, the picked experts, the shared expert. Contracts: `ops.Kernels.route`, `ops.Kernels.moe`.

Cost: each expert that any row picked is dequantised once a call.
"""

from __future__ import annotations

import numpy as np

from strata.kernels.check import check
from strata.kernels.formats import Weight
from strata.kernels.ops import F32, I32, MAX_TOP_K, Moe
from strata.kernels.reference.linear import linear
from strata.kernels.reference.scalar import sigmoid, silu


def route(logits: F32, used: int) -> tuple[I32, F32]:
    """logits (n, E) -> the `used` best experts by falling logit (equal: the lower index), weights softmax over them."""
    size = check(logits=(logits, "n E", np.float32))
    if not 1 <= used <= min(size["E"], MAX_TOP_K):
        raise ValueError(f"used must be in 1 to {min(size['E'], MAX_TOP_K)}, got {used}")
    experts = np.argsort(-logits, axis=1, kind="stable")[:, :used]
    picked = np.take_along_axis(logits, experts, axis=1).astype(np.float64)
    e = np.exp(picked - picked[:, :1])
    return experts.astype(np.int32), (e / e.sum(1, keepdims=True)).astype(np.float32)


def moe(w: Moe, x: F32, used: int) -> F32:
    """x (n, H) -> (n, H): the weighted sum of the picked experts, plus the shared expert behind its own gate."""
    check(x=(x, "n H", np.float32))
    logits, shared_gate = linear([w.router, w.shared_router], x)
    experts, weights = route(logits, used)
    outputs = np.empty((len(x), used, x.shape[1]))
    for e in np.unique(experts):
        row, rank = np.nonzero(experts == e)
        outputs[row, rank] = _expert(w.gate.expert(e), w.up.expert(e), w.down.expert(e), x[row])
    y = (weights.astype(np.float64)[:, :, None] * outputs).sum(1)
    shared = _expert(w.shared_gate, w.shared_up, w.shared_down, x)
    return (y + sigmoid(shared_gate.astype(np.float64)) * shared).astype(np.float32)


def _expert(gate: Weight, up: Weight, down: Weight, x: F32) -> F32:
    """down(silu(gate x) * (up x))."""
    g, u = linear([gate, up], x)
    return linear([down], (silu(g.astype(np.float64)) * u).astype(np.float32))[0]

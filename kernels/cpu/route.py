"""The experts of a row: the best logits and their softmax. Contract: `ops.Kernels.route`.

Cost   one pass over the logits of a row with an insertion into a short sorted list
"""

from __future__ import annotations

import numpy as np
from numba import njit

from strata.kernels.check import check, require
from strata.kernels.cpu.math import JIT, exp_f32
from strata.kernels.ops import F32, I32, MAX_TOP_K


@njit("void(float32[:, ::1], int32[:, ::1], float32[:, ::1])", **JIT)
def _route(logits, experts, weights):
    used = experts.shape[1]
    for row in range(len(logits)):
        best, value = experts[row], weights[row]
        for e in range(logits.shape[1]):
            x = logits[row, e]
            if e >= used and not x > value[used - 1]:
                continue
            at = min(e, used - 1)
            while at > 0 and x > value[at - 1]:  # equal logits keep the lower index in front
                value[at], best[at] = value[at - 1], best[at - 1]
                at -= 1
            value[at], best[at] = x, e
        first, total = value[0], np.float32(0)
        for i in range(used):
            value[i] = exp_f32(value[i] - first)
            total = value[i] if i == 0 else total + value[i]
        for i in range(used):
            value[i] /= total


def route(logits: F32, used: int) -> tuple[I32, F32]:
    """logits (n, E) -> the `used` best experts of every row, int32 (n, used), and their weights."""
    size = check(logits=(logits, "n E", np.float32))
    limit = min(size["E"], MAX_TOP_K)
    require(1 <= used <= limit, f"used must be in 1 to {limit}, got {used}")
    experts = np.empty((size["n"], used), np.int32)
    weights = np.empty((size["n"], used), np.float32)
    _route(logits, experts, weights)
    return experts, weights

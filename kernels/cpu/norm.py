"""Root mean square norm with a factor per element. Contract: `ops.Kernels.rms_norm`.

Cost   one pass over x (the second read of a row comes from the first-level cache) and one write
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numba import njit, types

from strata.kernels.cpu.lanes import get, lanes_dot, put
from strata.kernels.cpu.math import JIT, sqrt_f32
from strata.kernels.cpu.tasks import kernel, pack, threads_for, unpack
from strata.kernels.cpu.team import spread
from strata.kernels.ops import F32

ROWS: Final = 8
"""Rows of a task."""

_ONE: Final = np.float32(1.0)


@njit("float32(float32[::1], int64, int64, float32)", **JIT)
def rms_factor(x, at, n, eps):
    """1 / sqrt(lanes(x * x) / n + eps) of the n elements from x[at]."""
    return _ONE / sqrt_f32(lanes_dot(x, at, x, at, n) / np.float32(n) + eps)


@njit("void(float32[::1], int64, float32[::1], int64, float32[::1], int64, int64, float32)", **JIT)
def rms_row(x, at, w, w_at, out, out_at, n, eps):
    """One row: (x * r) * w; `out` may be `x`."""
    r = rms_factor(x, at, n, eps)
    for i in range(n):
        put(out, out_at + i, (get(x, at + i) * r) * get(w, w_at + i))


_ARGUMENTS = types.Tuple([*[types.float32[::1]] * 3, *[types.int64] * 2, types.float32])


@kernel
def _rms_rows(task, arguments):
    x, w, out, n, groups, eps = unpack(arguments, _ARGUMENTS)
    for row in range(task * ROWS, min((task + 1) * ROWS, x.size // n)):
        rms_row(x, row * n, w, (row % groups) * n, out, row * n, n, eps)


@njit(types.void(types.int64, *_ARGUMENTS, types.int64), **JIT)
def _run(address, x, w, out, n, groups, eps, threads):
    rows = x.size // n
    spread(address, pack((x, w, out, n, groups, eps)), -(-rows // ROWS), threads)


def rms_norm(x: F32, w: F32, eps: float) -> F32:
    """rms(x) * w over the last axis: x (..., N), w (N,), or w (G, N) for x (n, G, N)."""
    fits = w.ndim in (1, 2) and x.ndim >= w.ndim and x.shape[x.ndim - w.ndim :] == w.shape
    if not fits or x.dtype != np.float32 or w.dtype != np.float32:
        raise ValueError(f"w must be float32 with the last sizes of x {x.dtype} {x.shape}, got {w.dtype} {w.shape}")
    if not (x.flags.c_contiguous and w.flags.c_contiguous):
        raise ValueError(f"x and w must be C-contiguous, got strides {x.strides} and {w.strides}")
    out = np.empty_like(x)
    if x.size:
        n = x.shape[-1]
        threads = threads_for(-(-x.size // (n * ROWS)), x.size)
        _run(_rms_rows.address, x.reshape(-1), w.reshape(-1), out.reshape(-1), n, w.size // n, eps, threads)
    return out

"""Hyper-connections: C residual streams mixed into one block input, and a block's output added back.

Contracts: `ops.Kernels.hyper_mix`, `ops.Kernels.hyper_add`. Rows are taken `ROWS_AT_ONCE` at a time, which bounds the
two intermediates of C*H floats a row (normed streams and gates) and lets a product unpack a weight once for many rows.
Cost   two products (C*H x R and back) and about ten passes over C*H floats
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numba import njit, types

from strata.kernels.check import check
from strata.kernels.cpu.lanes import get, put
from strata.kernels.cpu.linear import linear, linear_in_parts
from strata.kernels.cpu.math import JIT, fma, sigmoid_f32, silu_f32
from strata.kernels.cpu.norm import rms_norm
from strata.kernels.cpu.tasks import kernel, pack, threads_for, unpack
from strata.kernels.cpu.team import spread
from strata.kernels.ops import F32, Hyper, streams_of_a_part

ROWS_AT_ONCE: Final = 256
ROWS: Final = 8
"""Rows of a task."""

_ONE: Final = np.float32(1.0)
_TWO: Final = np.float32(2.0)
_NONE: Final = np.empty(0, np.float32)


@njit("void(float32[::1], float32[::1], float32[::1], int64, float32)", **JIT)
def _activate(a, injected, beta, at, scale):
    """a = silu(a * scale) in place, and beta = 2 * sigmoid(injected * scale) from beta[at]."""
    for i in range(a.size):
        put(a, i, silu_f32(get(a, i) * scale))
    for i in range(injected.size):
        put(beta, at + i, _TWO * sigmoid_f32(get(injected, i) * scale))


_MIX = types.Tuple([*[types.float32[::1]] * 3, *[types.int64] * 3, types.float32])
_ADD = types.Tuple([*[types.float32[::1]] * 3, *[types.int64] * 2])


@kernel
def _mix_rows(task, arguments):
    """u = (sum_c sigmoid(gates[c]) * normed[c]) * scale, rows from u[at]."""
    gates, normed, u, at, streams, width, scale = unpack(arguments, _MIX)
    for row in range(task * ROWS, min((task + 1) * ROWS, gates.size // (streams * width))):
        out, first = at + row * width, row * streams * width
        for i in range(width):
            put(u, out + i, sigmoid_f32(get(gates, first + i)) * get(normed, first + i))
        for stream in range(first + width, first + streams * width, width):
            for i in range(width):
                gate = sigmoid_f32(get(gates, stream + i))
                put(u, out + i, fma(gate, get(normed, stream + i), get(u, out + i)))
        for i in range(width):
            put(u, out + i, get(u, out + i) * scale)


@kernel
def _add_rows(task, arguments):
    x, beta, y, streams, width = unpack(arguments, _ADD)
    for row in range(task * ROWS, min((task + 1) * ROWS, beta.size // streams)):
        for c in range(streams):
            strength, stream = get(beta, row * streams + c), (row * streams + c) * width
            for i in range(width):
                put(x, stream + i, fma(strength, get(y, row * width + i), get(x, stream + i)))


@njit(types.void(types.int64, *_MIX, types.int64, types.int64), **JIT)
def _mix(address, gates, normed, u, at, streams, width, scale, tasks, threads):
    spread(address, pack((gates, normed, u, at, streams, width, scale)), tasks, threads)


@njit(types.void(types.int64, *_ADD, types.int64, types.int64), **JIT)
def _add(address, x, beta, y, streams, width, tasks, threads):
    spread(address, pack((x, beta, y, streams, width)), tasks, threads)


def hyper_mix(x: F32, hc: Hyper, eps: float) -> tuple[F32, F32 | None]:
    """x (n, C, H) -> the block's input u (n, H), and beta (n, C) when the module injects."""
    size = check(x=(x, "n C H", np.float32), norm=(hc.norm, "C H", np.float32))
    n, streams, width = size["n"], size["C"], size["H"]
    scale = _ONE / np.float32(streams)
    weights = [hc.down] if hc.inject is None else [hc.down, hc.inject]
    together = streams_of_a_part(hc.down.type, streams, width)
    parts = [together * width if together < streams else 0, 0][: len(weights)]
    u = np.empty((n, width), np.float32)
    beta = np.empty((0 if hc.inject is None else n, streams), np.float32)
    for begin in range(0, n, ROWS_AT_ONCE):
        rows = x[begin : begin + ROWS_AT_ONCE]
        normed = rms_norm(rows, hc.norm, eps).reshape(len(rows), -1)
        a, *injected = linear_in_parts(weights, parts, normed)
        _activate(
            a.reshape(-1), injected[0].reshape(-1) if injected else _NONE, beta.reshape(-1), begin * streams, scale
        )
        (gates,) = linear([hc.up], a)
        tasks = -(-len(rows) // ROWS)
        _mix(
            _mix_rows.address,
            gates.reshape(-1),
            normed.reshape(-1),
            u.reshape(-1),
            begin * width,
            streams,
            width,
            scale,
            tasks,
            threads_for(tasks, gates.size),
        )
    return u, None if hc.inject is None else beta


def hyper_add(x: F32, beta: F32, y: F32) -> None:
    """x[c] = fma(beta[c], y, x[c]), in place."""
    size = check(x=(x, "n C H", np.float32), beta=(beta, "n C", np.float32), y=(y, "n H", np.float32))
    tasks = -(-size["n"] // ROWS)
    flat = (x.reshape(-1), beta.reshape(-1), y.reshape(-1))
    _add(_add_rows.address, *flat, size["C"], size["H"], tasks, threads_for(tasks, x.size))

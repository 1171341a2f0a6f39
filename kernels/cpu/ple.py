"""Per-layer n-gram embedding: hash the last tokens to table rows, gate them by the residual, convolve, add.

Contracts: `ops.Kernels.ple_rows`, `ops.Kernels.ple`. Rows are taken `ROWS_AT_ONCE` at a time, which bounds the
intermediates of C*H floats a row (keys and convolution inputs).
Cost   two products ((C + 1) * H x E), some fifteen passes over C*H floats, `heads` rows of the table from anywhere
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numba import njit, types

from strata.kernels.check import check, check_segments, require
from strata.kernels.cpu.lanes import get, lanes_dot, put
from strata.kernels.cpu.linear import dequantize, linear
from strata.kernels.cpu.math import JIT, fma, select, sigmoid_f32, silu_f32, sqrt_f32
from strata.kernels.cpu.norm import rms_row
from strata.kernels.cpu.tasks import kernel, pack, threads_for, unpack
from strata.kernels.cpu.team import spread
from strata.kernels.ops import F32, I32, I64, Ple

ROWS_AT_ONCE: Final = 256
ROWS: Final = 4
"""Rows of a task."""

_ZERO: Final = np.float32(0.0)
_ONE: Final = np.float32(1.0)
_MINUS_ZERO: Final = np.float32(-0.0)
_SMALLEST: Final = np.float32(1e-6)


@njit(
    "void(int32[::1], int32[:, ::1], int32[:, ::1], uint64[::1], uint64[::1], uint64[::1], int32, int64[:, ::1])", **JIT
)
def _hash(tokens, segments, history, multipliers, sizes, offsets, eos, rows):
    before = history.shape[1]
    per_order = sizes.size // before
    for s in range(len(segments)):
        slot, begin, end = segments[s, 0], segments[s, 1], segments[s, 2]
        for t in range(begin, end):
            mixed = np.uint64(tokens[t]) * multipliers[0]
            cut = False
            for back in range(1, before + 1):
                at = t - back
                token = tokens[at] if at >= begin else history[slot, before + at - begin]
                cut = cut or token == eos
                mixed ^= np.uint64(eos if cut else token) * multipliers[back]
                for head in range((back - 1) * per_order, back * per_order):
                    rows[t, head] = np.int64(mixed % sizes[head] + offsets[head])
        for i in range(before):
            at = end - before + i
            history[slot, i] = tokens[at] if at >= begin else history[slot, before + at - begin]


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
    before = size["N"] - 1
    require(before >= 1 and size["before"] == before, f"history must keep {before} ids, got {history.shape}")
    require(size["heads"] % before == 0, f"sizes must be a multiple of {before} heads, got {size['heads']}")
    require(bool(w.sizes.all()), "sizes must be above 0")
    check_segments(segments, size["n"], size["slots"])
    rows = np.empty((size["n"], size["heads"]), np.int64)
    _hash(tokens, segments, history, w.multipliers, w.sizes, w.offsets, w.eos, rows)
    return rows


class _Sizes(NamedTuple):
    """C streams of `width` = H · kernel taps, `gap` = N rows apart · first row of the chunk and its rows."""

    streams: int
    width: int
    kernel: int
    gap: int
    first: int
    rows: int


_FLOATS = types.float32[::1]
_INTS = types.int32[::1]
_ARGUMENTS = types.Tuple(
    [
        types.NamedUniTuple(types.int64, len(_Sizes._fields), _Sizes),
        types.UniTuple(_FLOATS, 4),  # norms of key, query and convolution, taps (kernel, C*H)
        types.UniTuple(_FLOATS, 6),  # x, keys, values, gamma, f, conv
        types.UniTuple(_INTS, 2),  # of each row: its slot, and where its segment begins in the chunk
        types.float32,  # eps
    ]
)


@kernel
def _gate(task, arguments):
    """gamma and f of some rows."""
    size, (norm_key, norm_query, norm_conv, _), (x, keys, values, gamma, f, _), _, eps = unpack(arguments, _ARGUMENTS)
    width, share = size.width, _ONE / sqrt_f32(np.float32(size.width))
    query = np.empty(width, np.float32)
    for row in range(task * ROWS, min((task + 1) * ROWS, size.rows)):
        for stream in range(size.streams):
            at, norm = (row * size.streams + stream) * width, stream * width
            rms_row(x, size.first * size.streams * width + at, norm_query, norm, query, 0, width, eps)
            rms_row(keys, at, norm_key, norm, keys, at, width, eps)
            s = lanes_dot(keys, at, query, 0, width) * share
            sign = select(s > _ZERO, _ONE, select(s < _ZERO, -_ONE, s))
            size_of_s = abs(s)
            g = sigmoid_f32(sign * sqrt_f32(select(size_of_s > _SMALLEST, size_of_s, _SMALLEST)))
            gamma[row * size.streams + stream] = g
            for i in range(width):
                put(f, at + i, g * get(values, row * width + i))
            rms_row(f, at, norm_conv, norm, f, at, width, eps)


@kernel
def _convolve(task, arguments):
    """x + (p + d) of some rows; all f are in place."""
    size, (_, _, _, taps), (x, _, values, gamma, f, conv), (slots, begins), _ = unpack(arguments, _ARGUMENTS)
    width, channels, kept = size.width, size.streams * size.width, (size.kernel - 1) * size.gap
    d = np.empty(width, np.float32)
    for row in range(task * ROWS, min((task + 1) * ROWS, size.rows)):
        for stream in range(size.streams):
            channel = stream * width
            for i in range(width):
                put(d, i, _MINUS_ZERO)
            for j in range(size.kernel):
                at = row - (size.kernel - 1 - j) * size.gap
                older = slots[row] * kept + kept + at - begins[row]
                inputs, source = (f, at) if at >= begins[row] else (conv, older)
                tap, source = j * channels + channel, source * channels + channel
                for i in range(width):
                    put(d, i, fma(get(taps, tap + i), get(inputs, source + i), get(d, i)))
            g, to = gamma[row * size.streams + stream], (size.first + row) * channels + channel
            for i in range(width):
                p = g * get(values, row * width + i)
                put(x, to + i, get(x, to + i) + (p + silu_f32(get(d, i))))


@njit(types.void(types.int64, types.int64, *_ARGUMENTS, types.int64), **JIT)
def _run(gate, convolve, size, weights, arrays, rows, eps, threads):
    tasks, arguments = -(-size.rows // ROWS), pack((size, weights, arrays, rows, eps))
    spread(gate, arguments, tasks, threads)
    spread(convolve, arguments, tasks, threads)


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
    n, streams, width, kernel_size = size["n"], size["C"], size["H"], size["kernel"]
    gap, kept = len(w.multipliers), size["kept"]
    require(kept == (kernel_size - 1) * gap, f"conv must keep {(kernel_size - 1) * gap} inputs, got {conv.shape}")
    check_segments(segments, n, size["slots"])
    embedding = size["heads"] * w.table.cols
    for name, weight, wanted in (("key", w.key, (streams * width, embedding)), ("value", w.value, (width, embedding))):
        require(weight.shape == wanted, f"{name} must be {wanted}, got {weight.shape}")
    inside = not rows.size or (rows.min() >= 0 and rows.max() < w.table.rows)
    require(inside, f"rows must be in 0 to {w.table.rows - 1}, got {rows.min(initial=0)} to {rows.max(initial=0)}")
    weights = (
        *(norm.reshape(-1) for norm in (w.norm_key, w.norm_query, w.norm_conv)),
        np.ascontiguousarray(w.conv.T).reshape(-1),
    )
    f = np.empty((min(n, ROWS_AT_ONCE), streams * width), np.float32)
    for first in range(0, n, ROWS_AT_ONCE):
        now = min(n - first, ROWS_AT_ONCE)
        pieces = _pieces(segments, first, first + now)
        e = dequantize(w.table, rows[first : first + now].reshape(-1)).reshape(now, -1)
        keys, values = linear([w.key, w.value], e)
        lengths = pieces[:, 2] - pieces[:, 1]
        _run(
            _gate.address,
            _convolve.address,
            _Sizes(streams, width, kernel_size, gap, first, now),
            weights,
            (
                *(a.reshape(-1) for a in (x, keys, values)),
                np.empty(now * streams, np.float32),
                f.reshape(-1),
                conv.reshape(-1),
            ),
            (np.repeat(pieces[:, 0], lengths), np.repeat(pieces[:, 1], lengths)),
            eps,
            threads_for(-(-now // ROWS), keys.size),
        )
        for slot, begin, end in pieces.tolist():
            _keep(conv[slot], f[begin:end])


def _pieces(segments: I32, first: int, last: int) -> I32:
    """The parts of segments within rows first..last, counted from `first`."""
    inside = segments[(segments[:, 2] > first) & (segments[:, 1] < last)].copy()
    inside[:, 1:] = np.clip(inside[:, 1:], first, last) - first
    return inside


def _keep(kept: F32, f: F32) -> None:
    """Shift rows f into the kept ones, oldest first."""
    new = min(len(kept), len(f))
    kept[: len(kept) - new] = kept[new:].copy()
    kept[len(kept) - new :] = f[len(f) - new :]

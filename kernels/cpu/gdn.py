"""Gated delta net: short causal convolution, decay and write strength, the delta rule token by token.

Contract: `ops.Kernels.gdn`. A task is one key head of one segment with the value heads that use it, so nothing is
computed twice and no two tasks touch the same state. Inside a task tokens are taken `TOKENS` at a time; the state of
a value head is walked in tiles of `TILE` columns: read from memory at the first token of a chunk, kept in the
first-level cache in between, written back at the last.
Cost   per token and value head two passes of loads and stores over D * D floats in the cache; a single token reads
       and writes the state in memory once
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numba import njit, types

from strata.kernels.check import check, check_segments, require
from strata.kernels.cpu.delta import TILE, delta_step
from strata.kernels.cpu.lanes import aligned_floats, get, lanes_dot, put
from strata.kernels.cpu.math import JIT, exp_f32, fma, sigmoid_f32, silu_f32, softplus_f32, sqrt_f32
from strata.kernels.cpu.norm import rms_row
from strata.kernels.cpu.tasks import kernel, pack, threads_for, unpack
from strata.kernels.cpu.team import spread
from strata.kernels.ops import F32, I32, Gdn

TOKENS: Final = 32

_ONE: Final = np.float32(1.0)
_UNIT_EPS: Final = np.float32(1e-6)
_MINUS_ZERO: Final = np.float32(-0.0)
"""Where a sum that begins with a plain product starts: fma(a, b, -0) is a * b with the sign of its zero."""


class _Sizes(NamedTuple):
    """key_heads K · value_heads V · d head size · kernel taps of the convolution · channels of it.

    apart: how far the next task of a thread is likely to be.
    """

    key_heads: int
    value_heads: int
    d: int
    kernel: int
    channels: int
    apart: int


@njit(**JIT)
def _taps(weights, size, head):
    """The convolution weights of a key head's channels (query, key, its values), one row a tap."""
    parts = 2 + size.value_heads // size.key_heads
    taps = np.empty(size.kernel * parts * size.d, np.float32)
    for part in range(parts):
        channel = (head + part * size.key_heads) * size.d
        for j in range(size.kernel):
            tap, first = (j * parts + part) * size.d, channel * size.kernel + j
            for i in range(size.d):
                put(taps, tap + i, get(weights, first + i * size.kernel))
    return taps


@njit(**JIT)
def _unit(x, at, d, scale):
    """x = (x / |x|) * scale in place."""
    r = _ONE / sqrt_f32(lanes_dot(x, at, x, at, d) + _UNIT_EPS)
    for i in range(d):
        put(x, at + i, (get(x, at + i) * r) * scale)


@njit(**JIT)
def _convolve(c, taps, size, head, p, begin, first, last, conv, kept):
    """c (tokens, parts, D) = silu of the convolution for rows first..last of the segment from row `begin`.

    `kept`: the first of the slot's rows in `conv`. Queries and keys become unit vectors.
    """
    parts, d = 2 + size.value_heads // size.key_heads, size.d
    scale = _ONE / sqrt_f32(np.float32(d))
    for t in range(first, last):
        row = (t - first) * parts * d
        for part in range(parts):
            channel = (head + part * size.key_heads) * d
            at = row + part * d
            for i in range(d):
                put(c, at + i, _MINUS_ZERO)
            for j in range(size.kernel):
                source = t - (size.kernel - 1) + j
                inputs, row_at = (p, source) if source >= begin else (conv, kept + t - begin + j)
                tap, first_input = (j * parts + part) * d, row_at * size.channels + channel
                for i in range(d):
                    put(c, at + i, fma(get(taps, tap + i), get(inputs, first_input + i), get(c, at + i)))
            for i in range(d):
                put(c, at + i, silu_f32(get(c, at + i)))
        _unit(c, row, d, scale)
        _unit(c, row + d, d, _ONE)


@njit(**JIT)
def _keep_inputs(size, head, p, begin, end, conv, kept):
    """Shift the last inputs of a segment into the kept ones, for a key head's channels."""
    for part in range(2 + size.value_heads // size.key_heads):
        channel = (head + part * size.key_heads) * size.d
        for row in range(size.kernel - 1):
            source, to = end - (size.kernel - 1) + row, (kept + row) * size.channels + channel
            inputs, row_at = (p, source) if source >= begin else (conv, kept + size.kernel - 1 + source - begin)
            for i in range(size.d):
                put(conv, to + i, get(inputs, row_at * size.channels + channel + i))


@njit(**JIT)
def _scan(size, c, part, first, last, decay, beta, state, at, ahead, tile, out, column):
    """The delta rule of one value head over rows first..last; o goes to out[:, column:column + D].

    ahead: where the state lies that is likely to come next.
    """
    d, width = size.d, (2 + size.value_heads // size.key_heads) * size.d
    for left in range(0, d, TILE):
        source, read, read_stride = state, at + left, d
        for t in range(first, last):
            q = (t - first) * width
            k, v, o = q + d, q + part * d + left, t * size.value_heads * d + column + left
            target, write, write_stride = (state, at + left, d) if t == last - 1 else (tile, 0, TILE)
            delta_step(
                source, read, read_stride, tile, target, write, write_stride,
                c, q, k, v, d, decay[t - first], beta[t - first], out, o,
                ahead + left * d if t == first else -1,
            )  # fmt: skip
            source, read, read_stride = tile, 0, TILE


_FLOATS = types.float32[::1]
_ARGUMENTS = types.Tuple(
    [
        types.NamedUniTuple(types.int64, len(_Sizes._fields), _Sizes),
        types.UniTuple(_FLOATS, 4),
        *[_FLOATS] * 4,
        types.int32[:, ::1],
        *[_FLOATS] * 3,
        types.float32,
    ]
)


@kernel
def _head(task, arguments):
    """A key head of one segment."""
    size, weights, p, z, b, a, segments, conv, state, out, eps = unpack(arguments, _ARGUMENTS)
    w_conv, w_a, w_dt, w_norm = weights
    head, row = task % size.key_heads, task // size.key_heads
    slot, begin, end = segments[row, 0], segments[row, 1], segments[row, 2]
    parts, d, heads = 2 + size.value_heads // size.key_heads, size.d, size.value_heads
    taps = _taps(w_conv, size, head)
    c, tile = np.empty(TOKENS * parts * d, np.float32), aligned_floats(d * TILE)
    decay, beta = np.empty(TOKENS, np.float32), np.empty(TOKENS, np.float32)
    kept = slot * (size.kernel - 1)
    for first in range(begin, end, TOKENS):
        last = min(first + TOKENS, end)
        _convolve(c, taps, size, head, p, begin, first, last, conv, kept)
        for part in range(2, parts):
            j = head + (part - 2) * size.key_heads
            for t in range(first, last):
                decay[t - first] = exp_f32(w_a[j] * softplus_f32(a[t * heads + j] + w_dt[j]))
                beta[t - first] = sigmoid_f32(b[t * heads + j])
            here = (slot * heads + j) * d * d
            ahead = here + (size.key_heads if part + 1 < parts else size.apart - (part - 2) * size.key_heads) * d * d
            _scan(size, c, part, first, last, decay, beta, state, here, ahead, tile, out, j * d)
            for t in range(first, last):
                at = (t * heads + j) * d
                rms_row(out, at, w_norm, 0, out, at, d, eps)
                for i in range(d):
                    put(out, at + i, get(out, at + i) * sigmoid_f32(get(z, at + i)))
    _keep_inputs(size, head, p, begin, end, conv, kept)


@njit(types.void(types.int64, *_ARGUMENTS, types.int64, types.int64), **JIT)
def _run(address, size, weights, p, z, b, a, segments, conv, state, out, eps, tasks, threads):
    spread(address, pack((size, weights, p, z, b, a, segments, conv, state, out, eps)), tasks, threads)


def gdn(w: Gdn, p: F32, z: F32, b: F32, a: F32, segments: I32, conv: F32, state: F32, eps: float) -> F32:
    """p (n, 2*K*D + V*D), z (n, V*D), b and a (n, V) -> (n, V*D); `conv` and `state` advance in place."""
    f32 = np.float32
    size = check(
        w_a=(w.a, "V", f32),
        w_dt=(w.dt, "V", f32),
        w_norm=(w.norm, "D", f32),
        p=(p, "n channels", f32),
        w_conv=(w.conv, "channels kernel", f32),
        z=(z, "n V*D", f32),
        b=(b, "n V", f32),
        a=(a, "n V", f32),
        conv=(conv, "slots kept channels", f32),
        state=(state, "slots V D D", f32),
    )
    heads, d, channels, kernel = size["V"], size["D"], size["channels"], size["kernel"]
    key_heads, rest = divmod(channels - heads * d, 2 * d)
    require(d % TILE == 0, f"D must be a multiple of {TILE}, got {d}")
    require(
        not rest and key_heads >= 1 and heads % key_heads == 0,
        f"p must have 2*K*D + V*D channels with V a multiple of K, got {channels} for V = {heads}, D = {d}",
    )
    require(size["kept"] == kernel - 1, f"conv must keep {kernel - 1} inputs, got {conv.shape}")
    check_segments(segments, size["n"], size["slots"])
    out = np.empty((size["n"], heads * d), f32)
    tasks = len(segments) * key_heads
    threads = threads_for(tasks)
    _run(
        _head.address,
        _Sizes(key_heads, heads, d, kernel, channels, threads),
        (w.conv.reshape(-1), w.a, w.dt, w.norm),
        p.reshape(-1),
        z.reshape(-1),
        b.reshape(-1),
        a.reshape(-1),
        segments,
        conv.reshape(-1),
        state.reshape(-1),
        out.reshape(-1),
        eps,
        tasks,
        threads,
    )
    return out

"""Sparse attention of rows over pages. Contract: `ops.Kernels.qsa_attend`.

A chunk of rows goes through five steps, each spread over threads: prepare the queries, score the index blocks, list
the kept tokens, attend to the parts of the lists, join the parts. A task of the fourth is one part for all query heads
of a kv head, so a key or value is read once for them. Lists are rows of the pages counted through, int32.
Cost   per row and kept token 4 * heads * head_dim operations; a row whose sequence exceeds the budget reads all its
       block keys. Scratch about `SCRATCH_BYTES`, or what one row needs where that is more
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numba import njit, types

from strata.kernels.check import check, require
from strata.kernels.cpu.attention import DOT_HEADS, WEIGH_COLUMNS, WEIGH_HEADS, dots, weigh
from strata.kernels.cpu.best import threshold
from strata.kernels.cpu.lanes import get, lanes_dot, lanes_sum, peak, put
from strata.kernels.cpu.math import JIT, exp_f32, fma, select, sigmoid_f32, sqrt_f32
from strata.kernels.cpu.norm import rms_row
from strata.kernels.cpu.pages import check_pages, rotate, token_row
from strata.kernels.cpu.tasks import kernel, pack, threads_for, unpack
from strata.kernels.cpu.team import spread
from strata.kernels.ops import ATTENTION_PART, F32, I32, AttentionPages, Norms, Rope

SCRATCH_BYTES: Final = 32 << 20
SCORED_BLOCKS: Final = 512
"""Index blocks of a scoring task."""
_STRIDE: Final = ATTENTION_PART + 16
"""Floats between the scores of two heads: the last pair of an odd part writes one too many."""

_ONE: Final = np.float32(1.0)
_ZERO: Final = np.float32(0.0)


class _Sizes(NamedTuple):
    """r tokens of an index block, 0 = dense; half of the rotated dims; picked = budget // r.

    parts, kept, blocks: the most parts, kept tokens and scored blocks (0 = none) of a row. first, rows: the chunk.
    """

    heads: int
    kv_heads: int
    head_dim: int
    index_heads: int
    index_dim: int
    r: int
    half: int
    picked: int
    parts: int
    kept: int
    blocks: int
    first: int = 0
    rows: int = 0


_FLOATS = types.float32[::1]
_INTS = types.int32[::1]
_ARGUMENTS = types.Tuple(
    [
        types.NamedUniTuple(types.int64, len(_Sizes._fields), _Sizes),
        types.Tuple([types.int32[:, ::1], _INTS, _INTS, _FLOATS, _FLOATS]),  # tables, slots, positions, q_gate, index_q
        types.UniTuple(_FLOATS, 3),  # cached k, v, block
        types.UniTuple(_FLOATS, 4),  # norms of q and index_q, cos, sin
        types.UniTuple(_FLOATS, 3),  # queries, index queries, block scores
        types.UniTuple(_FLOATS, 3),  # of the parts: largest score, sum of exponentials, sum of values
        types.UniTuple(_INTS, 2),  # kept tokens, their number
        _FLOATS,  # out
        types.float32,  # eps
    ]
)


@njit(**JIT)
def _complete(size, position):
    """Complete index blocks of a row whose blocks compete, 0 when it keeps all tokens."""
    blocks = (position + 1) // size.r if size.r else 0
    return blocks if blocks > size.picked else 0


@kernel
def _prepare(i, arguments):
    """Norm and rotate the queries of a row."""
    size, (_, _, positions, q_gate, index_q), _, (norm_q, norm_index, cos, sin), (q, iq, _), _, _, _, eps = unpack(
        arguments, _ARGUMENTS
    )
    row, d = size.first + i, size.head_dim
    position = np.int64(positions[row])
    for head in range(size.heads):
        at = (i * size.heads + head) * d
        rms_row(q_gate, (row * size.heads + head) * 2 * d, norm_q, 0, q, at, d, eps)
        rotate(q, at, cos, sin, size.half, position)
    if _complete(size, position):
        d = size.index_dim
        for head in range(size.index_heads):
            at = (i * size.index_heads + head) * d
            rms_row(index_q, (row * size.index_heads + head) * d, norm_index, 0, iq, at, d, eps)
            rotate(iq, at, cos, sin, size.half, position)


@njit("void(float32[::1], int64, int64, float32[::1], int64, int64, int64, float32, float32[::1], int64, int64)", **JIT)
def _products(q, q_at, heads, keys, k0, k1, d, scale, out, at, stride):
    """lanes(q * k) * scale of some heads with the keys at k0 and k1, to out[at + head * stride] and the one after."""
    grouped = heads // DOT_HEADS * DOT_HEADS if d in (128, 256) else 0
    for head in range(0, grouped, DOT_HEADS):
        if d == 256:
            dots(256, q, q_at + head * d, keys, k0, k1, scale, out, at + head * stride, stride)
        else:
            dots(128, q, q_at + head * d, keys, k0, k1, scale, out, at + head * stride, stride)
    for head in range(grouped, heads):
        put(out, at + head * stride, lanes_dot(q, q_at + head * d, keys, k0, d) * scale)
        put(out, at + head * stride + 1, lanes_dot(q, q_at + head * d, keys, k1, d) * scale)


@kernel
def _score(task, arguments):
    """Scores of some index blocks for one row."""
    size, (tables, slots, positions, _, _), (_, _, block), _, (_, iq, scores), _, _, _, _ = unpack(
        arguments, _ARGUMENTS
    )
    ranges = -(-size.blocks // SCORED_BLOCKS)
    i, d, heads, r = task // ranges, size.index_dim, size.index_heads, size.r
    row = size.first + i
    end = _complete(size, np.int64(positions[row]))
    sums = np.empty(2 * heads, np.float32)
    begin = (task % ranges) * SCORED_BLOCKS
    for j in range(begin, min(begin + SCORED_BLOCKS, end), 2):
        other = min(j + 1, end - 1)
        k0 = token_row(tables, slots[row], j * r) // r * d
        k1 = token_row(tables, slots[row], other * r) // r * d
        _products(iq, i * heads * d, heads, block, k0, k1, d, _ONE, sums, 0, 2)
        a = b = _ZERO
        for head in range(heads):
            x, y = sums[2 * head], sums[2 * head + 1]
            a, b = a + select(x > _ZERO, x, _ZERO), b + select(y > _ZERO, y, _ZERO)
        scores[i * size.blocks + other] = b
        scores[i * size.blocks + j] = a


@kernel
def _list(i, arguments):
    """The kept tokens of a row, ascending."""
    size, (tables, slots, positions, _, _), _, _, (_, _, scores), _, (kept, counts), _, _ = unpack(
        arguments, _ARGUMENTS
    )
    row, at, count = size.first + i, i * size.kept, 0
    slot, position = slots[row], np.int64(positions[row])
    complete = _complete(size, position)
    if complete:
        bits = scores[i * size.blocks : i * size.blocks + complete].view(np.int32)
        cut, equals = threshold(bits, size.picked)
        for j in range(complete):
            value = np.int64(bits[j])
            if value == cut and equals > 0:
                equals -= 1
            elif value <= cut:
                continue
            token = token_row(tables, slot, j * size.r)
            for t in range(size.r):
                kept[at + count + t] = token + t
            count += size.r
    for p in range(complete * size.r, position + 1):
        kept[at + count] = token_row(tables, slot, p)
        count += 1
    counts[i] = count


@kernel
def _attend(task, arguments):
    """One part of a row's list for the query heads of one kv head."""
    size, _, (k, v, _), _, (q, _, _), (peaks, sums, values), (kept, counts), _, _ = unpack(arguments, _ARGUMENTS)
    part, of = task % size.parts, task // size.parts
    i, kv_head = of // size.kv_heads, of % size.kv_heads
    count = min(counts[i] - part * ATTENTION_PART, ATTENTION_PART)
    if count <= 0:
        return
    d, group, token = size.head_dim, size.heads // size.kv_heads, size.kv_heads * size.head_dim
    first = i * size.heads + kv_head * group
    listed, scale = i * size.kept + part * ATTENTION_PART, _ONE / sqrt_f32(np.float32(d))
    e = np.empty(group * _STRIDE, np.float32)
    for t in range(0, count, 2):
        k0 = np.int64(kept[listed + t]) * token + kv_head * d
        k1 = np.int64(kept[listed + min(t + 1, count - 1)]) * token + kv_head * d
        _products(q, first * d, group, k, k0, k1, d, scale, e, t, _STRIDE)
    for head in range(group):
        at, to = head * _STRIDE, (first + head) * size.parts + part
        peaks[to] = peak(e, at, count)
        for t in range(count):
            put(e, at + t, exp_f32(get(e, at + t) - peaks[to]))
        sums[to] = lanes_sum(e, at, count)
    grouped, apart = group // WEIGH_HEADS * WEIGH_HEADS, size.parts * d
    for column in range(0, d, WEIGH_COLUMNS):
        v_at = kv_head * d + column
        for head in range(0, grouped, WEIGH_HEADS):
            to = ((first + head) * size.parts + part) * d + column
            weigh(WEIGH_HEADS, e, head * _STRIDE, _STRIDE, kept, listed, count, v, v_at, token, values, to, apart)
        for head in range(grouped, group):
            to = ((first + head) * size.parts + part) * d + column
            weigh(1, e, head * _STRIDE, _STRIDE, kept, listed, count, v, v_at, token, values, to, apart)


@kernel
def _join(i, arguments):
    """Join the parts of a row in order, and gate."""
    size, (_, _, _, q_gate, _), _, _, _, (peaks, sums, values), (_, counts), out, _ = unpack(arguments, _ARGUMENTS)
    d, parts = size.head_dim, -(-counts[i] // ATTENTION_PART)
    for head in range(size.heads):
        first, to = (i * size.heads + head) * size.parts, ((size.first + i) * size.heads + head) * d
        top, total = peak(peaks, first, parts), _ZERO
        for c in range(d):
            put(out, to + c, _ZERO)
        for part in range(first, first + parts):
            share = exp_f32(peaks[part] - top)
            total = fma(share, sums[part], total)
            for c in range(d):
                put(out, to + c, fma(share, get(values, part * d + c), get(out, to + c)))
        gate = 2 * to + d
        for c in range(d):
            put(out, to + c, (get(out, to + c) / total) * sigmoid_f32(get(q_gate, gate + c)))


@njit(types.void(types.UniTuple(types.int64, 5), *_ARGUMENTS, types.UniTuple(types.int64, 3)), **JIT)
def _run(steps, size, rows, pages, weights, queries, parts, lists, out, eps, threads):
    prepare, score, make_list, attend, join = steps
    few, scoring, attending = threads
    arguments = pack((size, rows, pages, weights, queries, parts, lists, out, eps))
    spread(prepare, arguments, size.rows, few)
    spread(score, arguments, size.rows * -(-size.blocks // SCORED_BLOCKS), scoring)
    spread(make_list, arguments, size.rows, few)
    spread(attend, arguments, size.rows * size.kv_heads * size.parts, attending)
    spread(join, arguments, size.rows, few)


def qsa_attend(
    pages: AttentionPages,
    tables: I32,
    slots: I32,
    positions: I32,
    q_gate: F32,
    index_q: F32,
    norms: Norms,
    rope: Rope,
    budget: int,
    eps: float,
) -> F32:
    """q_gate (n, heads, 2, head_dim), index_q (n, index_heads, index_dim) -> gated outputs (n, heads * head_dim).

    head_dim must be a multiple of WEIGH_COLUMNS.
    """
    size = check(
        q_gate=(q_gate, "n heads 2 head_dim", np.float32),
        index_q=(index_q, "n index_heads index_dim", np.float32),
        slots=(slots, "n", np.int32),
        positions=(positions, "n", np.int32),
        norm_q=(norms.q, "head_dim", np.float32),
        norm_index_q=(norms.index_q, "index_dim", np.float32),
    )
    n, heads, d = size["n"], size["heads"], size["head_dim"]
    check_pages(pages, tables, slots, positions, rope, {name: size[name] for name in ("head_dim", "index_dim")})
    r, kv_heads = pages.r, pages.k.shape[2]
    require(d % WEIGH_COLUMNS == 0, f"q_gate must have a head_dim that is a multiple of {WEIGH_COLUMNS}, got {d}")
    require(heads % kv_heads == 0, f"q_gate must have a multiple of {kv_heads} heads, got {heads}")
    require(budget >= max(r, 1), f"budget must be at least a block of {max(r, 1)} tokens, got {budget}")
    out = np.empty((n, heads * d), np.float32)
    if n:
        bound = _Sizes(
            heads, kv_heads, d, size["index_heads"], size["index_dim"], r, rope.cos.shape[1],
            *_most_of_a_row(int(positions.max()), r, budget),
        )  # fmt: skip
        rows = (tables, slots, positions, q_gate.reshape(-1), index_q.reshape(-1))
        cached = (pages.k.reshape(-1), pages.v.reshape(-1), pages.block.reshape(-1))
        weights = (norms.q, norms.index_q, rope.cos.reshape(-1), rope.sin.reshape(-1))
        _in_chunks(bound, n, rows, cached, weights, out.reshape(-1), eps)
    return out


def _most_of_a_row(last: int, r: int, budget: int) -> tuple[int, int, int, int]:
    """(picked, parts, kept, blocks) of the row at the last position, which no other row exceeds."""
    picked = budget // r if r else 0
    blocks = (last + 1) // r if r else 0
    kept = min(last + 1, picked * r + r - 1) if r else last + 1
    return picked, -(-kept // ATTENTION_PART), kept, blocks if blocks > picked else 0


def _in_chunks(bound: _Sizes, n: int, rows: Any, cached: Any, weights: Any, out: F32, eps: float) -> None:
    """All steps for as many rows at a time as the scratch memory holds."""
    of_query, of_index = bound.heads * bound.head_dim, bound.index_heads * bound.index_dim
    of_parts = bound.heads * bound.parts
    row_bytes = 4 * (of_query + of_index + bound.blocks + bound.kept + of_parts * (bound.head_dim + 2))
    at_once = min(n, max(1, SCRATCH_BYTES // row_bytes))
    queries = tuple(np.empty(at_once * each, np.float32) for each in (of_query, of_index, bound.blocks))
    parts = tuple(np.empty(at_once * of_parts * each, np.float32) for each in (1, 1, bound.head_dim))
    lists = (np.empty(at_once * bound.kept, np.int32), np.empty(at_once, np.int32))
    for first in range(0, n, at_once):
        now = min(at_once, n - first)
        read = now * bound.kept * bound.kv_heads * bound.head_dim
        threads = (
            threads_for(now, 4 * now * of_query),
            threads_for(now * -(-bound.blocks // SCORED_BLOCKS), now * bound.blocks * bound.index_dim),
            threads_for(now * bound.kv_heads * bound.parts, 2 * read),
        )
        size = bound._replace(first=first, rows=now)
        _run(_STEPS, size, rows, cached, weights, queries, parts, lists, out, eps, threads)


_STEPS: Final = tuple(step.address for step in (_prepare, _score, _list, _attend, _join))

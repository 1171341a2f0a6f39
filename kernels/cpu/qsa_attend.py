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
from strata.kernels.cpu.attention import (
    DOT_HEADS,
    LINE,
    MOST_GROUPS,
    SCORES,
    WEIGH_COLUMNS,
    groups_of,
    interleave,
    products,
    weighted,
)
from strata.kernels.cpu.best import threshold
from strata.kernels.cpu.lanes import get, lanes_sum, peak, put
from strata.kernels.cpu.math import JIT, exp_f32, fma, select, sigmoid_f32, sqrt_f32
from strata.kernels.cpu.norm import rms_row
from strata.kernels.cpu.pages import check_pages, rotate, token_row
from strata.kernels.cpu.tasks import kernel, pack, threads_for, unpack
from strata.kernels.cpu.team import spread
from strata.kernels.ops import ATTENTION_PART, F32, I32, AttentionPages, Norms, Rope

SCRATCH_BYTES: Final = 32 << 20
SCORED_BLOCKS: Final = ATTENTION_PART
"""Index blocks that are scored at once: what SCORES has room for."""

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
    """Norm, rotate and interleave the queries of a row."""
    size, (_, _, positions, q_gate, index_q), _, (norm_q, norm_index, cos, sin), (q, iq, _), _, _, _, eps = unpack(
        arguments, _ARGUMENTS
    )
    row, d, group = size.first + i, size.head_dim, size.heads // size.kv_heads
    position = np.int64(positions[row])
    x = np.empty(max(size.head_dim, size.index_dim), np.float32)
    for head in range(size.heads):
        rms_row(q_gate, (row * size.heads + head) * 2 * d, norm_q, 0, x, 0, d, eps)
        rotate(x, 0, cos, sin, size.half, position)
        of_kv_head = (i * size.kv_heads + head // group) * groups_of(group) * DOT_HEADS * d
        interleave(group, d, x, q, of_kv_head, head % group)
    if _complete(size, position):
        d = size.index_dim
        for head in range(size.index_heads):
            rms_row(index_q, (row * size.index_heads + head) * d, norm_index, 0, x, 0, d, eps)
            rotate(x, 0, cos, sin, size.half, position)
            interleave(size.index_heads, d, x, iq, i * groups_of(size.index_heads) * DOT_HEADS * d, head)


@njit("int64(int64)", **JIT)
def _rows_together(index_heads):
    """Rows whose index queries are multiplied with a block at once."""
    return max(MOST_GROUPS // groups_of(index_heads), 1)


@njit(**JIT)
def _scoring_tasks(size, rows):
    return -(-rows // _rows_together(size.index_heads)) * -(-size.blocks // SCORED_BLOCKS)


@njit("void(float32[::1], int64, int64, int64, float32[::1], int64)", **JIT)
def _add_positive(dots_of_heads, at, heads, count, scores, to):
    """scores[j] = sum over heads, ascending, of max(0, dot)."""
    for j in range(count):
        put(scores, to + j, _ZERO)
    for head in range(heads):
        for j in range(count):
            x = get(dots_of_heads, at + head * SCORES + j)
            put(scores, to + j, get(scores, to + j) + select(x > _ZERO, x, _ZERO))


@kernel
def _score(task, arguments):
    """Scores of a range of index blocks for a few rows. Those of one slot that follow each other read it together.

    What a row does not see is multiplied for the sake of the others, and left out of its scores.
    """
    size, (tables, slots, positions, _, _), (_, _, block), _, (_, iq, scores), _, _, _, _ = unpack(
        arguments, _ARGUMENTS
    )
    ranges, together = -(-size.blocks // SCORED_BLOCKS), _rows_together(size.index_heads)
    i, first, d, heads = task // ranges * together, task % ranges * SCORED_BLOCKS, size.index_dim, size.index_heads
    stop, of_row = min(i + together, size.rows), groups_of(heads) * DOT_HEADS
    listed, sums = np.empty(SCORED_BLOCKS, np.int32), np.empty(together * of_row * SCORES, np.float32)
    while i < stop:
        slot, after, most = slots[size.first + i], i, 0
        while after < stop and slots[size.first + after] == slot:
            most = max(most, _complete(size, np.int64(positions[size.first + after])))
            after += 1
        count = min(most - first, SCORED_BLOCKS)
        if count > 0:
            for j in range(count):
                listed[j] = token_row(tables, slot, (first + j) * size.r) // size.r
            groups = (after - i) * groups_of(heads)
            products(groups, iq, i * of_row * d, d, listed, 0, count, block, 0, d, _ONE, sums, block, 0)
        for row in range(i, after):
            visible = min(_complete(size, np.int64(positions[size.first + row])) - first, SCORED_BLOCKS)
            _add_positive(sums, (row - i) * of_row * SCORES, heads, visible, scores, row * size.blocks + first)
        i = after


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
    groups = groups_of(group)
    e = np.empty(groups * DOT_HEADS * SCORES, np.float32)
    q_at = (i * size.kv_heads + kv_head) * groups * DOT_HEADS * d
    products(groups, q, q_at, d, kept, listed, count, k, kv_head * d, token, scale, e, v, kv_head * d)
    for head in range(group):
        at, to = head * SCORES, (first + head) * size.parts + part
        peaks[to] = peak(e, at, count)
        for t in range(count):
            put(e, at + t, exp_f32(get(e, at + t) - peaks[to]))
        sums[to] = lanes_sum(e, at, count)
    to = (first * size.parts + part) * d
    weighted(group, d, e, kept, listed, count, v, kv_head * d, token, values, to, size.parts * d)


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
    spread(score, arguments, _scoring_tasks(size, size.rows), scoring)
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

    head_dim must be a multiple of WEIGH_COLUMNS, index_dim of LINE.
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
    require(
        size["index_dim"] % LINE == 0,
        f"index_q must have an index_dim that is a multiple of {LINE}, got {size['index_dim']}",
    )
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
    of_query = bound.kv_heads * groups_of(bound.heads // bound.kv_heads) * DOT_HEADS * bound.head_dim
    of_index = groups_of(bound.index_heads) * DOT_HEADS * bound.index_dim
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
            threads_for(_scoring_tasks(bound, now), now * bound.blocks * bound.index_dim),
            threads_for(now * bound.kv_heads * bound.parts, 2 * read),
        )
        size = bound._replace(first=first, rows=now)
        _run(_STEPS, size, rows, cached, weights, queries, parts, lists, out, eps, threads)


_STEPS: Final = tuple(step.address for step in (_prepare, _score, _list, _attend, _join))

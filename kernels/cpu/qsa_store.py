"""Write keys and values to pages and complete index blocks. Contract: `ops.Kernels.qsa_store`.

Raw indexer keys are all written before any block is pooled, so a block may be made of rows of this call and of
earlier ones. Cost: one pass over the rows.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numba import njit, types

from strata.kernels.check import check
from strata.kernels.cpu.lanes import get, put
from strata.kernels.cpu.math import JIT
from strata.kernels.cpu.norm import rms_row
from strata.kernels.cpu.pages import check_pages, rotate, token_row
from strata.kernels.cpu.tasks import kernel, pack, threads_for, unpack
from strata.kernels.cpu.team import spread
from strata.kernels.ops import F32, I32, AttentionPages, Norms, Rope

_ONE: Final = np.float32(1.0)


class _Sizes(NamedTuple):
    """r: tokens of an index block, 0 = dense; half: half of the rotated dims."""

    kv_heads: int
    head_dim: int
    index_dim: int
    r: int
    half: int


_FLOATS = types.float32[::1]
_ROWS = types.Tuple([types.int32[:, ::1], types.int32[::1], types.int32[::1], *[_FLOATS] * 3])
_PAGES = types.UniTuple(_FLOATS, 4)
_WEIGHTS = types.UniTuple(_FLOATS, 4)
_ARGUMENTS = types.Tuple(
    [types.NamedUniTuple(types.int64, len(_Sizes._fields), _Sizes), _ROWS, _PAGES, _WEIGHTS, types.float32]
)


@kernel
def _store_row(row, arguments):
    """Key, value and raw indexer key of one row."""
    size, (tables, slots, positions, k, v, index_k), (cached_k, cached_v, raw, _), (norm, _, cos, sin), eps = unpack(
        arguments, _ARGUMENTS
    )
    position, d = np.int64(positions[row]), size.head_dim
    token = token_row(tables, slots[row], position)
    for i in range(size.index_dim):
        put(raw, token * size.index_dim + i, get(index_k, row * size.index_dim + i))
    to = token * size.kv_heads * d
    for head in range(size.kv_heads):
        at, cached = (row * size.kv_heads + head) * d, to + head * d
        rms_row(k, at, norm, 0, cached_k, cached, d, eps)
        rotate(cached_k, cached, cos, sin, size.half, position)
        for i in range(d):
            put(cached_v, cached + i, get(v, at + i))


@kernel
def _complete_block(row, arguments):
    """The key of the index block that ends at this row, if one does."""
    size, (tables, slots, positions, _, _, _), (_, _, raw, block), (_, norm, cos, sin), eps = unpack(
        arguments, _ARGUMENTS
    )
    d, r, first = size.index_dim, size.r, np.int64(positions[row]) + 1 - size.r
    if first % r == 0:
        token = token_row(tables, slots[row], first)
        source, to = token * d, token // r * d
        for i in range(d):
            put(block, to + i, get(raw, source + i))
        for at in range(source + d, source + r * d, d):
            for i in range(d):
                put(block, to + i, get(block, to + i) + get(raw, at + i))
        share = _ONE / np.float32(r)
        for i in range(d):
            put(block, to + i, get(block, to + i) * share)
        rms_row(block, to, norm, 0, block, to, d, eps)
        rotate(block, to, cos, sin, size.half, first)


@njit(types.void(types.int64, types.int64, *_ARGUMENTS, types.int64), **JIT)
def _run(store_row, complete_block, size, rows, pages, weights, eps, threads):
    arguments = pack((size, rows, pages, weights, eps))
    spread(store_row, arguments, rows[2].size, threads)
    if size.r:
        spread(complete_block, arguments, rows[2].size, threads)


def qsa_store(
    pages: AttentionPages,
    tables: I32,
    slots: I32,
    positions: I32,
    k: F32,
    v: F32,
    index_k: F32,
    norms: Norms,
    rope: Rope,
    eps: float,
) -> None:
    """Write n rows' keys (normed, rotated), values and raw indexer keys; complete the blocks that end at one."""
    size = check(
        k=(k, "n kv_heads head_dim", np.float32),
        v=(v, "n kv_heads head_dim", np.float32),
        index_k=(index_k, "n index_dim", np.float32),
        slots=(slots, "n", np.int32),
        positions=(positions, "n", np.int32),
        norm_k=(norms.k, "head_dim", np.float32),
        norm_index_k=(norms.index_k, "index_dim", np.float32),
    )
    n = size.pop("n")
    check_pages(pages, tables, slots, positions, rope, size)
    _run(
        _store_row.address,
        _complete_block.address,
        _Sizes(size["kv_heads"], size["head_dim"], size["index_dim"], pages.r, rope.cos.shape[1]),
        (tables, slots, positions, k.reshape(-1), v.reshape(-1), index_k.reshape(-1)),
        (pages.k.reshape(-1), pages.v.reshape(-1), pages.raw.reshape(-1), pages.block.reshape(-1)),
        (norms.k, norms.index_k, rope.cos.reshape(-1), rope.sin.reshape(-1)),
        eps,
        threads_for(n, 4 * k.size),
    )

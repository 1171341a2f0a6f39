"""Sparse attention over pages: store keys and values, complete index blocks, select blocks, attend.

Contracts: `ops.Kernels.qsa_store`, `ops.Kernels.qsa_attend`. Positions in tokens from the start of the sequence;
pages of `PAGE` tokens. Cost: `qsa_attend` gathers a slot's keys and values once a call.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from strata.kernels.check import check, check_slots
from strata.kernels.kv import format_of
from strata.kernels.ops import F32, I32, PAGE, AttentionPages, Norms, Rope
from strata.kernels.reference.kv import decode, encode
from strata.kernels.reference.scalar import F64, rms, sigmoid

_ROWS_AT_ONCE = 64
"""Rows whose score matrices exist at the same time: bounds the memory of a long prompt."""


def rotate(x: F64, positions: npt.NDArray[np.integer], rope: Rope) -> F64:
    """Rotate the first dims of x (n, ..., d) by the angles of `positions` (n,), half-split; the other dims pass."""
    half = rope.cos.shape[1]
    shape = (len(x), *(1,) * (x.ndim - 2), half)
    cos, sin = rope.cos[positions].reshape(shape), rope.sin[positions].reshape(shape)
    x1, x2 = x[..., :half], x[..., half : 2 * half]
    return np.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin, x[..., 2 * half :]], axis=-1)


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
    d = k.shape[-1]
    keys, values = format_of("pages.k", pages.k, d), format_of("pages.v", pages.v, d)
    check(
        k=(k, "n kv_heads head_dim", np.float32),
        v=(v, "n kv_heads head_dim", np.float32),
        index_k=(index_k, "n index_dim", np.float32),
        slots=(slots, "n", np.int32),
        positions=(positions, "n", np.int32),
        pages_k=(pages.k, f"pages PAGE kv_heads {keys.row(d)}", keys.dtype.type),
        pages_v=(pages.v, f"pages PAGE kv_heads {values.row(d)}", values.dtype.type),
        pages_raw=(pages.raw, "pages PAGE index_dim", np.float32),
        pages_block=(pages.block, "pages blocks index_dim", np.float32),
        norm_k=(norms.k, "head_dim", np.float32),
        norm_index_k=(norms.index_k, "index_dim", np.float32),
    )
    _check_tables(pages, tables, slots, positions, rope)
    page, at = tables[slots, positions // PAGE], positions % PAGE
    turned = rotate(rms(k.astype(np.float64), eps) * norms.k, positions, rope)
    pages.k[page, at] = encode(keys, turned.astype(np.float32))
    pages.v[page, at] = encode(values, v)
    pages.raw[page, at] = index_k
    r = pages.r
    if not r:
        return
    ends = (positions + 1) % r == 0
    page, first = page[ends], at[ends] - (r - 1)
    mean = pages.raw[page[:, None], first[:, None] + np.arange(r)].astype(np.float64).mean(1)
    pages.block[page, first // r] = rotate(rms(mean, eps) * norms.index_k, positions[ends] - (r - 1), rope)


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
    """q_gate (n, heads, 2, head_dim), index_q (n, index_heads, index_dim) -> gated outputs (n, heads * head_dim)."""
    d = q_gate.shape[-1]
    keys, values = format_of("pages.k", pages.k, d), format_of("pages.v", pages.v, d)
    size = check(
        q_gate=(q_gate, "n heads 2 head_dim", np.float32),
        index_q=(index_q, "n index_heads index_dim", np.float32),
        slots=(slots, "n", np.int32),
        positions=(positions, "n", np.int32),
        pages_k=(pages.k, f"pages PAGE kv_heads {keys.row(d)}", keys.dtype.type),
        pages_block=(pages.block, "pages blocks index_dim", np.float32),
        norm_q=(norms.q, "head_dim", np.float32),
        norm_index_q=(norms.index_q, "index_dim", np.float32),
    )
    if size["heads"] % size["kv_heads"] or budget < 1:
        raise ValueError(f"{size['heads']} query heads over {size['kv_heads']} kv heads, budget {budget}")
    _check_tables(pages, tables, slots, positions, rope)
    q = rotate(rms(q_gate[:, :, 0].astype(np.float64), eps) * norms.q, positions, rope)
    iq = rotate(rms(index_q.astype(np.float64), eps) * norms.index_q, positions, rope)
    out = np.empty(q.shape)
    for slot in np.unique(slots):
        rows = np.flatnonzero(slots == slot)
        used = tables[slot, : positions[rows].max() // PAGE + 1]
        k = decode(keys, pages.k[used].reshape(-1, *pages.k.shape[2:]), d).astype(np.float64)
        v = decode(values, pages.v[used].reshape(-1, *pages.v.shape[2:]), d).astype(np.float64)
        blocks = pages.block[used].reshape(-1, pages.block.shape[2]).astype(np.float64)
        for begin in range(0, len(rows), _ROWS_AT_ONCE):
            part = rows[begin : begin + _ROWS_AT_ONCE]
            kept = selected(iq[part], blocks, positions[part], len(k), pages.r, budget)
            out[part] = _attend(q[part], k, v, kept)
    gated = out * sigmoid(q_gate[:, :, 1].astype(np.float64))
    return gated.reshape(len(out), -1).astype(np.float32)


def selected(iq: F64, blocks: F64, positions: I32, tokens: int, r: int, budget: int) -> npt.NDArray[np.bool_]:
    """Which of the first `tokens` tokens each query attends to: bool (n, tokens).

    iq (n, index_heads, index_dim) and blocks (m, index_dim), both normed and rotated; positions (n,) of the queries.
    Visible are tokens 0..p. Only complete blocks of r compete, a query's own block like any other; the tokens after
    the last complete block are always kept. Equal scores: the lower block.
    """
    kept = np.arange(tokens) <= positions[:, None]
    if not r or (positions.max() + 1) // r <= budget // r:
        return kept
    scores = np.maximum(np.einsum("nhd,bd->nhb", iq, blocks[: (positions.max() + 1) // r]), 0.0).sum(1)
    for i, position in enumerate(positions):
        complete = (position + 1) // r
        for block in np.argsort(-scores[i, :complete], kind="stable")[budget // r :]:
            kept[i, block * r : (block + 1) * r] = False
    return kept


def _attend(q: F64, k: F64, v: F64, kept: npt.NDArray[np.bool_]) -> F64:
    """Softmax attention of q (n, heads, d) over the kept tokens of k, v (tokens, kv_heads, d) -> (n, heads, d)."""
    out = np.empty(q.shape)
    per_kv = q.shape[1] // k.shape[1]
    seen = kept.any(0)
    kept, k, v = kept[:, seen], k[seen], v[seen]
    for head in range(q.shape[1]):
        s = np.where(kept, q[:, head] @ k[:, head // per_kv].T / np.sqrt(q.shape[2]), -np.inf)
        e = np.exp(s - s.max(1, keepdims=True))
        out[:, head] = (e / e.sum(1, keepdims=True)) @ v[:, head // per_kv]
    return out


def _check_tables(pages: AttentionPages, tables: I32, slots: I32, positions: I32, rope: Rope) -> None:
    """Every row's slot, position and page must exist."""
    check(tables=(tables, "slots pages_of_a_slot", np.int32))
    if not len(slots):
        return
    check_slots(slots, len(tables))
    limit = min(tables.shape[1] * PAGE, len(rope.cos))
    if positions.min() < 0 or positions.max() >= limit:
        raise ValueError(f"positions must be in 0 to {limit - 1}, got {positions.min()} to {positions.max()}")
    page = tables[slots, positions // PAGE]
    if page.min() < 0 or page.max() >= len(pages.k):
        raise ValueError(
            f"tables must name pages 0 to {len(pages.k) - 1} for these rows, got {page.min()}, {page.max()}"
        )

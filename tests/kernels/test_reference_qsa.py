"""Sparse attention over pages against a plain loop over queries that never saw a page."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest

from strata.kernels import reference
from strata.kernels.ops import PAGE, AttentionPages, Norms, Rope
from strata.kernels.reference.qsa import selected

HEADS, KV, DIM, IH, ID, ROTATED = 4, 2, 16, 3, 8, 8
EPS = 1e-6
MAX = 256


def rope_table() -> Rope:
    angles = np.arange(MAX)[:, None] * 1e4 ** (-np.arange(0, ROTATED, 2) / ROTATED)
    return Rope(np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32))


ROPE = rope_table()


@dataclass
class Case:
    """n tokens of one sequence and the norms; `store` and `attend` run the operations on given pages."""

    n: int
    r: int = 4
    budget: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        f = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
        self.k, self.v, self.index_k = f(self.n, KV, DIM), f(self.n, KV, DIM), f(self.n, ID)
        self.q_gate, self.index_q = f(self.n, HEADS, 2, DIM), f(self.n, IH, ID)
        self.norms = Norms(1 + 0.1 * f(DIM), 1 + 0.1 * f(DIM), 1 + 0.1 * f(ID), 1 + 0.1 * f(ID))

    def pages(self, n_pages: int, fill: float = 0.0) -> AttentionPages:
        shapes = ((KV, DIM), (KV, DIM), (ID,))
        k, v, raw = (np.full((n_pages, PAGE, *s), fill, np.float32) for s in shapes)
        return AttentionPages(k, v, raw, np.full((n_pages, PAGE // self.r if self.r else 0, ID), fill, np.float32))

    def store(self, pages, tables, begin, end, slot=0):
        part, slots = slice(begin, end), np.full(end - begin, slot, np.int32)
        positions = np.arange(begin, end, dtype=np.int32)
        rows = (a[part].copy() for a in (self.k, self.v, self.index_k))
        reference.qsa_store(pages, tables, slots, positions, *rows, self.norms, ROPE, EPS)

    def attend(self, pages, tables, begin, end, slot=0):
        part, slots = slice(begin, end), np.full(end - begin, slot, np.int32)
        positions = np.arange(begin, end, dtype=np.int32)
        rows = (a[part].copy() for a in (self.q_gate, self.index_q))
        return reference.qsa_attend(pages, tables, slots, positions, *rows, self.norms, ROPE, self.budget, EPS)

    def run(self, tables=None, cuts=()):
        tables = np.arange(MAX // PAGE, dtype=np.int32)[None] if tables is None else tables
        pages, edges = self.pages(8, fill=np.nan), [0, *cuts, self.n]
        out = []
        for begin, end in pairwise(edges):
            self.store(pages, tables, begin, end)
            out.append(self.attend(pages, tables, begin, end))
        return np.concatenate(out)


def normed(x, w):
    x = x.astype(np.float64)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * w


def turned(x, position):
    half = ROTATED // 2
    x1, x2, c, s = x[..., :half], x[..., half:ROTATED], ROPE.cos[position], ROPE.sin[position]
    return np.concatenate([x1 * c - x2 * s, x2 * c + x1 * s, x[..., ROTATED:]], -1)


def kept_tokens(case: Case, t: int) -> list[int]:
    """The tokens query t attends to, by the text of the model's description."""
    r = case.r
    if not r:
        return list(range(t + 1))
    blocks = (t + 1) // r
    iq = turned(normed(case.index_q[t], case.norms.index_q), t)
    scores = []
    for j in range(blocks):
        mean = case.index_k[j * r : (j + 1) * r].astype(np.float64).mean(0)
        scores.append(np.maximum(iq @ turned(normed(mean, case.norms.index_k), j * r), 0).sum())
    best = sorted(range(blocks), key=lambda j: (-scores[j], j))[: case.budget // r]
    return [j * r + i for j in sorted(best) for i in range(r)] + list(range(blocks * r, t + 1))


def plain(case: Case) -> np.ndarray:
    out = np.empty((case.n, HEADS, DIM))
    for t in range(case.n):
        kept = kept_tokens(case, t)
        keys = np.stack([turned(normed(case.k[i], case.norms.k), i) for i in kept])
        q = turned(normed(case.q_gate[t, :, 0], case.norms.q), t)
        for h in range(HEADS):
            s = keys[:, h // (HEADS // KV)] @ q[h] / np.sqrt(DIM)
            e = np.exp(s - s.max())
            o = e / e.sum() @ case.v[kept, h // (HEADS // KV)]
            out[t, h] = o / (1 + np.exp(-case.q_gate[t, h, 1].astype(np.float64)))
    return out.reshape(case.n, -1)


@pytest.mark.parametrize(("n", "r", "budget"), [(1, 4, 32), (70, 4, 32), (150, 4, 64), (150, 8, 48), (100, 0, 32)])
def test_pages_give_what_a_plain_loop_gives(n, r, budget):
    case = Case(n, r, budget, seed=n + r)
    np.testing.assert_allclose(case.run(), plain(case), atol=2e-6)


def test_the_order_of_pages_and_the_cut_of_the_prompt_do_not_matter():
    case = Case(150)
    whole = case.run()
    np.testing.assert_array_equal(case.run(np.array([[5, 0, 7, 2]], np.int32)), whole)
    np.testing.assert_allclose(case.run(cuts=(1, 2, 63, 65, 130)), whole, atol=1e-6)


def test_a_tail_brings_its_own_tokens_and_no_part_of_the_next_best_block():
    case = Case(MAX - 60)
    for t in range(case.budget + case.r, case.n):
        assert len(kept_tokens(case, t)) == case.budget + (t + 1) % case.r
    pages, tables = case.pages(4), np.arange(4, dtype=np.int32)[None]
    case.store(pages, tables, 0, case.n)
    positions = np.arange(case.n, dtype=np.int32)
    iq = np.stack([turned(normed(case.index_q[t], case.norms.index_q), t) for t in range(case.n)])
    mask = selected(iq, pages.block.reshape(-1, ID).astype(np.float64), positions, case.n, case.r, case.budget)
    for t in range(case.n):
        assert np.flatnonzero(mask[t]).tolist() == kept_tokens(case, t)


def test_everything_is_kept_up_to_the_budget_and_an_incomplete_block():
    case = Case(33 + 3)
    assert all(kept_tokens(case, t) == list(range(t + 1)) for t in range(32 + 3))
    dense = Case(33 + 3, r=0)
    last = case.budget + case.r - 1
    np.testing.assert_array_equal(case.run()[:last], dense.run()[:last])
    assert np.abs(case.run()[last] - dense.run()[last]).max() > 1e-3


def test_a_query_may_fail_to_attend_to_its_own_complete_block():
    blocks = np.eye(3, 8)[[0, 1, 2]]
    iq = np.zeros((1, 1, 8))
    iq[0, 0, :3] = 3.0, 2.0, 1.0  # the query's own block, the third, has the lowest score
    mask = selected(iq, blocks, np.array([11], np.int32), 12, 4, 8)
    assert np.flatnonzero(mask[0]).tolist() == list(range(8))


def test_equal_scores_keep_the_lower_block():
    mask = selected(np.zeros((1, 2, 8)), np.ones((5, 8)), np.array([20], np.int32), 21, 4, 8)
    assert np.flatnonzero(mask[0]).tolist() == [*range(8), 20]


def test_raw_indexer_keys_are_kept_and_the_block_turns_at_its_first_token():
    case = Case(12)
    pages, tables = case.pages(1), np.array([[0]], np.int32)
    case.store(pages, tables, 0, 10)
    np.testing.assert_array_equal(pages.raw[0, :10], case.index_k[:10])
    mean = case.index_k[4:8].astype(np.float64).mean(0)
    np.testing.assert_allclose(pages.block[0, 1], turned(normed(mean, case.norms.index_k), 4), atol=1e-6)
    assert not pages.block[0, 2].any(), "a block of two tokens is not complete"


def test_slots_in_one_call_read_their_own_pages():
    one, two = Case(70, seed=1), Case(30, seed=2)
    two.norms = one.norms
    pages, tables = one.pages(8), np.array([[6, 1, 0, 0], [3, 0, 0, 0]], np.int32)
    one.store(pages, tables, 0, 70)
    two.store(pages, tables, 0, 30, slot=1)
    slots, positions = np.array([0, 1, 0], np.int32), np.array([68, 29, 69], np.int32)
    q_gate = np.stack([one.q_gate[68], two.q_gate[29], one.q_gate[69]])
    index_q = np.stack([one.index_q[68], two.index_q[29], one.index_q[69]])
    got = reference.qsa_attend(pages, tables, slots, positions, q_gate, index_q, one.norms, ROPE, 32, EPS)
    np.testing.assert_allclose(got, np.stack([plain(one)[68], plain(two)[29], plain(one)[69]]), atol=2e-6)


@pytest.mark.parametrize(
    ("table", "message"),
    [([[-1, -1, -1, -1]], "tables must name pages"), ([[9, 9, 9, 9]], "tables must name pages"), ([[0]], "positions")],
)
def test_a_row_without_a_page_is_refused_before_anything_is_written(table, message):
    case = Case(65)
    pages = case.pages(2)
    with pytest.raises(ValueError, match=message):
        case.store(pages, np.array(table, np.int32), 0, 65)
    assert not pages.k.any()

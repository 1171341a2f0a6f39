"""Sparse attention on the host: written bits, selection, pages in any order, independence of company and cuts."""

from __future__ import annotations

from importlib import import_module

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.kernels import reference
from strata.kernels.cpu.best import threshold
from strata.kernels.cpu.qsa_attend import qsa_attend
from strata.kernels.cpu.qsa_store import qsa_store
from strata.kernels.ops import ATTENTION_PART, PAGE, AttentionPages, Norms, Rope

EPS = 1e-6
F = np.float32


class Layer:
    """Random pages, tables that scatter them, and rows for `tokens` positions of every slot."""

    def __init__(
        self, tokens, heads=4, kv_heads=2, d=32, index_heads=2, index_dim=32, r=4, half=8, budget=64, slots=1, seed=0
    ):
        rng = np.random.default_rng(seed)
        f = lambda *shape: rng.standard_normal(shape).astype(F)  # noqa: E731
        per_slot = -(-tokens // PAGE)
        n_pages = slots * per_slot + 2
        self.pages = AttentionPages(
            f(n_pages, PAGE, kv_heads, d),
            f(n_pages, PAGE, kv_heads, d),
            f(n_pages, PAGE, index_dim),
            f(n_pages, PAGE // r if r else 0, index_dim),
        )
        self.tables = rng.permutation(n_pages)[: slots * per_slot].reshape(slots, per_slot).astype(np.int32)
        angle = np.arange(per_slot * PAGE)[:, None] * 1e4 ** (-np.arange(half) / half)
        self.rope = Rope(np.cos(angle).astype(F), np.sin(angle).astype(F))
        self.norms = Norms(*(1 + F(0.1) * f(size) for size in (d, d, index_dim, index_dim)))
        self.slots = np.repeat(np.arange(slots), tokens).astype(np.int32)
        self.positions = np.tile(np.arange(tokens), slots).astype(np.int32)
        n = slots * tokens
        self.k, self.v, self.index_k = f(n, kv_heads, d), f(n, kv_heads, d), f(n, index_dim)
        self.q_gate, self.index_q = f(n, heads, 2, d), f(n, index_heads, index_dim)
        self.budget = budget

    def store(self, rows=slice(None), op=qsa_store):
        op(self.pages, self.tables, self.slots[rows], self.positions[rows],
           self.k[rows], self.v[rows], self.index_k[rows], self.norms, self.rope, EPS)  # fmt: skip

    def attend(self, rows=slice(None), op=qsa_attend):
        return op(self.pages, self.tables, self.slots[rows], self.positions[rows],
                  self.q_gate[rows], self.index_q[rows], self.norms, self.rope, self.budget, EPS)  # fmt: skip

    def snapshot(self):
        return [a.copy() for a in (self.pages.k, self.pages.v, self.pages.raw, self.pages.block)]


def written_rope(x, position, rope, w):
    """x (..., d) rotated by the angles of one position."""
    half = rope.cos.shape[1]
    c, s, a, b = rope.cos[position], rope.sin[position], x[..., :half], x[..., half : 2 * half]
    return np.concatenate([w.fma(a, c, -(b * s)), w.fma(b, c, a * s), x[..., 2 * half :]], -1)


def written_block(layer, slot, j, w):
    """The key of complete index block j from its raw keys."""
    r = layer.pages.r
    raw = layer.pages.raw[layer.tables[slot, j * r // PAGE], j * r % PAGE :][:r]
    mean = raw[0]
    for x in raw[1:]:
        mean = mean + x
    return written_rope(w.rms(mean * (F(1) / F(r)), layer.norms.index_k, EPS), j * r, layer.rope, w)


def written_kept(layer, row, w):
    """The kept positions of a row, ascending."""
    slot, p, r = layer.slots[row], layer.positions[row], layer.pages.r
    complete = (p + 1) // r if r else 0
    if complete <= layer.budget // max(r, 1):
        return list(range(p + 1))
    iq = written_rope(w.rms(layer.index_q[row], layer.norms.index_q, EPS), p, layer.rope, w)
    scores = np.zeros(complete, F)
    for j in range(complete):
        block = layer.pages.block[layer.tables[slot, j * r // PAGE], j * r % PAGE // r]
        for x in np.maximum(w.dot4(iq, block), F(0)):
            scores[j] = scores[j] + x
    blocks = np.sort(np.argsort(-scores, kind="stable")[: layer.budget // r])
    return [j * r + t for j in blocks for t in range(r)] + list(range(r * complete, p + 1))


def written_attend(layer, row, w):
    slot, p, (heads, _, d) = layer.slots[row], layer.positions[row], layer.q_gate[row].shape
    kv = np.arange(heads) // (heads // layer.pages.k.shape[2])
    q = written_rope(w.rms(layer.q_gate[row, :, 0], layer.norms.q, EPS), p, layer.rope, w)
    kept = np.array(written_kept(layer, row, w))
    page, at = layer.tables[slot, kept // PAGE], kept % PAGE
    k, v = (a[page, at][:, kv] for a in (layer.pages.k, layer.pages.v))
    parts = []
    for i in range(0, len(kept), ATTENTION_PART):
        s = w.dot4(q, k[i : i + ATTENTION_PART]) * (F(1) / np.sqrt(F(d)))
        m = s.max(0)
        e, o = w.exp(s - m), np.zeros((heads, d), F)
        for t in range(len(e)):
            o = w.fma(e[t][:, None], v[i + t], o)
        parts.append((m, w.lanes(np.ascontiguousarray(e.T)), o))
    top, total, out = np.max([m for m, _, _ in parts], 0), np.zeros(heads, F), np.zeros((heads, d), F)
    for m, part_sum, o in parts:
        share = w.exp(m - top)
        total, out = w.fma(share, part_sum, total), w.fma(share[:, None], o, out)
    return ((out / total[:, None]) * w.sigmoid(layer.q_gate[row, :, 1])).reshape(-1)


SHAPES = [
    {"tokens": 200, "heads": 3, "kv_heads": 1, "d": 64, "index_heads": 3, "r": 8, "budget": 48},
    {"tokens": 150, "heads": 4, "kv_heads": 2, "d": 128, "index_heads": 4, "index_dim": 64, "slots": 2},
    {"tokens": 700, "heads": 8, "kv_heads": 1, "d": 256, "index_heads": 4, "index_dim": 128, "half": 32, "budget": 520},
    {"tokens": 300, "heads": 12, "kv_heads": 2, "d": 32, "r": 0},
    {"tokens": 270, "heads": 40, "kv_heads": 2, "d": 32, "index_heads": 5, "index_dim": 48, "budget": 200},
    {"tokens": 90, "heads": 1, "kv_heads": 1, "d": 96, "index_heads": 14, "half": 16, "budget": 12},
]


@pytest.mark.parametrize("shape", SHAPES)
def test_stored_rows_have_the_written_bits(shape, written):
    layer = Layer(**shape)
    layer.store()
    tokens = shape["tokens"]
    for row in (0, 63, 64, tokens - 1, len(layer.slots) - 1):
        slot, p = layer.slots[row], layer.positions[row]
        page, at = layer.tables[slot, p // PAGE], p % PAGE
        key = written_rope(written.rms(layer.k[row], layer.norms.k, EPS), p, layer.rope, written)
        assert written.same(layer.pages.k[page, at], key)
        assert written.same(layer.pages.v[page, at], layer.v[row])
        assert written.same(layer.pages.raw[page, at], layer.index_k[row])
    r = layer.pages.r
    for j in range(0, tokens // r if r else 0, 5):
        block = layer.pages.block[layer.tables[0, j * r // PAGE], j * r % PAGE // r]
        assert written.same(block, written_block(layer, 0, j, written))


@pytest.mark.parametrize("shape", SHAPES)
def test_attended_rows_have_the_written_bits(shape, written):
    layer = Layer(**shape)
    layer.store()
    out = layer.attend()
    for row in (0, 1, 62, shape["tokens"] // 2, shape["tokens"] - 2, len(out) - 1):
        assert written.same(out[row], written_attend(layer, row, written)), row


@pytest.mark.parametrize("shape", SHAPES)
def test_store_and_attend_agree_with_the_reference(shape):
    layer, truth = Layer(**shape), Layer(**shape)
    layer.store()
    truth.store(op=reference.qsa_store)
    for got, wanted in zip(layer.snapshot(), truth.snapshot(), strict=True):
        assert np.allclose(got, wanted, atol=5e-6)
    assert np.abs(layer.attend() - truth.attend(op=reference.qsa_attend)).max() < 5e-6


@pytest.mark.parametrize("cut", [1, 7, 64, 128])
def test_a_prompt_stored_and_read_in_chunks_has_the_bits_of_one_read_at_once(cut, threads):
    shape = {"tokens": 300, "heads": 4, "d": 64, "slots": 1, "budget": 64}
    whole, parts = Layer(**shape), Layer(**shape)
    threads(1)
    whole.store()
    wanted = whole.attend()
    threads(2)
    got = []
    for begin in range(0, 300, cut):
        rows = slice(begin, begin + cut)
        parts.store(rows)
        got.append(parts.attend(rows))
    assert all((a == b).all() for a, b in zip(parts.snapshot(), whole.snapshot(), strict=True))
    assert (np.concatenate(got) == wanted).all()


def test_rows_of_several_slots_have_the_bits_they_have_alone():
    shape = {"tokens": 130, "slots": 3, "budget": 32}
    together, alone = Layer(**shape), Layer(**shape)
    order = np.random.default_rng(3).permutation(390)[:100]
    for layer in (together, alone):
        layer.store()
    out = together.attend(order)
    for i in range(0, 100, 9):
        assert (alone.attend(order[i : i + 1]) == out[i : i + 1]).all()


def test_little_scratch_memory_changes_no_bit(monkeypatch):
    layer = Layer(200, budget=32)
    layer.store()
    wanted = layer.attend()
    monkeypatch.setattr(import_module("strata.kernels.cpu.qsa_attend"), "SCRATCH_BYTES", 1)
    assert (layer.attend() == wanted).all()


def test_only_visible_tokens_are_read():
    layer = Layer(100, budget=32)
    layer.store()
    wanted = layer.attend(slice(0, 50))
    for cached in (layer.pages.k, layer.pages.v):
        cached[layer.tables[0, 0], 50:] = np.nan
        cached[layer.tables[0, 1]] = np.nan
    layer.pages.block[layer.tables[0, 0], 50 // 4 :] = np.nan
    assert (layer.attend(slice(0, 50)) == wanted).all()


def test_the_best_blocks_the_tail_and_nothing_else_are_kept(written):
    layer = Layer(tokens=210, budget=32, seed=4)
    layer.store()
    wanted = layer.attend()
    for row in (130, 163, 209):
        kept = set(written_kept(layer, row, written))
        assert len(kept) == 32 + (row + 1) % 4
        spoiled = Layer(tokens=210, budget=32, seed=4)
        spoiled.store()
        for p in set(range(row + 1)) - kept:
            spoiled.pages.k[spoiled.tables[0, p // PAGE], p % PAGE] = np.nan
            spoiled.pages.v[spoiled.tables[0, p // PAGE], p % PAGE] = np.nan
        assert (spoiled.attend(slice(row, row + 1)) == wanted[row]).all()


def test_equal_scores_keep_the_lower_blocks():
    layer = Layer(tokens=64, budget=8, heads=2, kv_heads=1)
    layer.store()
    layer.pages.block[:] = 0
    expected = layer.attend(slice(63, 64))
    for p in range(8, 64):
        layer.pages.v[layer.tables[0, 0], p] = np.nan
    assert (layer.attend(slice(63, 64)) == expected).all()


@given(st.lists(st.sampled_from([0.0, 1e-40, 0.5, 1.0, 1.0000001, 3e38, np.inf]), min_size=1, max_size=60), st.data())
@settings(max_examples=80, deadline=None)
def test_the_threshold_is_the_kth_best_score_and_its_share_of_equals(values, data):
    scores = np.array(values, F)
    k = data.draw(st.integers(1, len(scores)))
    cut, equals = threshold(scores.view(np.int32), k)
    value = np.array([cut], np.int32).view(F)[0]
    assert value == np.sort(scores)[::-1][k - 1]
    assert equals == k - (scores > value).sum()


def test_no_rows_are_no_rows():
    layer = Layer(4)
    layer.store(slice(0, 0))
    assert layer.attend(slice(0, 0)).shape == (0, 128)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"slots": np.full(70, 1, np.int32)}, "slots must be in 0 to 0, got 1"),
        ({"positions": np.arange(60, 130, dtype=np.int32)}, "positions must be in 0 to 127, got 60 to 129"),
        ({"positions": np.full(70, -1, np.int32)}, "positions must be in 0"),
        ({"positions": np.zeros(69, np.int32)}, "positions must be"),
        ({"tables": np.array([[0, 4]], np.int32)}, "tables must name pages 0 to 3 for row 64"),
        ({"tables": np.array([[-1, 1]], np.int32)}, "tables must name pages 0 to 3 for row 0"),
        ({"k": np.zeros((70, 2, 16), F)}, "must be"),
        ({"index_k": np.zeros((70, 16), F)}, "index_dim"),
        ({"v": np.zeros((70, 1, 32), F)}, "v must be"),
    ],
)
def test_store_refuses_what_does_not_fit_before_a_page_changes(change, named):
    layer = Layer(70)
    for name, value in change.items():
        setattr(layer, name, value)
    before = layer.snapshot()
    with pytest.raises(ValueError, match=named):
        layer.store()
    assert all((a == b).all() for a, b in zip(before, layer.snapshot(), strict=True))


@pytest.mark.parametrize(
    ("shape", "change", "named"),
    [
        ({"d": 16}, {}, "multiple of 32, got 16"),
        ({"index_dim": 40}, {}, "multiple of 16, got 40"),
        ({"heads": 3}, {}, "multiple of 2 heads, got 3"),
        ({}, {"budget": 3}, "budget must be at least a block of 4 tokens, got 3"),
        ({"half": 17}, {}, "rope must rotate at most 32 dims, got 34"),
        ({}, {"index_q": np.zeros((70, 2, 64), F)}, "norm_index_q must be"),
        ({}, {"tables": np.array([[0, 9]], np.int32)}, "tables must name pages"),
    ],
)
def test_attend_refuses_what_does_not_fit(shape, change, named):
    layer = Layer(70, **shape)
    for name, value in change.items():
        setattr(layer, name, value)
    with pytest.raises(ValueError, match=named):
        layer.attend()

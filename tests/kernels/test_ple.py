"""The n-gram embedding on the host: hashes, written bits, chunks and slots, refusals before a state changes."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from importlib import import_module
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.kernels import reference
from strata.kernels.cpu.linear import dequantize, linear
from strata.kernels.cpu.ple import ple, ple_rows
from strata.kernels.ops import Ple

EPS = 1e-6
F = np.float32
EOS = 7


@pytest.fixture
def weights(random_weight):
    def make(c, h, order=3, per_order=2, width=32, kernel=4, kind="Q8_0", seed=0) -> Ple:
        rng = np.random.default_rng(seed)
        f = lambda *shape: rng.standard_normal(shape).astype(F)  # noqa: E731
        heads = (order - 1) * per_order
        sizes = (97 + 2 * np.arange(heads)).astype(np.uint64)
        table = random_weight(kind, int(sizes.sum()), width, scale=0.5)
        return Ple(
            table,
            random_weight(kind, c * h, heads * width),
            random_weight(kind, h, heads * width),
            *(1 + F(0.1) * f(c, h) for _ in range(3)),
            f(c * h, kernel),
            rng.integers(2**43, 2**44, order).astype(np.uint64) | np.uint64(1),
            sizes,
            (np.cumsum(sizes) - sizes).astype(np.uint64),
            EOS,
        )

    return make


class Case:
    def __init__(self, w, n, slots=3, seed=0):
        rng = np.random.default_rng(seed)
        self.w, order, (c, h) = w, len(w.multipliers), w.norm_key.shape
        self.tokens = rng.integers(0, 12, n).astype(np.int32)
        self.history = rng.integers(0, 12, (slots, order - 1)).astype(np.int32)
        self.x = rng.standard_normal((n, c, h)).astype(F)
        self.conv = rng.standard_normal((slots, (w.conv.shape[1] - 1) * order, c * h)).astype(F)

    def run(self, segments, cuts=(), ops=(ple_rows, ple)):
        """(x, rows, history, conv) after all rows; with cuts, one sequence in several calls."""
        x, history, conv, rows = self.x.copy(), self.history.copy(), self.conv.copy(), []
        for b, e in pairwise([0, *cuts, len(x)]):
            now = np.array(segments if not cuts else [(0, 0, e - b)], np.int32)
            rows.append(ops[0](self.w, self.tokens[b:e], now, history))
            ops[1](self.w, x[b:e], rows[-1], now, conv, EPS)
        return x, np.concatenate(rows), history, conv


def same(a, b):
    return all(x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True))


def hashed(w, ids, per_order):
    """Rows of the last id of a context, with Python's integers. ids: newest first, already cut at eos."""
    out, mixed = [], ids[0] * int(w.multipliers[0])
    for n in range(1, len(ids)):
        mixed ^= ids[n] * int(w.multipliers[n])
        for head in range((n - 1) * per_order, n * per_order):
            out.append(mixed % 2**64 % int(w.sizes[head]) + int(w.offsets[head]))
    return out


@given(st.lists(st.integers(0, 9), min_size=1, max_size=20), st.integers(2, 4))
@settings(max_examples=60, deadline=None)
def test_rows_are_the_hash_of_the_ids_back_to_the_last_eos(tokens, order):
    rng = np.random.default_rng(len(tokens))
    sizes = np.arange(31, 31 + 2 * (order - 1)).astype(np.uint64)
    w = Ple(None, None, None, None, None, None, None, rng.integers(2**43, 2**44, order).astype(np.uint64),
            sizes, sizes * np.uint64(3), EOS)  # fmt: skip
    history = np.full((1, order - 1), EOS, np.int32)
    rows = ple_rows(w, np.array(tokens, np.int32), np.array([(0, 0, len(tokens))], np.int32), history)
    for t in range(len(tokens)):
        ids = [tokens[t]]
        while len(ids) < order:
            before = t - len(ids)
            ended = EOS in ids[1:] or before < 0
            ids.append(EOS if ended else tokens[before])
        assert rows[t].tolist() == hashed(w, ids, 2)
    assert history[0].tolist() == ([EOS] * order + tokens)[-(order - 1) :]


def test_the_real_hash_constants_need_all_64_bits():
    sizes = np.array([20_000_003] * 2, np.uint64)
    w = Ple(None, None, None, None, None, None, None,
            np.array([23703573157769, 20109073645365, 8052911324071], np.uint64),
            sizes, np.array([0, 20_000_003], np.uint64), 248044)  # fmt: skip
    tokens, history = np.array([248_319, 248_318, 248_317], np.int32), np.full((1, 2), 248044, np.int32)
    rows = ple_rows(w, tokens, np.array([(0, 0, 3)], np.int32), history)
    ids = [248_317, 248_318, 248_319]
    bigram = ids[0] * 23703573157769 ^ ids[1] * 20109073645365
    trigram = bigram ^ ids[2] * 8052911324071
    assert rows[2].tolist() == [bigram % 20_000_003, trigram % 20_000_003 + 20_000_003]


def written_ple(case, rows, slot, w):
    """The contract's steps for one sequence; w: the written arithmetic."""
    p, (n, c, h) = case.w, case.x.shape
    order, kernel = len(p.multipliers), p.conv.shape[1]
    e = dequantize(p.table, rows.reshape(-1)).reshape(n, -1)
    key, value = linear([p.key, p.value], e)
    key, query = w.rms(key.reshape(n, c, h), p.norm_key, EPS), w.rms(case.x, p.norm_query, EPS)
    s = w.lanes(key, query) * (F(1) / np.sqrt(F(h)))
    gamma = w.sigmoid(np.sign(s) * np.sqrt(np.maximum(np.abs(s), F(1e-6))))
    injected = gamma[:, :, None] * value[:, None, :]
    f = np.concatenate([case.conv[slot], w.rms(injected, p.norm_conv, EPS).reshape(n, -1)])
    d = p.conv[:, 0] * f[:n]
    for j in range(1, kernel):
        d = w.fma(p.conv[:, j], f[j * order : j * order + n], d)
    return case.x + (injected + w.silu(d).reshape(n, c, h)), f[n:]


@pytest.mark.parametrize(
    ("n", "c", "h", "order", "kernel"), [(1, 4, 64, 3, 4), (20, 2, 96, 4, 3), (5, 3, 160, 2, 2), (13, 1, 32, 3, 4)]
)
def test_outputs_and_states_have_the_written_bits(n, c, h, order, kernel, weights, written):
    case = Case(weights(c, h, order=order, kernel=kernel), n)
    x, rows, _, conv = case.run([(1, 0, n)])
    assert same((x, conv[1]), written_ple(case, rows, 1, written))


@pytest.mark.parametrize(("n", "c", "h", "order", "kernel"), [(40, 4, 64, 3, 4), (300, 2, 96, 4, 3)])
def test_it_agrees_with_the_reference_on_float_weights(n, c, h, order, kernel, weights):
    case = Case(weights(c, h, order=order, kernel=kernel, kind="F32"), n)
    segments = [(2, 0, n // 3), (0, n // 3, n)]
    got, wanted = case.run(segments), case.run(segments, ops=(reference.ple_rows, reference.ple))
    assert (got[1] == wanted[1]).all()
    assert (got[2] == wanted[2]).all()
    assert np.abs(got[0] - wanted[0]).max() < 2e-5
    assert np.abs(got[3] - wanted[3]).max() < 2e-5


@pytest.mark.parametrize("cut", [1, 7, 64, 128])
def test_a_prompt_read_in_chunks_leaves_the_bits_of_one_read_at_once(cut, weights, threads, monkeypatch):
    case = Case(weights(2, 64), 150)
    threads(1)
    whole = case.run([(0, 0, 150)])
    threads(2)
    monkeypatch.setattr(import_module("strata.kernels.cpu.ple"), "ROWS_AT_ONCE", 50)
    assert same(case.run(None, range(cut, 150, cut)), whole)


def test_a_sequence_has_the_same_bits_alone_and_beside_others(weights, monkeypatch):
    monkeypatch.setattr(import_module("strata.kernels.cpu.ple"), "ROWS_AT_ONCE", 16)
    case = Case(weights(2, 64), 40)
    segments = [(2, 0, 1), (0, 1, 35), (1, 35, 40)]
    x, rows, history, conv = case.run(segments)
    for slot, begin, end in segments:
        alone = copy(case)
        alone.tokens, alone.x = case.tokens[begin:end], case.x[begin:end]
        ax, arows, ahistory, aconv = alone.run([(slot, 0, end - begin)])
        assert same((ax, arows), (x[begin:end], rows[begin:end]))
        assert same((ahistory[slot], aconv[slot]), (history[slot], conv[slot]))


def test_no_rows_are_no_rows(weights):
    case = Case(weights(2, 64), 0)
    x, rows, history, conv = case.run(np.empty((0, 3)))
    assert x.shape == (0, 2, 64)
    assert rows.shape == (0, 4)
    assert same((history, conv), (case.history, case.conv))


def test_what_does_not_fit_is_refused_before_a_state_changes(weights, monkeypatch):
    monkeypatch.setattr(import_module("strata.kernels.cpu.ple"), "ROWS_AT_ONCE", 2)
    case = Case(weights(2, 64), 5)
    segments = np.array([(0, 0, 5)], np.int32)
    rows = ple_rows(case.w, case.tokens, segments, case.history.copy())
    too_high = rows + np.array([0, 0, 0, 0, 10_000])[:, None]
    before = case.x.copy(), case.conv.copy(), case.history.copy()
    for named, call in (
        ("history must keep 2 ids", lambda: ple_rows(case.w, case.tokens, segments, case.history[:, :1].copy())),
        ("segments", lambda: ple_rows(case.w, case.tokens[:4], segments, case.history)),
        ("sizes must be above 0", lambda: ple_rows(
            replace(case.w, sizes=np.zeros(4, np.uint64)), case.tokens, segments, case.history)),
        ("conv must keep 9 inputs", lambda: ple(case.w, case.x, rows, segments, case.conv[:, :6].copy(), EPS)),
        ("slot 3", lambda: ple(case.w, case.x, rows, np.array([(3, 0, 5)], np.int32), case.conv, EPS)),
        ("rows must be", lambda: ple(case.w, case.x, rows[:4].copy(), segments, case.conv, EPS)),
        ("rows must be in 0 to", lambda: ple(case.w, case.x, too_high, segments, case.conv, EPS)),
        ("key must be", lambda: ple(
            replace(case.w, key=case.w.value), case.x, rows, segments, case.conv, EPS)),
        ("norm_query must be", lambda: ple(
            replace(case.w, norm_query=np.ones((1, 64), F)), case.x, rows, segments, case.conv, EPS)),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=named):
            call()
    assert same(before, (case.x, case.conv, case.history))

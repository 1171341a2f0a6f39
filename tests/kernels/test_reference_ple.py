"""The n-gram embedding: the hash against Python's integers, the convolution against its definition."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from strata.kernels import reference
from strata.kernels.formats import BY_NAME, Weight
from strata.kernels.ops import Ple

C, H, WIDTH, KERNEL, EOS = 2, 8, 4, 4, 99
REAL_MULTIPLIERS = (23703573157769, 20109073645365, 8052911324071)
REAL_SIZES = (20000003, 20000023, 20000033, 20000047)
EPS = 1e-6


def matrix(rng: np.random.Generator, rows: int, cols: int) -> Weight:
    values = (rng.normal(size=(rows, cols)) / np.sqrt(cols)).astype(np.float32)
    return Weight(BY_NAME["F32"], (rows, cols), values.view(np.uint8))


def values(w: Weight) -> np.ndarray:
    return w.data.view(np.float32).astype(np.float64)


def weights(multipliers=(7, 11, 13), sizes=(31, 37, 41, 43), eos: int = EOS) -> Ple:
    rng = np.random.default_rng(11)
    heads, offsets = len(sizes), np.cumsum([0, *sizes[:-1]])
    norm = lambda: rng.normal(1, 0.1, size=(C, H)).astype(np.float32)  # noqa: E731
    return Ple(
        table=matrix(rng, 160, WIDTH),
        key=matrix(rng, C * H, heads * WIDTH),
        value=matrix(rng, H, heads * WIDTH),
        norm_key=norm(),
        norm_query=norm(),
        norm_conv=norm(),
        conv=rng.normal(size=(C * H, KERNEL)).astype(np.float32),
        multipliers=np.array(multipliers, np.uint64),
        sizes=np.array(sizes, np.uint64),
        offsets=np.array(offsets, np.uint64),
        eos=eos,
    )


def rows_of(ids: list[int], w: Ple) -> list[list[int]]:
    """By the text: the context is cut at the first eos going back, integers of any size."""
    m, size, offset = (x.tolist() for x in (w.multipliers, w.sizes, w.offsets))
    order, per = len(m), len(size) // (len(m) - 1)
    out = []
    for t in range(len(ids)):
        context, cut = [ids[t]], False
        for back in range(1, order):
            cut = cut or t - back < 0 or ids[t - back] == w.eos
            context.append(w.eos if cut else ids[t - back])
        row = []
        for n in range(2, order + 1):
            h = 0
            for j in range(n):
                h ^= context[j] * m[j]
            row += [h % size[i] + offset[i] for i in range((n - 2) * per, (n - 1) * per)]
        out.append(row)
    return out


def whole(n: int, slot: int = 0) -> np.ndarray:
    return np.array([[slot, 0, n]], np.int32)


def fresh(w: Ple, slots: int = 1) -> np.ndarray:
    return np.full((slots, len(w.multipliers) - 1), w.eos, np.int32)


def test_the_hash_needs_64_bit_integers():
    w = weights(REAL_MULTIPLIERS, REAL_SIZES, eos=248044)
    ids = np.random.default_rng(12).integers(200_000, 248_320, size=200)
    ids[::17] = 248044
    got = reference.ple_rows(w, ids.astype(np.int32), whole(200), fresh(w))
    assert got.tolist() == rows_of(ids.tolist(), w)
    by_float = (ids[1:].astype(np.float64) * REAL_MULTIPLIERS[0]).astype(np.uint64)
    assert (by_float != ids[1:].astype(np.uint64) * np.uint64(REAL_MULTIPLIERS[0])).any()


@pytest.mark.parametrize("cuts", [(), (1,), (1, 2, 3), (5, 11, 12)])
def test_n_grams_reach_back_over_a_cut_and_stop_at_an_eos(cuts):
    w = weights()
    ids = [5, 6, EOS, 7, 8, 9, EOS, EOS, 10, 11, 12, EOS, 3]
    history, edges = fresh(w), [0, *cuts, len(ids)]
    got = np.concatenate(
        [reference.ple_rows(w, np.array(ids[i:j], np.int32), whole(j - i), history) for i, j in pairwise(edges)]
    )
    assert got.tolist() == rows_of(ids, w)


def test_an_end_of_turn_does_not_cut_n_grams():
    w = weights()
    turn = reference.ple_rows(w, np.array([5, 50, 7], np.int32), whole(3), fresh(w))[2]
    text = reference.ple_rows(w, np.array([5, EOS, 7], np.int32), whole(3), fresh(w))[2]
    assert turn.tolist() == rows_of([5, 50, 7], w)[2]
    assert text.tolist() == rows_of([7], w)[0] != turn.tolist()


def test_slots_keep_their_own_history():
    w = weights()
    history = fresh(w, 2)
    tokens = np.array([1, 2, 3, 4, 5], np.int32)
    first = reference.ple_rows(w, tokens, np.array([[1, 0, 3], [0, 3, 5]], np.int32), history)
    again = reference.ple_rows(w, np.array([6, 7], np.int32), np.array([[0, 0, 1], [1, 1, 2]], np.int32), history)
    assert first.tolist() == rows_of([1, 2, 3], w) + rows_of([4, 5], w)
    assert again.tolist() == [rows_of([4, 5, 6], w)[-1], rows_of([1, 2, 3, 7], w)[-1]]


def added(w: Ple, x: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """What is added to the residual of a sequence from its start, by the formulas."""
    n, order = len(x), len(w.multipliers)
    normed = lambda a, g: a / np.sqrt((a * a).mean(-1, keepdims=True) + EPS) * g  # noqa: E731
    logistic = lambda a: 1 / (1 + np.exp(-a))  # noqa: E731
    e = values(w.table)[rows].reshape(n, -1)
    key = normed((e @ values(w.key).T).reshape(n, C, H), w.norm_key)
    s = (key * normed(x.astype(np.float64), w.norm_query)).sum(-1) / np.sqrt(H)
    p = logistic(np.sign(s) * np.sqrt(np.maximum(abs(s), 1e-6)))[..., None] * (e @ values(w.value).T)[:, None]
    f = normed(p, w.norm_conv).reshape(n, -1)
    d = np.zeros_like(f)
    for t in range(n):
        for j in range(KERNEL):
            back = t - (KERNEL - 1 - j) * order
            if back >= 0:
                d[t] += w.conv[:, j] * f[back]
    return p + (d * logistic(d)).reshape(p.shape)


@pytest.mark.parametrize("cuts", [(), (1,), (4, 5, 11)])
def test_the_convolution_is_dilated_and_an_eos_does_not_clear_it(cuts):
    w, n = weights(), 14
    x = np.random.default_rng(13).normal(size=(n, C, H)).astype(np.float32)
    ids = [3, EOS, 4, 5, EOS, EOS, 6, 7, 8, 9, EOS, 1, 2, 3]
    history, conv = fresh(w), np.zeros((1, (KERNEL - 1) * len(w.multipliers), C * H), np.float32)
    wanted = x + added(w, x, np.array(rows_of(ids, w)))
    edges, got = [0, *cuts, n], x.copy()
    for i, j in pairwise(edges):
        rows = reference.ple_rows(w, np.array(ids[i:j], np.int32), whole(j - i), history)
        part = got[i:j].copy()
        reference.ple(w, part, rows, whole(j - i), conv, EPS)
        got[i:j] = part
    np.testing.assert_allclose(got, wanted, atol=3e-6)


def test_a_state_of_another_depth_is_refused_before_the_residual_changes():
    w = weights()
    x = np.ones((2, C, H), np.float32)
    rows = reference.ple_rows(w, np.array([1, 2], np.int32), whole(2), fresh(w))
    with pytest.raises(ValueError, match="conv"):
        reference.ple(w, x, rows, whole(2), np.zeros((1, KERNEL - 1, C * H), np.float32), EPS)
    with pytest.raises(ValueError, match="history"):
        reference.ple_rows(replace(w, multipliers=w.multipliers[:2]), np.array([1], np.int32), whole(1), fresh(w))
    np.testing.assert_array_equal(x, 1)

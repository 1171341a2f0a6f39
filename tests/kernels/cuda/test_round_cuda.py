"""Rounds on a card: what stays is what windows without drafts would have said, and states done over have their bits."""

from __future__ import annotations

import numpy as np
import pytest

from strata.engine.draft.accept import n_kept
from strata.kernels import cpu
from strata.kernels.cuda.gdn_again import LAYERS, Again, gdn_again
from strata.kernels.cuda.ple import ple, ple_again, ple_rows
from strata.kernels.cuda.round import round_accept, round_choose, round_next
from strata.kernels.ops import Gdn, Ple

BESIDE = 1 << 16
END = 3


def accepted(target, ids: list[int], drafts: list[int], ends=(END,)) -> tuple[int, list[int]]:
    kept, again = target.put(np.full(1, -9, np.int32)), target.put(np.full(3, -9, np.int32))
    fed = np.array([77, *drafts], np.int32)
    given = [target.put(np.array(a, np.int32)) for a in (ids, fed, ends, (4 | BESIDE, 0, len(ids)))]
    round_accept(*given, kept, again)
    return int(target.host(kept)[0]), target.host(again).tolist()


def test_what_stays_ends_at_the_first_wrong_draft_and_at_an_end_token(target):
    rng = np.random.default_rng(2)
    for _ in range(40):
        rows = [(int(rng.integers(-1, 5)), rng.random() < 0.8) for _ in range(rng.integers(1, 9))]
        _check_what_stays(target, rows)


def _check_what_stays(target, rows: list[tuple[int, bool]]) -> None:
    ids = [token for token, _ in rows]
    drafts = [max(token, 0) + (not right) for token, right in rows[:-1]]
    n, again = accepted(target, ids, drafts)
    wanted = n_kept(drafts, ids)
    end = next((i + 1 for i, token in enumerate(ids) if token == END), len(ids))
    assert n == min(wanted, end)
    assert again == [4 | BESIDE, 0, n if n < len(ids) else 0]


@pytest.mark.parametrize("ends", [(END,), (9, 5, END), (-1,)])
def test_ends_are_looked_for_among_all_of_them(target, ends):
    n, _ = accepted(target, [8, END, 6], [8, END], ends)
    assert n == (2 if END in ends else 3)


def test_the_draft_behind_the_last_row_that_stays_begins_the_chain(target):
    rng = np.random.default_rng(1)
    out = rng.standard_normal((3, 4, 132)).astype(np.float32)
    fed, chain = target.put(np.zeros((1, 4, 132), np.float32)), target.put(np.full(2, -1, np.int32))
    likely, step = target.put(np.zeros(2, np.float32)), target.put(np.zeros(3, np.int32))
    kept = target.put(np.array([2], np.int32))
    drafts, p = np.array([40, 41, 42], np.int32), np.array([0.1, 0.2, 0.3], np.float32)
    places, slot = np.array([10, 11, 12], np.int32), np.array([5], np.int32)
    round_choose(target.put(out), kept, *map(target.put, (drafts, p, places, slot)), chain, likely, fed, step)
    assert np.array_equal(target.host(fed), out[1:2])
    assert target.host(chain).tolist() == [41, -1] and target.host(likely)[0] == np.float32(0.2)
    assert target.host(step).tolist() == [41, 12, 5], "the step has a place behind the rows that stay"


@pytest.mark.parametrize(("n", "ids"), [(1, [50, 7]), (2, [7, 51]), (2, [7, -1])])
def test_a_round_feeds_the_next_one(target, n, ids):
    tokens, positions = np.full(8, -5, np.int32), np.arange(20, 28, dtype=np.int32)
    places = np.arange(10, 18, dtype=np.int32)
    segments = np.array([[2 | BESIDE, 0, 1], [2 | BESIDE, 0, 2]], np.int32)
    device = [target.put(a) for a in (tokens, positions, places, segments)]
    given = [target.put(np.array(a, np.int32)) for a in (ids, [n], [90, 91, 92])]
    round_next(*given, *device)
    fed, at, of_layer, rows = map(target.host, device)
    assert fed[:4].tolist() == [max(ids[n - 1], 0), 90, 91, 92] and (fed[4:] == -5).all()
    assert at[:4].tolist() == [20 + n + i for i in range(4)]
    assert of_layer[:4].tolist() == [10 + n + i for i in range(4)]
    assert rows.tolist() == [[3 | BESIDE, 0, 1], [3 | BESIDE, 0, 2]]


@pytest.mark.parametrize(("k", "v", "d", "taps"), [(1, 2, 32, 4), (2, 6, 32, 3), (2, 2, 64, 4), (1, 3, 128, 4)])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_states_done_over_have_the_bits_of_the_rows_that_stay(target, same_bits, k, v, d, taps, n):
    rng = np.random.default_rng([k, v, d])
    f = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    channels, rows = (2 * k + v) * d, 4
    layers, wanted, states = [], [], []
    for _ in range(3):
        w = Gdn(f(channels, taps), -np.exp(f(v)), f(v), 1 + 0.1 * f(d))
        p, z, b, a = f(rows, channels), f(rows, v * d), f(rows, v), f(rows, v)
        conv, state = f(2, taps - 1, channels), 0.1 * f(2, v, d, d)
        own = target.put(conv.copy()), target.put(state.copy())
        layers.append(Again(target.put(w), *map(target.put, (p, b, a)), *own))
        states.append((conv, state, *own))
        after = conv[1:].copy(), state[1:].copy()
        cpu.gdn(w, p[:n], z[:n], b[:n], a[:n], np.array([[0, 0, n]], np.int32), *after, 1e-6)
        wanted.append(after)
    gdn_again(layers, target.put(np.array([[1 | BESIDE, 0, n]], np.int32)))
    for (conv, state, *own), after in zip(states, wanted, strict=True):
        for before, got, want in zip((conv, state), map(target.host, own), after, strict=True):
            same_bits(got[:1], want)
            same_bits(got[1:], before[1:])


def test_no_rows_to_do_over_change_nothing_and_every_layer_has_its_turn(target, same_bits):
    rng = np.random.default_rng(3)
    f = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    w = target.put(Gdn(f(128, 4), -np.exp(f(2)), f(2), 1 + 0.1 * f(32)))
    products = [target.put(a) for a in (f(2, 128), f(2, 2), f(2, 2))]
    before = [(f(2, 3, 128), f(2, 2, 32, 32)) for _ in range(LAYERS + 1)]
    layers = [Again(w, *products, *map(target.put, each)) for each in before]
    gdn_again(layers, target.put(np.array([[1 | BESIDE, 0, 0]], np.int32)))
    for layer, (conv, state) in zip(layers, before, strict=True):
        same_bits(target.host(layer.conv), conv)
        same_bits(target.host(layer.state), state)
    gdn_again(layers, target.put(np.array([[1 | BESIDE, 0, 1]], np.int32)))
    for layer, (_, state) in zip(layers, before, strict=True):
        assert not np.array_equal(target.host(layer.state), state)
    with pytest.raises(ValueError, match="layers of one shape"):
        other = [target.put(a) for a in (f(1, 128), f(1, 2), f(1, 2))]
        gdn_again([layers[0], Again(w, *other, *layers[1][4:])], target.put(np.zeros((1, 3), np.int32)))


@pytest.mark.parametrize("n", [0, 1, 3])
def test_an_n_gram_state_done_over_has_the_bits_of_the_rows_that_stay(target, same_bits, random_weight, n):
    rng = np.random.default_rng(1)
    f = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    order, c, h, taps, rows = 3, 2, 64, 3, 4
    w = target.put(
        Ple(
            table=random_weight("Q4_0", 130, 32, scale=0.3),
            key=random_weight("Q8_0", c * h, 128),
            value=random_weight("Q8_0", h, 128),
            norm_key=f(c, h),
            norm_query=f(c, h),
            norm_conv=f(c, h),
            conv=f(c * h, taps),
            multipliers=np.array([3, 5, 7], np.uint64),
            sizes=np.array([30, 40, 25, 35], np.uint64),
            offsets=np.array([0, 30, 70, 95], np.uint64),
            eos=7,
        )
    )
    tokens, x = target.put(rng.integers(0, 50, rows).astype(np.int32)), f(rows, c, h)
    history, conv = rng.integers(0, 50, (2, order - 1)).astype(np.int32), f(2, (taps - 1) * order, c * h)

    def read(end: int, kept, inputs=None) -> None:
        segment, space = target.put(np.array([[1 | BESIDE, 0, end]], np.int32)), target.workspace()
        table_rows = ple_rows(space, w, tokens[:end], segment, kept[0])
        ple(space, w, target.put(x[:end]), table_rows, segment, kept[1], 1e-6, 1000, inputs)

    whole, wanted = ([target.put(each.copy()) for each in (history, conv)] for _ in range(2))
    inputs = target.put(np.full((rows, c * h), np.nan, np.float32))
    read(rows, whole, inputs)
    read(n or rows, wanted)
    ple_again(w, tokens, inputs, target.put(np.array([[1 | BESIDE, 0, n]], np.int32)), *whole)
    for got, want in zip(whole, wanted, strict=True):
        same_bits(target.host(got), target.host(want))

"""From one window to the next on a card: tokens, positions, rows of state, recent ids; states that go beside."""

from __future__ import annotations

import numpy as np
import pytest

from strata.kernels.cuda.gdn import gdn
from strata.kernels.cuda.ple import ple, ple_rows
from strata.kernels.cuda.window import window_next, window_recent
from strata.kernels.ops import Gdn, Ple

BESIDE = 1 << 16
"""Upper half of a segment's first number: the state goes to the row that differs in the lowest bit."""


def test_a_window_feeds_the_next_one(target):
    tokens, positions = np.array([5, 6, 7], np.int32), np.array([10, 63, 0], np.int32)
    segments = np.array([[2 | BESIDE, 0, 1], [5 | BESIDE, 1, 2], [8, 2, 3]], np.int32)
    device = [target.put(a) for a in (tokens, positions, segments)]
    window_next(target.put(np.array([40, -1, 0], np.int32)), *device)
    fed, following, rows = map(target.host, device)
    assert fed.tolist() == [40, 0, 0], "a row without an id feeds token 0: the host stops it"
    assert following.tolist() == [11, 64, 1]
    assert rows.tolist() == [[3 | BESIDE, 0, 1], [4 | BESIDE, 1, 2], [8, 2, 3]]
    window_next(target.put(np.array([1, 2, 3], np.int32)), *device)
    assert target.host(device[2]).tolist() == segments.tolist()


def test_a_fed_token_takes_the_place_of_the_oldest_recent_id(target):
    recent = np.full((3, 4), -1, np.int32)
    device = target.put(recent)
    for step in range(9):
        tokens, positions = np.array([step, 100 + step, 200 + step], np.int32), np.full(3, step, np.int32)
        window_recent(target.put(tokens), target.put(positions), target.put(np.array([4, 3, 0], np.int32)), device)
    got = target.host(device)
    assert sorted(got[0].tolist()) == [5, 6, 7, 8]
    assert sorted(got[1].tolist()) == [-1, 106, 107, 108]
    assert got[2].tolist() == [-1] * 4


def test_more_rows_than_a_warp_are_refused(target):
    many = target.put(np.zeros(33, np.int32))
    with pytest.raises(ValueError, match="at most 32 rows, got 33"):
        window_next(many, many, many, target.put(np.zeros((33, 3), np.int32)))


@pytest.mark.parametrize("lengths", [(1, 2), (17, 3)], ids=["window", "prompt"])
def test_a_delta_net_state_that_goes_beside_leaves_the_one_before(target, same_bits, lengths):
    rng = np.random.default_rng(0)
    f = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    k, v, d, kernel, n = 1, 2, 32, 4, sum(lengths)
    channels = (2 * k + v) * d
    weights = target.put(Gdn(f(channels, kernel), -np.exp(f(v)), f(v), 1 + 0.1 * f(d)))
    conv, state = f(4, kernel - 1, channels), 0.1 * f(4, v, d, d)
    inputs = [target.put(a) for a in (f(n, channels), f(n, v * d), f(n, v), f(n, v))]
    results = []
    for beside in (0, BESIDE):
        rows = np.array([[3 | beside, 0, lengths[0]], [0 | beside, lengths[0], n]], np.int32)
        kept = target.put(conv.copy()), target.put(state.copy())
        y = gdn(target.workspace(), weights, *inputs, target.put(rows), *kept, 1e-6)
        results.append([target.host(a) for a in (y, *kept)])
    (y, *in_place), (other, *apart) = results
    same_bits(other, y)
    for before, inside, outside in zip((conv, state), in_place, apart, strict=True):
        same_bits(outside[[2, 1]], inside[[3, 0]])
        same_bits(outside[[3, 0]], before[[3, 0]])


@pytest.mark.parametrize("lengths", [(1, 2), (70, 3)], ids=["window", "prompt"])
def test_an_n_gram_state_that_goes_beside_leaves_the_one_before(target, same_bits, random_weight, lengths):
    rng = np.random.default_rng(1)
    f = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    order, c, h, kernel, n = 3, 2, 64, 3, sum(lengths)
    sizes = np.array([30, 40, 25, 35], np.uint64)
    weights = target.put(
        Ple(
            table=random_weight("Q4_0", 130, 32, scale=0.3),
            key=random_weight("Q8_0", c * h, 128),
            value=random_weight("Q8_0", h, 128),
            norm_key=f(c, h),
            norm_query=f(c, h),
            norm_conv=f(c, h),
            conv=f(c * h, kernel),
            multipliers=np.array([3, 5, 7], np.uint64),
            sizes=sizes,
            offsets=np.array([0, 30, 70, 95], np.uint64),
            eos=7,
        )
    )
    tokens, x = rng.integers(0, 50, n).astype(np.int32), f(n, c, h)
    history, conv = rng.integers(0, 50, (4, order - 1)).astype(np.int32), f(4, (kernel - 1) * order, c * h)
    results = []
    for beside in (0, BESIDE):
        rows = target.put(np.array([[3 | beside, 0, lengths[0]], [0 | beside, lengths[0], n]], np.int32))
        kept, residual, space = (target.put(history.copy()), target.put(conv.copy())), target.put(x), target.workspace()
        table_rows = ple_rows(space, weights, target.put(tokens), rows, kept[0])
        ple(space, weights, residual, table_rows, rows, kept[1], 1e-6, 1000)
        results.append([target.host(a) for a in (residual, *kept)])
    (y, *in_place), (other, *apart) = results
    same_bits(other, y)
    for before, inside, outside in zip((history, conv), in_place, apart, strict=True):
        same_bits(outside[[2, 1]], inside[[3, 0]])
        same_bits(outside[[3, 0]], before[[3, 0]])

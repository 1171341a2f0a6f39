"""Routing on a card: the experts and weights of the host, equal logits included."""

from __future__ import annotations

import numpy as np
import pytest

from strata.kernels import cpu
from strata.kernels.cuda.route import fits_window, route, route_window
from strata.kernels.formats import BY_NAME, Weight


@pytest.mark.parametrize(("n", "experts", "used"), [(1, 512, 10), (5, 16, 4), (9, 24, 3), (2, 100, 64), (3, 33, 33)])
@pytest.mark.parametrize("coarse", [False, True])
def test_picks_and_weights_are_those_of_the_host(target, same_bits, n, experts, used, coarse):
    logits = (3 * np.random.default_rng(experts).standard_normal((n, experts))).astype(np.float32)
    logits = np.round(logits) if coarse else logits
    picked, weights = (target.host(a) for a in route(target.workspace(), target.put(logits), used))
    want, want_weights = cpu.route(logits, used)
    np.testing.assert_array_equal(picked, want)
    same_bits(weights, want_weights)


def test_equal_logits_take_the_lower_experts_and_equal_weights(target):
    logits = np.zeros((2, 40), np.float32)
    logits[1, ::2] = -0.0
    picked, weights = (target.host(a) for a in route(target.workspace(), target.put(logits), 8))
    np.testing.assert_array_equal(picked, np.tile(np.arange(8), (2, 1)))
    np.testing.assert_array_equal(weights, np.full((2, 8), 0.125, np.float32))


@pytest.mark.parametrize("values", [2, 12, 16, 20, 30, 60])
def test_equal_logits_among_the_best_are_picked_at_once_as_one_by_one(target, same_bits, values):
    """Few values, so that now less and now more than a warp's lanes hold a logit that may be picked."""
    rng = np.random.default_rng(values)
    logits = rng.integers(0, values, (12, 512)).astype(np.float32)
    logits[6:] = np.where(rng.random((6, 512)) < 0.06, logits[6:], -logits[6:])
    picked, weights = (target.host(a) for a in route(target.workspace(), target.put(logits), 10))
    want, want_weights = cpu.route(logits, 10)
    np.testing.assert_array_equal(picked, want)
    same_bits(weights, want_weights)


def test_more_experts_than_there_are_is_refused(target):
    with pytest.raises(ValueError, match="used must be in 1 to 5, got 6"):
        route(target.workspace(), target.put(np.zeros((1, 5), np.float32)), 6)


def matrix(kind: str, rows: int, cols: int, seed: int) -> Weight:
    values = np.random.default_rng(seed).standard_normal((rows, cols)).astype(np.float32)
    if kind == "BF16":
        return Weight(BY_NAME[kind], (rows, cols), (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8))
    return Weight(BY_NAME[kind], (rows, cols), values.view(np.uint8))


@pytest.mark.parametrize("kind", ["F32", "BF16"])
@pytest.mark.parametrize(("n", "experts", "cols", "used"), [(1, 16, 64, 4), (3, 33, 2564, 10), (9, 70, 260, 3)])
def test_a_window_routes_as_its_two_steps_do_and_again(target, same_bits, kind, n, experts, cols, used):
    router, shared = matrix(kind, experts, cols, 1), matrix(kind, 1, cols, 2)
    ended = target.put(np.zeros(1, np.uint32))
    on_device = target.put(router), target.put(shared)
    assert fits_window(router, shared, n)
    for seed in (3, 4):
        x = np.random.default_rng(seed).standard_normal((n, cols)).astype(np.float32)
        logits, gate = cpu.linear([router, shared], x)
        want, want_weights = cpu.route(logits, used)
        got = [target.host(a) for a in route_window(target.workspace(), ended, *on_device, target.put(x), used)]
        np.testing.assert_array_equal(got[0], want)
        same_bits(got[1], want_weights)
        same_bits(got[2], gate.reshape(-1))
        assert target.host(ended).tolist() == [0]

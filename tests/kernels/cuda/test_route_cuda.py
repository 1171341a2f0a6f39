"""Routing on a card: the experts and weights of the host, equal logits included."""

from __future__ import annotations

import numpy as np
import pytest

from strata.kernels import cpu
from strata.kernels.cuda.route import route


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


def test_more_experts_than_there_are_is_refused(target):
    with pytest.raises(ValueError, match="used must be in 1 to 5, got 6"):
        route(target.workspace(), target.put(np.zeros((1, 5), np.float32)), 6)

"""Routing and the mixture of experts."""

from __future__ import annotations

import numpy as np
import pytest

from strata.kernels import reference
from strata.kernels.formats import BY_NAME, Weight
from strata.kernels.ops import Moe

E, H, I, S = 6, 8, 5, 7


def matrix(rng: np.random.Generator, *shape: int) -> Weight:
    values = (rng.normal(size=shape) / np.sqrt(shape[-1])).astype(np.float32)
    return Weight(BY_NAME["F32"], shape, values.view(np.uint8))


def values(w: Weight) -> np.ndarray:
    return w.data.view(np.float32).astype(np.float64)


@pytest.fixture
def weights() -> Moe:
    rng = np.random.default_rng(8)
    return Moe(
        router=matrix(rng, E, H),
        gate=matrix(rng, E, I, H),
        up=matrix(rng, E, I, H),
        down=matrix(rng, E, H, I),
        shared_router=matrix(rng, 1, H),
        shared_gate=matrix(rng, S, H),
        shared_up=matrix(rng, S, H),
        shared_down=matrix(rng, H, S),
    )


def logistic(x):
    return 1 / (1 + np.exp(-x))


def expert(gate, up, down, u):
    g = gate @ u
    return down @ (g * logistic(g) * (up @ u))


@pytest.mark.parametrize("used", [1, 3, E])
def test_the_picked_experts_are_weighted_by_a_softmax_over_all_that_is_normed_again(weights, used):
    x = np.random.default_rng(9).normal(size=(7, H)).astype(np.float32)
    y = reference.moe(weights, x, used)
    for row, u in zip(y, x.astype(np.float64), strict=True):
        logits = values(weights.router) @ u
        p = np.exp(logits) / np.exp(logits).sum()
        picked = np.argsort(-p)[:used]
        stacks = [values(w) for w in (weights.gate, weights.up, weights.down)]
        wanted = sum(p[e] / p[picked].sum() * expert(*(s[e] for s in stacks), u) for e in picked)
        shared = expert(*(values(w) for w in (weights.shared_gate, weights.shared_up, weights.shared_down)), u)
        np.testing.assert_allclose(row, wanted + logistic(values(weights.shared_router) @ u) * shared, atol=2e-6)


def test_equal_logits_pick_the_lower_expert_and_large_ones_do_not_overflow():
    experts, weights = reference.route(np.array([[1.0, 5.0, 5.0, 5.0], [3e38, -3e38, 0.0, 1.0]], np.float32), 2)
    assert experts.tolist() == [[1, 2], [0, 3]]
    np.testing.assert_array_equal(weights, np.array([[0.5, 0.5], [1.0, 0.0]], np.float32))


def test_experts_come_by_falling_logit():
    logits = np.random.default_rng(10).normal(size=(20, 16)).astype(np.float32)
    experts, weights = reference.route(logits, 5)
    picked = np.take_along_axis(logits, experts.astype(np.int64), 1)
    assert (np.diff(picked) <= 0).all() and (np.diff(weights) <= 0).all()
    assert picked.min(1).tolist() == np.sort(logits)[:, -5].tolist()
    np.testing.assert_allclose(weights.sum(1), 1, atol=1e-6)


@pytest.mark.parametrize("used", [0, E + 1])
def test_more_experts_than_there_are_is_refused(used):
    with pytest.raises(ValueError, match="used must be in 1 to 6"):
        reference.route(np.zeros((2, E), np.float32), used)

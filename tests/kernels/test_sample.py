"""Sampling on the host: the reference's draw from far fewer ids."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.kernels import reference
from strata.kernels.cpu.sample import RUN, sample
from strata.kernels.ops import MAX_TOP_K, Sampling

NONE = np.empty(0, np.int32)


def logits(vocab, seed, coarse=False):
    x = np.random.default_rng(seed).standard_normal(vocab).astype(np.float32) * 3
    return np.round(x) if coarse else x


@given(
    vocab=st.integers(1, 9000),
    seed=st.integers(0, 1000),
    coarse=st.booleans(),
    n_recent=st.integers(0, 90),
    temperature=st.floats(0.05, 4),
    top_k=st.integers(1, MAX_TOP_K),
    top_p=st.floats(0.05, 1),
    min_p=st.floats(0, 1),
    repeat=st.floats(0.3, 3),
    other=st.floats(-2, 2),
)
@settings(max_examples=150, deadline=None)
def test_it_draws_what_the_reference_draws(
    vocab, seed, coarse, n_recent, temperature, top_k, top_p, min_p, repeat, other
):
    recent = np.random.default_rng(seed).integers(0, vocab, n_recent).astype(np.int32)
    how = Sampling(temperature, top_k, top_p, min_p, repeat, other, -other / 2, seed * 2**40 + seed)
    x = logits(vocab, seed, coarse)
    assert sample(x, recent, how, seed) == reference.sample(x, recent, how, seed)


def test_the_candidates_of_a_whole_vocabulary_are_those_of_the_reference():
    x = logits(248_320, 5)
    recent = np.arange(0, 248_320, 5000, dtype=np.int32)
    for position in range(40):
        how = Sampling(1.5, top_k=64, penalty_repeat=1.3, penalty_present=-0.5, seed=9)
        assert sample(x, recent, how, position) == reference.sample(x, recent, how, position)


def test_a_recent_id_that_a_bonus_lifts_to_the_top_can_be_drawn():
    x = logits(RUN * 100, 1)
    recent = np.array([int(x.argmin())], np.int32)
    assert sample(x, recent, Sampling(1.0, top_k=1, penalty_present=-1000.0), 3) == recent[0]


def test_equal_logits_are_drawn_by_the_lower_id():
    x = np.zeros(RUN * 100, np.float32)
    assert sample(x, NONE, Sampling(1.0, top_k=1), 0) == 0
    assert sample(x, NONE, Sampling(), 0) == 0


def test_greedy_is_the_argmax_of_the_raw_logits():
    x = logits(5000, 2)
    recent = np.array([x.argmax()], np.int32)
    assert sample(x, recent, Sampling(penalty_present=100.0), 0) == x.argmax()


def test_masked_ids_are_never_drawn():
    x = np.full(RUN * 50, -np.inf, np.float32)
    x[[70, 2000]] = 1.0
    assert {sample(x, NONE, Sampling(1.0, top_k=2), p) for p in range(60)} == {70, 2000}


@pytest.mark.parametrize(
    ("x", "recent", "how", "named"),
    [
        (np.full(400, np.nan, np.float32), NONE, Sampling(1.0), "finite"),
        (np.array([0, np.inf] * 200, np.float32), NONE, Sampling(), "finite"),
        (np.zeros(400, np.float32), np.array([400], np.int32), Sampling(1.0), "recent ids must be in 0 to 399"),
        (np.zeros(400, np.float32), np.array([-1], np.int32), Sampling(1.0), "recent ids must be in 0 to 399"),
        (np.zeros(400, np.float32), NONE, Sampling(1.0, top_k=0), "top_k"),
        (np.zeros(400, np.float32), NONE, Sampling(1.0, top_k=65), "top_k"),
        (np.zeros(400, np.float32), NONE, Sampling(1.0, top_p=0.0), "top_p"),
        (np.zeros(400), NONE, Sampling(1.0), "logits must be float32"),
    ],
)
def test_what_cannot_be_sampled_is_refused(x, recent, how, named):
    with pytest.raises(ValueError, match=named):
        sample(x, recent, how, 0)

"""Sampling: tables of logits in and ids out, one line a case."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.kernels import reference
from strata.kernels.ops import Sampling
from strata.kernels.reference.sample import philox, uniform

NONE = np.empty(0, np.int32)


def ids_drawn(logits, how: Sampling, recent=(), draws: int = 400) -> Counter:
    logits, recent = np.array(logits, np.float32), np.array(recent, np.int32)
    return Counter(reference.sample(logits, recent, replace(how, seed=5), p) for p in range(draws))


def logs(*p: float) -> np.ndarray:
    return np.log(np.array(p, np.float64)).astype(np.float32)


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_the_generator_gives_the_words_that_its_authors_published(counter, key, words):
    assert philox(counter, key) == words


def test_the_draw_depends_on_all_64_bits_of_seed_and_position():
    numbers = {uniform(s, p) for s in (0, 1, 1 << 32, (1 << 64) - 1) for p in (0, 1, 1 << 32)}
    assert len(numbers) == 12 and all(0 < u < 1 for u in numbers)


@pytest.mark.parametrize(
    ("logits", "how", "recent", "allowed"),
    [
        ([1, 3, 3, 2], Sampling(), [], {1}),
        ([1, 3, 2, 0], Sampling(penalty_repeat=9.0, penalty_freq=9.0), [1, 1], {1}),
        ([1, 3, 2, 0], Sampling(temperature=-1.0), [], {1}),
        ([1, 3, 3, 2], Sampling(temperature=1.0, top_k=1), [], {1}),
        ([5, 5, 5, 5], Sampling(temperature=1.0, top_k=2), [], {0, 1}),
        (logs(0.5, 0.3, 0.15, 0.05), Sampling(temperature=1.0, top_p=0.7), [], {0, 1}),
        (logs(0.5, 0.3, 0.15, 0.05), Sampling(temperature=1.0, top_p=0.9), [], {0, 1, 2}),
        (logs(0.5, 0.3, 0.15, 0.05), Sampling(temperature=1.0, top_p=0.01), [], {0}),
        (logs(0.5, 0.3, 0.15, 0.05), Sampling(temperature=1.0, min_p=0.4), [], {0, 1}),
        (logs(0.5, 0.3, 0.15, 0.05), Sampling(temperature=1.0, min_p=1.0), [], {0}),
        ([4, 3.9, 0, -1], Sampling(temperature=1.0, top_k=1, penalty_repeat=2.0), [0], {1}),
        ([-1, -1.5, -3, -9], Sampling(temperature=1.0, top_k=1, penalty_repeat=2.0), [0], {1}),
        ([4, 3.9, 0, -1], Sampling(temperature=1.0, top_k=1, penalty_repeat=1.01), [0, 0, 0], {0}),
        ([4, 3, 0, -1], Sampling(temperature=1.0, top_k=1, penalty_freq=0.6), [0, 0], {1}),
        ([4, 3, 0, -1], Sampling(temperature=1.0, top_k=1, penalty_freq=0.6), [0], {0}),
        ([4, 3, 0, -1], Sampling(temperature=1.0, top_k=1, penalty_present=0.9), [0, 0, 0], {0}),
        ([4, 3, 0, -1], Sampling(temperature=1.0, top_k=1, penalty_present=1.1), [0], {1}),
        ([1, -np.inf, -np.inf, -np.inf], Sampling(temperature=1.0), [], {0}),
        ([2e38, -3e38, 1, 0], Sampling(temperature=1.0), [], {0}),
    ],
)
def test_what_can_be_drawn(logits, how, recent, allowed):
    assert set(ids_drawn(logits, how, recent)) == allowed


def test_draws_follow_the_distribution_at_the_temperature():
    p = np.array([0.5, 0.3, 0.15, 0.05])
    for temperature in (0.5, 1.0, 2.0):
        drawn = ids_drawn(logs(*p), Sampling(temperature=temperature), draws=4000)
        wanted = p ** (1 / temperature) / (p ** (1 / temperature)).sum()
        for token in range(4):
            assert abs(drawn[token] / 4000 - wanted[token]) < 0.03


def test_top_k_comes_before_the_temperature_and_top_p_before_min_p():
    # Two candidates after top-k: 0.625 and 0.375. top-p 0.6 leaves one; of all four it would leave two.
    how = Sampling(temperature=1.0, top_k=2, top_p=0.6)
    assert set(ids_drawn(logs(0.5, 0.3, 0.15, 0.05), how)) == {0}


def test_an_open_top_p_keeps_the_smallest_candidate():
    logits = np.array([0.0] + [-45.0] * 3, np.float32)
    how = Sampling(temperature=1e9)
    assert set(ids_drawn(logits, how)) == {0, 1, 2, 3}


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**40), st.floats(0.1, 3), st.integers(1, 64), st.floats(0.05, 1))
@settings(max_examples=60, deadline=None)
def test_the_id_is_a_pure_function_and_one_of_the_best_k(seed, position, temperature, k, top_p):
    logits = np.random.default_rng(seed % 1000).normal(size=500).astype(np.float32)
    before = logits.copy()
    how = Sampling(temperature=temperature, top_k=k, top_p=top_p, seed=seed)
    token = reference.sample(logits, NONE, how, position)
    assert token == reference.sample(logits, NONE, how, position)
    assert token in np.argsort(-logits)[:k]
    np.testing.assert_array_equal(logits, before)


@pytest.mark.parametrize(
    ("logits", "recent", "how", "message"),
    [
        ([1, np.nan], [], Sampling(), "finite"),
        ([1, np.inf], [], Sampling(temperature=1.0), "finite"),
        ([1, 2], [], Sampling(temperature=1.0, top_k=65), "top_k must be in 1 to 64, got 65"),
        ([1, 2], [], Sampling(temperature=1.0, top_p=0.0), "top_p"),
        ([1, 2], [], Sampling(temperature=1.0, min_p=1.5), "min_p"),
        ([1, 2], [2], Sampling(temperature=1.0), "recent ids must be in 0 to 1"),
    ],
)
def test_nothing_is_drawn_from_nonsense(logits, recent, how, message):
    with pytest.raises(ValueError, match=message):
        reference.sample(np.array(logits, np.float32), np.array(recent, np.int32), how, 3)

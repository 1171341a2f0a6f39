"""The recent ids that a card keeps while windows feed themselves: they are the host's, or the host is told."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.engine.model.window import RECENT_WIDTHS, Draw, penalises
from strata.kernels.cuda.sample import MAX_RECENT
from strata.kernels.ops import Sampling

PENALISED = Sampling(temperature=0.7, penalty_repeat=1.2)


def recent_of(tokens: list[int], last_n: int) -> np.ndarray:
    """What the schedule gives: the last ids, at most last_n."""
    return np.array(tokens[max(0, len(tokens) - last_n) :], np.int32)


@given(
    prompt=st.lists(st.integers(0, 50), min_size=1, max_size=90),
    steps=st.integers(0, 90),
    last_n=st.sampled_from([1, 5, 63, 64, 65, 80, 4096]),
)
@settings(max_examples=150, deadline=None)
def test_the_list_on_the_card_is_that_of_the_host_as_long_as_it_is_said_to_hold(prompt, steps, last_n):
    tokens, rng = list(prompt), np.random.default_rng(len(prompt))
    draw, told = None, 0
    for _ in range(steps + 1):
        recent = recent_of(tokens, last_n)
        if draw is None or not draw.holds_for(PENALISED, recent, len(tokens)):
            draw, told = Draw(PENALISED, recent, len(tokens)), told + 1
            table = draw.table(draw.width)
        assert Counter(table[table >= 0].tolist()) == Counter(recent.tolist())
        position = len(tokens)
        tokens.append(int(rng.integers(0, 50)))
        table[position % draw.modulus] = tokens[-1]  # as the window does that feeds the token
    assert told <= 3, "the host is told again when the list is full, and once when it begins to slide"


def test_a_draw_without_penalties_has_no_list_and_holds_for_any_recent_ids():
    for how in (Sampling(), Sampling(temperature=1.0, seed=3), Sampling(penalty_repeat=2.0)):
        draw = Draw(how, np.arange(30, dtype=np.int32), 40)
        assert not penalises(how) and (draw.width, draw.modulus) == (0, 0)
        assert draw.holds_for(how, np.arange(31, dtype=np.int32), 41)
        assert not draw.holds_for(PENALISED, np.arange(31, dtype=np.int32), 41)


def test_other_settings_are_never_taken_for_the_same():
    draw = Draw(PENALISED, np.arange(5, dtype=np.int32), 40)
    for name, value in (("seed", 1), ("temperature", 0.8), ("top_k", 3), ("penalty_repeat", 1.3), ("min_p", 0.1)):
        other = Sampling(**{field: getattr(PENALISED, field) for field in Sampling.__slots__} | {name: value})
        assert not draw.holds_for(other, np.arange(5, dtype=np.int32), 41)
    assert draw.holds_for(PENALISED, np.arange(5, dtype=np.int32), 41)


@pytest.mark.parametrize("n", [1, 64, 512, MAX_RECENT])
def test_a_full_list_slides_at_every_width(n):
    draw = Draw(PENALISED, np.arange(n, dtype=np.int32), 5000)
    assert draw.width == next(w for w in RECENT_WIDTHS if w >= n) and draw.modulus == n
    table = draw.table(draw.width)
    assert sorted(table[table >= 0].tolist()) == list(range(n))
    assert table[(5000 - n) % n] == 0 and table[4999 % n] == n - 1

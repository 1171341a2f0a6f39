"""Where a read takes checkpoints: at the places that the rules name, and never at the price of another chunk."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from strata.engine.state.checkpoints import CacheRules, due

TURN = 7


def pieces(begin: int, n: int, stops: list[int], chunk: int) -> list[int]:
    """Ends of what a read from begin to n takes at a time."""
    ends, at = [], begin
    while at < n:
        at = min([at + chunk, n, *(stop for stop in stops if stop > at)])
        ends.append(at)
    return ends


def found(rules: CacheRules, boundaries: list[int], n: int, begin: int, pin: int, chunk: int) -> dict[int, str]:
    prompt = np.zeros(n, np.int32)
    prompt[[b for b in boundaries if b < n]] = TURN
    return due(rules, TURN, prompt, begin, pin, True, chunk)


@given(
    n=st.integers(1, 400),
    begin=st.integers(0, 200),
    boundaries=st.lists(st.integers(0, 399), max_size=5),
    pin=st.integers(0, 80),
    chunk=st.integers(1, 60),
    more=st.integers(2, 4),
)
def test_periodic_checkpoints_cost_no_chunk_and_are_no_further_apart(n, begin, boundaries, pin, chunk, more):
    begin = min(begin, n - 1)
    every = more * chunk + 5
    without = found(CacheRules(6, 0, 50), boundaries, n, begin, pin, chunk)
    withal = found(CacheRules(6, every, 50), boundaries, n, begin, pin, chunk)
    assert without.items() <= withal.items() and all(begin < at < n for at in withal)
    assert len(pieces(begin, n, list(withal), chunk)) == len(pieces(begin, n, list(without), chunk))
    periodic = [at for at in withal if at not in without]
    assert len(periodic) <= n // every
    for wanted in range((begin // every + 1) * every, n, every):
        before = max((at for at in [begin, *withal] if at <= wanted), default=begin)
        assert wanted - before < chunk


@given(n=st.integers(1, 400), begin=st.integers(0, 200), every=st.integers(1, 90), chunk=st.sampled_from([0, 64]))
def test_where_chunks_are_longer_periodic_checkpoints_have_their_own_places(n, begin, every, chunk):
    begin = min(begin, n - 1)
    at = found(CacheRules(6, every, 0), [], n, begin, 0, chunk)
    assert list(at) == [p for p in range(every, n, every) if p > begin]


def test_a_prompt_on_a_small_card_streams_its_experts_no_further_time():
    """29,854 tokens in chunks of 3,840: eight, not the nine that a checkpoint at just 16,384 makes."""
    at = found(CacheRules(3, 16384, 2048), [], 29_854, 0, 0, 3840)
    assert at == {15_360: "periodic"}
    assert len(pieces(0, 29_854, list(at), 3840)) == 8

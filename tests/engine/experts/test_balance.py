"""The card's share of missing experts follows who waits for whom, and stays where both take the same time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.engine.experts.balance import LEAST_REQUESTS, PARTS, SILENT, TRIED, Balance

LAYERS, MISSED = 48, 10


def windows(balance: Balance, card_us: float, processor_us: float, n: int, fixed_us: float = 40.0) -> int:
    """Looks of sixteen windows each at a card that takes so long for an expert, and a processor."""
    for _ in range(n):
        kept = MISSED * balance.parts // PARTS
        asked = MISSED - kept
        requests = 16 * LAYERS if asked else 0
        waits = requests if fixed_us + asked * processor_us > kept * card_us else 0
        balance.look(requests, waits)
    return MISSED * balance.parts // PARTS


@pytest.mark.parametrize("start", [0, 100, PARTS - 1])
@pytest.mark.parametrize(("card_us", "processor_us"), [(43, 25), (43, 57), (43, 200), (90, 20)])
def test_the_share_ends_where_both_take_as_long(card_us, processor_us, start):
    balance = Balance(start)
    windows(balance, card_us, processor_us, 60)
    kept = {windows(balance, card_us, processor_us, 1) for _ in range(20)}
    best = min(range(MISSED + 1), key=lambda k: max(k * card_us, (k < MISSED) * 40 + (MISSED - k) * processor_us))
    assert all(abs(k - best) <= 1 for k in kept)


def test_a_processor_that_others_keep_busy_is_left_alone_and_tried_again():
    balance = Balance(128)
    assert windows(balance, 43, 5000, 40) == MISSED
    balance = Balance(PARTS)
    for _ in range(SILENT - 1):
        assert balance.look(0, 0) == PARTS
    assert balance.look(0, 0) == TRIED < PARTS
    assert windows(balance, 43, 25, 60) < MISSED


@given(st.integers(0, PARTS), st.lists(st.tuples(st.integers(0, 2000), st.floats(0, 1)), max_size=60))
def test_no_correction_is_large_or_leaves_the_range(start, looks):
    balance = Balance(start)
    for requests, share in looks:
        before = balance.parts
        after = balance.look(requests, round(requests * share))
        assert 0 <= after <= PARTS and (abs(after - before) <= 12 or after == TRIED)
        assert requests or after in (before, TRIED)


def test_few_requests_say_nothing_yet():
    balance = Balance(100)
    assert balance.look(LEAST_REQUESTS - 1, LEAST_REQUESTS - 1) == 100
    assert balance.look(1, 1) == 112

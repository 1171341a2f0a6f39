"""Drafts that do not pay: off after a few windows, on again later, and never a loss that a request would feel."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.engine.draft.policy import CALIBRATION, FIRST_REST, LOSS, PROBES, REFRESH, Payoff, PlainTimes


def calibrated(ms: float = 1.0, key: int = 1) -> PlainTimes:
    times = PlainTimes()
    for _ in range(2 * CALIBRATION):
        times.saw(key, ms)
    return times


def run(payoff: Payoff, tokens: int, drafted_ms: float, kept: list[int], plain_ms: float = 1.0) -> tuple[float, int]:
    """Time of so many tokens, and windows with drafts. kept: tokens of windows with drafts, in turn."""
    ms, said, windows = 0.0, 0, 0
    while said < tokens:
        if payoff.wants(1):
            got = kept[windows % len(kept)]
            windows += 1
            payoff.drafted(1, drafted_ms, got)
            ms, said = ms + drafted_ms, said + got
        else:
            payoff.plain(1, plain_ms, 1)
            ms, said = ms + plain_ms, said + 1
    return ms, windows


def test_drafts_that_pay_stay():
    payoff = Payoff(calibrated())
    ms, windows = run(payoff, 1000, 1.4, [1, 3, 2])
    assert not payoff.turned_off and windows == pytest.approx(500, abs=10)
    assert ms < 750


def test_drafts_that_do_not_pay_end_after_a_try_and_come_back_less_and_less():
    payoff, tries = Payoff(calibrated()), int(LOSS / 0.25)
    _, windows = run(payoff, tries + FIRST_REST - 1, 1.25, [1])
    assert (windows, payoff.turned_off, payoff.off) == (tries, 1, True)
    _, windows = run(payoff, 1 + tries + 2 * FIRST_REST - 1, 1.25, [1])
    assert (windows, payoff.turned_off) == (tries, 2)


def test_the_request_after_one_that_lost_is_tried_more_shortly():
    payoff, tries = Payoff(calibrated()), int(LOSS / 0.25)
    run(payoff, tries - 2, 1.25, [1])
    assert not payoff.off
    payoff.next_request()
    _, windows = run(payoff, 100, 1.25, [1])
    assert payoff.off and windows < tries


def test_short_answers_do_not_pay_for_a_try_each():
    payoff, ms, tokens = Payoff(calibrated()), 0.0, 20
    for _ in range(100):
        payoff.next_request()
        ms += run(payoff, tokens, 1.5, [1])[0]
    assert ms < 100 * tokens * 1.01


@pytest.mark.parametrize("lost", [0.3, 1.2])
def test_answers_that_lose_a_little_each_end_drafts(lost):
    payoff, windows = Payoff(calibrated()), 0
    for _ in range(60):
        payoff.next_request()
        if payoff.wants(1):
            windows += 1
            payoff.drafted(1, 1.0 + lost, 1)
        for _ in range(3):
            payoff.plain(1, 1.0, 1)
    assert payoff.turned_off == 1 and windows <= LOSS / lost + 1


def test_one_answer_that_drafts_do_not_suit_does_not_end_those_of_many_that_they_do():
    payoff = Payoff(calibrated())
    for _ in range(20):
        for gained in (2, 0):
            payoff.next_request()
            for _ in range(4):
                assert payoff.wants(1)
                payoff.drafted(1, 2.0, 1 + gained)
            for _ in range(PROBES):
                payoff.plain(1, 1.0, 1)
    assert not payoff.turned_off


def test_texts_that_follow_well_are_tried_again_soon_after_one_that_did_not():
    payoff = Payoff(calibrated())
    for _ in range(3):
        run(payoff, 3 * FIRST_REST, 1.5, [1])
        payoff.next_request()
    run(payoff, 40 * FIRST_REST, 1.2, [3])
    assert not payoff.off
    run(payoff, 60, 2.9, [1])
    assert payoff.off
    _, windows = run(payoff, 2 * FIRST_REST, 1.2, [3])
    assert windows > 50


@settings(deadline=None)
@given(st.floats(1.0, 2.9), st.lists(st.integers(1, 4), min_size=1, max_size=9), st.integers(200, 2000))
def test_no_text_costs_a_request_more_than_its_tries(drafted_ms, kept, tokens):
    payoff = Payoff(calibrated())
    ms, _ = run(payoff, tokens, drafted_ms, kept)
    assert ms <= tokens + (1 + payoff.turned_off) * (LOSS + drafted_ms)


def test_times_of_a_machine_that_was_busy_do_not_keep_drafts_for_good():
    payoff = Payoff(calibrated(5.0))
    ms, windows = run(payoff, 1000, 1.6, [1])
    assert payoff.turned_off, "a token without drafts is believed to take as long as it once did"
    assert windows < 3 * REFRESH and ms < 1000 + 0.6 * 3 * REFRESH


def test_windows_that_are_never_steady_do_not_hold_drafts_up():
    payoff = Payoff(calibrated())
    for _ in range(REFRESH):
        payoff.drafted(1, 1.0, 2)
    assert not payoff.wants(1)
    for _ in range(2 * PROBES):
        payoff.plain(1, 1.0, 1, steady=False)
    assert payoff.wants(1)


def test_nothing_is_drafted_before_a_token_without_drafts_has_been_measured():
    payoff = Payoff(PlainTimes())
    for _ in range(CALIBRATION):
        assert not payoff.wants(1)
        payoff.plain(1, 1.0, 1)
    assert payoff.wants(1)
    assert not payoff.wants(2), "windows of two sequences have another time"


@pytest.mark.parametrize("slots", [1, 4, 7])
def test_a_try_costs_as_many_windows_however_many_slots_they_have(slots):
    payoff, windows = Payoff(calibrated(1 / slots, slots)), 0
    while not payoff.off:
        payoff.drafted(slots, 1.5, slots)
        windows += 1
    assert windows == LOSS / 0.5


def test_slow_windows_of_more_slots_are_not_compared_with_those_of_fewer():
    times = calibrated(1.0, 1)
    for _ in range(2 * CALIBRATION):
        times.saw(4, 1.0)  # four rows take four times as long as one
    payoff = Payoff(times)
    for _ in range(10):
        payoff.drafted(1, 1.0, 2)
    for _ in range(40):
        payoff.drafted(4, 8.0, 4)
    assert payoff.off


def test_one_slow_window_does_not_end_drafts():
    payoff = Payoff(calibrated())
    for i in range(32):
        assert not payoff.drafted(1, 5000.0 if i == 5 else 1.2, 3)


def test_the_first_window_that_loads_something_is_forgotten():
    times = PlainTimes()
    for ms in (900.0, *[1.0] * CALIBRATION):
        times.saw(1, ms)
    assert times.of(1) == pytest.approx(1.0)

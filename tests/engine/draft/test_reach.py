"""How many tokens the draft layer proposes: never more than pay, and never stuck where the text has been."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.engine.draft.reach import LOOK, MOST_LOOK, Reach, WindowTimes

MOST = 3


def run(reach: Reach, shares: list[float], step_ms: float, windows: int, seed: int = 1) -> list[int]:
    """Windows of a text whose drafts are right with these shares by depth; a draft costs step_ms beside 1 ms."""
    random, wanted = Random(seed), []
    for _ in range(windows):
        n = reach.want(MOST)
        kept = next((i for i in range(n) if random.random() >= shares[i]), n)
        reach.saw(n, kept, MOST)
        reach.timed(n, 1.0 + n * step_ms)
        wanted.append(n)
    return wanted


def mostly(wanted: list[int]) -> int:
    return max(set(wanted), key=wanted.count)


@pytest.mark.parametrize(
    ("shares", "step_ms", "best"),
    [([0.95, 0.1, 0.1], 0.2, 1), ([0.95, 0.9, 0.9], 0.2, 3), ([0.95, 0.9, 0.1], 0.2, 2), ([0.9, 0.6, 0.6], 0.01, 3)],
)
def test_deep_drafts_that_are_never_kept_are_not_proposed_and_those_that_are_kept_are(shares, step_ms, best):
    wanted = run(Reach(WindowTimes()), shares, step_ms, 400)
    assert mostly(wanted[200:]) == best


def test_a_text_that_begins_to_repeat_itself_is_followed_as_deep_as_it_goes():
    reach = Reach(WindowTimes())
    run(reach, [0.9, 0.05, 0.05], 0.2, 300)
    wanted = run(reach, [1.0, 1.0, 1.0], 0.2, MOST_LOOK + 3 * LOOK)
    assert wanted[-LOOK:] == [MOST] * LOOK


def test_looks_at_deeper_drafts_stay_rare():
    wanted = run(Reach(WindowTimes()), [0.9, 0.05, 0.05], 0.2, 400)[100:]
    assert wanted.count(MOST) <= len(wanted) // LOOK + 10


def test_the_next_request_begins_with_what_the_last_one_has_learned():
    times = WindowTimes()
    first = Reach(times)
    run(first, [0.95, 0.02, 0.02], 0.2, 300)
    assert mostly(run(Reach(times, first), [0.95, 0.02, 0.02], 0.2, 12)) == 1


def test_one_text_that_drafts_do_not_suit_does_not_hold_back_those_after_it():
    times, reach = WindowTimes(), None
    for seed in range(8):
        reach = Reach(times, reach)
        run(reach, [0.98, 0.9, 0.9], 0.2, 40, seed)
    other = Reach(times, reach)
    run(other, [0.98, 0.05, 0.05], 0.2, 100)
    assert other.want(MOST) == 1
    assert run(Reach(times, other), [0.98, 0.9, 0.9], 0.2, 10) == [MOST] * 10


def test_texts_that_drafts_do_not_suit_teach_those_after_them():
    times, reach = WindowTimes(), None
    for seed in range(2):
        reach = Reach(times, reach)
        run(reach, [0.98, 0.9, 0.9], 0.2, 40, seed)
    for seed in range(10):
        reach = Reach(times, reach)
        run(reach, [0.98, 0.05, 0.05], 0.2, 100, seed)
    assert mostly(run(Reach(times, reach), [0.98, 0.05, 0.05], 0.2, 10)) == 1


@pytest.mark.parametrize(("shares", "best"), [([0.9, 0.9, 0.9], 3), ([0.95, 0.1, 0.1], 1)])
def test_the_number_of_drafts_settles_and_does_not_go_to_and_fro(shares, best):
    """With the times of rounds of the demo model (H200, 2026-11-30): 0.41, 0.51 and 0.59 ms."""
    reach, wanted, random = Reach(WindowTimes()), [], Random(2)
    for _ in range(300):
        n = reach.want(MOST)
        kept = next((i for i in range(n) if random.random() >= shares[i]), n)
        reach.saw(n, kept, MOST)
        reach.timed(n, (0.37, 0.41, 0.51, 0.59)[n])
        wanted.append(n)
    late = wanted[60:]
    changes = sum(a != b for a, b in pairwise(late))
    assert mostly(late) == best and changes <= 2 * (1 + len(late) // LOOK)


def test_a_window_that_captured_its_graph_does_not_decide():
    reach = Reach(WindowTimes())
    for _ in range(20):
        n = reach.want(MOST)
        reach.saw(n, n, MOST)
        reach.timed(n, 500.0 if n == MOST and not reach._times._n.get(MOST) else 1.0 + 0.1 * n)
    assert reach.want(MOST) == MOST


@given(st.lists(st.tuples(st.integers(0, 7), st.floats(0, 1e6), st.integers(1, 7)), max_size=60), st.integers(0, 7))
def test_whatever_was_seen_at_least_one_and_never_too_many_are_wanted(windows, most):
    reach = Reach(WindowTimes())
    for kept, ms, room in windows:
        n = reach.want(room)
        assert 1 <= n <= room
        reach.saw(n, min(kept, n), room)
        reach.timed(n, ms)
    assert min(most, 1) <= reach.want(most) <= most


def test_what_a_token_takes_is_told_once_its_windows_were_measured():
    reach = Reach(WindowTimes())
    assert reach.best_ms(MOST) is None and reach.ms_of(MOST) is None and reach.best_ms(0) is None
    run(reach, [1.0, 1.0, 1.0], 0.2, 40)
    assert reach.ms_of(MOST) == pytest.approx(1.6 / 4, rel=0.01)
    assert reach.best_ms(MOST) == reach.ms_of(MOST)
    for _ in range(80):
        reach.saw(MOST, 1, MOST)
    assert reach.ms_of(MOST) == pytest.approx(1.6 / 2, rel=0.05)
    assert reach.best_ms(MOST) == pytest.approx(1.2 / 2, rel=0.05), "one draft is cheaper then"

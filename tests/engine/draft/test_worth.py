"""A slot's draft stays out of a window as long as it gives less than its row takes, and comes back when it does not."""

from __future__ import annotations

import pytest

from strata.engine.draft.reach import MEASURED
from strata.engine.draft.worth import LOOK, Kept, RowTimes


def measured(n: int, ms: dict[int, float], tokens: int) -> RowTimes:
    """Windows of n slots that take so long, by their number of drafts."""
    times = RowTimes()
    for _ in range(MEASURED + 2):
        for drafts, each in ms.items():
            times.saw(n, drafts, each, tokens)
    return times


def test_the_bar_is_what_a_row_takes_in_tokens():
    times = measured(4, {0: 1.0, 3: 1.3, 4: 1.4}, 4)
    assert times.bar(4) == pytest.approx(0.1 / (1.4 / 4), rel=0.3)
    assert times.bar(3) == 0.0, "nothing was measured with three slots"


@pytest.mark.parametrize("ms", [{4: 1.4}, {}])
def test_without_two_numbers_of_drafts_there_is_no_bar(ms):
    assert measured(4, ms, 8).bar(4) == 0.0


def test_rows_that_cost_nothing_have_no_bar():
    assert measured(4, {0: 1.0, 4: 0.9}, 4).bar(4) <= 0.0


def test_a_request_whose_drafts_are_wrong_has_one_in_many_windows_and_all_again_when_they_are_right():
    kept, asked = Kept(), []
    for right in [False] * 200 + [True] * 600:
        asked.append(kept.wants(0.3))
        if asked[-1]:
            kept.saw(right)
    assert all(asked[:10]) and sum(asked[100:200]) <= 100 / LOOK + 1
    assert sum(asked[100:200]) > 0 and all(asked[-100:])

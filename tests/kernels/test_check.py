"""Argument checks: a refusal names the argument, the wanted and the given."""

from __future__ import annotations

import numpy as np
import pytest

from strata.kernels.check import check, check_segments, check_slots

F = np.float32


def test_sizes_are_bound_at_first_use_and_products_are_multiplied():
    x, y = np.zeros((2, 3, 4), F), np.zeros((2, 12), F)
    assert check(x=(x, "n C H", F), y=(y, "n C*H", F)) == {"n": 2, "C": 3, "H": 4, "C*H": 12}
    assert check(y=(y, "2 K*D", F), z=(y, "2 K*D", F))["K*D"] == 12


@pytest.mark.parametrize(
    ("array", "want", "message"),
    [
        (np.zeros((2, 3)), "n H", "y must be float32 (n H), got float64 (2, 3)"),
        (np.zeros(3, F), "n H", "y must be float32 (n H), got float32 (3,)"),
        (np.zeros((5, 4), F), "n H", "y must be (n H) with n = 2, H = 4, got (5, 4)"),
        (np.zeros((2, 5), F), "n 2*H", "y must be (n 2*H) with n = 2, got (2, 5)"),
        (np.zeros((2, 5), F), "n 3", "y must be (n 3) with n = 2, got (2, 5)"),
        (np.zeros((4, 2), F).T, "n H", "y must be C-contiguous, got strides (4, 8) for (2, 4)"),
    ],
)
def test_what_does_not_fit_is_named_with_the_wanted_and_the_given(array, want, message):
    with pytest.raises(ValueError) as refused:
        check(x=(np.zeros((2, 4), F), "n H", F), y=(array, want, F))
    assert str(refused.value) == message


def test_what_a_caller_does_with_the_sizes_does_not_reach_the_next_check():
    x = np.zeros((2, 4), F)
    check(x=(x, "n H", F)).pop("n")
    assert check(x=(x, "n H", F)) == {"n": 2, "H": 4}
    with pytest.raises(ValueError, match="C-contiguous"):
        check(x=(np.zeros((4, 2), F).T, "n H", F))


def test_segments_that_cover_all_rows_in_order_are_accepted():
    check_segments(np.array([(2, 0, 1), (0, 1, 4)], np.int32), 4, 3)
    check_segments(np.empty((0, 3), np.int32), 0, 3)


@pytest.mark.parametrize(
    ("segments", "named"),
    [
        ([(0, 0, 3)], "rows 0 to 4, got rows 0 to 3"),
        ([(0, 1, 4)], "got rows 1 to 4 after row 0"),
        ([(0, 0, 2), (1, 2, 2), (2, 2, 4)], "got rows 2 to 2 after row 2"),
        ([(0, 0, 2), (0, 2, 4)], "got slot 0"),
        ([(3, 0, 4)], "each of the 3 slots once at most, got slot 3"),
        ([(-1, 0, 4)], "got slot -1"),
    ],
)
def test_other_segments_are_refused(segments, named):
    with pytest.raises(ValueError, match=named):
        check_segments(np.array(segments, np.int32), 4, 3)


def test_slots_beyond_the_state_are_refused():
    check_slots(np.array([], np.int32), 2)
    with pytest.raises(ValueError, match="slots must be in 0 to 1, got 0 to 2"):
        check_slots(np.array([0, 2], np.int32), 2)

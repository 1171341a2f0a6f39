"""Which drafts stay."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.engine.draft.accept import n_kept

small = st.integers(0, 2)


@given(st.lists(small, max_size=7), st.data())
def test_no_draft_stays_behind_a_wrong_one_and_no_right_one_is_lost(drafts, data):
    ids = data.draw(st.lists(small, min_size=len(drafts) + 1, max_size=len(drafts) + 1))
    n = n_kept(drafts, ids)
    assert list(drafts[: n - 1]) == ids[: n - 1]
    assert n == len(ids) or drafts[n - 1] != ids[n - 1]


def test_ids_that_are_not_those_of_the_rows_are_refused():
    with pytest.raises(ValueError, match="2 rows have as many ids, got 1"):
        n_kept([4], [4])

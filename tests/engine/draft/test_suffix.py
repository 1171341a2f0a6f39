"""Drafts from the text: the scan against a search that anyone can believe."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from strata.engine.draft import suffix
from strata.engine.draft.suffix import LEAST, LONGEST, Suffix, suffix_draft

texts = st.lists(st.integers(0, 3), max_size=60)


def search(tokens: list[int], most: int) -> Suffix:
    """Every earlier place, one after another."""
    best, after = 0, 0
    for end in range(len(tokens) - 1):
        agreed = 0
        while agreed < min(LONGEST, end + 1) and tokens[end - agreed] == tokens[-1 - agreed]:
            agreed += 1
        if agreed >= max(best, LEAST):
            best, after = agreed, end + 1
    if not best or not most:
        return Suffix((), 0)
    longer = list(tokens)
    for i in range(most):
        longer.append(longer[after + i])
    return Suffix(tuple(longer[len(tokens) :]), best)


@given(texts, st.integers(0, 7))
def test_a_draft_is_what_followed_the_longest_agreement(tokens, most):
    assert suffix_draft(np.array(tokens, np.int32), most) == search(tokens, most)


@given(st.lists(st.integers(0, 1), min_size=1, max_size=4), st.integers(8, 40))
def test_a_text_that_repeats_itself_is_drafted_without_a_fault(period, n):
    tokens = (period * n)[:n]
    if n < 3 * len(period) + LEAST:
        return
    found = suffix_draft(np.array(tokens, np.int32), 3)
    assert found.tokens == tuple((period * (n + 3))[n : n + 3])


def test_a_long_text_is_looked_at_from_its_end(monkeypatch):
    monkeypatch.setattr(suffix, "WINDOW", 8)
    tokens = [1, 2, 3, 4, 9, 9, 9, 9, 9, 8, 7, 1, 2, 3]
    assert suffix_draft(np.array(tokens, np.int32), 3).tokens == ()
    monkeypatch.setattr(suffix, "WINDOW", 14)
    assert suffix_draft(np.array(tokens, np.int32), 3).tokens == (4, 9, 9)


def test_the_first_tokens_of_a_text_have_no_draft():
    for n in range(LEAST + 1):
        assert suffix_draft(np.ones(n, np.int32), 3).tokens == ()

"""Whose turn it is beside a read, and each condition of a BYIELD alone."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.engine.schedule.turns import Share, Standing, keeps_reading

READ = Standing(own=None, left=100, chunk=32)


def reason(slot: int = 1, read: Standing | None = READ, **changes: object) -> str | None:
    asked = {"n_slots": 4, "is_free": True, "prompt_cache": True, "short_read": 64, **changes}
    return keeps_reading(slot, read, **asked)


def test_a_read_gives_way_when_nothing_speaks_against_it():
    assert reason() is None
    assert reason(read=dataclasses.replace(READ, own=1)) is None


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"read": None}, "no prompt is being read"),
        ({"is_free": False}, "slot 1 decodes"),
        ({"slot": 4, "is_free": False}, "there are 4 slots"),
        ({"slot": -1, "is_free": False}, "there are 4 slots"),
        ({"read": dataclasses.replace(READ, own=2)}, "the prompt is read for slot 2"),
        ({"prompt_cache": False}, "--prompt-cache is 0"),
        ({"read": dataclasses.replace(READ, left=64)}, "64 tokens are left to read, not more than 64"),
        ({"read": dataclasses.replace(READ, chunk=100)}, "100 tokens are left to read, not more than 100"),
    ],
)
def test_each_condition_alone_keeps_the_read_going(asked, why):
    assert reason(**asked) == why


def test_the_share_of_a_chunk_is_at_least_one_window_and_none_without_a_share():
    share = Share(0.5)
    assert not share.is_due
    share.earn(100.0)
    share.spend(49.0)
    assert share.is_due
    share.spend(2.0)
    assert not share.is_due
    share.earn(1.0)
    share.spend(1000.0)
    assert not share.is_due
    none = Share(0.0)
    none.earn(1e9)
    assert not none.is_due


@given(share=st.floats(0.01, 10), chunks=st.lists(st.tuples(st.floats(0.1, 1e3), st.floats(0.1, 1e3)), max_size=30))
def test_slots_decode_for_their_share_of_each_chunk_and_a_window_more_at_most(share, chunks):
    turns = Share(share)
    for chunk_ms, window_ms in chunks:
        turns.earn(chunk_ms)
        spent = windows = 0.0
        while turns.is_due:
            turns.spend(window_ms)
            spent += window_ms
            windows += 1
        assert windows >= 1
        assert spent - window_ms <= share * chunk_ms + 1e-6


def test_a_window_is_followed_by_another_when_there_is_time_for_two():
    share = Share(1.0)
    share.earn(100.0)
    seen = []
    while share.is_due:
        seen.append(share.is_due_again)
        share.spend(30.0)
    assert seen == [True, True, True, False]


def test_what_is_left_of_a_share_does_not_outlive_the_read():
    share = Share(1.0)
    share.earn(100.0)
    share.forfeit()
    assert not share.is_due

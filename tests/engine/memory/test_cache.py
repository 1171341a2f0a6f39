"""The expert cache: its budget, its slots, and what happens when the driver has less than it said."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.engine.device.arena import GIB, MIB
from strata.engine.memory.cache import (
    AFTER_FILL_TRIES,
    LEAST_RESERVE,
    Room,
    Slots,
    after_refusal,
    auto_budget,
    borrowing_need,
    equal_slots,
    given_budget,
    shrink_after_fill,
    sized_slots,
)

BLOB = 1731 * MIB // 1000
"""An expert of the pack of the measurements on an 8 GB card: 417 MiB are 241 of them."""
PAIRS = 24_576
sizes = st.lists(st.integers(1, 4 * MIB), max_size=200)


def test_the_reserve_is_not_spent_on_slots():
    # 508 slots at a reserve of 590 MiB, 749 when the head's 417 MiB count as free
    free = 590 * MIB + 508 * BLOB
    assert auto_budget(Room(free, 590 * MIB, True), BLOB, PAIRS, 1).n_bytes == 508 * BLOB
    with_head = auto_budget(Room(free + 417 * MIB, 590 * MIB, True), BLOB, PAIRS, 1).n_bytes // BLOB
    assert with_head in (748, 749)


def test_buffers_that_come_later_are_not_spent_on_slots():
    owned = 160 * MIB + 1024 * 680 * MIB // 1024
    room = Room(10 * GIB, 700 * MIB, True, owned, 300 * MIB)
    budget = auto_budget(room, BLOB, PAIRS, 1)
    assert budget.n_bytes == (10 * GIB - 700 * MIB - owned - 300 * MIB) // BLOB * BLOB


def test_a_cache_is_not_larger_than_all_experts():
    assert auto_budget(Room(1 << 40), BLOB, PAIRS, 1).n_bytes == PAIRS * BLOB


def test_a_reserve_that_nobody_asked_for_gives_way_and_one_that_was_asked_for_does_not():
    need = borrowing_need(300 * MIB, BLOB)
    assert need == -(-300 * MIB // BLOB) + 128
    free = 500 * MIB + need * BLOB
    lowered = auto_budget(Room(free, 700 * MIB), BLOB, PAIRS, need)
    assert lowered.n_bytes // BLOB == need
    assert lowered.reserve == 500 * MIB
    kept = auto_budget(Room(free, 700 * MIB, given=True), BLOB, PAIRS, need)
    assert (kept.reserve, kept.n_bytes) == (700 * MIB, (free - 700 * MIB) // BLOB * BLOB)


def test_a_reserve_never_falls_below_its_floor():
    need = 200
    exactly = Room(LEAST_RESERVE + need * BLOB)
    assert auto_budget(exactly, BLOB, PAIRS, need).reserve == LEAST_RESERVE
    less = Room(LEAST_RESERVE - 1 + need * BLOB)
    budget = auto_budget(less, BLOB, PAIRS, need)
    assert budget.reserve == 700 * MIB and budget.n_bytes < need * BLOB


def test_a_given_size_is_a_budget_of_bytes_and_small_experts_get_more_slots_than_that():
    # --expert-cache 5400 of a pack of 2.54 MiB at most and 1.943 on the mean: 7,056 slots in 13,709 MiB
    layers = [254 * MIB // 100, *[1930 * MIB // 1000] * 47]
    experts = [layers[pair % 48] for pair in range(PAIRS)]
    budget = given_budget(5400, Room(32 * GIB, 1536 * MIB, True), max(experts)).n_bytes
    assert budget == 5400 * (254 * MIB // 100)
    slots = sized_slots(experts, budget)
    assert abs(len(slots) - 7056) <= 12
    assert abs(slots.n_bytes - 13_709 * MIB) <= 10 * MIB
    # borrowing for 3,805 MiB lends some 1,972 of them
    lent = slots.lent_for(3805 * MIB)
    assert 1940 <= lent <= 1980


def test_an_explicit_size_stops_at_what_fits():
    room = Room(GIB, 700 * MIB, True)
    assert given_budget(10_000, room, BLOB).n_bytes == GIB - 700 * MIB
    assert given_budget(1, room, BLOB).n_bytes == BLOB
    assert given_budget(1, Room(0), BLOB).n_bytes == 0


def test_slots_are_whole_lines_and_a_pair_that_does_not_fit_ends_the_walk():
    slots = sized_slots([1000, 300, 5000, 10], 2500)
    assert slots.sizes == (1024, 512)
    assert len(equal_slots(1000, 3, 10_000)) == 3
    assert equal_slots(1000, 30, 10_000).sizes == (1024,) * 9


@given(sizes, st.integers(0, 400 * MIB), st.integers(0, 10 * MIB))
def test_no_cache_exceeds_its_budget_and_more_memory_never_means_fewer_slots(experts, budget, more):
    slots, larger = sized_slots(experts, budget), sized_slots(experts, budget + more)
    assert slots.n_bytes <= budget
    assert slots.sizes == larger.sizes[: len(slots)]
    same = equal_slots(2 * MIB, len(experts), budget)
    assert same.n_bytes <= budget and len(same) <= len(experts)


@given(sizes, st.integers(0, 900 * MIB))
def test_the_lent_tail_is_the_shortest_that_holds_the_buffers(experts, wanted):
    slots = Slots(experts)
    lent = slots.lent_for(wanted)
    if lent is None:
        assert slots.n_bytes < wanted
    else:
        assert slots.tail_bytes(lent) == sum(experts[len(experts) - lent :]) >= wanted
        assert lent == 0 or slots.tail_bytes(lent - 1) < wanted


rooms = st.builds(
    Room,
    free=st.integers(0, 40 * GIB),
    reserve=st.integers(0, 3 * GIB),
    given=st.booleans(),
    owned=st.integers(0, 3 * GIB),
    later=st.integers(0, GIB),
)


@given(rooms, st.integers(0, GIB), st.integers(1, 400))
def test_no_budget_exceeds_what_is_free_and_none_shrinks_when_more_is(room, more, need):
    budget = auto_budget(room, BLOB, PAIRS, need)
    if budget.n_bytes:
        assert budget.n_bytes + budget.reserve + room.owned + room.later <= room.free
    assert budget.reserve == room.reserve or (LEAST_RESERVE <= budget.reserve < room.reserve and not room.given)
    larger = Room(room.free + more, room.reserve, room.given, room.owned, room.later)
    assert auto_budget(larger, BLOB, PAIRS, need).n_bytes >= budget.n_bytes
    assert given_budget(300, room, BLOB).n_bytes <= given_budget(300, larger, BLOB).n_bytes <= 300 * BLOB


@pytest.mark.parametrize(
    ("free", "reserve", "tries", "wanted"),
    [
        (700, 700, 0, 0),
        (636, 700, 0, 0),
        (635, 700, 0, 700 - 635 + 64),
        (100, 700, 5, 664),
        (100, 700, 6, 0),
        (15, 700, 0, 1024),
        (15, 700, 1, 1024),
        (15, 700, 2, 749),
        (15, 200, 3, 500),
    ],
)
def test_a_cache_that_the_driver_did_not_really_back_shrinks(free, reserve, tries, wanted):
    assert shrink_after_fill(free * MIB, reserve * MIB, 2000 * MIB, tries) == wanted * MIB


@given(st.integers(0, GIB), st.integers(0, 2 * GIB), st.integers(0, 8 * GIB))
def test_shrinking_ends_and_takes_no_more_than_there_is(free, reserve, cache):
    tries = 0
    while (less := shrink_after_fill(free, reserve, cache, tries)) > 0:
        assert less <= cache
        cache, free, tries = cache - less, free + less, tries + 1
    assert tries <= AFTER_FILL_TRIES


def test_a_refused_allocation_is_asked_for_again_at_three_quarters():
    assert after_refusal(100 * BLOB, BLOB) == 75 * BLOB
    assert after_refusal(BLOB, BLOB) == 0

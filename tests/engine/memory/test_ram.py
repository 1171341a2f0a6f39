"""RAM: head-room that does not overflow, and experts that do not take what parked conversations were promised."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.engine.device.arena import GIB, MIB
from strata.engine.memory.ram import (
    BUDGET_SLACK,
    MOST,
    ConversationCache,
    ExpertSource,
    headroom,
    resident_budget,
    resident_homes,
    saturating,
)


def cache(mib: int = 2048, min_free: int = 2560, slots: int = 4, prompt_cache: int = 6, serve: bool = True):
    return ConversationCache(mib * MIB, min_free * MIB, slots, prompt_cache, serve)


@pytest.mark.parametrize(
    ("existing", "given_cache", "result"),
    [
        (0, cache(), 4864),
        (4096, cache(), 4864),
        (8192, cache(), 8192),
        (4096, cache(mib=0), 4096),
        (4096, cache(slots=0), 4096),
        (4096, cache(prompt_cache=0), 4096),
        (4096, cache(serve=False), 4096),
    ],
)
def test_parked_conversations_keep_the_room_that_they_were_promised(existing, given_cache, result):
    assert headroom(existing * MIB, True, given_cache) == result * MIB


def test_without_resident_experts_nothing_changes():
    assert headroom(4 * GIB, False, cache()) == 4 * GIB


def test_a_budget_of_all_bytes_does_not_wrap_around():
    assert headroom(0, True, ConversationCache(MOST, 1, 4, 6, True)) == MOST
    assert headroom(MOST, True, cache()) == MOST


@given(st.lists(st.integers(0, MOST), max_size=5))
def test_a_sum_never_passes_64_bits_and_is_never_less_than_a_term(terms):
    total = saturating(*terms)
    assert total == min(sum(terms), MOST) and all(total >= term for term in terms)


@given(st.integers(0, MOST), st.integers(0, MOST), st.integers(0, MOST), st.booleans(), st.integers(0, 2))
def test_headroom_is_never_below_what_was_planned(existing, budget, min_free, resident, slots):
    found = headroom(existing, resident, ConversationCache(budget, min_free, slots, 6, True))
    assert existing <= found <= MOST


def test_a_given_budget_does_not_eat_the_head_room():
    assert resident_budget(40 * GIB, 4 * GIB, None) == 36 * GIB
    assert resident_budget(40 * GIB, 4 * GIB, 20 * GIB) == 20 * GIB
    assert resident_budget(40 * GIB, 4 * GIB, 60 * GIB) == 36 * GIB - 256 * MIB
    assert resident_budget(2 * GIB, 4 * GIB, None) == 0 == resident_budget(2 * GIB, 4 * GIB, GIB)


def test_experts_that_do_not_fit_stay_in_the_file_and_lent_ones_come_last():
    homes = resident_homes([10] * 5, [7, 7, 7], 65)
    assert (homes.source, homes.copies, homes.lent_copies, homes.lent_copy_bytes) == ("resident", 5, 2, 14)
    homes = resident_homes([10] * 5, [7], 35)
    assert (homes.copies, homes.lent_copies, homes.mapped_bytes) == (3, 0, 20)
    assert resident_homes([10] * 5, [], 9).source == "mapped"
    assert resident_homes([], [], 0).mapped_bytes == 0


@given(st.lists(st.integers(1, 100), max_size=50), st.lists(st.integers(1, 100), max_size=50), st.integers(0, 4000))
def test_no_plan_for_ram_exceeds_its_budget(missing, lent, budget):
    homes = resident_homes(missing, lent, budget)
    assert homes.copy_bytes + homes.lent_copy_bytes <= budget
    assert homes.mapped_bytes == sum(missing[homes.copies :])
    assert resident_homes(missing, lent, budget + 50).copies >= homes.copies


def test_an_arena_is_all_that_vram_lacks_or_the_file():
    arena = ExpertSource()
    assert arena.homes([GIB] * 5, [GIB], 6 * GIB + BUDGET_SLACK).source == "arena"
    found = arena.homes([GIB] * 5, [GIB], 6 * GIB + BUDGET_SLACK - 1)
    assert (found.source, found.copies, found.mapped_bytes) == ("mapped", 0, 5 * GIB)


def test_a_limit_of_what_is_locked_leaves_the_rest_to_the_file():
    found = ExpertSource(pinned=2 * GIB).homes([GIB] * 5, [], 40 * GIB)
    assert (found.source, found.copies, found.mapped_bytes) == ("resident", 2, 3 * GIB)
    auto = ExpertSource(pinned="auto")
    assert (
        auto.homes([GIB] * 5, [], 7 * GIB).copies == 3 == ExpertSource("resident").homes([GIB] * 5, [], 7 * GIB).copies
    )
    assert ExpertSource(pinned=2 * GIB).homes([GIB] * 5, [], 1 * GIB).source == "mapped"


def test_a_budget_is_for_resident_experts_only():
    assert ExpertSource("resident", given=2 * GIB).homes([GIB] * 5, [], 40 * GIB).copies == 2
    assert ExpertSource("arena", given=2 * GIB).homes([GIB] * 5, [], 40 * GIB).copies == 5
    assert ExpertSource("mapped", given=2 * GIB).homes([GIB] * 5, [], 40 * GIB).copies == 0


@given(
    kind=st.sampled_from(["arena", "resident", "mapped"]),
    headroom=st.one_of(st.none(), st.integers(0, 9 * GIB)),
    given_=st.one_of(st.none(), st.integers(1, 99 * GIB)),
    pinned=st.one_of(st.none(), st.just("auto"), st.integers(1, 99 * GIB)),
    parked=st.builds(cache, mib=st.integers(0, 4096), min_free=st.integers(0, 4096)),
    missing=st.lists(st.integers(1, 9 * GIB), max_size=9),
    lent=st.lists(st.integers(1, 9 * GIB), max_size=9),
    available=st.integers(0, 99 * GIB),
)
def test_whatever_is_asked_copies_leave_what_must_stay_free(
    kind, headroom, given_, pinned, parked, missing, lent, available
):
    source = ExpertSource(kind, False, headroom, given_, pinned, parked)
    homes = source.homes(missing, lent, available)
    taken = homes.copy_bytes + homes.lent_copy_bytes
    assert taken == 0 or taken <= available - source.kept
    assert homes.missing == len(missing) and homes.copy_bytes == sum(missing[: homes.copies])

"""A card's rest as slots and prompt buffers: nothing is promised twice, and the recorded plans come out."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from strata.engine.device.arena import GIB, MIB
from strata.engine.memory.card import RING, CardPlan, CardRoom, plan_card
from strata.engine.memory.prompt import KEPT_FREE
from strata.engine.memory.published import plan_published

BLOB = 1731 * MIB // 1000 // 256 * 256
HEAD = 417 * MIB
IN_SLOTS = {256: 200, 512: 328, 768: 475, 1024: 540, 1280: 588, 1536: 647, 1792: 690, 2048: 760}
"""Of chunks on the 8 GB card (test_prompt.py)."""


def laptop(chunk: int) -> int:
    """The workspace of a chunk there: what it took in slots, without the double buffer."""
    known = next((c for c in IN_SLOTS if c >= chunk), None)
    slots = IN_SLOTS[known] if known else IN_SLOTS[2048] + (chunk - 2048) * 50 // 256
    return slots * BLOB - BLOB // 2 - RING * BLOB


SMALL = CardRoom(
    free=590 * MIB + 508 * BLOB + MIB // 2,
    reserve=590 * MIB,
    given=True,
    experts=(BLOB,) * 24_576,
    per_layer=512,
    known=True,
    cache=0,
    prefill=0,
    most=8192,
    price=laptop,
)


def test_the_8_gb_card_borrows_328_of_508_slots_for_chunks_of_512():
    plan = plan_card(SMALL)
    assert (plan.way, plan.alias, len(plan.slots)) == ("borrowed", "off", 508)
    assert (plan.layout.chunk, plan.layout.lent) == (512, 328)
    assert plan.free >= 590 * MIB == plan.reserve


def test_with_the_head_alias_it_has_749_slots_lends_748_and_reads_2048():
    plan = plan_published(SMALL, HEAD)
    assert plan.exchanged and len(plan.slots) == 749
    assert (plan.layout.chunk, plan.layout.lent) == (2048, 748)
    # the head comes back into the reserve: less than half of it stays free while tokens are generated
    assert plan.free == SMALL.free - plan.slots.n_bytes
    assert 0 <= plan.free - (590 * MIB - HEAD) < BLOB
    assert plan.free_reading == plan.free + HEAD - plan.layout.own_bytes >= KEPT_FREE


def test_a_reserve_smaller_than_the_head_lends_its_memory_in_place_and_nothing_is_freed():
    plan = plan_published(replace(SMALL, reserve=331 * MIB), HEAD)
    assert (plan.exchanged, plan.layout.chunk, plan.layout.head_bytes) == (False, 2048, HEAD)
    assert plan.free >= 331 * MIB and plan.free_reading >= 331 * MIB


def test_a_cache_of_one_slot_reads_1024_in_own_buffers_and_2048_with_the_alias():
    room = replace(SMALL, free=2100 * MIB, cache=1, own=False)
    plain, lent = plan_card(room), plan_published(room, HEAD)
    assert (len(plain.slots), plain.layout.kind, plain.layout.chunk) == (1, "own", 1024)
    assert (len(lent.slots), lent.layout.chunk, lent.layout.lent) == (1, 2048, 0)
    spare = plan_card(replace(room, own=True))
    assert (spare.way, spare.layout.chunk) == ("own from spare memory", 2048)


def desktop(chunk: int) -> int:
    """Own buffers of 3,805 MiB for the longest chunk, on the 32 GB card."""
    return 3805 * MIB * (chunk + 512) // (8192 + 512)


MIXED = tuple((254 * MIB // 100 if pair % 48 == 0 else 1930 * MIB // 1000) // 256 * 256 for pair in range(24_576))
LARGE = replace(SMALL, free=1536 * MIB + 19_860 * MIB, reserve=1536 * MIB, experts=MIXED, price=desktop)


def test_a_given_cache_on_a_32_gb_card_leaves_room_for_own_buffers_and_lends_nothing():
    plan = plan_card(replace(LARGE, cache=5400))
    assert abs(len(plan.slots) - 7056) <= 15
    assert (plan.way, plan.layout.chunk, plan.layout.lent) == ("own from spare memory", 8192, 0)
    assert plan.layout.own_bytes == 3805 * MIB + LARGE.ring
    without = plan_card(replace(LARGE, cache=5400, own=False))
    assert (without.way, without.slots.sizes) == ("borrowed", plan.slots.sizes)
    assert 1900 <= without.layout.lent <= 2080  # 1,972 were recorded for 3,805 MiB


def test_an_auto_cache_on_it_takes_all_and_borrows_whether_own_buffers_are_allowed_or_not():
    plan, without = plan_card(LARGE), plan_card(replace(LARGE, own=False))
    assert abs(len(plan.slots) - 10_222) <= 30
    assert plan.way == without.way == "borrowed"
    assert plan.slots.sizes == without.slots.sizes and plan.layout == without.layout


def test_a_card_that_holds_all_experts_reads_in_own_buffers_without_any_profile():
    everything = sum(MIXED)
    plan = plan_card(replace(LARGE, free=everything + 6 * GIB, known=False))
    assert len(plan.slots) == 24_576
    assert (plan.way, plan.layout.chunk) == ("own from spare memory", 8192)
    assert plan.layout.own_bytes == desktop(8192)  # no double buffer: nothing is streamed
    tighter = plan_card(replace(LARGE, free=everything + 5 * GIB, known=False))
    assert (tighter.way, tighter.layout.chunk) == ("borrowed", 8192)  # own buffers would be a step shorter


def test_a_chunk_shorter_than_the_candidates_streams_nothing_where_all_experts_are_there():
    room = replace(LARGE, free=sum(MIXED) + 6 * GIB, prefill=64)
    plan = plan_card(replace(room, borrow=False))
    assert (len(plan.slots), plan.layout.chunk, plan.layout.own_bytes) == (24_576, 64, desktop(64))


def test_without_a_known_order_nothing_is_lent():
    plan = plan_card(replace(LARGE, known=False))
    assert (plan.way, plan.layout.chunk, plan.layout.lent) == ("own, stepped down", 2048, 0)
    assert set(plan.slots.sizes) == {max(MIXED)}
    borrowing_off = plan_card(replace(LARGE, borrow=False))
    assert (borrowing_off.way, borrowing_off.layout.chunk) == ("own, stepped down", 2048)


def test_a_reserve_that_nobody_asked_for_is_lowered_before_a_prompt_cannot_be_borrowed_for():
    free = 350 * MIB + 330 * BLOB
    plan = plan_card(replace(SMALL, free=free, reserve=700 * MIB, given=False))
    assert plan.way == "borrowed" and plan.layout.chunk == 256
    assert 300 * MIB <= plan.reserve < 360 * MIB and "lowered" in plan.said[0]
    kept = plan_card(replace(SMALL, free=free, reserve=700 * MIB))
    assert kept.way == "own, stepped down"


rooms = st.builds(
    CardRoom,
    free=st.integers(0, 3000).map(lambda n: n * MIB),
    reserve=st.integers(0, 900).map(lambda n: n * MIB),
    given=st.booleans(),
    experts=st.lists(st.integers(MIB, 3 * MIB), min_size=1, max_size=900).map(tuple),
    per_layer=st.integers(1, 64),
    known=st.booleans(),
    cache=st.sampled_from([0, 0, 1, 50, 400]),
    prefill=st.sampled_from([0, 0, 100, 512, 4096]),
    most=st.sampled_from([50, 256, 3000, 8192]),
    price=st.builds(lambda base, per: lambda c: base * MIB + c * per * 1024, st.integers(0, 200), st.integers(1, 500)),
    borrow=st.booleans(),
    own=st.booleans(),
    pct=st.integers(1, 100),
)


def held(plan: CardPlan) -> int:
    """Bytes that are taken of the card."""
    return plan.slots.n_bytes + (plan.layout.own_bytes if plan.layout.kind == "own" else 0)


@settings(max_examples=300, deadline=None)
@given(rooms)
def test_no_plan_exceeds_the_card(room):
    plan = plan_card(room)
    assert held(plan) + plan.free == room.free and plan.free >= 0
    assert plan.layout.chunk <= room.most
    if plan.layout.chunk:
        assert plan.layout.lent_bytes + plan.layout.own_bytes >= room.price(plan.layout.chunk)
    assert plan.layout.lent <= len(plan.slots) <= len(room.experts)


@settings(max_examples=300, deadline=None)
@given(rooms, st.integers(0, 500))
def test_the_published_plan_exceeds_the_card_at_no_time(room, head_mib):
    plan = plan_published(room, head_mib * MIB)
    assert plan.slots.n_bytes + plan.free == room.free
    gone = head_mib * MIB if plan.exchanged else 0
    assert plan.slots.n_bytes + plan.layout.own_bytes + plan.free_reading == room.free + gone
    if plan.layout.chunk:
        assert plan.free >= 0 and plan.free_reading >= 0
        everywhere = plan.layout.lent_bytes + plan.layout.own_bytes + plan.layout.head_bytes
        assert everywhere >= room.price(plan.layout.chunk)


def test_a_card_that_just_holds_everything_reads_in_no_shorter_chunks_than_one_a_byte_smaller():
    room = replace(SMALL, experts=(MIB + 1,), per_layer=1, reserve=516 * MIB, price=lambda c: c << 10, most=3000)
    room = replace(room, known=False, given=False, own=False, cache=0, prefill=0, pct=1)
    assert [plan_card(replace(room, free=n * MIB)).layout.chunk for n in (517, 518)] == [1536, 2048]


@settings(max_examples=300, deadline=None)
@given(rooms, st.integers(1, 1500))
def test_a_larger_card_never_reads_in_shorter_chunks(room, more):
    """With the same reserve, which is free: where it is lowered or eaten into so that a prompt can be read at all, each
    card has its own."""
    room = replace(room, cache=0)
    larger, smaller = plan_card(replace(room, free=room.free + more * MIB)), plan_card(room)
    same = larger.reserve == smaller.reserve <= room.free
    assert not same or larger.layout.chunk >= smaller.layout.chunk


@settings(max_examples=300, deadline=None)
@given(rooms, st.integers(1, 1500))
def test_a_larger_card_never_has_fewer_experts(room, more):
    room = replace(room, cache=0, own=False)
    assert len(plan_card(replace(room, free=room.free + more * MIB)).slots) >= len(plan_card(room).slots)

"""Prompt buffers: own, borrowed, both; which chunk they allow."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.engine.device.arena import MIB
from strata.engine.memory.cache import Room, Slots, auto_budget, equal_slots
from strata.engine.memory.prompt import (
    GRID,
    KEPT_FREE,
    OWN_CANDIDATES,
    PromptLayout,
    borrowed,
    lend_pct,
    own_chunk,
    stepped_down,
)
from strata.engine.memory.published import CANDIDATES, alias_layout, hybrid

KIB = 1024


def linear(chunk: int) -> int:
    """The prices of the published vectors: 2048: 1112, 4096: 2064, 6144: 3016, 8192: 3968 MiB."""
    return 160 * MIB + chunk * 476 * KIB


@pytest.mark.parametrize(
    ("free", "most", "borrowed_chunk", "chunk"),
    [
        (5504, 8192, 2048, 8192),
        (5503, 8192, 2048, 6144),
        (4000, 8192, 2048, 4096),
        (2000, 8192, 2048, 0),
        (2000, 8192, 512, 512),
        (6000, 4096, 2048, 4096),
        (1536, 8192, 0, 0),
        (1537, 8192, 0, 0),
        (9999, 0, 0, 0),
        (9999, 8192, 16384, 0),
    ],
)
def test_own_buffers_never_eat_the_reserve_nor_shorten_the_chunk(free, most, borrowed_chunk, chunk):
    assert own_chunk(free * MIB, 1536 * MIB, most, borrowed_chunk, linear) == chunk


def test_the_prices_of_the_vectors_are_those_that_they_were_written_with():
    assert [linear(c) // MIB for c in (2048, 4096, 6144, 8192)] == [1112, 2064, 3016, 3968]


BLOB = 1731 * MIB // 1000
FREE = 590 * MIB + 508 * BLOB + MIB // 2
"""Free before the cache on the 8 GB card: 508 slots at a reserve of 590 MiB."""
IN_SLOTS = {256: 200, 512: 328, 768: 475, 1024: 540, 1280: 588, 1536: 647, 1792: 690, 2048: 760}
"""What chunks took there, in slots: 328 for 512 is recorded, the others follow from when the chunk changed."""


def recorded(chunk: int) -> int:
    """The next longer chunk that is known, in bytes of slots; from there on as the last ones grew."""
    known = next((c for c in IN_SLOTS if c >= chunk), None)
    slots = IN_SLOTS[known] if known else IN_SLOTS[2048] + (chunk - 2048) * 50 // 256
    return slots * BLOB - BLOB // 2


@pytest.mark.parametrize(
    ("reserve", "chunk"),
    [
        *[(reserve, 256) for reserve in (745, 720, 686)],
        *[(reserve, 512) for reserve in (667, 590, 442)],
        *[(reserve, 768) for reserve in (405, 360, 331)],
        *[(reserve, 1024) for reserve in (295, 260, 239)],
        *[(reserve, 1280) for reserve in (221, 180, 147)],
        *[(reserve, 1536) for reserve in (110, 90, 73)],
        *[(reserve, 1792) for reserve in (36, 18, 0)],
    ],
)
def test_the_recorded_chunks_of_an_8_gb_card_come_out_of_their_reserves(reserve, chunk):
    budget = auto_budget(Room(FREE, reserve * MIB, True), BLOB, 24_576, 1)
    slots = Slots([BLOB] * (budget.n_bytes // BLOB))
    layout = borrowed(slots, recorded, 0, 8192, lend_pct(None, 0.0))
    assert layout.chunk == chunk
    if reserve == 590:
        assert (len(slots), layout.lent) == (508, 328)


def test_the_head_makes_of_a_chunk_of_512_one_of_2048_and_lends_all_slots_but_one():
    head = 417 * MIB
    budget = auto_budget(Room(FREE + head, 590 * MIB, True), BLOB, 24_576, 1)
    slots = Slots([BLOB] * (budget.n_bytes // BLOB))
    assert len(slots) == 749
    left = FREE + head - slots.n_bytes
    layout = alias_layout(slots, left, head, recorded, 262_144, exchange=True)
    assert (layout.kind, layout.chunk, layout.lent) == ("hybrid", 2048, 748)
    assert layout.own_bytes == recorded(2048) - 748 * BLOB
    assert left - layout.own_bytes >= KEPT_FREE


def test_a_head_that_keeps_its_memory_gives_the_same_chunk_with_fewer_slots():
    head, slots = 417 * MIB, Slots([BLOB] * 508)
    layout = alias_layout(slots, 590 * MIB, head, recorded, 262_144, exchange=False)
    assert (layout.chunk, layout.head_bytes) == (2048, head)
    assert layout.lent_bytes + layout.own_bytes + layout.head_bytes >= recorded(2048)
    assert layout.lent == 507


def test_with_a_cache_of_one_slot_the_whole_chunk_is_an_allocation():
    layout = alias_layout(Slots([BLOB]), 2000 * MIB, 417 * MIB, recorded, 262_144, exchange=True)
    assert (layout.chunk, layout.lent, layout.own_bytes) == (2048, 0, recorded(2048))


def test_the_alias_takes_its_candidates_in_order_and_says_when_none_fits():
    slots = equal_slots(MIB, 400, 400 * MIB)
    at = {m: hybrid(slots, 1, m * MIB, linear, CANDIDATES, 8192).chunk for m in (400, 512, 600, 1000, 1225, 1226)}
    # 399 MiB in slots and what is free beyond 512: price 398 for 512, 636 for 1024, 874 for 1536, 1112 for 2048
    assert at == {400: 512, 512: 512, 600: 512, 1000: 1536, 1225: 2048, 1226: 2048}
    assert hybrid(equal_slots(MIB, 100, 100 * MIB), 1, 512 * MIB, linear, CANDIDATES, 8192).chunk == 0
    assert hybrid(slots, 1, 4000 * MIB, linear, CANDIDATES, 1024).chunk == 1024


def test_at_least_128_slots_stay_when_a_prompt_borrows():
    exactly = Slots([MIB] * (128 + 398))  # 512 tokens take 398 MiB
    assert borrowed(exactly, linear, 512, 8192, 85).lent == 398
    assert borrowed(Slots([MIB] * (127 + 398)), linear, 512, 8192, 85).chunk == 256


def test_auto_leaves_a_share_of_the_cache_and_a_given_chunk_does_not():
    slots = Slots([MIB] * 1000)
    assert borrowed(slots, linear, 0, 8192, 85).chunk == 1280  # 1,536 would take 874 of 1,000
    assert borrowed(slots, linear, 0, 8192, 90).chunk == 1280  # and leave 126 slots
    assert borrowed(slots, linear, 1500, 8192, 85).chunk == 1500
    assert (lend_pct(None, 0.89), lend_pct(None, 0.9), lend_pct(50, 1.0)) == (85, 90, 50)


def test_a_given_chunk_is_halved_until_it_fits_and_not_below_256():
    slots = Slots([MIB] * 700)
    assert borrowed(slots, linear, 4096, 8192, 85).chunk == 512
    assert borrowed(Slots([MIB] * 300), linear, 4096, 8192, 85).chunk == 0
    assert borrowed(slots, linear, 300, 8192, 85).chunk == 300


def test_no_chunk_is_longer_than_the_context():
    slots = Slots([MIB] * 10_000)
    assert borrowed(slots, linear, 0, 1000, 85).chunk == 768
    assert borrowed(slots, linear, 0, 100, 85).chunk == 100
    assert borrowed(slots, linear, 4096, 1000, 85).chunk == 1000
    assert own_chunk(10_000 * MIB, 0, 1000, 0, linear) == 512


def test_own_buffers_step_down_and_leave_half_a_gib():
    assert stepped_down(2048, 1112 * MIB + KEPT_FREE, linear) == PromptLayout("own", 2048, own_bytes=1112 * MIB)
    assert stepped_down(2048, 1112 * MIB + KEPT_FREE - 1, linear).chunk == 1536
    assert stepped_down(8192, 3016 * MIB + KEPT_FREE, linear).chunk == 6144
    assert stepped_down(2048, KEPT_FREE, linear).chunk == 0


slots_ = st.lists(st.integers(MIB, 4 * MIB), max_size=600).map(Slots)
prices = st.builds(lambda base, per: lambda c: base * MIB + c * per * KIB, st.integers(1, 300), st.integers(1, 700))


@given(slots_, prices, st.sampled_from([0, 100, 256, 1000, 2048, 8192]), st.integers(1, 40_000), st.integers(1, 100))
def test_borrowed_slots_hold_the_chunk_and_the_longest_one_is_found(slots, price, asked, most, pct):
    layout = borrowed(slots, price, asked, most, pct)
    assert layout.chunk <= most
    if layout.chunk:
        assert price(layout.chunk) <= layout.lent_bytes == slots.tail_bytes(layout.lent)
        assert len(slots) - layout.lent >= 128
    if not asked and most >= GRID:

        def fits(chunk: int) -> bool:
            lent = slots.lent_for(price(chunk))
            return lent is not None and len(slots) - lent >= 128 and 100 * lent <= pct * len(slots)

        longest = max((c for c in range(GRID, most + 1, GRID) if fits(c)), default=0)
        assert layout.chunk == longest


@given(st.integers(0, 9000), st.integers(0, 4000), st.integers(0, 40_000), st.integers(0, 9000), prices)
def test_own_buffers_fit_and_grow_with_the_memory(free, reserve, most, least, price):
    chunk = own_chunk(free * MIB, reserve * MIB, most, least, price)
    if chunk:
        assert chunk in OWN_CANDIDATES and least <= chunk <= most
        assert price(chunk) <= (free - reserve) * MIB
    assert own_chunk((free + 500) * MIB, reserve * MIB, most, least, price) >= chunk


@given(slots_, st.integers(0, 3000), prices, st.integers(0, 500))
def test_a_hybrid_holds_its_chunk_and_grows_with_the_memory(slots, free, price, head):
    layout = hybrid(slots, 1, free * MIB, price, CANDIDATES, 8192, head * MIB)
    if layout.chunk:
        assert layout.lent_bytes + layout.own_bytes + layout.head_bytes >= price(layout.chunk)
        assert layout.lent_bytes == slots.tail_bytes(layout.lent) and layout.lent <= max(0, len(slots) - 1)
        assert layout.own_bytes <= max(0, free * MIB - KEPT_FREE)
    assert hybrid(slots, 1, (free + 300) * MIB, price, CANDIDATES, 8192, head * MIB).chunk >= layout.chunk

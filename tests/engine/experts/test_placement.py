"""Every expert lies in one place, no two in the same, and the books of the cache and of RAM add up."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from strata.engine.device.arena import ALIGNMENT
from strata.engine.experts.placement import ExpertSize, by_number, missing_order, place, with_copies
from strata.engine.memory.cache import equal_slots, sized_slots
from strata.engine.memory.ram import ExpertSource

SIZES = st.builds(ExpertSize, *[st.integers(1, 3 * ALIGNMENT)] * 3)


@given(
    sizes=st.lists(SIZES, min_size=1, max_size=5),
    experts=st.integers(1, 6),
    budget=st.integers(0, 100_000),
    sized=st.booleans(),
    data=st.data(),
)
def test_places_do_not_overlap_and_all_experts_have_one(sizes, experts, budget, sized, data):
    pairs = by_number(len(sizes), experts)
    order = data.draw(st.permutations(pairs)) if sized else pairs
    largest = max(size.n_bytes for size in sizes)
    bytes_of = [sizes[layer].n_bytes for layer, _ in order]
    slots = sized_slots(bytes_of, budget) if sized else equal_slots(largest, len(order), budget)
    placement = place(sizes, experts, slots.sizes, order)
    taken = sorted(
        (begin, begin + sizes[layer].n_bytes) for (layer, _), begin in np.ndenumerate(placement.begins) if begin >= 0
    )
    assert all(end <= begin for (_, end), (begin, _) in pairwise(taken))
    assert all(begin % ALIGNMENT == 0 for begin, _ in taken)
    assert (taken[-1][1] if taken else 0) <= placement.cache_bytes <= max(budget, 0)
    assert placement.in_cache == len(slots) == placement.pairs - placement.missing
    assert (placement.in_ram == (placement.begins < 0)).all() and placement.filed_bytes == 0
    assert set(order[: len(slots)]) == {
        (layer, expert) for (layer, expert), begin in np.ndenumerate(placement.begins) if begin >= 0
    }


@given(
    sizes=st.lists(SIZES, min_size=1, max_size=4),
    experts=st.integers(1, 5),
    held=st.integers(0, 20),
    spare=st.integers(0, 3),
    ram=st.integers(0, 60_000),
    source=st.sampled_from(["arena", "resident", "mapped"]),
    data=st.data(),
)
def test_what_ram_has_no_room_for_lies_in_the_file_the_least_used_first(sizes, experts, held, spare, ram, source, data):
    """And what is locked is what the plan said, and no more than there was."""
    order = data.draw(st.permutations(by_number(len(sizes), experts)))
    largest = max(size.n_bytes for size in sizes)
    slotted = place(sizes, experts, (largest,) * min(held, len(order)), order, spare)
    known = order[: data.draw(st.integers(0, len(order)))]
    missing = missing_order(slotted, known)
    others = [pair for pair in by_number(len(sizes), experts) if pair not in known]
    assert missing == [pair for pair in [*known, *others] if slotted.begins[pair] < 0]
    of = ExpertSource(source, headroom=0)
    homes = of.homes([sizes[layer].n_bytes for layer, _ in missing], (), ram - slotted.spare_bytes)
    placement = with_copies(slotted, missing[: homes.copies])
    assert placement.locked_bytes == homes.copy_bytes + placement.spare_bytes
    assert placement.filed_bytes == homes.mapped_bytes == sum(sizes[i].n_bytes for i, _ in missing[homes.copies :])
    assert homes.copies == 0 or placement.locked_bytes <= ram
    everywhere = (placement.begins >= 0).astype(int) + placement.in_ram + placement.filed
    assert (everywhere == 1).all()
    assert source != "arena" or homes.copies in (0, len(missing))
    assert source != "mapped" or homes.copies == 0


@given(size=SIZES)
def test_the_matrices_of_an_expert_lie_behind_each_other(size):
    gate, up, down = size.begins
    assert gate == 0 and size.gate <= up and up + size.up <= down and down + size.down <= size.n_bytes
    assert {up % ALIGNMENT, down % ALIGNMENT, size.n_bytes % ALIGNMENT} == {0}


def test_by_number_gives_every_layer_the_same_share():
    assert by_number(3, 2) == ((0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1))

"""Swaps follow the rule, and never leave an expert without a place or two in the same."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.engine.experts.adapt import LEAST_USE, AdaptRules, Swap, choose
from strata.engine.experts.homes import Homes
from strata.engine.experts.placement import ExpertSize

COUNTS = st.integers(0, 6).map(float)


def by_hand(use: list[list[float]], resident: list[list[bool]], rules: AdaptRules) -> list[float]:
    """The gains of a round, by the words of the rule."""
    gains = []
    for counts, held in zip(use, resident, strict=True):
        wanted = sorted(
            (n for n, there in zip(counts, held, strict=True) if not there and n >= LEAST_USE), reverse=True
        )
        unused = sorted(n for n, there in zip(counts, held, strict=True) if there)
        gains += [a - b for a, b in zip(wanted, unused, strict=False) if a >= b + rules.min_gain]
    return sorted(gains, reverse=True)[: rules.swaps]


@given(
    layers=st.integers(1, 4), experts=st.integers(1, 7), swaps=st.integers(1, 6), gain=st.floats(0, 4), data=st.data()
)
def test_the_pairs_with_most_gain_are_swapped(layers, experts, swaps, gain, data):
    rows = st.lists(COUNTS, min_size=experts, max_size=experts)
    flags = st.lists(st.booleans(), min_size=experts, max_size=experts)
    use = data.draw(st.lists(rows, min_size=layers, max_size=layers))
    resident = data.draw(st.lists(flags, min_size=layers, max_size=layers))
    rules = AdaptRules(swaps=swaps, min_gain=gain)
    found = choose(np.array(use), np.array(resident), rules)
    assert [use[each.layer][each.gets] - use[each.layer][each.leaves] for each in found] == by_hand(
        use, resident, rules
    )
    assert all(resident[each.layer][each.leaves] and not resident[each.layer][each.gets] for each in found)
    assert len({(each.layer, each.gets) for each in found}) == len({(e.layer, e.leaves) for e in found}) == len(found)


def test_an_expert_that_was_used_once_is_not_worth_a_swap():
    assert choose(np.array([[1.9, 0.0]]), np.array([[False, True]]), AdaptRules()) == []
    assert choose(np.array([[2.0, 0.0]]), np.array([[False, True]]), AdaptRules()) == [Swap(0, 0, 1)]
    assert choose(np.array([[2.0, 0.6]]), np.array([[False, True]]), AdaptRules()) == []


@pytest.mark.parametrize("rules", [AdaptRules(every=0), AdaptRules(swaps=0)])
def test_nothing_moves_when_it_is_not_to(rules):
    assert not rules.on


@given(
    size=st.builds(ExpertSize, *[st.integers(1, 600)] * 3),
    in_cache=st.lists(st.booleans(), min_size=1, max_size=8),
    each=st.integers(1, 5),
    data=st.data(),
)
def test_tables_name_every_expert_once_whatever_was_swapped(size, in_cache, each, data):
    n, cache, ram = size.n_bytes, 1 << 40, 1 << 41
    slots = iter(range(len(in_cache)))
    homes = Homes.of(size, np.array([next(slots) * n if held else -1 for held in in_cache], np.int64))
    missing = in_cache.count(False)
    bytes_of = {("cache", int(b)): e for e, b in enumerate(homes.begins) if b >= 0}
    bytes_of |= {("ram", int(p) * n): e for e, p in enumerate(homes.places) if p >= 0}
    for _ in range(data.draw(st.integers(0, 5)) if 0 < missing < len(in_cache) else 0):
        gets = data.draw(st.sampled_from(np.flatnonzero(homes.places >= 0).tolist()))
        leaves = data.draw(st.sampled_from(np.flatnonzero(homes.begins >= 0).tolist()))
        begin, place = homes.swap(gets, leaves)
        slot, there = ("cache", begin), ("ram", place * n)
        bytes_of[slot], bytes_of[there] = bytes_of[there], bytes_of[slot]

    def expert_at(at: int) -> int:
        return bytes_of[("ram", at - ram) if at >= ram else ("cache", at - cache)]

    table = homes.table(cache, ram)
    assert [expert_at(int(at)) for at in table[0]] == list(range(len(in_cache)))
    assert (table - table[0] == np.array(size.begins, np.uint64)[:, None]).all()
    firsts = range(0, missing, each)
    seen = np.zeros(len(in_cache), int)
    for first in firsts:
        part = homes.round_table(cache, 1 << 42, first, min(each, missing - first))
        for expert, at in enumerate(part[0].tolist()):
            if at >= 1 << 42:
                assert bytes_of["ram", at - (1 << 42) + first * n] == expert
            elif at:
                assert expert_at(at) == expert
        seen += part[0] > 0
        assert ((part > 0) == (part[0] > 0)).all()
    assert not firsts or (seen == 1).all()


@given(
    in_cache=st.lists(st.booleans(), min_size=2, max_size=9).filter(lambda held: 0 < sum(held) < len(held)),
    spare=st.integers(1, 3),
    data=st.data(),
)
def test_swaps_in_two_steps_lose_no_expert_and_no_place(in_cache, spare, data):
    size, slots = ExpertSize(1, 1, 1), iter(range(len(in_cache)))
    homes = Homes.of(size, np.array([next(slots) * size.n_bytes if held else -1 for held in in_cache], np.int64), spare)
    places, empty = homes.n_places, []
    assert places == in_cache.count(False) + spare
    for _ in range(data.draw(st.integers(1, 8))):
        held, missing = np.flatnonzero(homes.begins >= 0), np.flatnonzero(homes.places >= 0)
        if empty and (not len(held) or not homes.free or data.draw(st.booleans())):
            homes.enter(int(data.draw(st.sampled_from(missing.tolist()))), empty.pop())
        elif len(held) and homes.free:
            expert = int(data.draw(st.sampled_from(held.tolist())))
            empty.append(int(homes.begins[expert]))
            homes.leave(expert)
        assert ((homes.begins >= 0) ^ (homes.places >= 0)).all()
        taken = [*homes.places[homes.places >= 0].tolist(), *homes.free]
        assert sorted(taken) == list(range(places)) and homes.n_places == places
        begins = homes.begins[homes.begins >= 0].tolist()
        assert len(set(begins)) == len(begins) and not set(begins) & set(empty)
    with pytest.raises(ValueError, match="must lie in RAM"):
        homes.enter(int(np.flatnonzero(homes.begins >= 0)[0]) if (homes.begins >= 0).any() else 0, -1)

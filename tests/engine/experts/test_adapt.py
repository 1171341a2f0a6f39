"""Swaps follow the rule, and never leave an expert without a place or two in the same."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.engine.experts.adapt import LEAST_USE, AdaptRules, Swap, choose, dropping
from strata.engine.experts.homes import Homes
from strata.engine.experts.placement import ExpertSize
from strata.kernels.desk import IN_FILE

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
    use=st.lists(st.floats(0, 9), min_size=4, max_size=9),
    where=st.lists(st.sampled_from("vrf"), min_size=9, max_size=9),
    gain=st.sampled_from([0.0, 1.5]),
)
def test_who_is_dropped_for_an_expert_of_the_file_is_in_ram_and_colder_than_who_leaves(use, where, gain):
    use, where = np.array([use]), np.array([where[: len(use)]])
    in_ram = where == "r"
    swaps = choose(use, where == "v", AdaptRules(min_gain=gain))
    found = dropping(swaps, use, in_ram)
    dropped = [each.drops for each in found if each.drops >= 0]
    assert [replace(each, drops=-1) for each in found] == swaps and len(set(dropped)) == len(dropped)
    gets = {each.gets for each in swaps}
    for each in found:
        if each.drops >= 0:
            assert where[0, each.gets] == "f" and in_ram[0, each.drops] and each.drops not in gets
            assert use[0, each.drops] < use[0, each.leaves]
        elif where[0, each.gets] == "f":
            left = set(np.flatnonzero(in_ram[0]).tolist()) - gets - set(dropped)
            assert not any(use[0, e] < use[0, each.leaves] for e in left)


WHERE = st.lists(st.sampled_from("vrf"), min_size=1, max_size=8)
"""Of an expert: in the cache, in RAM, in the file."""


def homes_of(size: ExpertSize, where: list[str], spare: int = 0) -> Homes:
    slots = iter(range(len(where)))
    begins = np.array([next(slots) * size.n_bytes if at == "v" else -1 for at in where], np.int64)
    return Homes.of(size, begins, spare, np.array(where) == "r")


@given(size=st.builds(ExpertSize, *[st.integers(1, 600)] * 3), where=WHERE, each=st.integers(1, 5), data=st.data())
def test_tables_name_every_expert_once_whatever_was_swapped(size, where, each, data):
    n, cache, ram = size.n_bytes, 1 << 40, 1 << 41
    homes = homes_of(size, where)
    missing = len(where) - where.count("v")
    bytes_of = {("cache", int(b)): e for e, b in enumerate(homes.begins) if b >= 0}
    bytes_of |= {("ram", int(p) * n): e for e, p in enumerate(homes.places) if 0 <= p < homes.locked}
    for _ in range(data.draw(st.integers(0, 5)) if 0 < missing < len(where) else 0):
        gets = data.draw(st.sampled_from(np.flatnonzero(homes.places >= 0).tolist()))
        leaves = data.draw(st.sampled_from(np.flatnonzero(homes.begins >= 0).tolist()))
        from_file, in_ram = homes.in_file(int(homes.places[gets])), np.flatnonzero(homes.in_ram).tolist()
        begin, place = homes.swap(gets, leaves)
        if from_file and in_ram and data.draw(st.booleans()):
            drops = data.draw(st.sampled_from(in_ram))
            homes.trade(leaves, drops)
            place = int(homes.places[leaves])
        bytes_of["cache", begin] = gets
        if not homes.in_file(place):
            bytes_of["ram", place * n] = leaves

    def expert_at(at: int) -> int:
        if at >= IN_FILE:
            return at - IN_FILE
        return bytes_of[("ram", at - ram) if at >= ram else ("cache", at - cache)]

    table, filed = homes.table(cache, ram, card=False), homes.places >= homes.locked
    assert int(filed.sum()) == where.count("f"), "as many experts lie in the file as ever"
    assert [expert_at(int(at)) for at in table[0]] == list(range(len(where)))
    assert (table[:, filed] == table[0, filed]).all() and (table[0] >= IN_FILE).tolist() == filed.tolist()
    in_place = homes.table(cache, ram, card=True)
    assert (in_place == np.where(filed, 0, table)).all()
    assert (in_place - in_place[0] == np.where(filed, 0, np.array(size.begins, np.uint64)[:, None])).all()
    rounds = [(first, min(each, end - first)) for begin, end in ((0, homes.locked), (homes.locked, missing))
              for first in range(begin, end, each)]  # fmt: skip
    seen = np.zeros(len(where), int)
    for i, (first, count) in enumerate(rounds):
        part = homes.round_table(cache, 1 << 42, first, count, with_cache=i == 0)
        of_round = {expert: first_place for first_place, expert in homes.within(first, count)}
        for expert, at in enumerate(part[0].tolist()):
            if at >= 1 << 42:
                assert at == (1 << 42) + (of_round[expert] - first) * n
                assert homes.in_file(first) or bytes_of["ram", of_round[expert] * n] == expert
            elif at:
                assert expert_at(at) == expert
        seen += part[0] > 0
        assert ((part > 0) == (part[0] > 0)).all()
    assert not rounds or (seen == 1).all()


@given(where=WHERE.filter(lambda where: {"v"} < {*where}), spare=st.integers(1, 3), data=st.data())
def test_swaps_in_two_steps_lose_no_expert_and_no_place(where, spare, data):
    homes, empty = homes_of(ExpertSize(1, 1, 1), where, spare), []
    places, from_file = homes.n_places, 0
    assert places == len(where) - where.count("v") + spare
    for _ in range(data.draw(st.integers(1, 8))):
        held, missing = np.flatnonzero(homes.begins >= 0), np.flatnonzero(homes.places >= 0)
        left = [place for place in homes.free if not homes.in_file(place)]
        if empty and (not len(held) or not left or data.draw(st.booleans())):
            gets = int(data.draw(st.sampled_from(missing.tolist())))
            from_file = homes.in_file(int(homes.places[gets]))
            homes.enter(gets, empty.pop())
            if from_file and homes.in_ram.any():
                homes.retreat(int(data.draw(st.sampled_from(np.flatnonzero(homes.in_ram).tolist()))))
        elif len(held) and homes.free:
            expert = int(data.draw(st.sampled_from(held.tolist())))
            empty.append(int(homes.begins[expert]))
            homes.leave(expert)
        assert ((homes.begins >= 0) ^ (homes.places >= 0)).all()
        taken = [*homes.places[homes.places >= 0].tolist(), *homes.free]
        assert sorted(taken) == list(range(places)) and homes.n_places == places
        begins = homes.begins[homes.begins >= 0].tolist()
        assert len(set(begins)) == len(begins) and not set(begins) & set(empty)
    with pytest.raises(ValueError, match="must have a place"):
        homes.enter(int(np.flatnonzero(homes.begins >= 0)[0]) if (homes.begins >= 0).any() else 0, -1)
    for expert in np.flatnonzero(~homes.in_ram).tolist():
        with pytest.raises(ValueError, match="must lie in RAM"):
            homes.retreat(expert)

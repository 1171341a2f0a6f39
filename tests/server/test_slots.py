"""Which slot a prompt goes to, and whose turn it is."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.protocol.lines import SamplingKeys
from strata.server.job import Job
from strata.server.slots import SlotTable, Use, common_prefix
from strata.server.turns import Rules, gives_way_to, in_order

TURN = 7


def ids(*parts: int | tuple[int, int]) -> array[int]:
    """ids(1, (5, 3)) is 1, 5, 5, 5."""
    return array("i", [i for part in parts for i in ([part] if isinstance(part, int) else [part[0]] * part[1])])


def job(prompt: array[int], output: tuple[int, ...] = (), **fields: object) -> Job:
    return Job(prompt, 100, fields.pop("keys", SamplingKeys()), output=array("i", output), **fields)


def ends_in(table: SlotTable, index: int, prompt: array[int], *output: int, **fields: object) -> None:
    """A request was in a slot and left it."""
    request = job(prompt, output, **fields)
    table.take(index, request, Use.BUSY)
    table.left_by(request)


def test_a_slot_holds_prompt_and_output_but_the_last_token():
    table = SlotTable(2, keeps=True, turn_token=TURN)
    ends_in(table, 1, ids(1, TURN, 2, TURN, 3), 50, 51, 52)
    assert table.slots[1].held == ids(1, TURN, 2, TURN, 3, 50, 51) and table.slots[1].n_turn == 3
    assert table.slots[1].use is Use.IDLE and table.slots[1].job is None


@pytest.mark.parametrize(
    "table, fields",
    [
        (SlotTable(2, keeps=False), {}),
        (SlotTable(2, keeps=True), {"keys": SamplingKeys(ckpt=False)}),
        (SlotTable(2, keeps=True), {"pictures": "/tmp/p"}),
    ],
    ids=["slot_cache=0", "ckpt=0", "pictures"],
)
def test_a_slot_that_cannot_be_continued_counts_as_empty(table, fields):
    ends_in(table, 0, ids(1, 2, 3), 4, 5, **fields)
    assert not table.slots[0].held and table.slots[0].n_turn == 0


def test_the_next_turn_of_a_conversation_goes_to_its_slot():
    table = SlotTable(3, keeps=True)
    ends_in(table, 0, ids((1, 10)), 5, 6)
    ends_in(table, 1, ids((1, 20)), 5, 6)
    assert table.choose(ids((1, 20), 5, 6, 8, 8)).slot.index == 1  # both begin it with (1, 10); the longest wins
    assert table.choose(ids((1, 10), 5, 6, 8)).slot.index == 0


def test_a_prompt_that_is_all_that_a_slot_holds_is_no_continuation():
    table = SlotTable(2, keeps=True)
    ends_in(table, 0, ids(1, 2, 3), 4, 5)  # holds 1, 2, 3, 4
    assert table.choose(ids(1, 2, 3, 4)).slot.index == 1


def test_a_history_without_the_reasoning_goes_by_the_turn_checkpoint():
    table = SlotTable(2, keeps=True, turn_token=TURN)
    ends_in(table, 0, ids((1, 10), TURN), 5, 6, 6, 6)
    assert table.choose(ids((1, 10), TURN, 8, 8)).slot.index == 0
    ends_in(table, 1, ids((1, 10), TURN), *[5] * 40)  # the checkpoint is a small part of it: the slot is worth more
    table.take(0, job(ids(1)), Use.BUSY)
    assert table.choose(ids((1, 10), TURN, 8, 8)).why == "it was used longest ago"


def test_an_empty_slot_is_taken_before_one_that_holds_something_and_then_the_oldest():
    table = SlotTable(3, keeps=True)
    ends_in(table, 0, ids((1, 5)), 2, 2)
    ends_in(table, 1, ids((2, 5)), 2, 2)
    assert table.choose(ids((9, 4))).slot.index == 2
    ends_in(table, 2, ids((3, 5)), 2, 2)
    assert table.choose(ids((9, 4))).slot.index == 0
    ends_in(table, 0, ids((1, 5)), 2, 2)
    assert table.choose(ids((9, 4))).slot.index == 1


def test_slots_are_taken_in_turn_from_each_group():
    table = SlotTable(8, n_groups=4, keeps=True)
    taken = []
    for i in range(8):
        slot = table.choose(ids((i, 5))).slot
        table.take(slot.index, job(ids(i)), Use.BUSY)
        taken.append((slot.index, slot.group))
    assert taken == [(0, 0), (2, 1), (4, 2), (6, 3), (1, 0), (3, 1), (5, 2), (7, 3)]
    assert table.choose(ids(1)) is None


def test_the_emptiest_group_goes_first_when_slots_became_free():
    table = SlotTable(4, n_groups=2, keeps=False)
    jobs = {i: job(ids(i)) for i in (0, 1, 3)}
    for i in (0, 1, 3):
        table.take(i, jobs[i], Use.BUSY)
    assert table.choose(ids(1)).slot.index == 2
    table.left_by(jobs[0])
    table.left_by(jobs[1])
    assert table.choose(ids(1)).slot.group == 0


@pytest.mark.parametrize("n, groups", [(8, 3), (8, 0), (2, 4)])
def test_groups_that_do_not_divide_the_slots_are_one(n, groups):
    table = SlotTable(n, n_groups=groups)
    assert [slot.place for slot in table.slots] == list(range(n)) and {slot.group for slot in table.slots} == {0}


@pytest.mark.parametrize("n_held, goes_back", [(511, False), (512, True)])
def test_with_groups_a_short_prefix_is_not_worth_a_crowded_group(n_held, goes_back):
    table = SlotTable(4, n_groups=2, keeps=True)
    ends_in(table, 0, ids((1, n_held)), 5)
    table.take(1, job(ids(9)), Use.BUSY)
    assert (table.choose(ids((1, n_held), 5, 5)).slot.index == 0) is goes_back


def test_a_slot_has_one_owner():
    table = SlotTable(2)
    first = job(ids(1))
    table.take(0, first, Use.RESERVED)
    table.take(0, first, Use.ADMITTING)
    with pytest.raises(AssertionError):
        table.take(0, job(ids(2)), Use.BUSY)


@given(st.lists(st.integers(0, 2), max_size=40), st.lists(st.integers(0, 2), max_size=40))
def test_the_common_prefix_is_what_counting_says(a, b):
    counted = 0
    while counted < min(len(a), len(b)) and a[counted] == b[counted]:
        counted += 1
    assert common_prefix(array("i", a), array("i", b)) == counted


# --- turns


def waiting(*lengths: int, arrived: float = 0.0) -> list[Job]:
    return [job(ids((1, n)), number=i, arrived=arrived) for i, n in enumerate(lengths)]


def test_without_a_limit_everybody_is_served_in_order_of_arrival():
    queue = waiting(500, 80, 90)
    assert in_order(queue, Rules(), now=0.0) == queue


def test_short_prompts_go_first_and_a_long_one_that_waited_counts_as_short():
    queue = waiting(500, 80, 90)
    rules = Rules(short_first=100, short_after_s=30)
    assert [len(one.prompt) for one in in_order(queue, rules, now=29.9)] == [80, 90, 500]
    assert [len(one.prompt) for one in in_order(queue, rules, now=30.0)] == [500, 80, 90]


def test_a_request_that_continues_counts_as_short():
    queue = waiting(500, 80)
    queue[0].end("cancel")
    queue[0].total = queue[0].end("cancel")
    assert in_order(queue, Rules(short_first=100), now=0.0) == queue


@pytest.mark.parametrize("waiting_n, gives_way", [(49, True), (50, True), (51, False), (100, False)])
def test_a_read_gives_way_to_a_prompt_of_at_most_half_its_length(waiting_n, gives_way):
    assert gives_way_to(100, job(ids((1, waiting_n)))) is gives_way

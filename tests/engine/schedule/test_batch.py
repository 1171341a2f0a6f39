"""Slots beside each other and beside reads, through the real schedule: a slot says what it says alone."""

from __future__ import annotations

import dataclasses
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.engine.schedule.live import Path
from strata.engine.schedule.solo import Request
from strata.kernels.ops import Sampling
from strata.protocol.lines import Admitted, Done, Output, Progress, Resume, Reused, SlotDone, SlotToken, Token, Yielded

END = 3
TURN = 63


def request(prompt: list[int], max_new: int = 6, last_n: int = 0, **how: object) -> Request:
    return Request(np.array(prompt, np.int32), max_new, Sampling(**how), last_n)


class Drive:
    """A schedule with all that it said: tokens of each admission by its number, in order."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.events: list[Output] = []
        self.said: dict[int, list[int]] = {}
        self.ends: dict[int, SlotDone] = {}
        self._owner: dict[int, int] = {}
        self._reading: int | None = None

    def take(self, events: list[Output]) -> list[Output]:
        for event in events:
            if isinstance(event, Token) and self._reading is not None:
                self.said[self._reading].append(event.id)
            elif isinstance(event, SlotToken):
                self.said[self._owner[event.slot]].append(event.id)
            elif isinstance(event, SlotDone):
                self.ends[self._owner.pop(event.slot)] = event
        self.events += events
        return events

    @property
    def read_to(self) -> int:
        """How far the read has come."""
        return next(
            getattr(event, "position", 0) for event in reversed(self.events) if isinstance(event, (Progress, Resume))
        )

    def begin(self, slot: int, asked: Request) -> int:
        """Admit a request. -> its number."""
        number = len(self.said)
        self.said[number] = []
        self._reading = number
        self.take(self.path.admit(slot, asked))
        return number

    def admit(self, slot: int, asked: Request) -> int:
        number = self.begin(slot, asked)
        self.finish_read(slot, number)
        return number

    def finish_read(self, slot: int, number: int) -> None:
        while self.path.busy:
            events = self.path.step()
            if events and events[-1] == Admitted(slot, True):
                self._owner[slot] = number
            self.take(events)
        self._reading = None

    def solo(self, asked: Request) -> list[Output]:
        events = self.take(self.path.start(asked))
        while self.path.busy:
            events += self.take(self.path.step())
        return events

    def windows(self, n: int) -> None:
        for _ in range(n):
            if self.path.decoding:
                self.take(self.path.step())

    def run_out(self) -> None:
        while self.path.decoding:
            self.take(self.path.step())


def of_type(events: list[Output], kind: type) -> list:
    return [event for event in events if isinstance(event, kind)]


def alone(schedule, scripted, asked: Request) -> list[int]:
    """What a request says on the solo path of a fresh engine."""
    return [event.id for event in of_type(Drive(schedule(scripted(), reuse=False)).solo(asked), Token)]


REQUESTS = st.builds(
    request,
    st.lists(st.integers(4, 62), min_size=1, max_size=24),
    st.integers(1, 12),
    st.sampled_from([0, 4, 64]),
    temperature=st.sampled_from([0.0, 1.0]),
    seed=st.integers(1, 1 << 60),
    penalty_repeat=st.sampled_from([1.0, 1.5]),
)


@settings(max_examples=150, deadline=None)
@given(
    arrivals=st.lists(st.tuples(REQUESTS, st.integers(0, 6), st.integers(0, 30)), min_size=1, max_size=7),
    chunk=st.integers(1, 30),
    beside=st.integers(0, 6),
    share=st.sampled_from([0.0, 0.5, 3.0]),
)
def test_a_slot_says_what_it_says_alone_whoever_comes_and_goes(scripted, schedule, arrivals, chunk, beside, share):
    drive = Drive(schedule(scripted(n_slots=3), chunk=chunk, beside=beside, share=share))
    cancelled = {}
    for asked, wait, cancel in arrivals:
        drive.windows(wait)
        while not any(map(drive.path.slots.is_free, range(3))):
            drive.windows(1)
        slot = next(filter(drive.path.slots.is_free, range(3)))
        number = drive.admit(slot, asked)
        if cancel < len(arrivals) and not drive.path.slots.is_free(cancel % 3):
            cancelled[drive._owner[cancel % 3]] = True
            drive.take(drive.path.stop_slot(cancel % 3))
        assert number in drive.said
    drive.run_out()
    for number, (asked, _, _) in enumerate(arrivals):
        wanted, said = alone(schedule, scripted, asked), drive.said[number]
        if number in cancelled:
            assert said == wanted[: len(said)] and drive.ends[number].finish == "cancel"
        else:
            assert said == wanted
            if number in drive.ends:
                assert drive.ends[number].generated == len(said)
                assert drive.ends[number].finish == ("stop" if said[-1] == END else "length")


def test_the_lines_of_an_admission_end_with_done_and_whether_it_goes_on(scripted, schedule):
    drive = Drive(schedule(scripted(n_slots=2), chunk=4))
    drive.admit(1, request([5, 6, 7, 8, 9], 3))
    kinds = [type(event) for event in drive.events]
    assert kinds == [Resume, Progress, Progress, Reused, Token, Done, Admitted]
    done, admitted = drive.events[-2:]
    assert (done.generated, done.prompt, done.finish, done.prompt_read) == (1, 5, "length", 5)
    assert admitted == Admitted(1, True)


def test_an_admission_for_one_token_or_with_an_end_token_leaves_its_slot_free(scripted, schedule):
    drive = Drive(schedule(scripted(n_slots=2)))
    drive.admit(0, request([5, 6], 1))
    assert drive.events[-1] == Admitted(0, False) and drive.events[-2].finish == "length"
    ends = next([p, 9] for p in range(4, 60) if alone(schedule, scripted, request([p, 9], 1)) == [END])
    drive.admit(0, request(ends, 9))
    assert drive.events[-1] == Admitted(0, False) and drive.events[-2].finish == "stop"
    assert not drive.path.decoding


@pytest.mark.parametrize(("share", "windows"), [(0.5, 3), (0.25, 2), (0.01, 1), (0.0, 0)])
def test_slots_decode_between_chunks_for_their_share_and_stand_still_without_one(scripted, schedule, share, windows):
    model, now = scripted(n_slots=2), [0.0]

    class Timed(type(model)):
        def feed(self, slot, begin, tokens, want_logits):
            now[0] += 10.0 if slot == 0 else 2.0
            return super().feed(slot, begin, tokens, want_logits)

    model.__class__ = Timed
    drive = Drive(schedule(model, chunk=4, share=share, clock=lambda: now[0]))
    drive.admit(0, request([5, 6], 50))
    del drive.events[:]
    drive.admit(1, request(list(range(10, 26)), 3))
    counts = "".join({Progress: "P", SlotToken: "t"}.get(type(event), "") for event in drive.events).split("P")
    assert [len(part) for part in counts] == [0, windows, windows, windows, 0]


def test_a_chunk_beside_slots_is_no_longer_than_they_are_made_to_wait(scripted, schedule):
    drive = Drive(schedule(scripted(n_slots=2), chunk=8, beside=2))
    drive.admit(0, request([5] * 16, 50))
    drive.admit(1, request([6] * 8, 3))
    assert [event.position for event in of_type(drive.events, Progress)] == [8, 16, 2, 4, 6, 8]


def test_a_stop_between_chunks_ends_the_admission_and_not_the_slots(scripted, schedule):
    drive = Drive(schedule(scripted(n_slots=2), chunk=2))
    drive.admit(0, request([5, 6], 50))
    drive.begin(1, request([7, 8, 9, 10, 11], 5))
    drive.take(drive.path.step())
    done, admitted = drive.take(drive.path.step(stop=True))
    assert (done.finish, done.generated, done.prompt_read, admitted) == ("cancel", 0, 2, Admitted(1, False))
    assert not drive.path.busy and drive.path.decoding


def test_a_bstop_during_a_read_ends_the_slot_at_once_and_its_conversation_goes_on_from_there(scripted, schedule):
    drive = Drive(schedule(scripted(n_slots=2), chunk=2))
    first = drive.admit(0, request([5, 6], 50))
    drive.windows(3)
    drive.begin(1, request([7, 8, 9, 10, 11], 5))
    drive.take(drive.path.step())
    (end,) = drive.take(drive.path.stop_slot(0))
    assert (end.finish, end.generated) == ("cancel", 4)
    drive.finish_read(1, 1)
    drive.run_out()
    said = drive.said[first]
    whole = alone(schedule, scripted, request([5, 6], 50))
    assert said == whole[:4]
    again = drive.admit(0, request([5, 6, *said], 46))
    assert of_type(drive.events, Resume)[-1] == Resume(5)
    drive.run_out()
    assert said + drive.said[again] == whole


def test_a_bstop_for_a_slot_that_does_not_decode_is_no_line(scripted, schedule):
    drive = Drive(schedule(scripted(n_slots=2), chunk=2))
    assert drive.path.stop_slot(0) == [] == drive.path.stop_slot(7)
    drive.begin(1, request([7, 8, 9, 10, 11], 5))
    drive.take(drive.path.step())
    assert drive.path.stop_slot(1) == []


@pytest.mark.parametrize("own", [True, False], ids=["admission", "solo"])
def test_a_read_gives_way_and_goes_on_where_it_was_with_the_text_of_an_uninterrupted_one(scripted, schedule, own):
    asked, short = request(list(range(10, 40)), 6), request([7, 8, 9], 4)
    drive = Drive(schedule(scripted(n_slots=3), chunk=4, short_read=0))
    drive.admit(2, request([5, 6], 30))
    if own:
        drive.begin(0, asked)
    else:
        drive.take(drive.path.start(asked))
    while drive.read_to < 8:
        drive.take(drive.path.step())
    events = drive.take(drive.path.give_way(0))
    assert events[0] == Yielded(0, 8)
    assert (events[1].finish, events[1].generated, events[1].prompt_read) == ("cancel", 0, 8)
    assert events[2:] == ([Admitted(0, False)] if own else [])
    drive.admit(1, short)
    number = drive.admit(0, asked)
    assert of_type(drive.events, Resume)[-1] == Resume(8)
    positions = [event.position for event in of_type(drive.events, Progress)]
    assert positions[-6:] == [12, 16, 20, 24, 28, 30], "the chunks of an uninterrupted read"
    drive.run_out()
    assert drive.said[number] == alone(schedule, scripted, asked)
    assert drive.said[number - 1] == alone(schedule, scripted, short)


def test_a_read_that_does_not_give_way_goes_on_without_a_line(scripted, schedule):
    drive = Drive(schedule(scripted(n_slots=3), chunk=4, short_read=0))
    drive.admit(2, request([5, 6], 50))
    asked = request(list(range(10, 30)), 6)
    drive.begin(0, asked)
    drive.take(drive.path.step())
    for slot in (2, 1, 3, 99):  # decodes, is not its own, is not there
        assert drive.path.give_way(slot) == []
    while drive.read_to < 16:
        drive.take(drive.path.step())
    assert drive.path.give_way(0) == [], "one chunk is left"
    drive.finish_read(0, 1)
    assert drive.path.give_way(0) == [], "no prompt is being read"
    drive.run_out()
    assert drive.said[1] == alone(schedule, scripted, asked)


def test_without_a_prompt_cache_nothing_gives_way_and_nothing_is_reused(scripted, schedule):
    drive = Drive(schedule(scripted(n_slots=2), chunk=2, short_read=0, reuse=False))
    drive.begin(0, request(list(range(10, 30)), 6))
    drive.take(drive.path.step())
    assert drive.path.give_way(0) == []
    drive.finish_read(0, 0)
    drive.run_out()
    drive.admit(0, request([*range(10, 30), *drive.said[0]], 2))
    assert of_type(drive.events, Resume)[-1] == Resume(0)


def test_the_next_turn_of_a_slot_continues_all_it_holds_or_its_last_turn(scripted, schedule):
    drive = Drive(schedule(scripted(n_slots=2, n_checkpoints=4), chunk=4, turn_token=TURN))
    prompt = [10, 11, 12, 13, 14, TURN, 20, 21]
    first = drive.admit(0, request(prompt, 5))
    drive.run_out()
    drive.admit(1, request([40, 41, 42, TURN, 43], 2))  # so that nothing of it is live
    drive.run_out()
    said = drive.said[first]
    whole = request([*prompt, *said, TURN, 22], 4)
    second = drive.admit(0, whole)
    assert of_type(drive.events, Resume)[-1] == Resume(len(prompt) + len(said) - 1)
    drive.run_out()
    assert drive.said[second] == alone(schedule, scripted, whole)
    shortened = request([*prompt[:6], 50, 51], 4)
    third = drive.admit(1, shortened)
    assert of_type(drive.events, Resume)[-1] == Resume(5)
    drive.run_out()
    assert drive.said[third] == alone(schedule, scripted, shortened)


def test_a_request_without_checkpoints_leaves_its_slot_empty(scripted, schedule):
    drive = Drive(schedule(scripted(n_slots=2)))
    asked = dataclasses.replace(request([9, 8, 7], 5), keep=False)
    drive.admit(0, asked)
    drive.run_out()
    drive.admit(0, request([9, 8, 7, *drive.said[0], 4], 2))
    assert of_type(drive.events, Resume)[-1] == Resume(0)


def test_a_request_moves_between_the_solo_path_and_slots_without_a_trace(scripted, schedule):
    asked = request([11, 12, 13, 14, 15], 24, last_n=8, temperature=1.0, seed=9, penalty_repeat=1.3)
    whole = alone(schedule, scripted, asked)
    assert len(whole) > 9
    drive = Drive(schedule(scripted(n_slots=2), chunk=4))
    events = drive.take(drive.path.start(asked))
    while len(of_type(events, Token)) < 4:
        events += drive.take(drive.path.step())
    events += drive.take(drive.path.step(stop=True))
    said = [event.id for event in of_type(events, Token)]

    def rest() -> Request:
        prompt = np.concatenate([asked.prompt, said]).astype(np.int32)
        return dataclasses.replace(asked, prompt=prompt, max_new=24 - len(said))

    number = drive.admit(0, rest())
    assert of_type(drive.events, Resume)[-1] == Resume(5 + len(said) - 1)
    drive.admit(1, request([40, 41, 42], 9))
    drive.windows(2)
    drive.take(drive.path.stop_slot(0))
    said += drive.said[number]
    events = drive.solo(rest())
    assert events[0] == Resume(5 + len(said) - 1)
    assert said + [event.id for event in of_type(events, Token)] == whole


def test_slots_stand_still_while_a_solo_request_decodes_and_not_while_it_is_read(scripted, schedule):
    drive = Drive(schedule(scripted(n_slots=2), chunk=2))
    drive.admit(0, request([5, 6], 40))
    events = drive.solo(request([7, 8, 9, 10, 11, 12], 5))
    kinds = [type(event) for event in events]
    read = kinds.index(Reused)
    assert SlotToken in kinds[:read] and SlotToken not in kinds[read:]
    drive.run_out()
    assert drive.said[0] == alone(schedule, scripted, request([5, 6], 40))


def test_a_slot_without_room_is_an_ended_admission_and_a_read_without_room_goes_on(scripted, schedule):
    model = scripted(n_slots=2)
    drive = Drive(schedule(model, chunk=2, short_read=0))
    model.state.refused = {1}
    drive.admit(0, request([5, 6], 9))
    assert drive.events[-1] == Admitted(0, False)
    drive.begin(0, request(list(range(10, 30)), 6))
    drive.take(drive.path.step())
    assert drive.path.give_way(0) == []
    drive.finish_read(0, 1)
    assert drive.events[-1] == Admitted(0, False)
    model.state.refused = set()
    drive.admit(0, request([5, 6], 9))
    drive.run_out()
    assert drive.said[2] == alone(schedule, scripted, request([5, 6], 9))


def test_one_request_is_worked_on_at_a_time(scripted, schedule):
    path = schedule(scripted(n_slots=2))
    path.start(request([5], 2))
    with pytest.raises(RuntimeError, match="one request"):
        path.admit(0, request([5], 2))


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_lines_of_slots_and_of_the_one_read_keep_their_order(scripted, schedule, data):
    drive = Drive(schedule(scripted(n_slots=3, n_checkpoints=2), chunk=data.draw(st.integers(1, 6)), short_read=0))
    for _ in range(data.draw(st.integers(1, 25))):
        free = [slot for slot in range(3) if drive.path.slots.is_free(slot)]
        action = data.draw(st.sampled_from(["admit", "window", "stop", "yield"]))
        if action == "admit" and free and not drive.path.busy:
            drive.events += drive.path.admit(data.draw(st.sampled_from(free)), data.draw(REQUESTS))
        elif action == "stop":
            drive.events += drive.path.stop_slot(data.draw(st.integers(0, 3)))
        elif action == "yield" and drive.path.busy:
            drive.events += drive.path.give_way(data.draw(st.integers(0, 3)))
        elif drive.path.busy or drive.path.decoding:
            drive.events += drive.path.step(stop=data.draw(st.integers(0, 9)) == 0)
    decoding: dict[int, bool] = defaultdict(bool)
    for before, event in zip([None, *drive.events], drive.events, strict=False):
        if isinstance(event, (SlotToken, SlotDone)):
            assert decoding[event.slot]
            decoding[event.slot] = isinstance(event, SlotToken)
        elif isinstance(event, Admitted):
            assert isinstance(before, Done) and not decoding[event.slot]
            decoding[event.slot] = event.goes_on
        elif isinstance(before, Yielded):
            assert isinstance(event, Done) and event.finish == "cancel"

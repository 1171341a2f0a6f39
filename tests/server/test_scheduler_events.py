"""What each event does in each state of a request: a client that leaves, a stop string, an ERR, a death, a shutdown."""

from __future__ import annotations

import pytest
from strata_test_scheduling import World, both_in_slots, done, left_alone, two

from strata.protocol.lines import (
    Admitted,
    BStop,
    Done,
    Err,
    Resume,
    SlotDone,
    SlotToken,
    Stop,
    Token,
    Yielded,
)
from strata.server.effects import Failed
from strata.server.job import Job, State
from strata.server.scheduler import Engine


def in_state(state: str) -> tuple[World, Job]:
    """A request in `state`, with others around it where the state needs them."""
    world = two(3)
    if state == "solo reading":
        job = world.arrive(1, 400)
        world.line(Resume(0))
    elif state == "solo asked":
        job = world.arrive(1, 400)
        world.line(Resume(0))
        world.arrive(2, 20)
    elif state == "solo decoding":
        job = world.arrive(1, 400)
        world.read(400, 100)
    elif state == "solo told to move":
        job = world.arrive(1, 400)
        world.read(400, 100)
        world.arrive(2, 20)
    elif state == "waiting for a slot":
        world = two(2)
        both_in_slots(world)
        job = world.arrive(3, 20)
    elif state == "waiting for the lines":
        world.arrive(1, 400)
        world.line(Resume(0))
        job = world.arrive(2, 390)
    elif state in ("gave way", "gave way with output"):
        job = world.arrive(1, 400)
        if state == "gave way with output":
            world.read(400, 100)
            world.arrive(2, 20)
            world.line(done(1, "cancel", 400), Resume(0))
            world.line(Yielded(0, 64), done(0, "cancel", 401, prompt_read=64), Admitted(0, False))
        else:
            world.line(Resume(0))
            world.arrive(2, 20)
            world.line(Yielded(0, 64), done(0, "cancel", 400, prompt_read=64))
        assert job.state is State.WAITING and job.slot == 0
    elif state in ("admission reading", "admission asked", "admission at its BADM"):
        both_in_slots(world)
        job = world.arrive(3, 400)
        if state == "admission asked":
            world.line(SlotDone(1, 1, "stop", 1.0), Resume(0))
            world.arrive(4, 20)
            assert job.leg.asked
        elif state == "admission at its BADM":
            world.read(400, 300)
            world.line(done(1, "length", 400))
    elif state == "slot":
        job, _ = both_in_slots(world)
    elif state == "returning":
        job = left_alone(world)
        world.line(SlotToken(0, 103))
        assert job.state is State.RETURNING
    world.take_sent()
    return world, job


# state -> what a disconnect sends, and the lines with which the engine then lets go of the request
LEAVING = {
    "solo reading": ([Stop()], [done(0, "cancel")]),
    "solo asked": ([Stop()], [Yielded(0, 64), done(0, "cancel")]),
    "solo decoding": ([Stop()], [Token(101), done(2, "cancel")]),
    "solo told to move": ([], [Token(101), done(2, "cancel")]),
    "waiting for a slot": ([], []),
    "waiting for the lines": ([], []),
    "gave way": ([], []),
    "gave way with output": ([], []),
    "admission reading": ([Stop()], [done(0, "cancel"), Admitted(2, False)]),
    "admission asked": ([Stop()], [Yielded(2, 64), done(0, "cancel"), Admitted(2, False)]),
    "admission at its BADM": ([], [Admitted(2, False)]),
    "slot": ([BStop(0)], [SlotToken(0, 103), SlotDone(0, 2, "cancel", 1.0)]),
    "returning": ([], [SlotToken(0, 104), SlotDone(0, 3, "cancel", 1.0)]),
}


@pytest.mark.parametrize("state", LEAVING)
def test_a_client_that_leaves_is_heard_of_no_more_and_leaves_no_slot_behind(state):
    world, job = in_state(state)
    sent, lines = LEAVING[state]
    heard = list(world.heard.get(job, []))
    n_others = len(world.jobs) - 1
    world.leave(job)
    world.leave(job)
    assert world.take_sent()[: len(sent)] == sent
    world.line(*lines)
    assert job.state is State.ENDED and world.heard.get(job, []) == heard and job.slot is None
    assert len(world.ends[job]) == 1 and len([j for j in world.jobs if j is not job]) == n_others
    assert all(slot.job is not job for slot in world.scheduler.slots.slots)


def test_a_client_that_leaves_as_its_admission_succeeds_ends_its_slot():
    world, job = in_state("admission reading")
    world.leave(job)
    world.read(400, 300)
    world.line(done(1, "length", 400), Admitted(2, True))
    assert world.take_sent() == [Stop(), BStop(2)] and job.state is State.SLOT and world.tokens(job) == []
    world.line(SlotToken(2, 301), SlotDone(2, 2, "cancel", 1.0))
    assert job.state is State.ENDED


@pytest.mark.parametrize("state", ["solo decoding", "solo told to move", "slot", "returning", "gave way with output"])
def test_a_stop_string_ends_the_request_with_its_figures_whatever_state_it_is_in(state):
    world, job = in_state(state)
    tokens = world.tokens(job)
    world.stop(job)
    world.line(*LEAVING[state][1])
    assert world.tokens(job) == tokens and job.state is State.ENDED
    assert isinstance(world.heard[job][-1], Done) and world.heard[job][-1] == world.ends[job][0]
    assert world.heard[job][-1].generated >= len(tokens)


def test_a_stop_string_in_the_first_token_of_an_admission_ends_its_slot():
    world, job = in_state("admission at its BADM")
    world.stop(job)
    world.line(Admitted(2, True))
    assert world.take_sent() == [BStop(2)]
    world.line(SlotToken(2, 301), SlotDone(2, 2, "cancel", 1.0))
    assert world.ends[job][0].finish == "cancel" and world.tokens(job) == [300]


@pytest.mark.parametrize("state", LEAVING)
def test_a_death_fails_what_is_open_and_keeps_what_only_waits_and_has_said_nothing(state):
    world, job = in_state(state)
    others = [other for other in world.jobs if other is not job and other.state is not State.ENDED]
    world.die()
    waits = state in ("waiting for a slot", "waiting for the lines", "gave way")
    assert job.state is (State.WAITING if waits else State.ENDED) and job.slot is None
    if not waits:
        assert isinstance(world.heard[job][-1], Failed) and "SIGKILL" in world.heard[job][-1].message
    assert len(world.scheduler.slots) == 0 and world.scheduler.holder is None
    assert all((other.state is State.ENDED) or not other.output for other in others)
    someone_waits = bool(world.scheduler.waiting)
    assert world.starts == (1 if someone_waits else 0)
    world.up(3)
    while world.scheduler.holder is not None:
        reader = world.scheduler.holder
        world.read(reader.length, 500)
        world.line(done(1, "stop"), *([Admitted(reader.slot, False)] if reader.slot is not None else []))
    assert world.scheduler.is_idle and all(len(world.ends[one]) == 1 for one in world.jobs)
    if waits:
        assert world.tokens(job) == [500] and world.ends[job][0].reused == 0


@pytest.mark.parametrize("state", [s for s in LEAVING if s not in ("slot", "returning", "waiting for a slot")])
def test_an_err_ends_the_request_that_is_read_and_no_other(state):
    world, _ = in_state(state)
    reader = world.scheduler.holder
    running = [job for job in world.scheduler.running if job is not reader]
    world.line(Err("bad request: ids"))
    assert [type(end) for end in world.ends[reader]] == [Failed] and world.ends[reader][0].status == 400
    assert all(job.state is State.SLOT for job in running) and reader.slot is None


@pytest.mark.parametrize("state", LEAVING)
def test_a_shutdown_tells_everybody_once(state):
    world, _ = in_state(state)
    world.apply(world.scheduler.shut_down("the server is shutting down"))
    world.check()
    assert all(len(world.ends[job]) == 1 for job in world.jobs)
    assert world.scheduler.engine is Engine.REFUSING and world.scheduler.is_idle

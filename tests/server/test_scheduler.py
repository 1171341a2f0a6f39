"""The queue as pure state, with an engine that has no slots: orders, ends, and what an engine's death means."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strata_test_scheduling import World, done

from strata.protocol.lines import Done, Err, Gen, Progress, Resume, Reused, Stop, Token
from strata.server.effects import Failed
from strata.server.errors import Refused
from strata.server.job import Phase
from strata.server.scheduler import Engine, Facts
from strata.server.turns import Rules


def test_one_request_is_one_gen_and_nothing_else():
    world = World().up()
    job = world.arrive()
    world.line(Resume(0), Progress(3, 3, 1.0, 1.0), Reused(0), Token(7), done())
    assert [type(command) for command in world.sent] == [Gen]
    assert world.heard[job] == [Resume(0), Progress(3, 3, 1.0, 1.0), Reused(0), Token(7), done()]
    assert world.ends[job] == [done()] and job.phase is Phase.ENDED


def test_requests_are_served_in_the_order_they_came():
    world = World().up()
    jobs = [world.arrive(i) for i in (1, 2, 3)]
    for _ in jobs:
        world.line(Resume(0), Reused(0), Token(7), done())
    assert [command.ids[0] for command in world.sent] == [1, 2, 3]


def test_a_waiting_request_that_leaves_is_never_sent():
    world = World().up()
    first, second, third = (world.arrive(i) for i in (1, 2, 3))
    world.apply(world.scheduler.leave(second))
    world.line(done())
    assert [command.ids[0] for command in world.sent] == [1, 3]
    assert world.ends[second] == [None] and third is world.scheduler.holder and first.phase is Phase.ENDED


@pytest.mark.parametrize("lines", [[], [Resume(0)], [Resume(0), Reused(0), Token(5)]])
def test_tokens_of_a_gone_request_never_reach_the_next_one(lines):
    world = World().up()
    gone, waiting = world.arrive(1), world.arrive(2)
    world.line(*lines)
    heard_before = list(world.heard.get(gone, []))
    world.apply(world.scheduler.leave(gone))
    assert world.sent[-1] == Stop() and world.scheduler.holder is gone
    world.line(Resume(0), Reused(0), Token(8), Token(9), done(2, "cancel"))
    assert world.heard.get(gone, []) == heard_before and waiting not in world.heard
    assert world.scheduler.holder is waiting and world.sent[-1].ids[0] == 2


def test_leaving_twice_sends_one_stop():
    world = World().up()
    job = world.arrive()
    world.apply(world.scheduler.leave(job))
    world.apply(world.scheduler.leave(job))
    assert world.sent.count(Stop()) == 1


def test_an_engine_without_stop_runs_out_a_request_whose_client_is_gone():
    world = World()
    world.apply(world.scheduler.started(Facts(can_stop=False)))
    job, waiting = world.arrive(1), world.arrive(2)
    world.apply(world.scheduler.leave(job))
    world.line(Token(5), Token(6), done(2, "length"))
    assert Stop() not in world.sent and job not in world.heard and world.scheduler.holder is waiting


def test_after_a_stop_string_the_figures_still_arrive_and_the_tokens_do_not():
    world = World().up()
    job = world.arrive()
    world.line(Resume(0), Reused(0), Token(5))
    world.apply(world.scheduler.stop(job))
    world.line(Token(6), done(2, "cancel"))
    assert world.heard[job][-2:] == [Token(5), done(2, "cancel")] and world.sent[-1] == Stop()


def test_a_refusal_ends_the_request_without_waiting_for_a_done():
    world = World().up()
    job, waiting = world.arrive(1), world.arrive(2)
    world.line(Err("prompt (3 tokens) + max_new (10) exceeds the context (12)"))
    assert world.ends[job][0].status == 400 and world.scheduler.holder is waiting


def test_a_request_is_not_sent_to_an_engine_whose_error_may_be_its_last_word():
    world = World().up()
    job, waiting = world.arrive(1), world.arrive(2)
    world.line(Err("cuda: an illegal memory access"))
    assert world.ends[job][0].status == 503 and world.scheduler.holder is None and world.settles == 1
    world.apply(world.scheduler.ended("the engine ended: cuda"))
    assert waiting.phase is Phase.WAITING and world.starts == 1
    world.up()
    assert world.scheduler.holder is waiting


def test_a_request_is_sent_when_the_engine_lives_on_after_an_error():
    world = World().up()
    world.arrive(1)
    waiting = world.arrive(2)
    world.line(Err("the disk is full"))
    world.apply(world.scheduler.settled())
    assert world.scheduler.holder is waiting


def test_a_death_fails_the_open_request_and_serves_the_waiting_ones_with_the_next_engine():
    world = World().up()
    first, second, third = (world.arrive(i) for i in (1, 2, 3))
    world.line(Resume(0), Reused(0), Token(5))
    world.apply(world.scheduler.ended("the engine was killed by SIGKILL"))
    assert isinstance(world.heard[first][-1], Failed) and "SIGKILL" in world.heard[first][-1].message
    assert "next request" in world.heard[first][-1].message
    assert world.starts == 1 and [second.phase, third.phase] == [Phase.WAITING] * 2
    world.up()
    world.line(done())
    world.line(done())
    assert world.ends[second] == world.ends[third] == [done()]


def test_a_death_with_nobody_waiting_starts_nothing_until_the_next_request():
    world = World().up()
    world.arrive()
    world.apply(world.scheduler.ended("gone"))
    assert world.starts == 0 and world.scheduler.engine is Engine.DOWN
    world.arrive()
    assert world.starts == 1


def die_three_times(world: World, pause_s: float) -> None:
    for _ in range(3):
        world.up()
        world.arrive()
        world.apply(world.scheduler.ended("out of memory"))
        world.now += pause_s


def test_three_deaths_in_a_minute_stop_the_restarts_and_tell_why():
    world = World()
    waiting = []
    world.scheduler.starting()
    waiting = [world.arrive() for _ in range(5)]
    for _ in range(3):
        world.up()
        world.apply(world.scheduler.ended("out of memory"))
    assert [world.ends[job][0].status for job in waiting] == [503] * 5
    assert "out of memory" in world.ends[waiting[-1]][0].message and "/load" in world.ends[waiting[-1]][0].message
    with pytest.raises(Refused) as refused:
        world.arrive()
    assert refused.value.status == 503 and "out of memory" in refused.value.message


def test_a_load_forgives_the_deaths():
    world = World()
    die_three_times(world, pause_s=0)
    world.scheduler.forgive()
    world.arrive()
    assert world.scheduler.engine is Engine.STARTING


def test_deaths_far_apart_or_with_a_finished_request_between_do_not_add_up():
    world = World()
    die_three_times(world, pause_s=31)
    assert world.scheduler.engine is Engine.DOWN
    world = World()
    for _ in range(5):
        world.up()
        world.arrive()
        world.line(done())
        world.arrive()
        world.apply(world.scheduler.ended("out of memory"))
    assert world.scheduler.engine is Engine.DOWN


def test_a_failed_start_tells_everybody_who_waited_and_the_next_request_tries_again():
    world = World()
    jobs = [world.arrive() for _ in range(3)]
    world.apply(world.scheduler.start_failed("no such file: model.gguf"))
    assert all("model.gguf" in world.ends[job][0].message for job in jobs) and world.starts == 1
    world.arrive()
    assert world.starts == 2


def test_a_full_queue_refuses_and_names_the_limit():
    world = World(Rules(max_queue=2)).up()
    jobs = [world.arrive() for _ in range(3)]  # one runs, two wait
    with pytest.raises(Refused) as refused:
        world.arrive()
    assert refused.value.status == 429 and "max_queue is 2" in refused.value.message
    world.apply(world.scheduler.leave(jobs[1]))
    world.arrive()


def test_shutting_down_tells_the_open_and_the_waiting_and_takes_nobody():
    world = World().up()
    jobs = [world.arrive() for _ in range(3)]
    world.apply(world.scheduler.shut_down("the server is shutting down"))
    assert all(isinstance(world.heard[job][-1], Failed) for job in jobs) and world.sent[-1] == Stop()
    world.line(Token(5), done())
    assert all(len(world.ends[job]) == 1 for job in jobs)
    with pytest.raises(Refused):
        world.arrive()


@dataclass
class ObedientEngine:
    """Answers as the protocol says, one line at a time, whenever the test lets it; ids of tokens are the prompt's."""

    script: list[object] = field(default_factory=list)
    stopped: bool = False

    def take(self, command: object) -> None:
        if isinstance(command, Gen):
            token = Token(command.ids[0])
            self.stopped = False
            self.script = [Resume(0), Progress(3, 3, 1.0, 1.0), Reused(0), token, token, token, done(3)]
        elif command == Stop():
            self.stopped = True

    def next_line(self) -> object | None:
        if not self.script:
            return None
        if self.stopped and not isinstance(self.script[0], Done | Token):
            self.script = [done(0, "cancel")]
        return self.script.pop(0)


ACTIONS = st.sampled_from(["arrive", "line", "line", "line", "leave", "stop", "die", "err", "settle", "start"])


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(ACTIONS, st.integers(0, 9)), max_size=60))
def test_whatever_happens_every_request_ends_once_and_hears_only_its_own_tokens(actions):
    world, engine, jobs = World(), ObedientEngine(), []

    def step(action: str, which: int) -> None:
        n_sent = len(world.sent)
        scheduler = world.scheduler
        if action == "arrive" and len(jobs) < 12:
            try:
                jobs.append(world.arrive(first_id=len(jobs)))
            except Refused:
                scheduler.forgive()
        elif action in ("leave", "stop") and jobs:
            job = jobs[which % len(jobs)]
            world.apply(scheduler.leave(job) if action == "leave" else scheduler.stop(job))
        elif action == "line" and scheduler.engine is Engine.UP and (line := engine.next_line()):
            world.line(line)
        elif action == "die" and scheduler.engine is Engine.UP:
            engine.script = []
            world.apply(scheduler.ended("died"))
        elif action == "err" and scheduler.engine is Engine.UP and scheduler.holder is not None:
            engine.script = []
            world.line(Err("bad request: ids" if which % 2 else "the disk is full"))
        elif action == "settle":
            world.apply(scheduler.settled())
        elif action == "start" and scheduler.engine is Engine.STARTING:
            world.up()
        for command in world.sent[n_sent:]:
            engine.take(command)
        assert scheduler.holder not in scheduler.waiting

    for action, which in actions:
        step(action, which)
    for _ in range(400):  # let the engine finish
        step("start", 0)
        step("settle", 0)
        step("line", 0)
    assert world.scheduler.is_idle
    for i, job in enumerate(jobs):
        assert job.phase is Phase.ENDED and len(world.ends[job]) == 1
        heard = world.heard.get(job, [])
        assert {event.id for event in heard if isinstance(event, Token)} <= {i}
        ends = [event for event in heard if isinstance(event, Done | Failed)]
        assert (len(ends) <= 1 and heard[-1:] == ends) or job.gone

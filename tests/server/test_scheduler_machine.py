"""The scheduler and the scripted engine, moved one step at a time in every order that queues between them allow.

After every step the accounts balance, and every command is one that the protocol allows at that moment. At the end
every request has ended once, and has heard its own answer, in order and without a token of another.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from strata_test_scheduling import END_ID, EngineWorld, Failed, answer, replies

from strata.protocol.lines import Done
from strata.server.errors import Refused
from strata.server.job import Job, State
from strata.server.mock_script import Reply, Step
from strata.server.scheduler import Engine
from strata.server.turns import Rules

N_JOBS = 24
CHUNK = 8
FIRST = 100  # first id of a prompt, so that no prompt begins another

# Job k answers so many tokens; some jobs are refused by the engine, one breaks its slot.
LENGTHS = {FIRST + k: (2, 60, 5, 90, 120, 40)[k % 6] for k in range(N_JOBS)}
REFUSED = {FIRST + 4, FIRST + 13}
BROKEN = {FIRST + 9}


def script() -> tuple[Reply, ...]:
    refused = tuple(Reply(match=rf"^{k}\b", before=[Step(err="bad request: ids")]) for k in sorted(REFUSED))
    broken = tuple(
        Reply(match=rf"^{k}\b", steps=[Step(tokens=answer(k, 4)), Step(err="it broke")], repeat=False)
        for k in sorted(BROKEN)
    )
    return (*refused, *broken, *replies(LENGTHS))


class Conversation(RuleBasedStateMachine):
    """Rules are what can happen to a server; the moves of the queues are rules too."""

    def __init__(self) -> None:
        super().__init__()
        self.world = EngineWorld()

    @initialize(
        n_slots=st.sampled_from([0, 2, 2, 3, 4, 8]),
        returns=st.booleans(),
        short_first=st.sampled_from([0, 0, 10]),
    )
    def begin(self, n_slots: int, returns: bool, short_first: int) -> None:
        rules = Rules(returns_to_solo=returns, short_first=short_first, short_after_s=0.2)
        self.world = EngineWorld(rules, replies=script(), chunk=CHUNK, n_slots=n_slots)
        self.world.scheduler.starting()
        self.world.start()

    @property
    def running(self) -> list[Job]:
        return [job for job in self.world.jobs if job.state is not State.ENDED]

    @precondition(lambda self: len(self.world.jobs) < N_JOBS)
    @rule(n=st.sampled_from([1, 3, 7, 8, 20, 20, 45, 100]), max_new=st.sampled_from([1, 2, 40, 100, 1000, 1000]))
    def arrive(self, n: int, max_new: int) -> None:
        try:
            self.world.arrive(FIRST + len(self.world.jobs), n, max_new)
        except Refused:
            assert self.world.scheduler.engine is Engine.REFUSING
            self.world.scheduler.forgive()

    @rule(n=st.integers(0, 2))
    def prompts_are_prepared(self, n: int) -> None:
        """So many others will come, or will not after all."""
        self.world.scheduler.n_coming = n

    @precondition(lambda self: self.running)
    @rule(data=st.data(), luck=st.integers(0, 2))
    def leave(self, data: st.DataObject, luck: int) -> None:
        if luck == 0:
            self.world.leave(data.draw(st.sampled_from(self.running)))

    @precondition(lambda self: any(job.output for job in self.running))
    @rule(data=st.data(), luck=st.integers(0, 2))
    def stop_string(self, data: st.DataObject, luck: int) -> None:
        if luck == 0:
            self.world.stop(data.draw(st.sampled_from([job for job in self.running if job.output])))

    @rule(n=st.integers(1, 12))
    def engine_works(self, n: int) -> None:
        for _ in range(n):
            self.world.engine_works()

    @rule(n=st.integers(1, 12))
    def server_reads(self, n: int) -> None:
        for _ in range(n):
            self.world.server_reads()

    @rule(n=st.integers(1, 3))
    def engine_reads(self, n: int) -> None:
        for _ in range(n):
            self.world.engine_reads()

    @rule(n=st.integers(1, 60))
    def everything_moves(self, n: int) -> None:
        for _ in range(n):
            self.world.turn()

    @precondition(lambda self: self.world.scheduler.engine is Engine.UP and self.world.scheduler.running)
    @rule(luck=st.integers(0, 9))
    def die(self, luck: int) -> None:
        if luck == 0:
            self.world.die()
            self.world.now += 61.0  # far apart: the death loop has a test of its own

    @precondition(lambda self: self.world.scheduler.engine is Engine.STARTING)
    @rule()
    def start(self) -> None:
        self.world.start()

    @precondition(lambda self: self.world.scheduler.unsettled)
    @rule()
    def settle(self) -> None:
        self.world.apply(self.world.scheduler.settled())

    @invariant()
    def accounts_balance(self) -> None:
        self.world.check()

    @invariant()
    def every_token_is_its_own(self) -> None:
        for k, job in enumerate(self.world.jobs):
            heard = self.world.tokens(job)
            assert heard == whole_answer(k)[: len(heard)]

    def teardown(self) -> None:
        world = self.world
        world.settle()
        world.check()
        assert world.scheduler.is_idle and world.scheduler.slots.n_free == len(world.scheduler.slots)
        for k, job in enumerate(world.jobs):
            ends_as_it_should(world, k, job)


def whole_answer(k: int) -> list[int]:
    return [*answer(FIRST + k, LENGTHS[FIRST + k]), END_ID]


def ends_as_it_should(world: EngineWorld, k: int, job: Job) -> None:
    (end,) = world.ends[job]
    heard = world.heard.get(job, [])
    n_ends = sum(isinstance(event, Done | Failed) for event in heard)
    if job.gone:
        assert n_ends <= 1
        return
    assert n_ends == 1 and heard[-1] == end
    if isinstance(end, Done):
        assert end.generated == len(job.output) and end.prompt == len(job.prompt)
        if not job.is_ending:
            assert world.tokens(job) == whole_answer(k)[: job.max_new]
            assert end.finish == ("length" if job.max_new < len(whole_answer(k)) else "stop")


TestConversation = Conversation.TestCase
TestConversation.settings = settings(
    max_examples=100, stateful_step_count=100, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.soak
def test_soak_of_the_state_machine():
    run_state_machine_as_test(
        Conversation,
        settings=settings(
            max_examples=10_000, stateful_step_count=150, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


# --- whole runs


def run(lengths: dict[int, int], prompts: list[tuple[int, int]], n_slots: int, **options: object) -> EngineWorld:
    """Every request at once: (prompt length, max_new) of each."""
    world = EngineWorld(replies=replies(lengths), chunk=CHUNK, n_slots=n_slots, **options)
    world.start()
    for i, (n, max_new) in enumerate(prompts):
        world.arrive(FIRST + i, n, max_new)
    world.settle()
    return world


@pytest.mark.parametrize("n_slots", [0, 2, 3, 8])
def test_a_hundred_requests_over_a_few_slots_all_get_their_own_answer(n_slots):
    chance = random.Random(n_slots)
    prompts = [(chance.choice([1, 5, 30, 100, 300]), chance.choice([1, 2, 50, 200])) for _ in range(100)]
    lengths = {FIRST + i: chance.choice([1, 3, 30, 120]) for i in range(100)}
    world = run(lengths, prompts, n_slots)
    for i, job in enumerate(world.jobs):
        wanted = [*answer(FIRST + i, lengths[FIRST + i]), END_ID][: job.max_new]
        assert world.tokens(job) == wanted and world.ends[job][0].generated == len(wanted)
    assert world.scheduler.is_idle


def test_a_long_prompt_is_not_starved_by_short_ones_that_keep_coming():
    lengths = {FIRST + i: 3 for i in range(300)}
    world = EngineWorld(replies=replies(lengths), chunk=CHUNK, n_slots=2)
    world.start()
    long = world.arrive(FIRST, 400, 50)
    for i in range(1, 300):
        world.arrive(FIRST + i, 10, 50)
        for _ in range(8):
            world.turn()
        if long.state is State.ENDED:
            break
    assert long.state is State.ENDED and long.n_yields == 2 and i < 100
    world.settle()


def test_with_short_first_a_long_prompt_still_gets_its_turn_after_its_wait():
    lengths = {FIRST + i: 3 for i in range(300)}
    rules = Rules(short_first=50, short_after_s=0.5)
    world = EngineWorld(rules, replies=replies(lengths), chunk=CHUNK, n_slots=2)
    world.start()
    world.arrive(FIRST, 20, 50)
    long = world.arrive(FIRST + 1, 400, 50)
    for i in range(2, 300):
        world.arrive(FIRST + i, 40, 50)
        for _ in range(6):
            world.turn()
        if long.state is State.ENDED:
            break
    assert long.state is State.ENDED and long.sent - long.arrived >= 0.4
    world.settle()


def test_a_long_read_is_left_and_gone_on_with_and_the_short_one_ends_first():
    world = EngineWorld(replies=replies({FIRST: 5, FIRST + 1: 5}), chunk=CHUNK, n_slots=2)
    world.start()
    long = world.arrive(FIRST, 400, 20)
    world.until(lambda: long.leg.n_read >= 3 * CHUNK)
    short = world.arrive(FIRST + 1, 20, 50)
    world.until(lambda: short.state is State.ENDED)
    assert long.state is not State.ENDED and long.n_yields == 1
    world.settle()
    end = world.ends[long][0]
    assert (end.generated, end.prompt_read, end.reused) == (6, 400, 0)  # nothing was read twice


def test_a_moved_request_reads_nothing_again():
    world = EngineWorld(replies=replies({FIRST: 60, FIRST + 1: 10}), chunk=CHUNK, n_slots=2)
    world.start()
    first = world.arrive(FIRST, 100, 100)
    world.until(lambda: len(first.output) >= 5)
    second = world.arrive(FIRST + 1, 90, 100)
    world.settle()
    assert first.path == ["solo", "slot 0", "solo"] and second.path == ["slot 1"]
    assert world.ends[first][0].prompt_read == 100 + 2 and world.ends[first][0].finish == "stop"


def test_a_conversation_comes_back_to_its_slot():
    world = EngineWorld(replies=replies({FIRST: 3, FIRST + 1: 50}), chunk=CHUNK, n_slots=3)
    world.start()
    other = world.arrive(FIRST + 1, 30, 100)
    world.until(lambda: len(other.output) >= 2)
    turn = world.arrive(FIRST, 20, 100)
    world.until(lambda: turn.state is State.ENDED)
    slot = next(slot for slot in world.scheduler.slots.slots if slot.held[:20] == turn.prompt)
    following = Job(turn.prompt + turn.output + turn.prompt, 5, turn.keys)
    world.jobs.append(following)
    world.apply(world.scheduler.arrive(following))
    assert following.slot == slot.index
    world.settle()
    assert world.ends[following][0].reused == len(turn.prompt) + len(turn.output) - 1

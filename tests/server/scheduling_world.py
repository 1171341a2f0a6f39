"""A scheduler under test, alone or with the scripted engine behind it, everything in one thread and on one clock.

Tests import it as `strata_test_scheduling`; conftest.py registers it under that name.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from strata.protocol.lines import (
    Admitted,
    BGen,
    BStop,
    BYield,
    Done,
    Err,
    Gen,
    Progress,
    Resume,
    Reused,
    SamplingKeys,
    SlotDone,
    Stop,
    Token,
    decode_output,
    encode,
)
from strata.server.effects import Deliver, Effect, Ended, Failed, Note, Send, Settle, StartEngine
from strata.server.job import Job, State
from strata.server.mock_machine import Machine
from strata.server.mock_script import Reply, Script, Step
from strata.server.scheduler import Engine, Facts, Scheduler
from strata.server.slots import Use
from strata.server.turns import Rules

END_ID = 9


@dataclass
class World:
    """The scheduler with its effects sorted by kind, and a clock that stands still unless a test moves it."""

    rules: Rules = field(default_factory=Rules)
    turn_token: int | None = None
    now: float = 0.0
    scheduler: Scheduler = field(init=False)
    jobs: list[Job] = field(default_factory=list)
    sent: list[object] = field(default_factory=list)
    heard: dict[Job, list[object]] = field(default_factory=dict)
    ends: dict[Job, list[object]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    starts: int = 0
    settles: int = 0

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(lambda: self.now, self.rules, self.turn_token)

    # --- what happens

    def up(self, n_slots: int = 0, **facts: object) -> World:
        if n_slots:
            facts = {"n_slots": n_slots, "keeps_slots": True, **facts}
        self.apply(self.scheduler.started(Facts(**facts)))
        return self

    def arrive(self, first_id: int = 1, n: int = 3, max_new: int = 100, **job: object) -> Job:
        self.now += 0.001
        new = Job(array("i", [first_id] * n), max_new, job.pop("keys", SamplingKeys()), **job)
        self.apply(self.scheduler.arrive(new))
        self.jobs.append(new)
        return new

    def line(self, *outputs: object) -> None:
        for output in outputs:
            self.apply(self.scheduler.line(output))
            self.check()

    def leave(self, job: Job) -> None:
        self.apply(self.scheduler.leave(job))
        self.check()

    def stop(self, job: Job) -> None:
        self.apply(self.scheduler.stop(job))
        self.check()

    def die(self, reason: str = "the engine was killed by SIGKILL") -> None:
        self.apply(self.scheduler.ended(reason))
        self.check()

    # --- usual stretches of what an engine says

    def read(self, n: int, *tokens: int, reused: int = 0) -> None:
        """A whole read and the tokens that follow it."""
        self.line(Resume(reused), Progress(n, n, 1.0, 1.0), Reused(reused), *(Token(token) for token in tokens))

    def admitted(self, slot: int, n: int, token: int, reused: int = 0) -> None:
        """A whole admission whose request goes on in its slot."""
        self.read(n, token, reused=reused)
        self.line(done(1, "length", n, reused=reused), Admitted(slot, True))

    # --- what came of it

    @property
    def words(self) -> list[str]:
        return [command.word for command in self.sent]

    def take_sent(self) -> list[object]:
        """What has been sent since the last call."""
        sent, self.sent = self.sent, []
        return sent

    def tokens(self, job: Job) -> list[int]:
        return [event.id for event in self.heard.get(job, []) if isinstance(event, Token)]

    def apply(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(command):
                    self.send(command)
                case Deliver(job, event):
                    self.heard.setdefault(job, []).append(event)
                case Ended(job, end):
                    self.ends.setdefault(job, []).append(end)
                case StartEngine():
                    self.starts += 1
                case Settle():
                    self.settles += 1
                case Note(job, text):
                    self.notes.append(text)

    def send(self, command: object) -> None:
        encode(command)  # what cannot be written is a failure
        self.sent.append(command)

    def check(self) -> None:
        """The accounts: every request is in one place, every slot has the owner that its use says."""
        scheduler = self.scheduler
        holder, slots = scheduler.holder, scheduler.slots.slots
        for slot in slots:
            assert (slot.job is None) == (slot.use is Use.IDLE)
            if slot.job is None:
                continue
            assert slot.job.slot == slot.index
            state = slot.job.state
            if slot.use is Use.RESERVED:
                assert state is State.WAITING or (state is State.SOLO and slot.job.leg.asked)
            elif slot.use is Use.ADMITTING:
                assert state is State.ADMITTING and slot.job is holder
            else:
                assert state in (State.SLOT, State.RETURNING)
        in_slots = [slot.job for slot in slots if slot.job is not None]
        for job in self.jobs:
            places = [job in scheduler.waiting, job is holder or (job in in_slots and job not in scheduler.waiting)]
            assert sum(places) == (0 if job.state is State.ENDED else 1), job.state
            assert len(self.ends.get(job, [])) == (1 if job.state is State.ENDED else 0)
            assert in_slots.count(job) == (job.slot is not None)
            assert job.n_yields <= 2 and job.n_returns <= 2
        assert [job.number for job in scheduler.waiting] == sorted({job.number for job in scheduler.waiting})
        if holder is not None:
            assert holder.state in (State.SOLO, State.ADMITTING, State.RETURNING)
            assert holder.state is not State.SOLO or scheduler.slots.n_busy == 0
        elif scheduler.waiting and scheduler.engine is Engine.UP and not scheduler.unsettled:
            assert scheduler.slots.n_free == 0 and all(job.slot is None for job in scheduler.waiting)


def done(generated: int = 1, finish: str = "stop", prompt: int = 3, **fields: object) -> Done:
    return Done(generated, prompt, 1.0, 1.0, finish, **fields)


class Numbers:
    """Words that are numbers."""

    end_ids = frozenset({END_ID})

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))


@dataclass
class Judge:
    """Raises for a command that the protocol does not allow, as far as the sender could know."""

    n_slots: int
    reader: object | None = None
    is_read: bool = False
    was_asked: bool = False
    was_stopped: bool = False
    busy: set[int] = field(default_factory=set)
    stopped: set[int] = field(default_factory=set)
    n_reads: int = 0

    def sent(self, command: object) -> None:
        match command:
            case Gen() | BGen():
                assert self.reader is None, "two requests are read at a time"
                if isinstance(command, Gen):
                    assert not self.busy, "a solo request while slots decode"
                else:
                    assert 0 <= command.slot < self.n_slots and command.slot not in self.busy
                assert command.max_new >= 1
                self.reader, self.is_read, self.was_asked, self.was_stopped = command, False, False, False
                self.n_reads += 1
            case Stop():
                assert self.reader is not None and not self.was_stopped, "a STOP with nothing to stop"
                self.was_stopped = True
            case BYield(slot=slot):
                assert self.reader is not None and not self.is_read and not self.was_asked
                assert slot not in self.busy
                assert isinstance(self.reader, Gen) or self.reader.slot == slot
                self.was_asked = True
            case BStop(slot=slot):
                assert slot in self.busy and slot not in self.stopped
                self.stopped.add(slot)
            case _:
                raise AssertionError(f"never sent: {command}")

    def heard(self, output: object) -> None:
        match output:
            case Reused() | Token():
                self.is_read = True
            case Done() if isinstance(self.reader, Gen):
                self.reader = None
            case Admitted(slot=slot, goes_on=goes_on):
                self.reader = None
                if goes_on:
                    self.busy.add(slot)
            case SlotDone(slot=slot):
                self.busy.discard(slot)
                self.stopped.discard(slot)
            case Err():
                self.reader = None


@dataclass
class EngineWorld(World):
    """With the scripted engine behind it. Both directions are queues: nothing moves unless a test moves it.

    The answer of the job with first id k is k * 1000, k * 1000 + 1, ..., then the end token.
    """

    replies: tuple[Reply, ...] = ()
    chunk: int = 32
    n_slots: int = 0
    machine: Machine | None = None
    judge: Judge = field(default_factory=lambda: Judge(0))
    to_engine: deque[str] = field(default_factory=deque)
    from_engine: deque[object] = field(default_factory=deque)

    def start(self) -> None:
        script = Script(context=1 << 20, chunk=self.chunk, slots=self.n_slots, replies=self.replies)
        self.to_engine.clear()
        self.from_engine.clear()
        say = lambda line: self.from_engine.append(decode_output(line))  # noqa: E731
        self.machine = Machine(script, Numbers(), say, lambda: self.now)
        self.judge = Judge(self.n_slots)
        list(self.machine.start())
        info, ready = self.from_engine.popleft(), self.from_engine.popleft()
        self.apply(self.scheduler.started(Facts.of(info, ready)))

    def send(self, command: object) -> None:
        super().send(command)
        self.judge.sent(command)
        self.to_engine.append(encode(command))

    def die(self, reason: str = "killed") -> None:
        self.machine = None
        self.to_engine.clear()
        self.from_engine.clear()
        super().die(reason)

    def engine_reads(self) -> bool:
        if self.machine is None or not self.to_engine:
            return False
        self.machine.take(self.to_engine.popleft())
        return True

    def engine_works(self) -> bool:
        return self.machine is not None and self.machine.step()

    def server_reads(self) -> bool:
        if not self.from_engine:
            return False
        output = self.from_engine.popleft()
        self.judge.heard(output)
        self.line(output)
        return True

    def turn(self) -> bool:
        """Everything moves: the engine by one unit of work, the server by all lines that it had when this began."""
        self.now += 0.001
        n_lines = len(self.from_engine)
        moved = [self.engine_reads(), self.engine_works()]
        return any([*moved, *(self.server_reads() for _ in range(n_lines))])

    def settle(self, most: int = 100_000) -> None:
        """Until nothing moves any more."""
        idle = 0
        for _ in range(most):
            if self.scheduler.unsettled:
                self.apply(self.scheduler.settled())
            if self.scheduler.engine is Engine.STARTING:
                self.start()
            idle = 0 if self.turn() else idle + 1
            if idle > 3 and not self.scheduler.unsettled:
                return
        raise AssertionError("the engine never came to rest")

    def until(self, condition: object) -> None:
        for _ in range(100_000):
            if condition():
                return
            self.turn()
        raise AssertionError("it never came to that")


def answer(k: int, n: int) -> list[int]:
    return [k * 1000 + i for i in range(n)]


def replies(lengths: dict[int, int], **fields: object) -> tuple[Reply, ...]:
    """Job k answers `lengths[k]` tokens and the end token."""
    return tuple(Reply(match=rf"^{k}\b", steps=[Step(tokens=answer(k, n))], **fields) for k, n in lengths.items())


def two(n_slots: int = 2, **facts: object) -> World:
    return World().up(n_slots, **facts)


def both_in_slots(world: World, max_new: int = 100) -> tuple[Job, Job]:
    """The first request moved from the solo path to slot 0 after two tokens, the second was admitted to slot 1."""
    a = world.arrive(1, 30, max_new)
    world.read(30, 100, 101)
    b = world.arrive(2, 25, max_new)
    world.line(done(2, "cancel", 30))
    world.admitted(0, 32, 102, reused=31)
    world.admitted(1, 25, 200)
    assert (a.state, b.state, a.slot, b.slot) == (State.SLOT, State.SLOT, 0, 1)
    world.take_sent()
    return a, b


def left_alone(world: World, n_left: int = 90) -> Job:
    a, _ = both_in_slots(world, max_new=n_left + 4)
    world.line(SlotDone(1, 1, "stop", 1.0))
    return a


__all__ = [
    "END_ID",
    "EngineWorld",
    "Failed",
    "Judge",
    "Numbers",
    "World",
    "answer",
    "both_in_slots",
    "done",
    "left_alone",
    "replies",
    "two",
]

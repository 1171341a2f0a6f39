"""Who talks to the engine: the queue, the solo path, the slots, and what an engine's end means for each request.

Pure state: every method takes one thing that happened and returns the effects it wants, in order; service.py carries
them out. Nothing here waits, writes or reads a clock other than the one it is given.

States   job.State, drawn in docs/scheduling.md. A request that leaves while it reads or decodes is stopped and keeps
         its place, unheard, until the engine says that it is over: no token can reach the next one
Lines    one request at a time holds the control lines: it alone sends GEN, BGEN, STOP and BYIELD, and every line
         without a slot number is its. They are free while somebody waits for a slot
Solo     a request alone; with company it moves to a slot, and comes back when it is left alone (at most twice)
Errors   Refused (429, 503) from `arrive`; a request that fails later gets a Failed event
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from strata.protocol.lines import (
    Admitted,
    BGen,
    BGenI,
    BStop,
    BYield,
    Command,
    Done,
    Err,
    Gen,
    GenI,
    Info,
    Output,
    Progress,
    Ready,
    Resume,
    Reused,
    SlotDone,
    SlotToken,
    Stop,
    Token,
    Yielded,
)

from .effects import Deliver, Effect, Ended, Event, Failed, Note, Send, Settle, StartEngine
from .errors import Refused, status_of_err
from .job import Job, State
from .slots import SlotTable, Use
from .turns import MOST_RETURNS, Rules, gives_way_to, in_order, may_give_way

DEATHS_ALLOWED = 3
DEATH_WINDOW_S = 60.0

# An ERR that is no refusal often comes right before the engine ends. The next request is held back this long, so
# that it meets the new engine instead of the dying one.
SETTLE_S = 1.0

LEAST_LEFT = 32  # tokens: for fewer, going back to the solo path costs more than it brings


class Engine(enum.StrEnum):
    DOWN = "down"  # not running; the next request starts it
    STARTING = "starting"
    UP = "up"
    REFUSING = "refusing"  # died too often: only a load starts it again


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the started engine said about itself."""

    can_stop: bool = True
    n_slots: int = 0  # 0: one request at a time
    n_groups: int = 1
    keeps_slots: bool = False  # an ended slot holds its conversation and can be taken back to the solo path

    @classmethod
    def of(cls, info: Info, ready: Ready) -> Facts:
        n_slots = info.whole("batch_slots")
        return cls(
            can_stop="stop" in ready.capabilities,
            n_slots=n_slots if n_slots > 1 else 0,
            n_groups=info.whole("batch_groups", 1),
            keeps_slots=info.whole("slot_cache") == 1,
        )


@dataclass(slots=True)
class Scheduler:
    clock: Callable[[], float]
    rules: Rules = field(default_factory=Rules)
    turn_token: int | None = None
    engine: Engine = Engine.DOWN
    reason: str = ""  # why the engine is not up, when that is known
    facts: Facts = field(default_factory=Facts)
    slots: SlotTable = field(default_factory=SlotTable)
    waiting: list[Job] = field(default_factory=list)  # in the order of arrival
    holder: Job | None = None  # of the control lines
    n_coming: int = 0  # requests whose prompts are being prepared: company that will wait in a moment
    unsettled: bool = False
    _arrivals: int = 0
    _deaths: deque[float] = field(default_factory=deque)

    # --- what can be seen

    @property
    def running(self) -> list[Job]:
        """Every request that the engine works on."""
        in_slots = [slot.job for slot in self.slots.slots if slot.use is Use.BUSY and slot.job is not None]
        return [*([self.holder] if self.holder and self.holder not in in_slots else []), *in_slots]

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.running

    # --- requests

    def arrive(self, job: Job) -> list[Effect]:
        """A request wants the engine. Raises Refused when the queue is full or the engine is not started any more."""
        if self.engine is Engine.REFUSING:
            raise Refused(503, self.reason)
        limit, n_waiting = self.rules.max_queue, sum(not other.has_run for other in self.waiting)
        if limit and n_waiting >= limit:
            raise Refused(429, f"{n_waiting} requests already wait and max_queue is {limit}; try again later")
        self._arrivals += 1
        job.number, job.arrived = self._arrivals, self.clock()
        self.waiting.append(job)
        return self._advance()

    def leave(self, job: Job) -> list[Effect]:
        """The client of `job` is gone: it hears nothing any more, and the engine is freed for the next one."""
        job.gone = True
        return self.stop(job)

    def stop(self, job: Job) -> list[Effect]:
        """No further token of `job` is wanted, its end still is."""
        if job.is_ending:
            return []
        job.is_ending = True
        match job.state:
            case State.WAITING:
                self.waiting.remove(job)
                end = job.end("cancel") if job.sent is not None else None
                return self._finish(job, end) + self._advance()
            case State.SOLO | State.ADMITTING:
                return self._send_stop(job)
            case State.SLOT:
                return self._send_slot_stop(job)
            case State.RETURNING | State.ENDED:
                return []

    # --- the engine's life

    def starting(self) -> None:
        """A start that no request asked for: at the server's start, or by a load."""
        self.engine = Engine.STARTING

    def started(self, facts: Facts) -> list[Effect]:
        self.engine, self.reason, self.facts, self.unsettled = Engine.UP, "", facts, False
        self.slots = SlotTable(facts.n_slots, facts.n_groups, facts.keeps_slots, self.turn_token)
        return self._advance()

    def start_failed(self, reason: str) -> list[Effect]:
        """All tries of a start failed: whoever waited for it is told why; the next request tries again."""
        self.engine, self.reason = Engine.DOWN, reason
        return self._fail_waiting(reason)

    def ended(self, reason: str) -> list[Effect]:
        """The engine died: what it worked on fails; who only waits and has said nothing is served by the next one."""
        self.engine, self.reason, self.unsettled = Engine.DOWN, reason, False
        self._deaths.append(self.clock())
        while self._deaths[0] < self.clock() - DEATH_WINDOW_S:
            self._deaths.popleft()
        looping = len(self._deaths) >= DEATHS_ALLOWED
        lost = Failed(503, reason if looping else f"{reason}; the next request starts it again")
        spoken = [job for job in self.waiting if job.output]
        self.waiting = [job for job in self.waiting if not job.output]
        effects = [effect for job in [*self.running, *spoken] for effect in self._finish(job, lost)]
        self.slots, self.facts = SlotTable(), Facts()
        for job in self.waiting:
            job.forget_legs()
        if looping:
            self.engine = Engine.REFUSING
            self.reason = (
                f"the engine ended {len(self._deaths)} times within {DEATH_WINDOW_S:.0f} s without finishing a request "
                f"and is not started again until POST /load; last: {reason}"
            )
            return effects + self._fail_waiting(self.reason)
        return effects + self._advance()

    def closed(self) -> None:
        """The engine was ended on purpose, with nothing open."""
        self.engine, self.reason, self.slots, self.facts = Engine.DOWN, "", SlotTable(), Facts()

    def forgive(self) -> None:
        """A person asked for a load: earlier deaths no longer count."""
        self._deaths.clear()
        if self.engine is Engine.REFUSING:
            self.engine, self.reason = Engine.DOWN, ""

    def settled(self) -> list[Effect]:
        self.unsettled = False
        return self._advance()

    def shut_down(self, reason: str) -> list[Effect]:
        """The server ends: everybody is told, and nothing is sent any more but a STOP; slots end with the engine."""
        effects = self._fail_waiting(reason)
        if self.holder is not None and self.holder.state is not State.RETURNING:
            effects += self._send_stop(self.holder)
        for job in self.running:
            effects += self._finish(job, Failed(503, reason))
        self.engine, self.reason = Engine.REFUSING, reason
        return effects

    # --- lines of the engine; one that belongs to nobody is of no interest

    def line(self, output: Output) -> list[Effect]:
        job = self.holder
        match output:
            case SlotToken(slot=index, id=token):
                return self._slot_token(self.slots.job_in(index), token)
            case SlotDone(slot=index):
                return self._slot_done(self.slots.job_in(index), output)
            case Err(text=text):
                return self._error(job, text, output.is_fatal)
        if job is None or job.state is State.RETURNING:
            return []
        leg = job.leg
        match output:
            case Resume(reused=reused):
                leg.has_begun, leg.n_read, leg.n_reused = True, reused, reused
                if job.has_run:
                    return self._advance()
                job.n_reused = reused
                return self._deliver(job, output) + self._advance()
            case Progress(position=position):
                leg.n_read = position
                shown = job.shown(output)
                return (self._deliver(job, shown) if shown else []) + self._advance()
            case Reused():
                return self._is_read(job, output)
            case Token(id=token):
                leg.is_read, leg.n_tokens = True, leg.n_tokens + 1
                return self._token(job, token) + self._advance()
            case Yielded(tokens=tokens):
                leg.n_yielded = tokens if leg.asked and not leg.is_read else None
            case Done():
                return self._done(job, output)
            case Admitted(slot=index, goes_on=goes_on) if index == job.slot and leg.done is not None:
                return self._admitted(job, leg.done, goes_on)
        return []

    def _is_read(self, job: Job, output: Reused) -> list[Effect]:
        leg = job.leg
        leg.is_read, leg.n_read = True, len(leg.ids)
        effects: list[Effect] = [] if job.output else self._deliver(job, output)
        if leg.asked:
            effects.append(Note(job, "the read did not give way"))
        if job.state is State.SOLO:
            self.slots.free(job)
        return effects + self._advance()

    def _token(self, job: Job, token: int) -> list[Effect]:
        job.output.append(token)
        job.token_times.append(self.clock())
        return [] if job.is_ending else self._deliver(job, Token(token))

    def _done(self, job: Job, done: Done) -> list[Effect]:
        if job.state is State.ADMITTING:
            job.leg.done = done
            return []
        job.add_done(done)
        if job.leg.n_yielded is not None:
            return self._gave_way(job)
        if done.finish == "cancel" and job.leg.stop_sent and self._wants_more(job):
            return self._place(job)
        return self._finish(job, job.end(done.finish)) + self._advance()

    @property
    def _has_company(self) -> bool:
        """Whether others wait for the engine, or will when their prompts are ready."""
        return bool(self.waiting) or self.n_coming > 0

    def _wants_more(self, job: Job) -> bool:
        return job.n_left > 0 and not job.is_ending

    def _admitted(self, job: Job, done: Done, goes_on: bool) -> list[Effect]:
        assert job.slot is not None
        job.add_done(done)
        if goes_on:
            job.state, job.slot_stopped, self.holder = State.SLOT, False, None
            self.slots.take(job.slot, job, Use.BUSY)
            return (self._send_slot_stop(job) if job.is_ending else []) + self._advance()
        if job.leg.n_yielded is not None:
            return self._gave_way(job)
        end: Done | Failed = job.end(done.finish)
        if done.finish == "length" and self._wants_more(job):
            end = Failed(503, f"the engine could not go on in slot {job.slot}; send the request again")
        return self._finish(job, end) + self._advance()

    def _gave_way(self, job: Job) -> list[Effect]:
        """The part that was read waits in the request's slot, and so does the request, behind whom it made room for."""
        assert job.leg.n_yielded is not None
        n = job.leg.n_yielded
        self.slots.keeps_part(job, job.leg.ids[:n])
        if job.is_ending:
            return self._finish(job, job.end("cancel")) + self._advance()
        job.n_yields += 1
        job.state, self.holder = State.WAITING, None
        self.waiting.append(job)
        self.waiting.sort(key=lambda other: other.number)
        note = Note(job, f"gave way at {n} of {len(job.leg.ids)} tokens; slot {job.slot} keeps them")
        return [note, *self._advance(made_room=len(job.leg.ids))]

    def _slot_token(self, job: Job | None, token: int) -> list[Effect]:
        if job is None:
            return []
        effects = self._token(job, token)
        if self._may_return(job):
            job.state, self.holder = State.RETURNING, job
            job.n_returns += 1
            effects += [Note(job, f"left alone, goes back from slot {job.slot}"), *self._send_slot_stop(job)]
        return effects

    def _may_return(self, job: Job) -> bool:
        return (
            self.holder is None
            and not self._has_company
            and job.state is State.SLOT
            and not job.is_ending
            and self.rules.returns_to_solo
            and self.facts.keeps_slots
            and job.pictures is None
            and job.n_returns < MOST_RETURNS
            and job.n_left >= LEAST_LEFT
            and self.slots.is_only(job)
            and not self.unsettled
        )

    def _slot_done(self, job: Job | None, done: SlotDone) -> list[Effect]:
        if job is None:
            return []
        index = job.slot
        job.add_stay(done)
        self.slots.left_by(job, is_usable=done.finish != "error")
        if done.finish == "error":
            return self._finish(job, Failed(503, f"the engine gave the request up in slot {index}")) + self._advance()
        if done.finish == "cancel" and job.state is State.RETURNING and self._wants_more(job):
            return self._place(job)
        return self._finish(job, job.end(done.finish)) + self._advance()

    def _error(self, job: Job | None, text: str, is_fatal: bool) -> list[Effect]:
        """No DONE follows an ERR: the request it answers is over. Without one it is an engine about to end."""
        status = status_of_err(text)
        effects: list[Effect] = []
        if job is not None and job.state is not State.RETURNING:
            effects = self._finish(job, Failed(status, f"the engine answered: {text}"))
        if status == 503 and not is_fatal:
            self.unsettled = True
            return [*effects, Settle(SETTLE_S)]
        return effects + self._advance()

    # --- decisions

    def _advance(self, made_room: int = 0) -> list[Effect]:
        """What can be done now: for who holds the lines, or else by giving them to the next one, first to whom a read
        of `made_room` tokens has just made room for."""
        if not self.waiting or self.unsettled:
            return []
        if self.engine is Engine.DOWN:
            self.engine = Engine.STARTING
            return [StartEngine()]
        if self.engine is not Engine.UP:
            return []
        if self.holder is not None:
            return self._make_room(self.holder)
        job = self._next(made_room)
        if job is None:
            return []  # everybody waits for a slot
        self.waiting.remove(job)
        return self._place(job)

    def _next(self, made_room: int) -> Job | None:
        """Who gets the lines, of those that could go on now."""
        if not self.facts.n_slots:
            return self.waiting[0]
        has_free = self.slots.n_free > 0
        able = [job for job in in_order(self.waiting, self.rules, self.clock()) if has_free or job.slot is not None]
        for_whom = [job for job in able if gives_way_to(made_room, job)]
        return next(iter(for_whom or able), None)

    def _place(self, job: Job) -> list[Effect]:
        """The next leg of a request that has the lines: solo when it is alone, else in its slot or the best one."""
        leg = job.next_leg()
        job.sent = self.clock() if job.sent is None else job.sent
        self.holder = job
        if not self.facts.n_slots or (self.slots.n_busy == 0 and not self._has_company and job.n_left > 1):
            self.slots.free(job)
            job.state = State.SOLO
            job.went("solo")
            return [Send(self._command(job, None))]
        effects: list[Effect] = []
        if job.slot is None:
            choice = self.slots.choose(leg.ids)
            assert choice is not None, "the lines are given only to who can go on"
            effects.append(Note(job, f"goes to slot {choice.slot.index}: {choice.why}"))
            job.slot = choice.slot.index
        self.slots.take(job.slot, job, Use.ADMITTING)
        job.state = State.ADMITTING
        job.went(f"slot {job.slot}")
        return [*effects, Send(self._command(job, job.slot))]

    def _make_room(self, job: Job) -> list[Effect]:
        """Somebody waits: a long read gives way to a short one, a request that decodes alone moves to a slot."""
        leg = job.leg
        if job.is_ending or leg.stop_sent or not self.facts.n_slots:
            return []
        if job.is_reading:
            return self._ask(job) if leg.has_begun else []
        if job.state is State.SOLO and leg.n_tokens and job.n_left:
            note = Note(job, f"moves to a slot after {len(job.output)} tokens: {len(self.waiting)} wait")
            return [note, *self._send_stop(job)] if self.facts.can_stop else []
        return []

    def _ask(self, job: Job) -> list[Effect]:
        """Ask a read to give way, when that lets somebody in who waits with a prompt under half as long."""
        leg = job.leg
        if not may_give_way(job) or len(leg.ids) - leg.n_read <= 1:
            return []
        n_free = self.slots.n_free - (job.slot is None)  # one more keeps the part that a solo request has read
        if n_free < 0 or not any(
            gives_way_to(len(leg.ids), other) and (n_free or other.slot is not None) for other in self.waiting
        ):
            return []
        if job.slot is None:
            choice = self.slots.choose(leg.ids)
            assert choice is not None, "one is free"
            self.slots.take(choice.slot.index, job, Use.RESERVED)
        assert job.slot is not None
        leg.asked = True
        note = Note(
            job, f"is asked to give way at {leg.n_read} of {len(leg.ids)} tokens; slot {job.slot} would keep them"
        )
        return [note, Send(BYield(job.slot))]

    # --- effects

    def _command(self, job: Job, slot: int | None) -> Command:
        ids, n, keys = job.leg.ids, job.n_left, job.keys
        if job.pictures is None:
            return Gen(n, ids, keys) if slot is None else BGen(slot, n, ids, keys)
        return GenI(n, job.pictures, ids, keys) if slot is None else BGenI(slot, n, job.pictures, ids, keys)

    def _send_stop(self, job: Job) -> list[Effect]:
        """Once a leg, and not when its DONE has come."""
        if job.leg.stop_sent or job.leg.done is not None or not self.facts.can_stop:
            return []
        job.leg.stop_sent = True
        return [Send(Stop())]

    def _send_slot_stop(self, job: Job) -> list[Effect]:
        if job.slot_stopped or job.slot is None:
            return []
        job.slot_stopped = True
        return [Send(BStop(job.slot))]

    def _deliver(self, job: Job, event: Event) -> list[Effect]:
        return [] if job.gone else [Deliver(job, event)]

    def _finish(self, job: Job, end: Done | Failed | None) -> list[Effect]:
        """The request is over: it hears so, and its slot and the lines are free."""
        if isinstance(end, Done):
            self._deaths.clear()
        self.slots.free(job)
        if job is self.holder:
            self.holder = None
        job.state = State.ENDED
        heard = self._deliver(job, end) if end is not None else []
        return [*heard, Ended(job, end)]

    def _fail_waiting(self, reason: str) -> list[Effect]:
        jobs, self.waiting = self.waiting, []
        return [effect for job in jobs for effect in self._finish(job, Failed(503, reason))]

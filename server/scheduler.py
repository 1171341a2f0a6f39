"""Who talks to the engine: the queue, one request at a time, and what an engine's end means for each request.

Pure state: every method takes one thing that happened and returns the effects it wants, in order; service.py carries
them out. Nothing here waits, writes or reads a clock other than the one it is given.

States   WAITING -> READING -> DECODING -> ENDED. A request that leaves while it reads or decodes is stopped and stays
         `open`, unheard, until the engine's DONE: only then is the engine free, and no token can reach the next one
Order    first come, first served. One request is open at a time; slots become further open requests beside it
Errors   Refused (429, 503) from `arrive`; a request that fails later gets a Failed event
"""

from __future__ import annotations

import enum
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from strata.protocol.lines import (
    Command,
    Done,
    Err,
    Gen,
    Output,
    Progress,
    Resume,
    Reused,
    SamplingKeys,
    Stop,
    Token,
)

from .errors import Refused, status_of_err

DEATHS_ALLOWED = 3
DEATH_WINDOW_S = 60.0

# An ERR that is no refusal often comes right before the engine ends. The next request is held back this long, so
# that it meets the new engine instead of the dying one.
SETTLE_S = 1.0

_RATE_WINDOW_S, _RATE_LEAST_S = 2.0, 0.25
_TIMES_KEPT = 1024


class Phase(enum.StrEnum):
    WAITING = "waiting"
    READING = "reading"
    DECODING = "decoding"
    ENDED = "ended"


class Engine(enum.StrEnum):
    DOWN = "down"  # not running; the next request starts it
    STARTING = "starting"
    UP = "up"
    REFUSING = "refusing"  # died too often: only a load starts it again


@dataclass(slots=True, eq=False)
class Job:
    """One request as the engine sees it. Times are seconds of the scheduler's clock."""

    prompt: array[int]
    max_new: int
    keys: SamplingKeys
    arrived: float = 0.0
    sent: float = 0.0
    phase: Phase = Phase.WAITING
    n_read: int = 0  # prompt tokens in the state, reused ones included
    n_reused: int = 0
    n_generated: int = 0
    token_times: deque[float] = field(default_factory=lambda: deque(maxlen=_TIMES_KEPT))
    stopping: bool = False  # a STOP was sent, or is not possible: tokens that still come belong to nobody
    gone: bool = False  # nobody listens any more

    def tok_s(self, now: float) -> float:
        """Tokens per second over the last two seconds."""
        recent = [at for at in self.token_times if at >= now - _RATE_WINDOW_S]
        return len(recent) / max(now - recent[0], _RATE_LEAST_S) if recent else 0.0


@dataclass(frozen=True, slots=True)
class Failed:
    """The end of a request that did not get its DONE."""

    status: int
    message: str


Event = Resume | Progress | Reused | Token | Done | Failed


@dataclass(frozen=True, slots=True)
class StartEngine:
    pass


@dataclass(frozen=True, slots=True)
class Send:
    command: Command


@dataclass(frozen=True, slots=True)
class Settle:
    """Call `settled` after `seconds`."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Deliver:
    job: Job
    event: Event


@dataclass(frozen=True, slots=True)
class Ended:
    """The job left the scheduler; always its last effect. `end` is None when it never reached the engine."""

    job: Job
    end: Done | Failed | None


Effect = StartEngine | Send | Settle | Deliver | Ended


@dataclass(slots=True)
class Scheduler:
    clock: Callable[[], float]
    max_queue: int = 0
    engine: Engine = Engine.DOWN
    reason: str = ""  # why the engine is not up, when that is known
    can_stop: bool = True
    waiting: deque[Job] = field(default_factory=deque)
    open: Job | None = None
    unsettled: bool = False
    _deaths: deque[float] = field(default_factory=deque)

    @property
    def is_idle(self) -> bool:
        return self.open is None and not self.waiting

    def arrive(self, job: Job) -> list[Effect]:
        """A request wants the engine. Raises Refused when the queue is full or the engine is not started any more."""
        if self.engine is Engine.REFUSING:
            raise Refused(503, self.reason)
        if self.max_queue and len(self.waiting) >= self.max_queue:
            n_waiting = len(self.waiting)
            raise Refused(429, f"{n_waiting} requests already wait and max_queue is {self.max_queue}; try again later")
        job.arrived = self.clock()
        self.waiting.append(job)
        return self._advance()

    def leave(self, job: Job) -> list[Effect]:
        """The client of `job` is gone: it hears nothing any more, and the engine is freed for the next one."""
        job.gone = True
        if job.phase is Phase.WAITING:
            self.waiting.remove(job)
            return self._end(job, None)
        return self.stop(job)

    def stop(self, job: Job) -> list[Effect]:
        """No further token of `job` is wanted, its DONE still is."""
        if job is not self.open or job.stopping:
            return []
        job.stopping = True
        return [Send(Stop())] if self.can_stop else []

    def starting(self) -> None:
        """A start that no request asked for: at the server's start, or by a load."""
        self.engine = Engine.STARTING

    def started(self, can_stop: bool) -> list[Effect]:
        self.engine, self.reason, self.can_stop, self.unsettled = Engine.UP, "", can_stop, False
        return self._advance()

    def start_failed(self, reason: str) -> list[Effect]:
        """All tries of a start failed: whoever waited for it is told why; the next request tries again."""
        self.engine, self.reason = Engine.DOWN, reason
        return self._fail_waiting(reason)

    def ended(self, reason: str) -> list[Effect]:
        """The engine died: the open request fails, the waiting ones are served by the next engine."""
        self.engine, self.reason, self.unsettled = Engine.DOWN, reason, False
        self._deaths.append(self.clock())
        while self._deaths[0] < self.clock() - DEATH_WINDOW_S:
            self._deaths.popleft()
        effects: list[Effect] = []
        looping = len(self._deaths) >= DEATHS_ALLOWED
        if self.open is not None:
            advice = "" if looping else "; the next request starts it again"
            effects += self._finish(self.open, Failed(503, f"{reason}{advice}"))
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
        self.engine, self.reason = Engine.DOWN, ""

    def forgive(self) -> None:
        """A person asked for a load: earlier deaths no longer count."""
        self._deaths.clear()
        if self.engine is Engine.REFUSING:
            self.engine, self.reason = Engine.DOWN, ""

    def settled(self) -> list[Effect]:
        self.unsettled = False
        return self._advance()

    def shut_down(self, reason: str) -> list[Effect]:
        """The server ends: everybody is told, and nothing is sent any more but the STOP of the open request."""
        effects = self._fail_waiting(reason)
        job = self.open
        if job is not None:
            effects += self.stop(job) + self._finish(job, Failed(503, reason))
        self.engine, self.reason = Engine.REFUSING, reason
        return effects

    def line(self, output: Output) -> list[Effect]:
        """A line of the engine. Lines that belong to no open request are of no interest here."""
        job = self.open
        if job is None:
            return []
        match output:
            case Resume(reused=reused):
                job.n_reused = job.n_read = reused
            case Progress(position=position):
                job.n_read = position
            case Reused():
                job.n_read = len(job.prompt)
                job.phase = Phase.DECODING
            case Token():
                job.phase = Phase.DECODING
                job.n_generated += 1
                job.token_times.append(self.clock())
                if job.stopping:
                    return []
            case Done():
                self._deaths.clear()
                return self._finish(job, output) + self._advance()
            case Err(text=text):
                status = status_of_err(text)
                effects = self._finish(job, Failed(status, f"the engine answered: {text}"))
                if status == 503 and not output.is_fatal:
                    self.unsettled = True
                    return [*effects, Settle(SETTLE_S)]
                return effects + self._advance()
            case _:
                return []
        return self._deliver(job, output)

    def _advance(self) -> list[Effect]:
        """Send the next request, or start the engine that it needs."""
        if self.open is not None or not self.waiting or self.unsettled:
            return []
        if self.engine is Engine.DOWN:
            self.engine = Engine.STARTING
            return [StartEngine()]
        if self.engine is not Engine.UP:
            return []
        job = self.open = self.waiting.popleft()
        job.phase, job.sent = Phase.READING, self.clock()
        return [Send(Gen(job.max_new, job.prompt, job.keys))]

    def _deliver(self, job: Job, event: Event) -> list[Effect]:
        return [] if job.gone else [Deliver(job, event)]

    def _finish(self, job: Job, end: Done | Failed) -> list[Effect]:
        return self._deliver(job, end) + self._end(job, end)

    def _fail_waiting(self, reason: str) -> list[Effect]:
        jobs, self.waiting = self.waiting, deque()
        return [effect for job in jobs for effect in self._finish(job, Failed(503, reason))]

    def _end(self, job: Job, end: Done | Failed | None) -> list[Effect]:
        job.phase = Phase.ENDED
        if job is self.open:
            self.open = None
        return [Ended(job, end)]

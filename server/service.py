"""The server's heart: one scheduler, one engine link, and a ticket for each request.

Carries out what the scheduler decides and tells it what the engine does. Everything here runs on the event loop, no
method blocks, and state is only ever changed from one place: `_apply`.

Errors   Refused: 503 while the engine starts or cannot be started, 429 when the queue is full, 409 for load and unload
"""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from strata.protocol.lines import Done, Info, Output, Ready, SamplingKeys, Token, merge_info, rate

from .effects import Deliver, Effect, Ended, Event, Failed, Note, Send, Settle, StartEngine
from .errors import Refused
from .job import Job, State
from .link import EngineLink
from .metrics import Metrics, Record
from .process import EngineError
from .scheduler import Engine, Facts, Scheduler
from .settings import Settings, switch

log = logging.getLogger("strata.service")
requests = logging.getLogger("strata.request")
decisions = logging.getLogger("strata.scheduler")

SHUTTING_DOWN = "the server is shutting down"
LOADING = "the model is loading; try again in a moment"


class Ticket:
    """A request's seat: `next` gives what happens to it. Its holder gives it back with `Service.leave`."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.tail = ""  # the end of the answer so far, for /status
        self.tool = ""  # the tool call being written
        self._events: deque[Event] = deque()  # at most max_new tokens and the lines of its reads
        self._waiter: asyncio.Future[None] | None = None
        self._due = 0.0  # when the waiter is woken in any case
        self._timer: asyncio.TimerHandle | None = None

    @property
    def has_more(self) -> bool:
        """Whether an event is there."""
        return bool(self._events)

    def take(self) -> Event:
        """The next event, which is there."""
        return self._events.popleft()

    def put(self, event: Event) -> None:
        self._events.append(event)
        self._wake()

    async def next(self, within_s: float) -> Event | None:
        """The next event, or None when nothing happens within `within_s` seconds."""
        if not self._events:
            loop = asyncio.get_running_loop()
            self._due = loop.time() + within_s
            if self._timer is None or self._timer.when() > self._due:
                self._arm(loop)
            self._waiter = loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._events.popleft() if self._events else None

    def close(self) -> None:
        """Nobody waits any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        """One timer that is set anew when it rings too early: a timer for every token would cost more than the rest."""
        self.close()
        self._timer = loop.call_at(self._due, self._rings, loop)

    def _rings(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        if self._waiter is None:
            return
        if loop.time() < self._due:
            self._arm(loop)
        else:
            self._wake()


class Service:
    def __init__(self, settings: Settings, metrics: Metrics, turn_token: int | None = None) -> None:
        self.settings = settings
        self.metrics = metrics
        self.scheduler = Scheduler(time.monotonic, settings.rules, turn_token)
        self.info = Info({})
        self.context: int | None = None  # of the last READY; stays known while the engine is down
        self.engine_started_at: float | None = None
        self._link = EngineLink(settings.launch, self, settings.patience, settings.before_load)
        self._tickets: dict[Job, Ticket] = {}
        self._on_request = False  # the start in progress was asked for by a request, which waits for it
        self._start_waiters: list[asyncio.Future[None]] = []
        self._idle_timer: asyncio.TimerHandle | None = None
        self._closing: asyncio.Task[None] | None = None
        self._shut_down = False

    # --- requests

    async def ready_context(self) -> int:
        """The engine's context. An engine that has never been up is started for it."""
        if self.context is not None and self.scheduler.engine is not Engine.REFUSING:
            self.refuse_while_loading()
            return self.context
        self.refuse_while_loading()
        await self._up()
        assert self.context is not None
        return self.context

    def refuse_while_loading(self) -> None:
        """503 during a start that no request asked for, unless requests are to wait for it."""
        loading = self.scheduler.engine is Engine.STARTING and not self._on_request
        if loading and not self.settings.wait_for_engine:
            raise Refused(503, LOADING, code="loading")

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """A request's prompt is being made ready; `submit` follows. Who is placed meanwhile counts it as company, and
        does not begin alone on the solo path only to be moved to a slot after its first token."""
        self.scheduler.n_coming += 1
        try:
            yield
        finally:
            self.scheduler.n_coming -= 1

    def submit(self, prompt: array[int], max_new: int, keys: SamplingKeys) -> Ticket:
        """Take a place in the queue. Raises Refused."""
        self.refuse_while_loading()
        job = Job(prompt, max_new, keys)
        ticket = self._tickets[job] = Ticket(job)
        try:
            effects = self.scheduler.arrive(job)
        except Refused:
            del self._tickets[job]
            raise
        self._cancel_idle_timer()
        self._apply(effects)
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """The holder is done with it, in whatever state: a waiting request is forgotten, a running one stopped."""
        ticket.close()
        if ticket.job.state is not State.ENDED:
            log.info("request %d: the client left while %s", ticket.job.number, ticket.job.phase)
            self._apply(self.scheduler.leave(ticket.job))

    def stop(self, ticket: Ticket) -> None:
        """No more tokens are wanted; the Done still comes."""
        self._apply(self.scheduler.stop(ticket.job))

    @property
    def first_job(self) -> Job | None:
        """The request on the solo path or being read, else the oldest one in a slot."""
        oldest = min(self.scheduler.running, key=lambda job: job.number, default=None)
        return self.scheduler.holder or oldest

    @property
    def first_ticket(self) -> Ticket | None:
        return None if self.first_job is None else self._tickets.get(self.first_job)

    # --- the engine's life

    @property
    def is_loaded(self) -> bool:
        return self.scheduler.engine is Engine.UP

    @property
    def engine_pid(self) -> int | None:
        return self._link.pid

    def start(self) -> None:
        """At the server's start."""
        if not self.settings.lazy_load:
            self._start(on_request=False)

    async def load(self) -> None:
        """Start the engine and wait until it is up. Raises Refused."""
        if not self.scheduler.is_idle:
            raise Refused(409, "requests are running; load and unload need an idle server")
        self.scheduler.forgive()
        if self.scheduler.engine is Engine.DOWN:
            self._start(on_request=False)
        await self._up()

    async def unload(self) -> None:
        """End the engine; the next request starts it again. Raises Refused."""
        if not self.scheduler.is_idle or self.scheduler.engine is Engine.STARTING:
            raise Refused(409, "requests are running; load and unload need an idle server")
        if self.is_loaded:
            self._close_engine()
        await self._until_closed()

    def tell_everybody(self) -> None:
        """The server ends: every request fails now, so that its stream can say so; no new one is taken."""
        self._shut_down = True
        self._cancel_idle_timer()
        self._apply(self.scheduler.shut_down(SHUTTING_DOWN))
        self._wake(Refused(503, SHUTTING_DOWN))

    async def shut_down(self) -> None:
        """End the engine. Returns when it is gone."""
        if not self._shut_down:
            self.tell_everybody()
        await self._until_closed()
        try:
            await self._link.close()
        except EngineError as error:
            log.error("engine: %s", error)

    def kill_engine(self) -> None:
        """At once, without its last words; `shut_down` then finds it gone."""
        self._link.kill_now()

    # --- what the link reports

    def on_started(self, info: Info, ready: Ready) -> None:
        self.info, self.context, self.engine_started_at = info, ready.max_context, time.time()
        facts = Info({name: value for name, value in info.values.items() if value not in (0, -1, "0", "")})
        log.info("engine: ready, context %d; %s", ready.max_context, facts.line().removeprefix("INFO "))
        engine = Facts.of(info, ready)
        if engine.n_slots:
            log.info(
                "engine: %d slots in %d groups (%d asked)", engine.n_slots, engine.n_groups, self.settings.parallel
            )
        else:
            asked = f"; {self.settings.parallel} slots were asked for" if self.settings.parallel > 1 else ""
            log.info("engine: requests are served one at a time%s", asked)
        drafts_in_slots = engine.n_slots > 0 and info.whole("mtp_max") > 0
        if switch(self.settings.launch.env, "STRATA_BATCH_MTP", False) and not drafts_in_slots:
            log.warning("engine: STRATA_BATCH_MTP=1 does nothing: drafts in slots need slots and a draft layer")
        self._apply(self.scheduler.started(engine))
        self._wake(None)
        self._arm_idle_timer()

    def on_start_failed(self, reason: str) -> None:
        self._apply(self.scheduler.start_failed(reason))
        self._wake(Refused(503, reason))

    def on_line(self, output: Output) -> None:
        if isinstance(output, Info):
            self.info = merge_info([self.info, output])  # counters that have changed
            return
        self._apply(self.scheduler.line(output))

    def on_ended(self, reason: str) -> None:
        self._apply(self.scheduler.ended(reason))

    # --- effects

    def _apply(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(command):
                    self._link.send(command)
                case StartEngine():
                    self._start(on_request=True)
                case Settle(seconds):
                    asyncio.get_running_loop().call_later(seconds, self._settled)
                case Deliver(job, event):
                    self._tickets[job].put(event)
                    if isinstance(event, Token):
                        self.metrics.token(job)
                case Ended(job, end):
                    del self._tickets[job]
                    self._log_request(job, self.metrics.ended(job, end, self.scheduler.clock()), end)
                    self._arm_idle_timer()
                case Note(job, text):
                    decisions.debug("request %d: %s", job.number, text)

    def _log_request(self, job: Job, record: Record, end: Done | Failed | None) -> None:
        if not self.settings.request_lines:
            return
        read_tok_s = rate(record.prompt_read, record.prompt_ms)
        parts = [
            f"prompt {record.prompt_tokens}",
            f"reused {record.reused}",
            f"read {record.prompt_read} at {read_tok_s:.1f} tok/s",
            f"generated {record.output_tokens} at {record.decode_tok_s:.1f} tok/s",
            f"finish {record.finish}",
        ]
        if record.drafts_offered:
            parts.append(f"drafts {record.drafts_accepted} of {record.drafts_offered}")
        if record.hit_rate is not None and self.info.text("device") != "host":
            parts.append(f"experts in VRAM {record.hit_rate:.1%}, over PCIe {record.pcie_share or 0.0:.1%}")
        parts.append(" > ".join(job.path) or "never sent")
        if job.n_yields:
            parts.append(f"gave way {job.n_yields} time{'s' if job.n_yields > 1 else ''}")
        parts.append(f"{record.duration_s:.2f} s")
        if isinstance(end, Failed):
            parts.append(end.message)
        requests.info("request %d: %s", job.number, ", ".join(parts))

    def _settled(self) -> None:
        self._apply(self.scheduler.settled())

    def _start(self, *, on_request: bool) -> None:
        self._on_request = on_request
        self.scheduler.starting()
        if self._closing is None:
            self._link.start()
        else:
            self._closing.add_done_callback(lambda _: self._link.start())

    async def _up(self) -> None:
        """Wait until the engine is up, starting it when it is down. Raises Refused: why a start failed."""
        if self.scheduler.engine is Engine.REFUSING:
            raise Refused(503, self.scheduler.reason)
        if self.scheduler.engine is Engine.DOWN:
            self._start(on_request=True)
        while self.scheduler.engine is Engine.STARTING:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._start_waiters.append(waiter)
            await waiter

    def _wake(self, refused: Refused | None) -> None:
        waiters, self._start_waiters = self._start_waiters, []
        for waiter in waiters:
            if waiter.done():
                continue
            if refused is None:
                waiter.set_result(None)
            else:
                waiter.set_exception(refused)

    def _close_engine(self) -> None:
        """Begin to end the engine; a start that is asked for meanwhile comes after it."""
        self.scheduler.closed()
        if self._closing is None:
            self._closing = asyncio.create_task(self._link.close(), name="close")
            self._closing.add_done_callback(self._closed)

    def _closed(self, task: asyncio.Task[None]) -> None:
        self._closing = None
        if not task.cancelled() and task.exception() is not None:
            log.error("engine: %s", task.exception())

    async def _until_closed(self) -> None:
        if self._closing is not None:
            await asyncio.wait([self._closing])

    def _arm_idle_timer(self) -> None:
        self._cancel_idle_timer()
        if self.settings.idle_unload_s and self.scheduler.is_idle and self.is_loaded and not self._shut_down:
            loop = asyncio.get_running_loop()
            self._idle_timer = loop.call_later(self.settings.idle_unload_s, self._unload_idle)

    def _cancel_idle_timer(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None

    def _unload_idle(self) -> None:
        if self.scheduler.is_idle and self.is_loaded:
            log.info("engine: unloaded after %g s without a request", self.settings.idle_unload_s)
            self._close_engine()

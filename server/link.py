"""The engine over its lives: start, lines, silence, death.

The link knows processes and lines, not requests. It calls its listener: `on_started` (READY), `on_line` (each line of a
life, never one after its end), `on_ended` (a life is over unasked; exactly once, its process is reaped) and
`on_start_failed` (all tries failed). Restarting is the listener's decision.

Units    seconds
Errors   EngineError from `close` when the process cannot be ended; then no second one is ever started
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Protocol

from strata.protocol.lines import (
    Command,
    Err,
    Info,
    Output,
    ProtocolError,
    Ready,
    decode_output,
    encode,
    merge_info,
)

from .process import EngineError, EngineProcess, Launch, Usage
from .silence import SilenceClock

log = logging.getLogger("strata.link")
trace = logging.getLogger("strata.trace")

_REAP_S = 1.0  # a process whose stdout has ended is given this long to leave by itself
_FROZEN_CPU_S = 0.5
_FROZEN_IO_BYTES = 1024 * 1024
_WATCH_S = 1.0
_EXIT_REFUSED = 2  # bad options or a bad pack: another try would say the same


@dataclass(frozen=True, slots=True)
class Patience:
    """Every limit that the link waits for; 0 = for ever where it says so."""

    ready_s: float = 900.0  # 0: for ever
    silence_s: float = 300.0  # 0: for ever
    stall_s: float = 90.0  # 0: not watched
    slot_stop_s: float = 600.0
    close_s: float = 20.0
    start_tries: int = 3
    retry_s: float = 15.0
    before_load_s: float = 600.0


class Listener(Protocol):
    def on_started(self, info: Info, ready: Ready) -> None: ...
    def on_start_failed(self, reason: str) -> None: ...
    def on_line(self, output: Output) -> None: ...
    def on_ended(self, reason: str) -> None: ...


class EngineLink:
    def __init__(self, launch: Launch, listener: Listener, patience: Patience, before_load: list[str] | None) -> None:
        self._launch = launch
        self._listener = listener
        self._patience = patience
        self._before_load = before_load
        self._process: EngineProcess | None = None
        self._life: asyncio.Task[None] | None = None
        self._silence = self._new_silence()
        self._is_ready = False
        self._stuck = ""

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Begin a life. The outcome comes through the listener."""
        assert self._life is None or self._life.done(), "one engine at a time"
        self._life = asyncio.create_task(self._live(), name="engine")

    def send(self, command: Command) -> None:
        if self._process is None:
            return  # it has just ended; `on_ended` tells everybody
        line = encode(command)
        trace.debug("> %.200s", line)
        self._silence.sent(command, time.monotonic())
        self._process.write_line(line)

    async def close(self) -> None:
        """End the engine on purpose; nothing is reported to the listener."""
        life, self._life = self._life, None
        if life is not None:
            life.cancel()
            await asyncio.wait([life])
        process = self._process
        if process is not None:
            try:
                await self._end_process(process, process.close(self._patience.close_s, polite=self._is_ready))
            finally:
                self._process = None
                process.release()

    def _new_silence(self) -> SilenceClock:
        return SilenceClock(self._patience.silence_s, slot_stop_s=self._patience.slot_stop_s)

    def kill_now(self) -> None:
        if self._process is not None:
            self._process.kill_now()

    async def _live(self) -> None:
        """One life: the tries to start, the lines, the end."""
        self._is_ready = False
        try:
            info, ready = await self._start()
        except EngineError as error:
            log.error("engine: %s", error)
            self._life = None
            self._listener.on_start_failed(str(error))
            return
        process = self._process
        assert process is not None
        self._is_ready = True
        self._silence = self._new_silence()
        self._listener.on_started(info, ready)
        reason = await self._until_its_end(process)
        log.error("engine: %s", reason)
        self._life = self._process = None
        process.release()
        self._listener.on_ended(reason)

    async def _until_its_end(self, process: EngineProcess) -> str:
        """Pass lines on while watching for silence; end the process. Returns why it is over."""
        pump = asyncio.create_task(self._pump(process))
        watch = asyncio.create_task(self._watch(process))
        try:
            await asyncio.wait((pump, watch), return_when=asyncio.FIRST_COMPLETED)
        finally:
            was_ended = not pump.done()
            pump.cancel()
            watch.cancel()
            await asyncio.wait((pump, watch))
        reason = watch.result() if was_ended else pump.result()
        try:
            await self._end_process(process, process.kill() if was_ended else process.reap(_REAP_S))
        except EngineError as error:
            return str(error)
        return reason or _death(process)

    async def _start(self) -> tuple[Info, Ready]:
        """Start a process and wait for READY; up to `start_tries` times."""
        if self._stuck:
            raise EngineError(self._stuck)
        for attempt in range(1, self._patience.start_tries + 1):
            try:
                await self._run_before_load()
                self._process = process = await EngineProcess.spawn(self._launch)
                log.info("engine: started as process %d: %s", process.pid, " ".join(self._launch.command))
                return await self._ready(process)
            except EngineError as error:
                refused = self._process is not None and self._process.exit_code == _EXIT_REFUSED
                if self._process is not None:
                    self._process.release()
                self._process = None
                if refused or self._stuck or attempt == self._patience.start_tries:
                    raise
                log.warning("engine: %s; next try in %.0f s", error, self._patience.retry_s)
                await asyncio.sleep(self._patience.retry_s)
        raise AssertionError("start_tries is at least 1")

    async def _ready(self, process: EngineProcess) -> tuple[Info, Ready]:
        infos: list[Info] = []
        last_err = ""
        try:
            async with asyncio.timeout(self._patience.ready_s or None):
                while (line := await process.read_line()) is not None:
                    trace.debug("< %.200r", line)
                    match _decode(line):
                        case Info() as info:
                            infos.append(info)
                        case Ready() as ready:
                            return merge_info(infos), ready
                        case Err(text=text):
                            last_err = text
            await self._end_process(process, process.reap(_REAP_S))
        except TimeoutError:
            await self._end_process(process, process.kill())
            raise EngineError(
                f"the engine was not ready after {self._patience.ready_s:g} s (STRATA_ENGINE_READY_S) and was ended"
            ) from None
        why = last_err or process.last_words()
        raise EngineError(f"the engine did not start, it {process.how_it_ended()}{f': {why}' if why else ''}")

    async def _pump(self, process: EngineProcess) -> str:
        """Pass lines on until the life is over. Returns why, or "" when only the process's end can say it."""
        last_err = ""
        while True:
            try:
                lines = await process.read_lines()
            except EngineError as error:
                return f"the engine was ended because of its output: {error}"
            if lines is None:
                return f"the engine ended: {last_err}" if last_err else ""
            now = time.monotonic()
            for line in lines:
                trace.debug("< %.200r", line)
                try:
                    output = decode_output(line)
                except ProtocolError as error:
                    return f"the engine was ended because of its output: {error}"
                if output is None:
                    continue
                last_err = output.text if isinstance(output, Err) else ""
                self._silence.heard(output, now)
                if isinstance(output, Err) and output.is_fatal:
                    return f"the engine ended: {output.text}"
                self._listener.on_line(output)

    async def _watch(self, process: EngineProcess) -> str:
        """Returns when the engine is silent or frozen while a request is open, with that as the reason."""
        period = min([_WATCH_S] + [limit / 4 for limit in (self._patience.silence_s, self._patience.stall_s) if limit])
        mark: tuple[float, Usage] | None = None
        heard = self._silence.since
        while True:
            await asyncio.sleep(period)
            now = time.monotonic()
            complaint = self._silence.complaint(now)
            if complaint is not None:
                return f"{complaint} and was ended"
            usage = process.usage() if self._silence.since is not None and self._patience.stall_s else None
            if usage is None:
                mark = None
            elif mark is None or self._silence.since != heard or _has_worked(mark[1], usage):
                mark, heard = (now, usage), self._silence.since
            elif now - mark[0] > self._patience.stall_s:
                return f"the engine was frozen for {self._patience.stall_s:g} s and was ended"

    async def _run_before_load(self) -> None:
        if not self._before_load:
            return
        shown = " ".join(self._before_load)
        try:
            helper = await asyncio.create_subprocess_exec(*self._before_load, cwd=self._launch.cwd)
        except OSError as error:
            raise EngineError(f"before_load cannot be started: {shown}: {error.strerror}") from None
        try:
            async with asyncio.timeout(self._patience.before_load_s):
                code = await helper.wait()
        except BaseException as error:
            helper.kill()
            if isinstance(error, TimeoutError):
                raise EngineError(f"before_load took longer than {self._patience.before_load_s:g} s: {shown}") from None
            raise
        if code != 0:
            raise EngineError(f"before_load failed with exit code {code}: {shown}")

    async def _end_process(self, process: EngineProcess, ending: Coroutine[None, None, None]) -> None:
        """Await one of the process's endings; remember a process that nothing ends."""
        try:
            await ending
        except EngineError as error:
            self._stuck = f"{error}; no second engine is started beside it"
            raise EngineError(self._stuck) from None


def _death(process: EngineProcess) -> str:
    words = process.last_words()
    return f"the engine {process.how_it_ended()}{f': {words}' if words else ''}"


def _decode(line: bytes) -> Output | None:
    """Before READY every line that cannot be read is noise."""
    try:
        return decode_output(line)
    except ProtocolError:
        return None


def _has_worked(before: Usage, after: Usage) -> bool:
    cpu_s, io_bytes = after.cpu_s - before.cpu_s, after.io_bytes - before.io_bytes
    return cpu_s >= _FROZEN_CPU_S or io_bytes >= _FROZEN_IO_BYTES

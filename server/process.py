"""One engine process: three pipes, a log file, and a sure end.

Lines    stdout is read as it comes and split into lines, up to MAX_LINE_BYTES each; stderr goes straight into the log
         file, so that a stalled server never stalls the engine
Signals  the child leads a session of its own, so Ctrl-C in the terminal reaches the server alone, which ends the
         engine in order; if the server dies without doing that, the kernel kills the child (PR_SET_PDEATHSIG)
Errors   EngineError with one line for the person at the keyboard
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from strata.protocol.lines import MAX_LINE_BYTES

_PR_SET_PDEATHSIG = 1
_LOG_KEPT_BYTES = 64 * 1024 * 1024  # a larger log is moved aside at a start, one generation is kept
_READ_BYTES = 1 << 16
_TAIL_BYTES = 8192
_TAIL_LINES = 4
_TAIL_CHARS = 500
_HINTS = ("watchdog", "out of memory", "cannot allocate")


class EngineError(Exception):
    """The engine cannot be started, or did not end."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start an engine."""

    command: list[str]
    cwd: Path | None = None
    env: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    log: Path | None = None  # None: kept only as long as the process runs


@dataclass(frozen=True, slots=True)
class Usage:
    """What the process has used so far."""

    cpu_s: float
    io_bytes: int


class EngineProcess:
    """A started process. `read_lines` until it returns None, then `reap` or one of the endings."""

    def __init__(self, process: Process, log: Path | int, log_start: int) -> None:
        self._process = process
        self._log = log
        self._log_start = log_start
        assert process.stdin is not None and process.stdout is not None
        self._stdin = process.stdin
        self._stdout = process.stdout
        self._lines: list[bytes] = []  # that were read and not yet given out
        self._torn = bytearray()  # the beginning of the next one
        self._has_ended = False

    @classmethod
    async def spawn(cls, launch: Launch) -> EngineProcess:
        program = launch.command[0]
        log_fd, log_start = _open_log(launch.log)
        try:
            process = await asyncio.create_subprocess_exec(
                *launch.command,
                stdin=PIPE,
                stdout=PIPE,
                stderr=log_fd,
                cwd=launch.cwd,
                env=dict(launch.env),
                start_new_session=True,
                preexec_fn=_die_with_parent(),
            )
        except (OSError, ValueError) as error:
            os.close(log_fd)
            what = error.filename if isinstance(error, OSError) and error.filename else program
            why = error.strerror if isinstance(error, OSError) else str(error)
            raise EngineError(f"the engine cannot be started: {what}: {why}; see `exe` and `cwd`") from None
        if launch.log is None:
            return cls(process, log_fd, log_start)
        os.close(log_fd)
        return cls(process, launch.log, log_start)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        return self._process.returncode

    def write_line(self, line: str) -> None:
        """Queue a line for the engine's stdin. A pipe that is already closed shows as the end of its stdout."""
        if not self._stdin.is_closing():
            self._stdin.write(line.encode() + b"\n")

    async def read_lines(self) -> list[bytes] | None:
        """The lines of stdout that have come, without their LF; waits for one. None at its end. Raises EngineError for
        a line without an end."""
        while not self._lines and not self._has_ended:
            try:
                self._split(await self._stdout.read(_READ_BYTES))
            except OSError:
                self._split(b"")
        lines, self._lines = self._lines, []
        return lines or None

    async def read_line(self) -> bytes | None:
        """The first line that has come, as `read_lines` gives them; None at the end of stdout."""
        lines = await self.read_lines()
        if lines is None:
            return None
        self._lines = lines[1:]
        return lines[0]

    def _split(self, data: bytes) -> None:
        """`data` has come; nothing: stdout is at its end."""
        head, *others = data.split(b"\n")
        self._torn += head
        if len(self._torn) > MAX_LINE_BYTES:
            raise EngineError(f"it wrote a line longer than {MAX_LINE_BYTES} bytes")
        if others:
            self._lines += [bytes(self._torn), *others[:-1]]
            self._torn = bytearray(others[-1])
        if not data:
            self._has_ended = True
            self._lines += [bytes(self._torn)] if self._torn else []

    async def reap(self, grace_s: float) -> None:
        """Wait for a process that is about to end; kill it when it does not. Raises EngineError if even that fails."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._process.wait()
                return
        await self.kill()

    def kill_now(self) -> None:
        self._signal(signal.SIGKILL)

    async def kill(self, patience_s: float = 20.0) -> None:
        self.kill_now()
        await self._gone_within(patience_s)

    async def close(self, patience_s: float = 20.0, *, polite: bool = True) -> None:
        """QUIT and the end of stdin (only when `polite`); then SIGTERM; then SIGKILL; each given `patience_s`."""
        if polite:
            self.write_line("QUIT")
        else:
            self._signal(signal.SIGTERM)
        self._stdin.close()
        for step in (signal.SIGTERM, signal.SIGKILL):
            try:
                await self._drain_until_gone(patience_s)
                return
            except TimeoutError:
                self._signal(step)
        await self._gone_within(patience_s)

    def how_it_ended(self) -> str:
        """Exit code or signal, in words."""
        code = self.exit_code
        if code is None:
            return "is still running"
        if code >= 0:
            return f"ended with exit code {code}"
        name = signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}"
        hint = " (when nobody sent it: the system ran out of memory)" if -code == signal.SIGKILL else ""
        return f"was killed by {name}{hint}"

    def last_words(self) -> str:
        """The end of its log: a line that explains the death when there is one, else the last few lines. A process
        that was killed from outside had no time for any."""
        lines = [line for line in self._log_tail().splitlines() if line.strip()]
        telling = [line for line in lines if any(hint in line.lower() for hint in _HINTS)]
        if self.exit_code in (-signal.SIGKILL, -signal.SIGTERM):
            lines = []
        return " | ".join(telling[-1:] or lines[-_TAIL_LINES:])[-_TAIL_CHARS:]

    def usage(self) -> Usage | None:
        """CPU seconds and I/O bytes so far; None where the system does not say, or where a GPU works out of sight."""
        try:
            if _uses_gpu(self.pid):
                return None
            fields = Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()
            ticks = int(fields[11]) + int(fields[12])
            io = dict(line.split(": ") for line in Path(f"/proc/{self.pid}/io").read_text().splitlines())
        except (OSError, IndexError, ValueError):
            return None
        return Usage(ticks / os.sysconf("SC_CLK_TCK"), int(io["rchar"]) + int(io["wchar"]))

    def release(self) -> None:
        """Give up what a process that has ended still holds here: its stdin, and a log that is no file."""
        self._stdin.close()
        if isinstance(self._log, int):
            os.close(self._log)
            self._log = Path(os.devnull)

    def _log_tail(self) -> str:
        try:
            if isinstance(self._log, int):
                size = os.fstat(self._log).st_size
                return os.pread(self._log, _TAIL_BYTES, max(size - _TAIL_BYTES, 0)).decode("utf-8", "replace")
            with self._log.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(size - _TAIL_BYTES, min(self._log_start, size)))
                return file.read(_TAIL_BYTES).decode("utf-8", "replace")
        except OSError:
            return ""

    async def _gone_within(self, patience_s: float) -> None:
        try:
            await self._drain_until_gone(patience_s)
        except TimeoutError:
            raise EngineError(f"the engine (process {self.pid}) is stuck and cannot be killed") from None

    async def _drain_until_gone(self, patience_s: float) -> None:
        """Wait for the exit while reading on: an engine whose stdout is full could not leave."""
        async with asyncio.timeout(patience_s):
            while await self._stdout.read(65536):
                pass
            await self._process.wait()

    def _signal(self, number: int) -> None:
        """To the whole group, for the case that the engine has children."""
        if self.exit_code is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)


def _open_log(path: Path | None) -> tuple[int, int]:
    """A descriptor to append to, and the size it starts at."""
    if path is None:
        with tempfile.TemporaryFile() as file:
            return os.dup(file.fileno()), 0
    try:
        if path.exists() and path.stat().st_size > _LOG_KEPT_BYTES:
            path.replace(path.with_suffix(path.suffix + ".old"))
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise EngineError(f"the engine's log cannot be written: {path}: {error.strerror}; see `log`") from None
    return descriptor, os.fstat(descriptor).st_size


def _die_with_parent() -> Callable[[], None] | None:
    """What the child runs between fork and exec. Everything that needs an import or a lock is done here, before."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    parent = os.getpid()

    def in_child() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # the server died before the kernel was told
            os._exit(1)

    return in_child


def _uses_gpu(pid: int) -> bool:
    folder = f"/proc/{pid}/fd"
    for name in os.listdir(folder):
        with contextlib.suppress(OSError):
            if os.readlink(f"{folder}/{name}").startswith(("/dev/nvidia", "/dev/kfd", "/dev/dri")):
                return True
    return False

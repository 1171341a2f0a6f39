"""An engine process driven over its pipes: start, one request after another, or line by line; leave.

Units    seconds on the monotonic clock for arrival times; the engine's own figures are in its DONE line (ms)
Errors   EngineFailed with the engine's last ERR line and the end of its log
"""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Self

import msgspec

from strata.protocol.lines import (
    Command,
    Done,
    Err,
    Gen,
    Info,
    Output,
    Progress,
    ProtocolError,
    Quit,
    Ready,
    SamplingKeys,
    Token,
    decode_output,
    encode,
)

LOG_TAIL_BYTES = 4000
CLOSE_S = 20.0


class EngineFailed(Exception):
    """The engine did not start, refused a request or went away."""


class Generation(msgspec.Struct, frozen=True):
    """One finished request: its tokens, when each arrived (seconds since the command was sent), its DONE line and its
    PP lines."""

    tokens: list[int]
    arrival_s: list[float]
    done: Done
    progress: list[Progress]

    @property
    def prompt_tok_s(self) -> float:
        """Prompt tokens read per second."""
        return self.done.prompt_read / self.done.prompt_ms * 1e3 if self.done.prompt_ms > 0 else 0.0

    @property
    def decode_tok_s(self) -> float:
        """Tokens after the first per second: the first one comes with the prompt."""
        return (self.done.generated - 1) / self.done.decode_ms * 1e3 if self.done.decode_ms > 0 else 0.0


def engine_command(exe: str | None) -> list[str]:
    """The engine to start: `exe`, or the one of this installation."""
    return [exe] if exe else [sys.executable, "-m", "strata.engine"]


class EngineProcess:
    """A running engine. Use as a context manager; leaving it sends QUIT and waits.

    env   variables beside those of this process · cwd: its working directory
    info  what its INFO lines said · max_context: what its READY line said · start_s: seconds until then
    """

    def __init__(
        self,
        argv: Sequence[str],
        ready_s: float = 900.0,
        silence_s: float = 300.0,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        self._silence_s = silence_s
        self._log: IO[bytes] = tempfile.TemporaryFile("a+b")  # noqa: SIM115 - closed with the process
        self._lines: queue.SimpleQueue[tuple[float, bytes | None]] = queue.SimpleQueue()
        started = time.monotonic()
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, **(env or {})},
            cwd=cwd,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.info: dict[str, int | float | str] = {}
        try:
            self.max_context = self._wait_ready(ready_s)
        except BaseException:
            self.close()
            raise
        self.start_s = time.monotonic() - started

    @property
    def pid(self) -> int:
        return self._process.pid

    def generate(self, ids: Sequence[int], max_new: int, keys: SamplingKeys | None = None) -> Generation:
        """Sends GEN and collects lines up to DONE. Raises EngineFailed on ERR, silence or death."""
        sent = time.monotonic()
        self.send(Gen(max_new, array("i", ids), keys or SamplingKeys()))
        tokens, arrivals, progress = [], [], []
        while True:
            arrival, line = self.receive()
            if isinstance(line, Token):
                tokens.append(line.id)
                arrivals.append(arrival - sent)
            elif isinstance(line, Progress):
                progress.append(line)
            elif isinstance(line, Done):
                return Generation(tokens, arrivals, line, progress)
            elif isinstance(line, Err):
                raise EngineFailed(f"the engine refused the request: {line.text}")

    def send(self, *commands: Command | bytes) -> None:
        """Commands in one write; bytes are a line as it is, without its LF. Raises EngineFailed when it is gone."""
        lines = [command if isinstance(command, bytes) else encode(command).encode() for command in commands]
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(b"".join(line + b"\n" for line in lines))
            self._process.stdin.flush()
        except OSError as e:
            raise EngineFailed(self._death()) from e

    def receive(self, silence_s: float | None = None) -> tuple[float, Output]:
        """The next line and when it arrived. Raises EngineFailed on silence, on the end of stdout, and for a line that
        is not of the protocol."""
        for arrival, line in self._outputs(self._silence_s if silence_s is None else silence_s):
            return arrival, line
        raise EngineFailed(self._death())

    def rest(self) -> list[tuple[float, Output]]:
        """Every line until its stdout ends. Raises EngineFailed on silence."""
        return list(self._outputs(self._silence_s))

    def waits(self) -> bool:
        """Whether every line that has arrived has been received."""
        return self._lines.empty()

    def close_input(self) -> None:
        """End of its stdin. What it still says can be received, then its stdout ends."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def exit_code(self, wait_s: float = CLOSE_S) -> int:
        """Waits for its end. Raises EngineFailed when it does not come."""
        try:
            return self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            raise EngineFailed(f"the engine did not end within {wait_s:.0f} s") from None

    def log_text(self) -> str:
        """Its log so far."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def close(self) -> None:
        """QUIT, then terminate, then kill; each gets 20 s."""
        assert self._process.stdin is not None and self._process.stdout is not None
        if self._process.poll() is None:
            try:
                if not self._process.stdin.closed:
                    self.send(Quit())
                    self._process.stdin.close()
            except EngineFailed:
                pass  # it went away by itself: nothing to ask
            for end in (None, self._process.terminate, self._process.kill):
                if end is not None:
                    end()
                try:
                    self._process.wait(CLOSE_S)
                    break
                except subprocess.TimeoutExpired:
                    continue
        self._reader.join(CLOSE_S)  # stdout ends with the process
        self._process.stdout.close()
        with contextlib.suppress(BrokenPipeError):  # what it no longer reads
            self._process.stdin.close()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put((time.monotonic(), line))
        self._lines.put((time.monotonic(), None))

    def _outputs(self, silence_s: float) -> Iterator[tuple[float, Output]]:
        while True:
            try:
                arrival, raw = self._lines.get(timeout=silence_s)
            except queue.Empty:
                raise EngineFailed(f"no line from the engine for {silence_s:.0f} s") from None
            if raw is None:
                self._lines.put((arrival, None))  # for whoever asks again
                return
            try:
                line = decode_output(raw)
            except ProtocolError as e:
                raise EngineFailed(f"the engine wrote a line that is not of the protocol: {e}") from None
            if line is not None:
                yield arrival, line

    def _wait_ready(self, ready_s: float) -> int:
        reason = ""
        for _, line in self._outputs(ready_s):
            if isinstance(line, Info):
                self.info.update(line.values)
            elif isinstance(line, Ready):
                return line.max_context
            elif isinstance(line, Err):
                reason = line.text
        raise EngineFailed(f"the engine did not start: {reason or self._death()}")

    def _death(self) -> str:
        code = self._process.wait(CLOSE_S)
        self._log.seek(0, 2)
        self._log.seek(max(0, self._log.tell() - LOG_TAIL_BYTES))
        tail = self._log.read().decode(errors="replace").strip()
        return f"the engine ended with code {code}" + (f"; its log ends: {tail}" if tail else "")


def pack_argument(path: Path) -> list[str]:
    """The flags that load a pack without reusing one request's state for the next."""
    return ["--serve", "--pack", str(path), "--prompt-cache", "0"]

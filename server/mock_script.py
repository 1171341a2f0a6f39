"""What the scripted engine does: its facts, and an answer for each request.

Script   a JSON object: facts of the engine, and for each request the first reply whose `match` is found in the prompt's
         text. A list `lives` gives a script for each start after the other; the last one repeats
Play     the answer of one request, token by token. It can be left (a STOP) and gone on with when prompt and output
         come again, so a request may move between the solo path and slots as with a real engine
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import msgspec

from strata.protocol.lines import Finish


class Step(msgspec.Struct, frozen=True, omit_defaults=True):
    """One thing to do; exactly one field is set."""

    text: str | None = None  # tokens of this text; \\1 .. \\9 are the groups of `match`
    tokens: list[int] | None = None
    delay_ms: float | None = None
    gate: str | None = None  # go on when this file exists
    raw: str | None = None  # a line as it is
    log: str | None = None  # a line for stderr
    err: str | None = None  # ERR, which ends the request; in a slot, its end with `error`
    exit: int | None = None  # the process ends with this code
    kill: bool | None = None  # the process ends by SIGKILL
    silent: bool | None = None  # never says anything again


class Reply(msgspec.Struct, frozen=True):
    """What to do with a request whose prompt text contains `match` (a regular expression; the last find counts)."""

    match: str = ""
    before: list[Step] = []  # before RESUME
    reading: list[Step] = []  # after each chunk
    steps: list[Step] = []  # the answer
    reused: int = 0  # 0: what the engine's own state has of the prompt, when it has slots
    finish: Finish = "stop"
    token_ms: float = 0.0
    repeat: bool = False  # the steps again and again, until max_new or STOP
    times: int | None = None  # used for so many requests, then passed over


class Script(msgspec.Struct, frozen=True):
    context: int = 4096
    chunk: int = 32  # prompt tokens per PP
    chunk_ms: float = 0.0  # time that reading a chunk takes
    slots: int = 0  # below 2: one request at a time
    capabilities: tuple[str, ...] = ("stop",)
    info: dict[str, int | float | str] = {}
    start: list[Step] = []  # before READY
    replies: tuple[Reply, ...] = (Reply(steps=[Step(text="This is the scripted engine; no model is loaded.")]),)
    transcript: str | None = None  # file that gets START and every command received
    lives: list[Script] = []


class Words(Protocol):
    """Text to ids and back."""

    @property
    def end_ids(self) -> frozenset[int]: ...
    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...


class EndOfRequest(Exception):
    """The request fails: an ERR with this text, or the end of its slot."""


class Play:
    """`token` raises EndOfRequest where the script has an error."""

    def __init__(self, stage: Stage, reply: Reply, match: re.Match[str] | None) -> None:
        self.reply = reply
        self._tokens = stage.tokens(reply, match)
        self.is_over = False

    def token(self) -> int | None:
        """The next token; None: not yet, or not any more when `is_over`."""
        for token in self._tokens:
            return token
        self.is_over = True
        return None


class Stage:
    """Performs steps. `say` writes a line; `clock` is in seconds."""

    def __init__(self, words: Words | None, say: Callable[[str], None], clock: Callable[[], float]) -> None:
        self._words = words
        self._say = say
        self._clock = clock

    def tokens(self, reply: Reply, match: re.Match[str] | None) -> Iterator[int | None]:
        """The ids of an answer; None while it has to wait."""
        while True:
            for step in reply.steps:
                for _ in self.perform([step]):
                    yield None
                for token in self._ids(step, match):
                    yield token
                    yield from self.wait(reply.token_ms)
            if not reply.repeat:
                break
        if reply.finish == "stop" and self._words is not None:
            yield min(self._words.end_ids)

    def perform(self, steps: Sequence[Step]) -> Iterator[None]:
        """Everything but tokens; yields while it has to wait."""
        for step in steps:
            if step.delay_ms is not None:
                yield from self.wait(step.delay_ms)
            while step.gate is not None and not os.path.exists(step.gate):
                yield None
            if step.raw is not None:
                self._say(step.raw)
            if step.log is not None:
                sys.stderr.write(f"{step.log}\n")
                sys.stderr.flush()
            if step.err is not None:
                raise EndOfRequest(step.err)
            if step.kill:
                os.kill(os.getpid(), signal.SIGKILL)
            if step.exit is not None:
                sys.stderr.flush()
                os._exit(step.exit)
            if step.silent:
                threading.Event().wait()

    def wait(self, ms: float) -> Iterator[None]:
        until = self._clock() + ms / 1000
        while self._clock() < until:
            yield None

    def _ids(self, step: Step, match: re.Match[str] | None) -> Sequence[int]:
        if step.tokens is not None:
            return step.tokens
        if step.text is None:
            return []
        if self._words is None:
            raise SystemExit("mock engine: a text in the script needs --tokenizer")
        text = step.text if match is None else re.sub(r"\\([0-9])", lambda group: match[int(group[1])] or "", step.text)
        return self._words.encode(text)


class Cast:
    """Which reply a prompt gets. A request that was interrupted goes on where it was."""

    _KEPT = 256

    def __init__(self, script: Script, stage: Stage, words: Words | None) -> None:
        self._script = script
        self._stage = stage
        self._words = words
        self._used: dict[int, int] = {}
        self._left: dict[bytes, Play] = {}

    def play(self, ids: array[int]) -> Play:
        left = self._left.pop(ids.tobytes(), None)
        if left is not None:
            return left
        text = "" if self._words is None else self._words.decode(ids)
        for i, reply in enumerate(self._script.replies):
            found = list(re.finditer(reply.match, text)) if reply.match else []
            usable = reply.times is None or self._used.get(i, 0) < reply.times
            if usable and (found or not reply.match):
                self._used[i] = self._used.get(i, 0) + 1
                return Play(self._stage, reply, found[-1] if found else None)
        return Play(self._stage, Reply(), None)

    def leave(self, ids: array[int], play: Play) -> None:
        """`play` goes on when a request begins with exactly `ids`."""
        self._left[ids.tobytes()] = play
        while len(self._left) > self._KEPT:
            del self._left[next(iter(self._left))]

"""stdin lines -> commands, events -> stdout lines. The only place that writes the protocol.

Loop     a line is taken, decoded and answered to its end before the next one; a STOP acts between two units of work
Ends     QUIT, end of input, or a signal while nothing runs: 0. A failure, or a signal while a request runs: a last line
         `ERR fatal: ...` and 1. A reader that went away (EPIPE): 1
Source   docs/protocol.md
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from strata.engine.inbox import End, Inbox, Leave, Line
from strata.engine.log import log
from strata.engine.schedule.live import SoloPath
from strata.engine.schedule.solo import Request
from strata.kernels.ops import Sampling
from strata.protocol.lines import (
    MAX_LINE_BYTES,
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
    ProtocolError,
    Quit,
    Ready,
    Restore,
    SamplingKeys,
    Save,
    SessionError,
    Stop,
    VramCommand,
    decode_command,
    encode,
)

SPARE_TOKENS = 8
"""What the context rule keeps free behind prompt and new tokens."""
SAMPLING_RANGES = {
    "temperature": (1e-100, 1e100),
    "penalty_repeat": (1e-6, 1e6),
    "penalty_freq": (-1e6, 1e6),
    "penalty_present": (-1e6, 1e6),
}
"""What a sampled request may ask for: inside, every score stays finite for any float32 logit."""


class Leaving(Exception):
    """A signal asked the process to leave while a request was running."""


class Writer:
    """Protocol lines to a file descriptor, each out at once. Raises BrokenPipeError when nobody reads any more."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __call__(self, events: Iterable[Output]) -> None:
        data = "".join(f"{encode(event)}\n" for event in events).encode()
        while data:
            data = data[os.write(self._fd, data) :]


@dataclass(slots=True)
class Totals:
    """What `--stats` reports at the end. Times in milliseconds."""

    requests: int = 0
    refused: int = 0
    prompt_read: int = 0
    prompt_ms: float = 0.0
    generated: int = 0
    decode_ms: float = 0.0

    def add(self, done: Done) -> None:
        self.requests += 1
        self.prompt_read += done.prompt_read
        self.prompt_ms += done.prompt_ms
        self.generated += done.generated
        self.decode_ms += done.decode_ms

    def __str__(self) -> str:
        return (
            f"{self.requests} requests, {self.refused} refused lines; {self.prompt_read} prompt tokens read in "
            f"{self.prompt_ms:.0f} ms, {self.generated} tokens generated in {self.decode_ms:.0f} ms"
        )


def gen_refusal(gen: Gen, max_context: int, vocab: int) -> str | None:
    """Why a GEN cannot be served, or None."""
    n = len(gen.ids)
    if n + gen.max_new + SPARE_TOKENS > max_context:
        return (
            f"prompt ({n} tokens) + max_new ({gen.max_new}) exceeds the context ({max_context}); "
            f"{SPARE_TOKENS} tokens stay free: shorten one of them or start with a larger --max-context"
        )
    largest = max(gen.ids)
    if largest >= vocab:
        return f"a token id is outside the vocabulary: {largest}, the model has {vocab}"
    return None if gen.keys.is_greedy else _sampling_refusal(gen.keys)


def _sampling_refusal(keys: SamplingKeys) -> str | None:
    for name, (low, high) in SAMPLING_RANGES.items():
        value: float = getattr(keys, name)
        if not low <= value <= high:
            return f"bad request: {name}: wants a number from {low:g} to {high:g}, got {value:g}"
    return None


def request_of(gen: Gen) -> Request:
    """The request of a GEN line. Seed 0 takes the clock."""
    keys = gen.keys
    return Request(
        prompt=np.array(gen.ids, np.int32),
        max_new=gen.max_new,
        sampling=sampling_of(keys, keys.seed or time.time_ns()),
        penalty_last_n=keys.penalty_last_n,
        keep=keys.ckpt,
    )


def sampling_of(keys: SamplingKeys, seed: int) -> Sampling:
    return Sampling(
        temperature=keys.temperature,
        top_k=keys.top_k,
        top_p=keys.top_p,
        min_p=keys.min_p,
        penalty_repeat=keys.penalty_repeat,
        penalty_freq=keys.penalty_freq,
        penalty_present=keys.penalty_present,
        seed=seed,
    )


class Server:
    """Answers the lines of an inbox until it is time to leave.

    max_context   tokens a request may need, as in READY
    vocab         ids are below it
    """

    def __init__(self, path: SoloPath, inbox: Inbox, write: Writer, *, max_context: int, vocab: int) -> None:
        self.totals = Totals()
        self._path = path
        self._inbox = inbox
        self._write = write
        self._max_context = max_context
        self._vocab = vocab

    def greet(self, info: Info) -> None:
        self._write([info, Ready(self._max_context, ("stop",))])

    def run(self) -> None:
        """Until QUIT, end of input or a signal. Raises Leaving, BrokenPipeError, and whatever the model raises."""
        while True:
            entry = self._inbox.take()
            if isinstance(entry, End):
                if entry.error:
                    log(entry.error)
                return
            if isinstance(entry, Leave):
                log(f"leaving: {entry.signal}")
                return
            if not isinstance(entry, Line):
                self._refuse(f"bad request: the line is longer than {MAX_LINE_BYTES} bytes")
                continue
            try:
                command = decode_command(entry.text)
            except ProtocolError as error:
                self._refuse(str(error))
                continue
            if isinstance(command, Quit):
                return
            if isinstance(command, Gen):
                self._generate(entry.number, command)
            elif command is not None:
                self._side(command)

    def _generate(self, number: int, gen: Gen) -> None:
        reason = gen_refusal(gen, self._max_context, self._vocab)
        if reason is not None:
            self._refuse(reason)
            return
        if gen.keys.pin is not None:
            log("pin ignored: there are no checkpoints here")
        self._inbox.begin(number)
        self._write(self._path.start(request_of(gen)))
        while self._path.busy:
            if self._inbox.leaving:
                raise Leaving(f"the engine was told to leave ({self._inbox.leaving}) while a request ran")
            events = self._path.step(self._inbox.stop_asked())
            for event in events:
                if isinstance(event, Done):
                    self.totals.add(event)
                    self._inbox.end()  # before DONE is out: a STOP that answers it is for the next request
            self._write(events)

    def _side(self, command: Command) -> None:
        """The commands of parts that this engine does not have, and the ones that only act on a running request."""
        if isinstance(command, (GenI, BGenI)):
            self._refuse("this engine was started without --vision")
        elif isinstance(command, BGen):
            self._refuse("BGEN: no such free slot (--batch 0) or a bad max_new")
        elif isinstance(command, VramCommand):
            self._refuse("VRAM needs --vram-elastic, which this engine does not have")
        elif isinstance(command, (Save, Restore)):
            self._write([SessionError("invalid", False, f"{command.word}: this engine has no session files")])
        elif isinstance(command, BYield):
            log(f"BYIELD {command.slot} dropped: there are no slots")
        elif not isinstance(command, (BStop, Stop)):
            raise TypeError(f"{type(command).__name__} has no answer")

    def _refuse(self, reason: str) -> None:
        self.totals.refused += 1
        self._write([Err(reason)])

"""The solo path: one request at a time, and the session that it leaves for the next one.

Reuse    the state is recurrent and cannot be cut back, so a session continues only when all it holds is the beginning
         of the next prompt and at least one prompt token is left to read
Effects  go through a `Runner`; what is done, and when, is decided in `solo.py`
"""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Protocol

import numpy as np

from strata.engine.schedule.solo import Decode, Read, Request, Solo
from strata.kernels.ops import F32, I32, Sampling
from strata.protocol.lines import Output

_NOTHING = np.empty(0, np.int32)


class Runner(Protocol):
    """The model with the state of one sequence."""

    def reset(self) -> None:
        """Forget the sequence."""

    def feed(self, begin: int, tokens: I32, want_logits: bool) -> F32 | None:
        """Compute `tokens` at positions begin.. of the sequence. -> logits (vocab,) of the last one when wanted."""

    def sample(self, logits: F32, recent: I32, how: Sampling, position: int) -> int:
        """The token for `position`."""

    def check(self, n_held: int) -> None:
        """Raise when the books of the state do not balance, or it does not hold `n_held` tokens."""


def now_ms() -> float:
    return time.perf_counter() * 1e3


class SoloPath:
    """Runs a request unit by unit. `start`, then `step` while `busy`.

    chunk    most tokens of one prompt chunk
    reuse    a session may be continued
    verify   the books are checked after every unit
    """

    def __init__(
        self,
        runner: Runner,
        *,
        chunk: int,
        reuse: bool,
        end_ids: Collection[int],
        routed: int = 0,
        in_vram: bool = False,
        verify: bool = False,
    ) -> None:
        self._runner = runner
        self._chunk = chunk
        self._reuse = reuse
        self._end_ids = end_ids
        self._routed = routed
        self._in_vram = in_vram
        self._verify = verify
        self._solo: Solo | None = None
        self._session: I32 = _NOTHING

    @property
    def busy(self) -> bool:
        return self._solo is not None

    @property
    def n_session(self) -> int:
        """Tokens that the live session holds."""
        return len(self._session)

    def reusable(self, prompt: I32) -> int:
        """Leading tokens of the prompt that need not be read."""
        n = len(self._session)
        return n if 0 < n < len(prompt) and np.array_equal(self._session, prompt[:n]) else 0

    def start(self, request: Request) -> list[Output]:
        """Take up a request; the session before it is continued or forgotten."""
        reused = self.reusable(request.prompt) if self._reuse else 0
        if not reused:
            self._runner.reset()
        self._session = _NOTHING
        self._solo = Solo(
            request,
            reused=reused,
            chunk=self._chunk,
            end_ids=self._end_ids,
            clock=now_ms,
            routed=self._routed,
            in_vram=self._in_vram,
        )
        return [self._solo.begin()]

    def step(self, stop: bool) -> list[Output]:
        """One unit of work, or the end of the request."""
        solo = self._solo
        if solo is None:
            raise RuntimeError("a step without a request")
        unit = solo.next_unit(stop)
        events: list[Output] = []
        if isinstance(unit, Read):
            logits = self._runner.feed(unit.begin, solo.tokens[unit.begin : unit.end], unit.last)
            events += solo.read(unit)
        elif isinstance(unit, Decode):
            logits = self._runner.feed(unit.position, solo.tokens[unit.position :], True)
            solo.fed()
        else:
            logits = None
        if logits is not None:
            token = self._runner.sample(logits, solo.recent, solo.request.sampling, solo.n_tokens)
            events.append(solo.decided(token))
        if self._verify:
            self._runner.check(solo.n_held)
        if solo.finish is not None:
            events.append(solo.done())
            self._close(solo)
        return events

    def _close(self, solo: Solo) -> None:
        """Keep the session of a request whose prompt was read to its end, if it may be continued."""
        self._solo = None
        if self._reuse and solo.request.keep and not solo.is_reading:
            self._session = solo.held.copy()

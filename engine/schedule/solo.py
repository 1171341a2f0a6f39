"""One request on the solo path as a state machine: READING, DECODING, over. Decisions and events only.

Use      the owner asks `next_unit(stop)` for a unit of work, does it, and tells the result with `read` or `decoded`.
         Commands are looked at between units, so a STOP waits for one chunk or one token
Events   protocol lines in the order RESUME, PP.., REUSED, T.., DONE
Tokens   `tokens[:n]` is the prompt, what follows is output. A window feeds the last token and gives the next; so the
         state holds prompt and output but the last token, also when the request is over
Units    positions and counts in tokens, times in milliseconds of the given clock
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from strata.engine.draft.counts import DraftCounts
from strata.engine.schedule.ports import Picked
from strata.engine.schedule.short import NO_SHORT, ShortReads
from strata.kernels.ops import I32, Sampling
from strata.protocol.lines import ChainCounts, Done, Finish, Output, Progress, Resume, Reused, Token, rate


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """What a GEN or BGEN line asks for, checked. prompt int32 (n,) with n >= 1; max_new >= 1.

    penalty_last_n   tokens of prompt and output that the penalties look back over
    keep             afterwards the session may be continued
    pin              the first `pin` tokens are a prefix that other requests share; None: there is none
    spec_min_p       its own bar for proposals of the draft layer; None: the engine's
    """

    prompt: I32
    max_new: int
    sampling: Sampling
    penalty_last_n: int = 0
    keep: bool = True
    pin: int | None = None
    spec_min_p: float | None = None


@dataclass(frozen=True, slots=True)
class Read:
    """Read prompt tokens [begin, end); with `last` the first new token is sampled from the last row."""

    begin: int
    end: int
    last: bool


@dataclass(frozen=True, slots=True)
class Decode:
    """Feed the newest token at `position`; sample the next."""

    position: int


class Solo:
    """A request from its acceptance to its DONE.

    reused    leading prompt tokens whose state is there already, at most n - 1
    chunk     most tokens of one Read
    end_ids   tokens that end the answer
    clock     milliseconds, monotonic · begun_ms: of it, when the read began; None: now
    cuts      positions in the prompt where a Read must end, ascending
    short     pieces between them that are read a few tokens at a time
    routed    expert entries that one token routes through the whole model (for the counters of DONE)
    in_vram   the experts lie in a card's memory, else in RAM · hits: how many of those routed so far do, where some do;
              the card reads the others over PCIe, but for those that the processor computes
    """

    def __init__(
        self,
        request: Request,
        *,
        reused: int,
        chunk: int,
        end_ids: Collection[int],
        clock: Callable[[], float],
        begun_ms: float | None = None,
        cuts: Sequence[int] = (),
        short: ShortReads = NO_SHORT,
        routed: int = 0,
        in_vram: bool = False,
        hits: Callable[[], Picked] | None = None,
    ) -> None:
        self.request = request
        self.reused = reused
        self.n_prompt = len(request.prompt)
        self.n_held = reused
        """Leading tokens whose state has been computed."""
        self.n_tokens = self.n_prompt
        self.finish: Finish | None = None
        self._tokens = np.empty(self.n_prompt + request.max_new, np.int32)
        self._tokens[: self.n_prompt] = request.prompt
        self._chunk = chunk
        self._cuts = tuple(cuts)
        self._short = short
        self._end_ids = end_ids
        self._clock = clock
        self._routed = routed
        self._in_vram = in_vram
        self._hits = hits
        self._hits_before = Picked() if hits is None else hits()
        self._begun_ms = self._read_ms = self._last_ms = clock() if begun_ms is None else begun_ms

    @property
    def tokens(self) -> I32:
        """Prompt and output so far."""
        return self._tokens[: self.n_tokens]

    @property
    def held(self) -> I32:
        """The tokens whose state has been computed."""
        return self._tokens[: self.n_held]

    @property
    def n_generated(self) -> int:
        return self.n_tokens - self.n_prompt

    @property
    def is_reading(self) -> bool:
        return self.n_held < self.n_prompt

    @property
    def n_left(self) -> int:
        """Tokens that may still come."""
        return self.request.max_new - self.n_generated

    @property
    def recent(self) -> I32:
        """The tokens the penalties look at."""
        return self._tokens[max(0, self.n_tokens - self.request.penalty_last_n) : self.n_tokens]

    def begin(self) -> Output:
        return Resume(self.reused)

    def cancel(self) -> None:
        """The request ends here, unless it has ended already."""
        self.finish = self.finish or "cancel"

    def next_unit(self, stop: bool, most: int | None = None) -> Read | Decode | None:
        """What is to be done next; None when the request is over.

        stop: a STOP has come for it · most: a Read takes at most so many tokens this time
        """
        if stop:
            self.cancel()
        if self.finish is not None:
            return None
        if self.is_reading:
            edge = next((cut for cut in self._cuts if cut > self.n_held), self.n_prompt)
            end = self.n_held + self._short.unit(edge - self.n_held, min(self._chunk, most or self._chunk))
            return Read(self.n_held, end, end == self.n_prompt)
        return Decode(self.n_tokens - 1)

    def read(self, unit: Read) -> list[Output]:
        """The tokens of `unit` are in the state. Call before sampling: the read ends here."""
        self.n_held = unit.end
        self._read_ms = self._last_ms = self._clock()
        ms = self._read_ms - self._begun_ms
        events: list[Output] = [Progress(self.n_held, self.n_prompt, ms, rate(self.n_held - self.reused, ms))]
        if unit.last:
            events.append(Reused(self.reused))
        return events

    def fed(self) -> None:
        """The token of a Decode is in the state."""
        self.n_held = self.n_tokens

    def decided(self, token: int) -> Output:
        """The next token has been sampled."""
        self._tokens[self.n_tokens] = token
        self.n_tokens += 1
        self._last_ms = self._clock()
        if token in self._end_ids:
            self.finish = "stop"
        elif self.n_generated >= self.request.max_new:
            self.finish = "length"
        return Token(token)

    def done(self, drafts: DraftCounts | None = None) -> Done:
        """The closing event. Of the experts that decode windows routed to, how many lay in VRAM and how many in RAM.

        drafts: what became of them; None where windows have none
        """
        if self.finish is None:
            raise RuntimeError("a request that is not over has no DONE")
        counts = drafts or DraftCounts()
        routed = self._routed * (max(0, self.n_generated - 1) + counts.offered - counts.accepted)
        found, before = Picked(routed if self._in_vram else 0, 0), self._hits_before
        if self._hits is not None:
            now = self._hits()
            found = Picked(*(n - was for n, was in zip(now, before, strict=True)))
        return Done(
            generated=self.n_generated,
            prompt=self.n_prompt,
            prompt_ms=self._read_ms - self._begun_ms,
            decode_ms=self._last_ms - self._read_ms,
            finish=self.finish,
            drafts_accepted=counts.accepted,
            drafts_offered=counts.offered,
            reused=self.reused,
            hits=found.hits,
            lookups=routed,
            ram_blobs=max(0, routed - found.hits - found.filed),
            file_blobs=found.filed,
            file_mb=found.file_bytes / 1e6,
            prompt_read=min(self.n_held, self.n_prompt) - self.reused,
            offloaded=max(0, routed - found.hits - found.helped) if self._in_vram else 0,
            chain=None if drafts is None else ChainCounts(0, 0, *drafts.of_text),
        )

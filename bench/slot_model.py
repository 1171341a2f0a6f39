"""What a client knows of an engine with slots, and a check of every line that the engine writes.

Pure: commands go in as they are sent (`send`, `stop`, ..), lines as they arrive (`received`); nothing is read or waited
for. A line that the protocol does not allow at its place raises ProtocolBroken, which says why. A line may answer what
was sent long ago, so what only *may* have happened yet (a STOP under way) allows and never demands.

Source   docs/protocol.md: requests, admissions, slots, giving way, what may interleave
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from strata.protocol.lines import (
    Admitted,
    Done,
    Err,
    Info,
    Output,
    Progress,
    Resume,
    Reused,
    SamplingKeys,
    SlotDone,
    SlotToken,
    Token,
    Yielded,
)

SPARE_TOKENS = 8
State = Literal["waiting", "reading", "decoding", "over"]


class ProtocolBroken(Exception):
    """The engine wrote a line that its protocol does not allow here."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine said of itself, and what it was started with.

    keeps     an ended slot and the live session keep their conversation (prompt cache above 0)
    end_ids   None: not known, an answer may end with any token
    """

    context: int
    vocab: int
    slots: int
    chunk: int
    keeps: bool = True
    short_read: int = 0
    end_ids: Collection[int] | None = None


@dataclass(eq=False)
class Request:
    """A request as its client sees it. `slot` None: a solo request. Times in seconds on the caller's clock."""

    ids: tuple[int, ...]
    max_new: int
    keys: SamplingKeys
    slot: int | None
    sent_s: float = 0.0
    wanted: Sequence[int] | None = None
    """The tokens of the whole answer, when known: each token is compared as it comes."""
    state: State = "waiting"
    tokens: list[int] = field(default_factory=list)
    token_s: list[float] = field(default_factory=list)
    progress: list[Progress] = field(default_factory=list)
    reused: int = -1
    read_from_s: float = 0.0
    gave_way: Yielded | None = None
    done: Done | None = None
    done_s: float = 0.0
    slot_done: SlotDone | None = None
    over_s: float = 0.0
    refused: str = ""
    stop_sent: bool = False
    slot_stop_sent: bool = False
    yields_sent: set[int] = field(default_factory=set)
    slot_was_taken: bool = False

    @property
    def finish(self) -> str:
        """How it ended, "" while it runs or when it was refused."""
        end = self.slot_done or self.done
        return end.finish if end is not None and self.state == "over" else ""

    @property
    def held(self) -> tuple[int, ...]:
        """What the state holds that it leaves behind: all but the last token."""
        return (*self.ids, *self.tokens)[:-1]

    @property
    def position(self) -> int:
        """Prompt tokens in the state."""
        return self.progress[-1].position if self.progress else self.reused

    def __str__(self) -> str:
        where = "solo" if self.slot is None else f"slot {self.slot}"
        return f"{where} request of {len(self.ids)} + {self.max_new} tokens, {self.state} at {len(self.tokens)}"


class SideLine(msgspec.Struct, frozen=True):
    """A line that is no request and is answered by one of these."""

    kinds: tuple[type, ...]


class SlotModel:
    """The engine as its client knows it.

    reading  the request whose lines carry no slot · slots: who decodes in each · queue: sent and not yet answered
    live, held  what the solo path and each idle slot are known to hold; None: not known
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.queue: deque[Request | SideLine] = deque()
        self.reading: Request | None = None
        self.slots: list[Request | None] = [None] * limits.slots
        self.live: tuple[int, ...] | None = None
        self.held: list[tuple[int, ...] | None] = [None] * limits.slots
        self._due: type | None = None  # the kind that the read's next line must be
        self._may_inform = False  # the line before ended a request: INFO may tell what changed
        self._handlers: dict[type, Callable[..., None]] = {
            Resume: self._resume,
            Progress: self._progress,
            Reused: self._reused,
            Token: self._token,
            Yielded: self._yielded,
            Done: self._done,
            Admitted: self._admitted,
            SlotToken: self._slot_token,
            SlotDone: self._slot_done,
            Err: self._err,
        }

    @property
    def at_rest(self) -> bool:
        """Nothing is open: no line is due any more."""
        return not self.queue and self.reading is None and not any(self.slots)

    @property
    def open(self) -> list[Request]:
        """Every request that is not over."""
        queued = [entry for entry in self.queue if isinstance(entry, Request)]
        return [r for r in (self.reading, *self.slots, *queued) if r is not None]

    # what is sent

    def send(self, request: Request) -> Request:
        """A GEN or BGEN line has been written."""
        if request.slot is not None:
            request.slot_was_taken = any(r.slot == request.slot for r in self.open)
        self.queue.append(request)
        return request

    def send_other(self, *kinds: type) -> None:
        """A line that is no request has been written; one line of these kinds answers it."""
        self.queue.append(SideLine(kinds))

    def stop(self) -> None:
        for r in self.open:
            if r not in self.slots:
                r.stop_sent = True

    def slot_stop(self, slot: int) -> None:
        for r in self.open:
            if r.slot == slot:
                r.slot_stop_sent = True

    def give_way(self, slot: int) -> None:
        for r in self.open:
            if r not in self.slots:
                r.yields_sent.add(slot)

    def refusal(self, r: Request) -> str:
        """Why the engine must refuse it whatever happens before its turn, or ""."""
        if len(r.ids) + r.max_new + SPARE_TOKENS > self.limits.context:
            return "the context is too short"
        if not all(0 <= token < self.limits.vocab for token in r.ids):
            return "a token is outside the vocabulary"
        if r.slot is not None and not 0 <= r.slot < self.limits.slots:
            return "there is no such slot"
        return ""

    def least_reuse(self, ids: Sequence[int]) -> int:
        """Leading tokens that the engine is known to hold and must not read again."""
        if not self.limits.keeps:
            return 0
        known = [h for h in (self.live, *self.held) if h is not None]
        return max((len(h) for h in known if len(h) < len(ids) and tuple(ids[: len(h)]) == h), default=0)

    # what arrives

    def received(self, line: Output, now_s: float = 0.0) -> None:
        """The next line. Raises ProtocolBroken."""
        if isinstance(line, Info):
            self._informed(line)
            return
        handler = self._handlers.get(type(line))
        self._may_inform = isinstance(line, (Done, Admitted, SlotDone))
        if handler is None:
            self._side(line)
            return
        if self._due is not None and not isinstance(line, (self._due, SlotToken, SlotDone)):
            raise ProtocolBroken(f"{line.line()}: {self._due.__name__} is due first")
        handler(line, now_s)

    def _informed(self, line: Info) -> None:
        if not self._may_inform or self._due is not None:
            raise ProtocolBroken(f"{line.line()}: no request has just ended")
        self._may_inform = False

    def _side(self, line: Output) -> None:
        entry = self.queue[0] if self.queue else None
        if self.reading is not None or not isinstance(entry, SideLine) or not isinstance(line, entry.kinds):
            raise ProtocolBroken(f"{line.line()}: nothing has asked for it")
        self.queue.popleft()

    def _err(self, line: Err, now_s: float) -> None:
        entry = self.queue[0] if self.queue else None
        if line.is_fatal or self.reading is not None or entry is None:
            raise ProtocolBroken(f"{line.line()}: no line was to be refused")
        if isinstance(entry, Request):
            if not self.refusal(entry) and not entry.slot_was_taken:
                raise ProtocolBroken(f"{line.line()}: the {entry} was to be served")
            entry.refused, entry.state, entry.over_s = line.text, "over", now_s
        elif Err not in entry.kinds:
            raise ProtocolBroken(f"{line.line()}: {entry} was to be answered")
        self.queue.popleft()

    def _resume(self, line: Resume, now_s: float) -> None:
        entry = self.queue[0] if self.queue else None
        if self.reading is not None or not isinstance(entry, Request):
            raise ProtocolBroken(f"{line.line()}: no request was to begin")
        if reason := self.refusal(entry):
            raise ProtocolBroken(f"{line.line()}: the {entry} was to be refused, {reason}")
        if entry.slot is not None and self.slots[entry.slot] is not None:
            raise ProtocolBroken(f"{line.line()}: slot {entry.slot} decodes")
        least = self.least_reuse(entry.ids)
        if not least <= line.reused < len(entry.ids):
            raise ProtocolBroken(f"{line.line()}: wants {least} to {len(entry.ids) - 1} reused tokens")
        self.queue.popleft()
        entry.state, entry.reused, entry.read_from_s = "reading", line.reused, now_s
        self.reading, self.live = entry, None

    def _progress(self, line: Progress, now_s: float) -> None:
        r = self._in("reading", line)
        step = line.position - r.position
        if line.prompt_tokens != len(r.ids) or not 0 < step <= self.limits.chunk or line.position > len(r.ids):
            raise ProtocolBroken(f"{line.line()}: after {r.position} of {len(r.ids)}, chunks of {self.limits.chunk}")
        r.progress.append(line)

    def _reused(self, line: Reused, now_s: float) -> None:
        r = self._in("reading", line)
        if line.reused != r.reused or r.position != len(r.ids):
            raise ProtocolBroken(f"{line.line()}: RESUME said {r.reused}, {r.position} of {len(r.ids)} tokens are read")
        r.state = "decoding"

    def _token(self, line: Token, now_s: float) -> None:
        r = self._in("decoding", line)
        if r.slot is not None and r.tokens:
            raise ProtocolBroken(f"{line.line()}: an admission has one token")
        self._take(r, line.id, line, now_s)

    def _yielded(self, line: Yielded, now_s: float) -> None:
        r = self._in("reading", line)
        taken = line.slot >= self.limits.slots or self.slots[line.slot] is not None
        if line.slot not in r.yields_sent or taken or r.slot not in (None, line.slot) or not self.limits.keeps:
            raise ProtocolBroken(f"{line.line()}: the {r} was not to give way to slot {line.slot}")
        left = len(r.ids) - r.position
        if line.tokens != r.position or left <= max(self.limits.chunk, self.limits.short_read):
            raise ProtocolBroken(f"{line.line()}: {r.position} tokens were read, {left} are left")
        r.gave_way, self._due = line, Done
        self.held[line.slot] = r.ids[: line.tokens]

    def _done(self, line: Done, now_s: float) -> None:
        r = self.reading
        if r is None:
            raise ProtocolBroken(f"{line.line()}: no request is open")
        whole = 1 if r.slot is not None else r.max_new
        self._check_end(r, line, r.stop_sent or r.gave_way is not None, whole)
        if (line.prompt, line.reused, line.prompt_read) != (len(r.ids), r.reused, r.position - r.reused):
            raise ProtocolBroken(f"{line.line()}: {len(r.ids)} tokens, {r.reused} reused, read to {r.position}")
        r.done, r.done_s = line, now_s
        if r.slot is not None:
            self._due = Admitted
            return
        self._due = None
        self._over(r, now_s)

    def _admitted(self, line: Admitted, now_s: float) -> None:
        r = self.reading
        if r is None or r.done is None or r.slot != line.slot:
            raise ProtocolBroken(f"{line.line()}: no admission to this slot has had its DONE")
        if line.goes_on != (r.done.finish == "length" and r.max_new > 1):
            raise ProtocolBroken(f"{line.line()}: after {r.done.line()} with max_new {r.max_new}")
        self._due = None
        if line.goes_on:
            self.reading, self.slots[line.slot], self.held[line.slot] = None, r, None
            return
        if r.gave_way is None:
            self.held[line.slot] = None
        self._over(r, now_s)

    def _slot_token(self, line: SlotToken, now_s: float) -> None:
        if self.reading is not None and self.reading.slot is None and self.reading.state == "decoding":
            raise ProtocolBroken(f"{line.line()}: slots stand still while a solo request decodes")
        self._take(self._decoding_in(line.slot, line), line.id, line, now_s)

    def _slot_done(self, line: SlotDone, now_s: float) -> None:
        r = self._decoding_in(line.slot, line)
        self._check_end(r, line, r.slot_stop_sent, r.max_new)
        r.slot_done, r.state, r.over_s = line, "over", now_s
        self.slots[line.slot] = None
        self.held[line.slot] = r.held if r.keys.ckpt else None

    # what both paths share

    def _in(self, state: State, line: Output) -> Request:
        r = self.reading
        if r is None or r.state != state or r.done is not None:
            raise ProtocolBroken(f"{line.line()}: no request is {state}; open: {r}")
        return r

    def _decoding_in(self, slot: int, line: Output) -> Request:
        r = self.slots[slot] if slot < self.limits.slots else None
        if r is None:
            raise ProtocolBroken(f"{line.line()}: slot {slot} does not decode")
        return r

    def _take(self, r: Request, token: int, line: Output, now_s: float) -> None:
        n = len(r.tokens)
        if n >= r.max_new or (n and self._is_end(r.tokens[-1])):
            raise ProtocolBroken(f"{line.line()}: the {r} had its last token")
        if r.wanted is not None and (n >= len(r.wanted) or r.wanted[n] != token):
            raise ProtocolBroken(f"{line.line()}: token {n} of the {r} was to be {[*r.wanted][n : n + 1]}")
        r.tokens.append(token)
        r.token_s.append(now_s)

    def _is_end(self, token: int) -> bool:
        return self.limits.end_ids is not None and token in self.limits.end_ids

    def _check_end(self, r: Request, line: Done | SlotDone, may_cancel: bool, whole: int) -> None:
        n = len(r.tokens)
        last_is_end = n > 0 and (self.limits.end_ids is None or r.tokens[-1] in self.limits.end_ids)
        allowed = {"stop": last_is_end, "length": n == whole, "cancel": may_cancel}.get(line.finish, False)
        if line.generated != n or not allowed:
            raise ProtocolBroken(f"{line.line()}: the {r} has {n} tokens of {whole}, a cancel was sent: {may_cancel}")

    def _over(self, r: Request, now_s: float) -> None:
        """The read is over and nothing of it goes on."""
        r.state, r.over_s, self.reading = "over", now_s, None
        if r.tokens and r.keys.ckpt:
            self.live = r.held

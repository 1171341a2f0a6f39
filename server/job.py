"""One request as the scheduler sees it, over all its legs.

A leg is one command to the engine, from its line to its DONE, and the stay in a slot that may follow. A request that
moves between the solo path and a slot, or that gives way while its prompt is read, has several; to its client it is
one: tokens once and in order, figures summed, `reused` of the first leg.

Units    token ids and counts in tokens, times in seconds of the scheduler's clock, `Done` in milliseconds
"""

from __future__ import annotations

import enum
from array import array
from collections import deque
from dataclasses import dataclass, field

import msgspec

from strata.protocol.lines import ChainCounts, Done, Finish, Progress, SamplingKeys, SlotDone

_RATE_WINDOW_S, _RATE_LEAST_S = 2.0, 0.25
_TIMES_KEPT = 1024


class State(enum.StrEnum):
    """Where a request is; docs/scheduling.md has the picture."""

    WAITING = "waiting"  # wants the control lines; with a slot of its own when it gave way
    SOLO = "solo"  # GEN was sent; holds the control lines
    ADMITTING = "admitting"  # BGEN was sent; holds the control lines and a slot
    SLOT = "slot"  # decodes in its slot
    RETURNING = "returning"  # BSTOP was sent to go back to the solo path; holds the control lines and a slot
    ENDED = "ended"


class Phase(enum.StrEnum):
    """What a person sees of it."""

    WAITING = "waiting"
    READING = "reading"
    DECODING = "decoding"
    ENDED = "ended"


@dataclass(slots=True)
class Leg:
    """One GEN or BGEN. `ids` is what was sent: the prompt and the output so far."""

    ids: array[int]
    n_read: int = 0  # tokens of `ids` in the state, reused ones included
    n_reused: int = 0
    n_tokens: int = 0
    has_begun: bool = False  # RESUME has come
    is_read: bool = False  # REUSED has come
    stop_sent: bool = False
    asked: bool = False  # BYIELD was sent
    n_yielded: int | None = None  # tokens of `ids` that wait in the slot; None: it did not give way
    done: Done | None = None  # of an admission whose BADM is still to come


@dataclass(slots=True, eq=False)
class Job:
    """A request. `pictures` is the path of the embeddings of its pictures."""

    prompt: array[int]
    max_new: int
    keys: SamplingKeys
    pictures: str | None = None
    number: int = 0  # in the order of arrival
    arrived: float = 0.0
    sent: float | None = None  # None: never
    state: State = State.WAITING
    slot: int | None = None  # its own: reserved, being admitted to, or decoding in
    leg: Leg = field(default_factory=lambda: Leg(array("i")))
    output: array[int] = field(default_factory=lambda: array("i"))
    total: Done | None = None  # of the legs that are over
    n_reused: int = 0  # of the first leg
    n_shown: int = 0  # prompt tokens that the client was told are read
    n_yields: int = 0
    n_returns: int = 0
    path: list[str] = field(default_factory=list)  # where it ran, for the log
    slot_stopped: bool = False  # BSTOP was sent for this stay
    is_ending: bool = False  # no further token is wanted: those that still come belong to nobody
    gone: bool = False  # nobody listens any more
    token_times: deque[float] = field(default_factory=lambda: deque(maxlen=_TIMES_KEPT))

    @property
    def length(self) -> int:
        """Tokens that its next leg sends."""
        return len(self.prompt) + len(self.output)

    @property
    def n_left(self) -> int:
        return self.max_new - len(self.output)

    @property
    def n_generated(self) -> int:
        return len(self.output)

    @property
    def n_read(self) -> int:
        """Prompt tokens in the state, reused ones included."""
        return len(self.prompt) if self.output else min(self.leg.n_read, len(self.prompt))

    @property
    def is_reading(self) -> bool:
        """A prompt, or a prompt with output, is being read for it."""
        return self.state in (State.SOLO, State.ADMITTING) and not self.leg.is_read

    @property
    def has_run(self) -> bool:
        """It had a leg before: it continues, whatever it waits for."""
        return self.total is not None

    @property
    def phase(self) -> Phase:
        if self.state in (State.WAITING, State.ENDED):
            return Phase(self.state)
        return Phase.READING if self.is_reading and not self.output else Phase.DECODING

    def next_leg(self) -> Leg:
        self.leg = Leg(self.prompt + self.output if self.output else self.prompt)
        return self.leg

    def went(self, where: str) -> None:
        if self.path[-1:] != [where]:
            self.path.append(where)

    def tok_s(self, now: float) -> float:
        """Tokens per second over the last two seconds."""
        recent = [at for at in self.token_times if at >= now - _RATE_WINDOW_S]
        return len(recent) / max(now - recent[0], _RATE_LEAST_S) if recent else 0.0

    def add_done(self, done: Done) -> None:
        """A command is over."""
        self.total = done if self.total is None else _sum(self.total, done)

    def add_stay(self, done: SlotDone) -> None:
        """A stay in a slot is over. Its count has the token of the admission, whose DONE had it too."""
        assert self.total is not None, "a stay follows an admission"
        self.total = msgspec.structs.replace(
            self.total,
            generated=self.total.generated + max(done.generated - 1, 0),
            decode_ms=self.total.decode_ms + done.ms,
            drafts_accepted=self.total.drafts_accepted + (done.drafts_accepted or 0),
            drafts_offered=self.total.drafts_offered + (done.drafts_offered or 0),
        )

    def end(self, finish: Finish) -> Done:
        """The figures of the whole request."""
        total = self.total or Done(0, len(self.prompt), 0.0, 0.0, finish)
        return msgspec.structs.replace(total, finish=finish)

    def shown(self, progress: Progress) -> Progress | None:
        """The progress of the client's own prompt; None for what the client has been told, and for later reads."""
        if self.output or progress.position <= self.n_shown:
            return None
        self.n_shown = progress.position
        earlier_ms = self.total.prompt_ms if self.total else 0.0
        return msgspec.structs.replace(progress, ms=progress.ms + earlier_ms) if earlier_ms else progress

    def forget_legs(self) -> None:
        """The engine that knew them is gone; nothing was generated."""
        self.slot, self.total, self.n_reused, self.n_shown = None, None, 0, 0
        self.leg = Leg(array("i"))


def _sum(total: Done, leg: Done) -> Done:
    """Prompt and reuse are the first leg's, everything else adds up."""
    added = {
        name: getattr(total, name) + getattr(leg, name)
        for name in Done.__struct_fields__
        if name not in ("prompt", "reused", "finish", "chain")
    }
    chain = total.chain or leg.chain
    if total.chain and leg.chain:
        counts = zip(msgspec.structs.astuple(total.chain), msgspec.structs.astuple(leg.chain), strict=True)
        chain = ChainCounts(*(a + b for a, b in counts))
    return msgspec.structs.replace(total, **added, chain=chain)

"""What the schedule works with: a model that computes, the keeper of sessions, and the rules it was given.

Slots    the schedule counts slots as the protocol does, 0 to n - 1; model and keeper count pool slots: 0 is the solo
         path, protocol slot s is pool slot 1 + s
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

from strata.kernels.ops import I32, Sampling

SOLO: Final = 0
"""The pool slot of the solo path."""


def pool_slot(slot: int) -> int:
    """The pool slot of a protocol slot."""
    return 1 + slot


class Row(NamedTuple):
    """A sequence in a window: its newest token is fed, the next one sampled.

    slot     pool slot; it holds all tokens but the newest
    tokens   prompt and output so far, int32 (n,)
    how      the next token is sampled so
    last_n   tokens that the penalties look back over
    """

    slot: int
    tokens: I32
    how: Sampling
    last_n: int

    @property
    def position(self) -> int:
        """Of the newest token."""
        return len(self.tokens) - 1

    @property
    def recent(self) -> I32:
        """The tokens that the penalties look at."""
        return self.tokens[max(0, len(self.tokens) - self.last_n) :]


class Runner(Protocol):
    """The model with the state of all pool slots."""

    def feed(self, slot: int, begin: int, tokens: I32, want_logits: bool) -> Any:
        """Compute `tokens` at positions begin.. of a slot. -> logits of the last one when wanted, for `sample`."""

    def sample(self, logits: Any, recent: I32, how: Sampling, position: int) -> int:
        """The token for `position`, from the logits of the last `feed`."""

    def window(self, rows: Sequence[Row], again: bool) -> list[int]:
        """Feed the newest token of every row and sample the next. again: the same sequences are likely to go on."""

    def check(self, lengths: Sequence[tuple[int, int]]) -> None:
        """Raise unless the state holds so many tokens: (pool slot, tokens) each."""


class Sessions(Protocol):
    """Who holds which tokens: see `engine.state.conversations.Conversations`."""

    def resume(self, prompt: I32) -> int: ...

    def stops(self, prompt: I32, begin: int, pin: int = 0, keep: bool = True) -> tuple[int, ...]: ...

    def reached(self, prompt: I32, position: int) -> None: ...

    def ended(self, tokens: I32 | None) -> None: ...

    def admit(self, slot: int, tokens: I32) -> None: ...

    def give_way(self, slot: int, prompt: I32, q: int) -> None: ...

    def release(self, slot: int, tokens: I32 | None) -> None: ...

    def check(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How the engine schedules.

    chunk         most tokens of a prompt chunk
    beside        the same while slots decode, 0: no other
    n_slots       batch slots, 0: none
    share         of the time of a chunk that decoding slots have before the next
    short_read    a read with at most so many tokens left does not give way
    prompt_cache  states may be continued
    routed        expert entries that one token routes through the whole model · in_vram: they lie in a card's memory
    verify        the books are checked after every unit
    trace         an admission leaves a line of its phases in the log
    """

    chunk: int
    max_context: int
    end_ids: Collection[int]
    beside: int = 0
    n_slots: int = 0
    share: float = 0.5
    short_read: int = 64
    prompt_cache: bool = True
    routed: int = 0
    in_vram: bool = False
    verify: bool = False
    trace: bool = False

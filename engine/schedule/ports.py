"""What the schedule works with: a model that computes, the keeper of sessions, and the rules it was given.

Slots    the schedule counts slots as the protocol does, 0 to n - 1; model and keeper count pool slots: 0 is the solo
         path, protocol slot s is pool slot 1 + s
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from strata.engine.schedule.short import NO_SHORT, ShortReads
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
    drafts   proposals for the tokens after the newest, which a verify window feeds as well
    """

    slot: int
    tokens: I32
    how: Sampling
    last_n: int
    drafts: tuple[int, ...] = ()

    @property
    def position(self) -> int:
        """Of the newest token."""
        return len(self.tokens) - 1

    @property
    def recent(self) -> I32:
        """The tokens that the penalties look at."""
        return self.recent_with(0)

    def recent_with(self, n: int) -> I32:
        """The same behind the first n drafts."""
        tokens = np.concatenate([self.tokens, np.array(self.drafts[:n], np.int32)]) if n else self.tokens
        return tokens[max(0, len(tokens) - self.last_n) :]

    @property
    def fed(self) -> I32:
        """The tokens of a verify window: the newest and the drafts."""
        return np.array([self.tokens[-1], *self.drafts], np.int32)


class Picked(NamedTuple):
    """Of the experts that rows of the solo slot's windows have picked so far: `hits` lay in VRAM, `helped` were
    computed by the processor. Of all windows, once for all rows of one: `filed` experts of `file_bytes` were read from
    the file."""

    hits: int = 0
    helped: int = 0
    filed: int = 0
    file_bytes: int = 0


@dataclass(frozen=True, slots=True)
class DraftRules:
    """spec: rows of a verify window, 1 = no drafts · min_p: bar for the draft layer's second proposal and on · suffix:
    tokens drafted from the text, 0 = none · slots: a draft for each slot"""

    spec: int = 1
    min_p: float = 0.0
    suffix: int = 0
    slots: bool = False


class Round(NamedTuple):
    """What a round gave: tokens, as `Runner.verify`, and how many drafts it had.

    ahead   drafts of the round that has been started behind it; None: none has
    """

    tokens: list[int]
    drafts: int
    ahead: int | None


class Runner(Protocol):
    """The model with the state of all pool slots."""

    def feed(self, slot: int, begin: int, tokens: I32, want_logits: bool) -> Any:
        """Compute `tokens` at positions begin.. of a slot. -> logits of the last one when wanted, for `sample`."""

    def sample(self, logits: Any, recent: I32, how: Sampling, position: int) -> int:
        """The token for `position`, from the logits of the last `feed`."""

    def window(self, rows: Sequence[Row], again: bool, rounds: int = 0) -> list[int]:
        """Feed the newest token of every row and sample the next. again: the same sequences are likely to go on.

        rounds: the one row goes on in a round, behind which so many drafts are wanted; 0: in a window
        """

    def follows(self, slot: int) -> bool:
        """Whether there is a draft layer that follows a pool slot."""

    def propose(self, row: Row, most: int, min_p: float) -> list[int]:
        """At most `most` proposals of the draft layer for the tokens after the newest, as long as the one before is as
        likely as min_p. There are some behind a verify window that the row was in, if the layer follows its slot."""

    def verify(self, rows: Sequence[Row]) -> list[list[int]]:
        """Feed the newest token and the drafts of every row. -> per row the drafts that the model says as well, then
        the token that it says next; the state holds what is before that one. The same tokens as of `window`."""

    def verify_ahead(self, row: Row) -> None:
        """Start what `verify` of this row alone will ask for, if nothing else is wanted before. It leaves no trace."""

    def rounds(self, row: Row) -> int:
        """Drafts of a round of this sequence at most; 0: the runner has no rounds for it."""

    def round(self, row: Row, after: int | None) -> Round:
        """`verify` of one row, which stops behind an end token and finds the drafts of the next one itself.

        The row's drafts count only where this round has not been started yet; the first one behind a prompt may have
        one without, which the runner finds. after: drafts that the next round is to have, if this one leaves so many,
        0: a window without drafts comes next; None: nobody knows
        """

    def check(self, lengths: Sequence[tuple[int, int]]) -> None:
        """Raise unless the state holds so many tokens: (pool slot, tokens) each."""


class Sessions(Protocol):
    """Who holds which tokens: see `engine.state.conversations.Conversations`."""

    def resume(self, prompt: I32) -> int: ...

    def stops(self, prompt: I32, begin: int, pin: int = 0, keep: bool = True, chunk: int = 0) -> tuple[int, ...]: ...

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
    short         pieces of a prompt that are read through windows
    prompt_cache  states may be continued
    routed        expert entries that one token routes through the whole model · in_vram: they lie in a card's memory
    hits          where not all of them do: where windows of the solo slot have found them so far
    drafts        which drafts windows have
    ahead         the device starts the next window of slots while the host still waits for the last one
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
    short: ShortReads = NO_SHORT
    prompt_cache: bool = True
    routed: int = 0
    in_vram: bool = False
    hits: Callable[[], Picked] | None = None
    drafts: DraftRules = DraftRules()
    ahead: bool = True
    verify: bool = False
    trace: bool = False

"""Batch slots as state machines: which of them decode, what each has said, when each is over. Nothing is computed here.

States   a slot decodes a request, or it is free. What a free slot holds (nothing, an ended conversation, part of a
         prompt) is known to `engine.state.conversations`
Tokens   a slot holds the prompt and every generated token but the last; so does what `BDONE` leaves behind
Stop     a BSTOP ends a decoding slot between two windows: it gives no further token
Units    counts in tokens, times in milliseconds of the given clock
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np

from strata.engine.draft.counts import DraftCounts
from strata.engine.draft.worth import Kept
from strata.engine.schedule.solo import Request
from strata.kernels.ops import I32
from strata.protocol.lines import Finish, Output, SlotDone, SlotToken


class Decoding:
    """A request in a slot, from its admission with the first token to its BDONE."""

    def __init__(self, slot: int, request: Request, first: int, now_ms: float) -> None:
        self.slot = slot
        self.request = request
        self.begun_ms = now_ms
        self.n_prompt = len(request.prompt)
        self.n_tokens = self.n_prompt + 1
        self.drafts = DraftCounts()
        self.kept = Kept()
        self._tokens = np.empty(self.n_prompt + request.max_new, np.int32)
        self._tokens[: self.n_prompt] = request.prompt
        self._tokens[self.n_prompt] = first

    @property
    def tokens(self) -> I32:
        """Prompt and output so far."""
        return self._tokens[: self.n_tokens]

    @property
    def held(self) -> I32:
        """The tokens whose state has been computed."""
        return self._tokens[: self.n_tokens - 1]

    @property
    def n_generated(self) -> int:
        """Tokens of the request in this stay, that of the admission included."""
        return self.n_tokens - self.n_prompt

    @property
    def n_left(self) -> int:
        """Tokens that may still come."""
        return self.request.max_new - self.n_generated

    def add(self, token: int) -> None:
        self._tokens[self.n_tokens] = token
        self.n_tokens += 1


def finish_of(token: int, end_ids: Collection[int], n_left: int, next_position: int, max_context: int) -> Finish | None:
    """Why a slot is over after a token, in the order that the protocol names; None: it goes on.

    n_left: tokens that may still come · next_position: where the next token would stand
    """
    if token in end_ids:
        return "stop"
    if n_left <= 0 or next_position + 2 > max_context:
        return "length"
    return None


class Slots:
    """The slots 0 to n - 1.

    end_ids   tokens that end an answer · max_context: tokens of a sequence · clock: milliseconds, monotonic
    drafts    windows may have drafts: they are counted
    """

    def __init__(
        self,
        n: int,
        *,
        end_ids: Collection[int],
        max_context: int,
        clock: Callable[[], float],
        drafts: bool = False,
    ) -> None:
        self.n = n
        self._drafts = drafts
        self._end_ids = end_ids
        self._max_context = max_context
        self._clock = clock
        self._decoding: dict[int, Decoding] = {}

    @property
    def decoding(self) -> list[Decoding]:
        """The requests in slots, in the order of the slots."""
        return [self._decoding[slot] for slot in sorted(self._decoding)]

    @property
    def any(self) -> bool:
        """Whether a slot decodes."""
        return bool(self._decoding)

    def is_free(self, slot: int) -> bool:
        """Whether the slot is there and does not decode."""
        return 0 <= slot < self.n and slot not in self._decoding

    def admit(self, slot: int, request: Request, first: int) -> None:
        """The slot decodes the request, whose first token has been sampled."""
        if not self.is_free(slot):
            raise RuntimeError(f"slot {slot} of {self.n} is not free")
        self._decoding[slot] = Decoding(slot, request, first, self._clock())

    def decided(self, slot: int, token: int) -> list[Output]:
        """The next token of a slot has been sampled; with its last one the slot is free."""
        one = self._decoding[slot]
        one.add(token)
        finish = finish_of(token, self._end_ids, one.n_left, one.n_tokens, self._max_context)
        said: list[Output] = [SlotToken(slot, token)]
        return said if finish is None else [*said, self._end(one, finish)]

    def stop(self, slot: int) -> SlotDone:
        """End a decoding slot; it is free."""
        return self._end(self._decoding[slot], "cancel")

    def _end(self, one: Decoding, finish: Finish) -> SlotDone:
        del self._decoding[one.slot]
        ms = self._clock() - one.begun_ms
        if not self._drafts:
            return SlotDone(one.slot, one.n_generated, finish, ms)
        return SlotDone(one.slot, one.n_generated, finish, ms, one.drafts.accepted, one.drafts.offered)

"""Drafting on the host: the draft layer behind prompt chunks and windows, and the proposals that come of it.

    drafter.read(slot, tokens, x)              # behind a prompt chunk: its tokens and residual
    drafter.follow([(slot, at, x, ids), ..])   # behind a window: rows that stay, and the tokens after them
    drafter.propose(slot, at, most, min_p)     # tokens for position `at` on

Shapes   x (n, C, H) as the model's last layer leaves it; row i comes before the token ids[i]
Cost     a pass of one layer for each call; each proposal but the first takes a pass of its own
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from strata.engine.draft.book import DraftBook
from strata.engine.memory.sizes import DRAFT_ROWS
from strata.engine.model.draft import DraftLayer
from strata.engine.model.rows import Rows
from strata.kernels.ops import F32, I32
from strata.kernels.reference.draft import likeliest


class Followed(NamedTuple):
    """Rows of a slot that stay. at: position of the token behind them, the last of `ids`."""

    slot: int
    at: int
    x: F32
    ids: I32


@dataclass(frozen=True, slots=True, eq=False)
class Proposal:
    """A token for position `at` of a sequence, how likely it is, and the residual (1, C, H) that the next takes."""

    at: int
    epoch: int
    id: int
    p: float
    x: F32


class HostDrafter:
    """`layer` with the pages of `book`."""

    def __init__(self, layer: DraftLayer, book: DraftBook) -> None:
        self.book = book
        self._layer = layer
        self._proposals: dict[int, Proposal] = {}

    def read(self, slot: int, tokens: I32, x: F32) -> None:
        """A prompt chunk. What follows its last token is not known yet: that row is left out."""
        most = min(DRAFT_ROWS, self.book.most)
        for begin in range(0, len(tokens) - 1, most):
            ids = tokens[begin + 1 : begin + 1 + most]
            self._pass([(slot, self.book.place(slot, len(ids)), ids)], x[begin : begin + len(ids)])
            self.book.keep(slot, len(ids))

    def follow(self, kept: Sequence[Followed]) -> None:
        """The rows of a window that stay, of slots that the book follows; a proposal for each."""
        if not kept:
            return
        parts = [(one.slot, self.book.place(one.slot, len(one.ids)), one.ids) for one in kept]
        out = self._pass(parts, np.concatenate([one.x for one in kept]))
        last = np.cumsum([len(one.ids) for one in kept]) - 1
        ids, p = self._likeliest(out[last])
        for i, one in enumerate(kept):
            self.book.keep(one.slot, len(one.ids))
            x, epoch = out[last[i] : last[i] + 1], self.book.epoch(one.slot)
            self._proposals[one.slot] = Proposal(one.at + 1, epoch, int(ids[i]), float(p[i]), x)

    def propose(self, slot: int, at: int, most: int, min_p: float) -> list[int]:
        """At most `most` tokens for position `at` on; one after another as long as the one before is as likely as
        min_p. None where the layer has not seen the token at `at` - 1."""
        proposal = self._proposals.get(slot)
        if proposal is None or (proposal.at, proposal.epoch) != (at, self.book.epoch(slot)) or not most:
            return []
        found = [proposal.id]
        begin, x, p = self.book.state.length(slot), proposal.x, proposal.p
        while len(found) < most and p >= min_p and begin + len(found) <= self.book.most:
            place = begin + len(found) - 1
            self.book.state.reserve(slot, len(found))
            x = self._pass([(slot, place, np.array(found[-1:], np.int32))], x)
            ids, likely = self._likeliest(x)
            found.append(int(ids[0]))
            p = float(likely[0])
        return found

    def copied(self, source: int, target: int) -> None:
        """A slot of the model has become a copy of another one."""
        self.book.copied(source, target)

    def _likeliest(self, x: F32) -> tuple[I32, F32]:
        ids, p = likeliest(self._layer.logits(x))
        return ids if self._layer.names is None else self._layer.names[ids], p

    def _pass(self, parts: list[tuple[int, int, I32]], x: F32) -> F32:
        return self._layer(x, Rows.of(parts), self.book.state)

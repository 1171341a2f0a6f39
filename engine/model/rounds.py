"""Rounds: windows of one sequence that verify drafts, decide about them on the card, and feed the next one.

A round of 1 + f rows runs the known token and f drafts through the model, samples behind every row, and accepts drafts
as `draft.accept` does, but for one thing: behind an end token nothing stays, so that what stays is what windows without
drafts would have kept. The recurrent state is done over for the rows that stay, unless all do; the draft layer goes
over all rows and leaves a chain of drafts behind the last one that stays. Its last act is the next round: the newest
token and the chain as rows, one position after the other, on the side of the state that this one wrote.

So a round is one graph that runs again and again, and the host may start one before it knows what the last one kept. It
counts when the host says so (`StatePool.advance`, `CardDrafter.chained`); until then it leaves no trace.

Shapes   a round has f drafts, `Layout.rows` - 1, and leaves m, `Layout.leaves`: as many as it had, or as there may be
         at most. The next one may have up to m
Memory   buffers of a window's rows at fixed addresses
Cost     a verify window, the draft layer m times, and some launches of a microsecond or two
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from strata.engine.device.cuda import CudaDevice
from strata.engine.model.card_drafter import CardDrafter
from strata.engine.model.card_tape import CardTape
from strata.engine.model.model import Model
from strata.engine.model.rows import Rows
from strata.engine.model.window_buffers import Buffers
from strata.engine.state.slots import StatePool
from strata.kernels.cuda.round import round_accept, round_next
from strata.kernels.ops import I32

if TYPE_CHECKING:
    from strata.engine.model.window import Layout

_NO_END: Final = -1
"""No token has this id."""


class Rounds:
    """The work of rounds with up to `most` drafts, between the buffers of all windows. ends: ids that end a text."""

    def __init__(
        self,
        model: Model,
        state: StatePool,
        device: CudaDevice,
        buffers: Buffers,
        drafter: CardDrafter,
        most: int,
        ends: Sequence[int],
    ) -> None:
        self.most = most
        self.drafter = drafter
        self._model = model
        self._state = state
        self._device = device
        self._buffers = buffers
        rows = buffers.most
        self.places = device.fixed(4 * 4 * rows).view(np.int32)
        self._segments, self._slots = self.places[: 3 * rows].reshape(rows, 3), self.places[3 * rows :]
        self._again = device.fixed(4 * 3).view(np.int32)
        self._own = device.fixed(4 * 2 * rows).view(np.int32)
        self._ends = device.fixed(4 * max(1, len(ends))).view(np.int32)
        device.upload(self._ends.view(np.uint8), np.array(ends or [_NO_END], np.int32).view(np.uint8))

    def leaves(self, fed: int, after: int) -> int:
        """Drafts that a round with `fed` of them leaves where `after` are wanted behind it: of few numbers, each of
        which is a graph."""
        return after if after == max(1, fed) else self.most

    def located(self, slot: int, name: int) -> I32:
        """What `places` must be before the first round of a slot, whose side of the state is called `name`."""
        rows = np.arange(1, 1 + len(self._segments), dtype=np.int32)
        segments = np.stack([np.full_like(rows, name), np.zeros_like(rows), rows], 1)
        return np.concatenate([segments.reshape(-1), np.full_like(rows, slot)])

    def compute(self, layout: Layout) -> None:
        """The work of a round: what a graph is captured of."""
        buffers, device, n, most = self._buffers, self._device, layout.rows, self._buffers.most
        tape, kernels = CardTape(device), device.kernels
        fed = buffers.rows(most, 1)
        rows = Rows(fed.tokens[:n], fed.positions[:n], self._slots[:n], self._segments[n - 1 : n], tape)
        own, kept = buffers.sampling(layout), buffers.kept
        drafts, likely = buffers.drafts(layout.leaves)
        logits, x = self._model.compute(rows, self._state, np.arange(n))
        kernels.sample_rows(logits, own.settings, own.seeds, rows.positions, own.recent, ahead=1, out=own.ids)
        round_accept(own.ids, rows.tokens, self._ends, self._segments[n - 1], kept, self._again)
        behind = self._own[:n], self._own[most : most + n].view(np.float32)
        self.drafter.chain(x, own.ids, rows, kept, behind, (drafts, likely))
        tape.replay(0, n, self._again.reshape(1, 3), self._state)
        round_next(own.ids, kept, drafts, fed.tokens, fed.positions, self.drafter.places, self._segments)

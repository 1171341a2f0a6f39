"""Rounds of one sequence on a card: room for them before they are known, and what counts of them afterwards.

A round is started while the one before is under way, so nobody knows how many tokens that gives: there must be room for
all that it may. What is started here counts when `over` says so, and leaves no trace where nobody asks for it.

Errors   RuntimeError for logits that are not finite
"""

from __future__ import annotations

from typing import Final

import numpy as np

from strata.engine.model.model import Model
from strata.engine.model.rounds import Rounds
from strata.engine.model.rows import Rows
from strata.engine.model.window import Draw, Ticket, Windows, penalises
from strata.engine.schedule.ports import Row
from strata.engine.state.pages import OutOfPages
from strata.engine.state.slots import StatePool

_FOUND: Final = np.zeros(1, np.int32)
"""In place of a draft that only the card knows."""


class CardRounds:
    """`rounds` of `windows` on a state."""

    def __init__(self, model: Model, rounds: Rounds, windows: Windows, state: StatePool) -> None:
        self._model = model
        self._rounds = rounds
        self._windows = windows
        self._state = state
        self._drafter = rounds.drafter

    def most(self, row: Row) -> int:
        """Drafts of a round of this sequence at most; 0: it has none."""
        return self._rounds.most if self._drafter.book.follows(row.slot) and not penalises(row.how) else 0

    def begin(self, row: Row, draw: Draw, after: int | None) -> Ticket | None:
        """A round of the row's newest token and drafts, or a draft that the layer finds now, where that token was
        sampled behind a read; None: the draft layer has no room. after: as `Runner.round`.

        ValueError for rows that do not fit the state, OutOfPages.
        """
        slot, book = row.slot, self._drafter.book
        begins = not row.drafts and row.position + 2 <= self._state.max_context and self._drafter.begins(slot)
        rows = Rows.of([(slot, row.position, np.append(row.fed, _FOUND) if begins else row.fed)])
        self._model.check(rows, self._state)
        fed = len(rows) - 1
        leaves = self._rounds.leaves(fed, after or max(1, fed))
        held = book.state.length(slot) if book.fits(slot, begins + 1 + fed) else 0
        if held + begins + fed + leaves > book.most:
            return None
        self._state.reserve(slot, 1 + fed)
        draft = self._drafter.begin(slot, int(row.tokens[-1])) if begins else None
        return self._windows.round(rows, draw, leaves, draft)

    def behind_window(self, slot: int, position: int, draw: Draw, after: int) -> Ticket | None:
        """A round without drafts behind a window of the slot that is under way and has been counted; `position`: of the
        token that it samples. after: drafts that are wanted behind it. None: there is no room."""
        leaves = self._rounds.leaves(0, after)
        if not self._has_room(slot, 1, 0, leaves):
            return None
        return self._windows.first_round(slot, position, draw, leaves)

    def behind_round(self, ticket: Ticket, row: Row, after: int) -> Ticket | None:
        """What comes behind a round of the row that is under way: one of `after` drafts, if it leaves so many, or a
        window without (0). None: there is no room."""
        rows = ticket.layout.rows
        position = row.position + rows
        if not after:
            return self._windows.behind_round(row.slot, position) if self._has_pages(row.slot, rows + 1) else None
        fed = min(after, ticket.layout.leaves)
        leaves = self._rounds.leaves(fed, after)
        if not self._has_room(row.slot, rows + 1 + fed, rows + fed, leaves):
            return None
        return self._windows.next_round(ticket, position, fed, leaves)

    def over(self, ticket: Ticket, row: Row) -> list[int]:
        """Wait for a round of the row, and count what stays of it. -> the tokens that it gives."""
        said, slot = ticket.said(), row.slot
        if min(said) < 0:
            raise RuntimeError(f"the logits of slot {slot} before {row.position + len(said)} are not finite")
        self._state.advance(slot, len(said))
        self._drafter.chained(slot, len(said), row.position + len(said) + 1, *ticket.drafts())
        return said

    def _has_room(self, slot: int, rows: int, fed: int, leaves: int) -> bool:
        """Make room for rows in the state, and for `fed` and a token in the draft layer, with the steps behind them."""
        book, own = self._drafter.book, fed + leaves
        if not book.fits(slot, own) or not self._has_pages(slot, rows):
            return False
        book.state.reserve(slot, own)
        return True

    def _has_pages(self, slot: int, rows: int) -> bool:
        state = self._state
        if state.length(slot) + rows > state.max_context:
            return False
        try:
            state.reserve(slot, rows)
        except OutOfPages:
            return False
        return True

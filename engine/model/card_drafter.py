"""Drafting on a card: the draft layer behind prompt chunks, inside of verify windows, and step by step.

    drafter.read(slot, tokens, x)                 # behind a prompt chunk, of residuals that the pass has left
    drafter.begin(slot, token)                    # a draft behind the first token after it, which stays on the card
    drafter.behind(x, ids, rows)                  # part of a verify window's graph: a draft behind every row
    drafter.kept(slot, row, n, at, id, p)         # what the host has decided: n rows of a slot stay
    drafter.propose(slot, at, most, min_p)        # the first is there; each further one is a captured step
    drafter.chain(x, ids, rows, kept, own, chain) # part of a round's graph: all of them behind the last row that stays
    drafter.chained(slot, n, at, ids, p)          # the same, when the host has seen it

The layer runs over all rows of a window, before anybody knows which of them stay: what it writes for others lies behind
its own length. So a window and the first draft behind it are one graph.

Memory   buffers of a window's rows at fixed addresses; weights and pages in the arenas
Cost     a step is a graph of one layer and the output matrix, and a wait
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np

from strata.engine.device.base import StateMemory
from strata.engine.device.cuda import CudaDevice, Staging
from strata.engine.device.driver import Array, Graph
from strata.engine.draft.book import DraftBook
from strata.engine.memory.sizes import DRAFT_ROWS
from strata.engine.model.draft import DraftLayer, draft_spec
from strata.engine.model.rows import Rows
from strata.engine.pack import DraftPack, ModelSpec
from strata.engine.state.slots import StatePool, estimate_bytes
from strata.kernels.cuda.draft import draft_tokens, keep_rows, likeliest
from strata.kernels.cuda.round import round_choose
from strata.kernels.ops import I32

_STEP_INTS: Final = 3
"""Token, position, slot."""


@dataclass(frozen=True, slots=True, eq=False)
class CardDrafts:
    """What a card has of drafts.

    verify    rows of a verify window at most, 1: there are none
    layer     the draft layer, None without one
    slots     pool slots that it follows, of so many batch slots
    context   rows that it holds of each
    rounds    drafts of a round at most, 0: there are none · ends: tokens that end a text
    """

    verify: int = 1
    layer: DraftPack | None = None
    slots: Callable[[int], int] = lambda n: 1 + n
    context: int = 0
    rounds: int = 0
    ends: tuple[int, ...] = ()

    @property
    def spec(self) -> ModelSpec | None:
        """The model that the layer alone would be."""
        return None if self.layer is None else draft_spec(self.layer.pack.spec, self.layer.spec.ratio)

    def pages(self, n_slots: int, kv: str, memory: StateMemory) -> StatePool | None:
        """The layer's pages with so many batch slots."""
        spec = self.spec
        return None if spec is None else StatePool(spec, self.slots(n_slots), self.context, kv=kv, memory=memory)

    def page_bytes(self, n_slots: int, kv: str) -> int:
        """Bytes of `pages`."""
        spec = self.spec
        return 0 if spec is None else estimate_bytes(spec, self.slots(n_slots), self.context, kv=kv)


@dataclass(frozen=True, slots=True)
class _Proposal:
    """Tokens for position `at` of a sequence and on, how likely they are, and the row of the last window that the first
    comes from.

    row: None when that window is over: nothing can go on from there
    """

    at: int
    epoch: int
    ids: list[int]
    p: list[float]
    row: int | None


class CardDrafter:
    """`layer` with the pages of `book`, for windows of at most `most_rows` rows. pass_rows: of a prompt, at once."""

    def __init__(self, device: CudaDevice, layer: DraftLayer, book: DraftBook, most_rows: int) -> None:
        self.book = book
        self._device = device
        self._layer = layer
        spec, driver = layer.spec, device.driver
        self._ints = device.fixed(4 * 2 * most_rows).view(np.int32)
        self._tokens, self._positions = self._ints[:most_rows], self._ints[most_rows:]
        self._carry = device.fixed(4 * most_rows * spec.wide).view(np.float32)
        self._carry = self._carry.reshape(most_rows, spec.streams, spec.hidden)
        self._fed = device.fixed(4 * spec.wide).view(np.float32).reshape(1, spec.streams, spec.hidden)
        self._step = device.fixed(4 * _STEP_INTS).view(np.int32)
        self._said = device.fixed(8).view(np.int32)
        self._landings = driver.pinned(8 * most_rows).view(np.int32).reshape(most_rows, 2)
        self._downloads = [driver.downloader(landing, self._said) for landing in self._landings]
        self._event = driver.event()
        self._staging = Staging(driver, 4 * max(2 * most_rows, _STEP_INTS))
        self._graphs: dict[int | None, Graph] = {}
        self._budget = spec.index_budget
        self._last_read: tuple[int, int, int] | None = None  # slot, epoch, tokens: its last residual is `_fed`
        self.pass_rows = min(DRAFT_ROWS, book.most)
        self._proposals: dict[int, _Proposal] = {}

    # ---------------------------------------------------------------------------------------------------------- reads

    def read(self, slot: int, tokens: I32, x: Array) -> None:
        """A prompt chunk, right behind its pass. What follows its last token is not known: that row is left out."""
        most = self.pass_rows
        for begin in range(0, len(tokens) - 1, most):
            ids = tokens[begin + 1 : begin + 1 + most]
            place = self.book.place(slot, len(ids))
            self.pass_over(Rows.of([(slot, place, ids)]), x[begin : begin + len(ids)])
            self.book.keep(slot, len(ids))
        self._device.copy(self._fed, x[len(tokens) - 1 : len(tokens)])
        self._last_read = self._standing(slot)

    def begins(self, slot: int) -> bool:
        """Whether nothing but the sampling of a token has come behind a read of this slot."""
        return self.book.follows(slot) and self._last_read == self._standing(slot)

    def begin(self, slot: int, token: int) -> Array:
        """Where it `begins`, with room for a row: the row of the read's last token, which `token` follows. -> where a
        draft of what follows that will be, int32 (1,); nobody waits for it."""
        place = self.book.place(slot, 1)
        self._last_read = None
        self._staging.upload(self._step, np.array([token, place, slot], np.int32))
        self._step_at(place)
        self.book.keep(slot, 1)
        return self._said[:1]

    def _standing(self, slot: int) -> tuple[int, int, int]:
        return slot, self.book.epoch(slot), self.book.held(slot)

    def pass_over(self, rows: Rows, x: Array) -> None:
        """The layer over rows that are on the host; `place` has made room for them."""
        self._device.expect(int(rows.positions[-1]) + 1)
        with self._device.kernels.workspace.scratch():
            self._layer(x, rows.placed(self._device), self.book.state)

    # -------------------------------------------------------------------------------------------------------- windows

    def enter(self, slots: list[tuple[int, int]]) -> None:
        """A verify window begins with so many rows of each slot, in order: say where they are."""
        places = [self.book.place(slot, n) + np.arange(n, dtype=np.int32) for slot, n in slots]
        positions = np.concatenate(places)
        self._last_read = None
        self._staging.upload(self._positions[: len(positions)], positions)
        self._proposals = {slot: replace(one, row=None) for slot, one in self._proposals.items()}

    def behind(self, x: Array, ids: Array, rows: Rows, drafts: Array, p: Array) -> None:
        """Work of a window's graph: drafts and p (n,) behind ids (n,), which were sampled behind x (n, C, H)."""
        keep_rows(self._behind(x, ids, rows, drafts, p), self._carry[: len(rows)])

    def _behind(self, x: Array, ids: Array, rows: Rows, drafts: Array, p: Array) -> Array:
        """The same; returns the layer's residual (n, C, H)."""
        n, kernels = len(rows), self._device.kernels
        if kernels.bound is not None and kernels.bound >= self.book.most:
            kernels.bound = None
        tokens = self._tokens[:n]
        draft_tokens(ids, tokens)
        own = Rows(tokens, self._positions[:n], rows.slots, rows.segments)
        out = self._layer(x, own, self.book.state)
        likeliest(kernels.workspace, self._layer.logits(out), drafts, p, self._layer.names)
        return out

    def kept(self, slot: int, row: int, n: int, at: int, draft: int, p: float) -> None:
        """n rows of a slot stay, the last of which is `row` of the window; `draft` is for position `at`."""
        self.book.keep(slot, n)
        self._proposals[slot] = _Proposal(at, self.book.epoch(slot), [draft], [p], row)

    # --------------------------------------------------------------------------------------------------------- rounds

    @property
    def places(self) -> Array:
        """Where the rows of a window lie in the layer, int32 (rows,)."""
        return self._positions

    def enter_round(self, slot: int, rows: int, steps: int) -> None:
        """A round begins with rows of a slot that the host knows: say where they are."""
        place = self.book.place(slot, rows)
        self.book.state.reserve(slot, rows + steps)
        self._last_read = None
        self._staging.upload(self._positions, place + np.arange(len(self._positions), dtype=np.int32))
        self._proposals = {slot: replace(one, row=None) for slot, one in self._proposals.items()}

    def chain(
        self, x: Array, ids: Array, rows: Rows, kept: Array, own: tuple[Array, Array], chain: tuple[Array, Array]
    ) -> None:
        """Work of a round's graph, as `behind`: a chain of m drafts behind the last of its rows that stays, and how
        likely they are, (m,) each. kept (1,): how many do · own: as drafts and p of `behind`"""
        out = self._behind(x, ids, rows, *own)
        bound = self._device.kernels.bound
        round_choose(out, kept, *own, self._positions[: len(rows)], rows.slots[:1], *chain, self._fed, self._step)
        for i in range(1, len(chain[0])):
            self._compute_step(bound, *(each[i : i + 1] for each in chain))

    def chained(self, slot: int, n: int, at: int, ids: list[int], p: list[float]) -> None:
        """n rows of a round stay; its chain is for position `at` on."""
        self.book.keep(slot, n)
        self._proposals[slot] = _Proposal(at, self.book.epoch(slot), ids, p, None)

    # ------------------------------------------------------------------------------------------------------ proposals

    def propose(self, slot: int, at: int, most: int, min_p: float) -> list[int]:
        """At most `most` tokens for position `at` on, as `HostDrafter.propose`; one, unless the slot was in the last
        window."""
        first = self._proposals.get(slot)
        if first is None or (first.at, first.epoch) != (at, self.book.epoch(slot)) or not most:
            return []
        known = 1 + next((i for i, p in enumerate(first.p[:-1]) if p < min_p), len(first.p) - 1)
        found, p, begin = first.ids[: min(known, most)], first.p[known - 1], self.book.state.length(slot)
        most = min(most, 1 + self.book.most - begin)
        if first.row is None or most < 2 or p < min_p:
            return found
        self.book.state.reserve(slot, most - 1)
        self._last_read = None
        self._device.copy(self._fed, self._carry[first.row : first.row + 1])
        self._staging.upload(self._step, np.array([first.ids[0], begin, slot], np.int32))
        at_once = most - 1 if min_p <= 0 else 1  # without a bar there is nothing to wait for in between
        while len(found) < most and p >= min_p:
            steps = self._stepped(begin + len(found) - 1, at_once)
            found += [token for token, _ in steps]
            _, p = steps[-1]
        return found

    def copied(self, source: int, target: int) -> None:
        """A slot of the model has become a copy of another one."""
        self.book.copied(source, target)

    def prepare(self) -> None:
        """Capture the steps. Slot 0 must have a page."""
        for bound in dict.fromkeys([self._budget if self._budget < self.book.most else None, None]):
            self._staging.upload(self._step, np.zeros(_STEP_INTS, np.int32))
            self._stepped(0 if bound is not None else self._budget, 1)

    def _stepped(self, place: int, n: int) -> list[tuple[int, float]]:
        """n steps from what is in the buffers, the first at `place`: tokens, and how likely they are."""
        for i in range(n):
            self._step_at(place + i)
            self._downloads[i]()
        self._event.record()
        self._event.wait()
        landed = self._landings[:n]
        return list(zip(landed[:, 0].tolist(), landed[:, 1].view(np.float32).tolist(), strict=True))

    def _step_at(self, place: int) -> None:
        """A step at a place from what is in the buffers; its draft, and how likely that is, go to `_said`."""
        bound = self._budget if place < self._budget < self.book.most else None
        if bound in self._graphs:
            self._graphs[bound].launch()
            return
        work = partial(self._compute_step, bound, self._said[:1], self._said[1:].view(np.float32))
        work()
        self._graphs[bound] = self._device.driver.capture(work)

    def _compute_step(self, bound: int | None, ids: Array, p: Array) -> None:
        """The work of a step, which leaves token, position and residual of the next one where it reads them.

        ids, p (1,): where the draft goes, and how likely it is
        """
        device = self._device
        device.expect(bound)
        device.begin()
        token, position, slot = (self._step[i : i + 1] for i in range(_STEP_INTS))
        out = self._layer(self._fed, Rows(token, position, slot, self._step.reshape(1, 3)), self.book.state)
        logits = self._layer.logits(out)
        likeliest(device.kernels.workspace, logits, ids, p, self._layer.names, (token, position))
        keep_rows(out, self._fed)

"""Windows: forward passes of a few rows with sampling inside, as one graph for each layout.

    ticket = windows.start(rows, wanted=1)     # rows from the host
    ticket = windows.step(ticket, position)    # the next token of the same sequences, fed on the device
    ids = ticket.wait()
    ticket = windows.verify(rows, draws)       # known tokens and drafts: what the model says behind every row
    windows.replay(ticket, slot, begin, n)     # the state of a slot is to be that of its first n rows
    ticket = windows.round(rows, draws, m)     # the same of one sequence, which decides on the card and feeds the next:
    ticket = windows.next_round(ticket, ..)    # with the drafts that this one has left

A layout is what a graph cannot change: numbers of rows, segments and wanted rows, width of the list of ids that the
penalties look at, and a bound of the positions. Everything else lies in fixed buffers and is read on the device. The
first use of a layout runs it as it is, which loads its kernels, and captures it; later ones replay the graph. Both give
the same bits. A layout that the card has no memory for runs as it is each time.

A window writes the recurrent state beside the one it reads, and keys and values behind those that count. So one, and
no more, may be started before anybody knows whether it is wanted: it counts when `StatePool.advance` says so.

Errors   ValueError for more rows than a window has; DeviceError of the card
Cost     a start copies some hundred bytes to the card; a step is one launch. Host work of both: tens of microseconds
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from strata.engine.device.cuda import CudaDevice, Staging
from strata.engine.device.driver import Array, Event, Graph
from strata.engine.log import log
from strata.engine.model.card_drafter import CardDrafter
from strata.engine.model.card_tape import CardTape
from strata.engine.model.model import Model
from strata.engine.model.rounds import Rounds
from strata.engine.model.rows import Rows
from strata.engine.model.window_buffers import Buffers, Sampled
from strata.engine.state.slots import StatePool
from strata.kernels.cuda.compile import DeviceError
from strata.kernels.cuda.sample import MAX_RECENT, pack
from strata.kernels.cuda.window import window_next, window_recent
from strata.kernels.ops import I32, Sampling

RECENT_WIDTHS: Final = (0, 64, 512, MAX_RECENT)
"""Widths of a row's list of recent ids: few, so that few layouts serve all requests."""
IN_FLIGHT: Final = 4
"""Windows whose ids may be on their way at once."""


def penalises(how: Sampling) -> bool:
    """Whether recent ids matter."""
    plain = how.penalty_repeat == 1.0 and how.penalty_freq == 0.0 and how.penalty_present == 0.0
    return how.temperature > 0 and not plain


@dataclass(frozen=True, slots=True, eq=False)
class Draw:
    """How a row's token of `position` is sampled, and what the windows after it may assume.

    recent   the ids that the penalties look at: those before `position`, as many as they look back or as there are
    last_n   how far they look back, where that is known
    """

    how: Sampling
    recent: I32
    position: int
    last_n: int = MAX_RECENT

    @property
    def width(self) -> int:
        """Places of the row's list on the card. Where all ids so far count, there is room for more."""
        n = len(self.recent) if penalises(self.how) else 0
        return next(width for width in RECENT_WIDTHS if n < width or (n == width and (self.slides or not n)))

    @property
    def slides(self) -> bool:
        """Whether a new id takes the place of the oldest; else the list still grows."""
        return len(self.recent) < self.position or len(self.recent) == self.last_n

    @property
    def modulus(self) -> int:
        """The id of position p lies at place p mod this; 0: there is no list."""
        return min(len(self.recent), self.width) if self.slides else self.width

    def holds_for(self, how: Sampling, recent: I32, position: int) -> bool:
        """Whether the card, having begun with this draw, samples a later position in this way."""
        if how != self.how:
            return False
        if not self.width:
            return not (penalises(how) and len(recent))
        grown = 0 if self.slides else position - self.position
        return len(recent) == len(self.recent) + grown <= self.width

    def table(self, width: int) -> I32:
        """The list as the card keeps it, int32 (width,), -1 = none."""
        table = np.full(width, -1, np.int32)
        if self.width:
            first = self.position - len(self.recent)
            table[np.arange(first, self.position) % self.modulus] = self.recent
        return table


@dataclass(frozen=True, slots=True)
class Layout:
    """rows · segments · wanted: last rows whose logits are made · recent: width of the lists · bound of positions.

    verifies: it samples behind every row, leaves a tape, and drafts behind every row where there is a draft layer
    leaves: it is a round (`engine.model.rounds`), which leaves so many drafts; 0: it is none
    """

    rows: int
    segments: int
    wanted: int
    recent: int = 0
    bound: int | None = None
    verifies: bool = False
    leaves: int = 0

    @property
    def steps(self) -> bool:
        """Whether the window samples and can feed itself: a row is a sequence and gets its next token."""
        return self.rows == self.segments == self.wanted and not self.verifies and not self.leaves


@dataclass(slots=True, eq=False)
class Ticket:
    """Work under way. `logits` (wanted, vocab) lie on the card until the next pass begins, and so do the residuals `x`
    (rows, C, H) behind the last layer; a draw has none."""

    layout: Layout
    logits: Array | None
    x: Array | None
    _landing: I32
    _event: Event
    _ids: list[int] | None = None
    _hits: I32 | None = None

    def wait(self) -> list[int]:
        """Until the work is done. The sampled ids, if it samples; below 0 where the logits of a row are not finite."""
        if self._ids is None:
            self._event.wait()
            self._ids = self._landing[: self.layout.wanted].tolist()
        return self._ids

    def hits(self) -> list[int] | None:
        """Behind `wait`, until some windows later: of the experts that each row picked in all layers, those in the
        expert cache; None where all lie in VRAM."""
        self.wait()
        return None if self._hits is None else self._hits[0, : self.layout.rows].tolist()

    def helped(self) -> list[int] | None:
        """The same: those that the processor computed."""
        self.wait()
        return None if self._hits is None else self._hits[1, : self.layout.rows].tolist()

    def drafts(self) -> tuple[list[int], list[float]]:
        """Behind `wait`: the draft behind every row of a window that verifies, or the chain of a round; how likely each
        is."""
        self.wait()
        most, n = len(self._landing) // 3, self.layout.leaves or self.layout.rows
        drafts, likely = self._landing[most : most + n], self._landing[2 * most : 2 * most + n]
        return drafts.tolist(), likely.view(np.float32).tolist()

    def said(self) -> list[int]:
        """Of a round: the ids behind the rows that stay."""
        return self.wait()[: int(self._landing[-1])]


class Windows:
    """Windows of at most `most_rows` rows of a model on a card, over one state."""

    def __init__(
        self,
        model: Model,
        state: StatePool,
        device: CudaDevice,
        most_rows: int,
        drafter: CardDrafter | None = None,
        rounds: int = 0,
        ends: Sequence[int] = (),
    ) -> None:
        self._drafter = drafter
        self._replays: dict[tuple[int, int], Graph | None] = {}
        self.most_rows = most_rows
        self._model = model
        self._state = state
        self._device = device
        self._hows: list[Sampling] = []  # what the settings on the card are
        self._graphs: dict[Layout, _Captured | None] = {}
        self._tapes: dict[Layout, CardTape] = {}
        self._buffers = Buffers(device, most_rows)
        self.rounds: Rounds | None = None
        if drafter is not None and rounds:
            self.rounds = Rounds(model, state, device, self._buffers, drafter, rounds, ends)
        self._staging = Staging(device.driver, max(array.nbytes for array in self._buffers.all))
        self._landings = [device.driver.pinned(4 * (3 * most_rows + 1)).view(np.int32) for _ in range(IN_FLIGHT)]
        self._events = [device.driver.event() for _ in range(IN_FLIGHT)]
        self._downloads = [
            [device.driver.downloader(landing[:n], self._buffers.ids[:n]) for landing in self._landings]
            for n in range(1, most_rows + 1)
        ]
        self._verdicts = [device.driver.downloader(landing, self._buffers.said) for landing in self._landings]
        self._hits: list[I32] = []
        self._count: list[Callable[[], None]] = []
        if device.tiers is not None:
            found = device.tiers.hits
            self._hits = [
                device.driver.pinned(found.nbytes).view(np.int32).reshape(found.shape) for _ in range(IN_FLIGHT)
            ]
            self._count = [device.driver.downloader(hits, found) for hits in self._hits]
        self._sent = 0

    @property
    def n_graphs(self) -> int:
        """Layouts that have been captured."""
        return sum(captured is not None for captured in self._graphs.values())

    def forget_graphs(self) -> None:
        """Capture every layout again when it is next used. No window may be under way."""
        self._graphs.clear()
        self._replays.clear()

    def _bound(self, last: int) -> int | None:
        """The tightest bound of positions up to this one that there are graphs for."""
        budget = self._model.spec.index_budget
        return budget if last < budget < self._model.max_context else None

    def layout(self, rows: Rows, wanted: int, recent: int = 0, verifies: bool = False) -> Layout:
        """The layout of these rows, with the tightest bound that there are graphs for."""
        bound = self._bound(int(rows.positions.max()))
        return Layout(len(rows), len(rows.segments), wanted, recent, bound, verifies)

    def round_layout(self, fed: int, leaves: int, position: int) -> Layout:
        """Of a round with so many drafts behind a token at this position, or an earlier one."""
        return Layout(1 + fed, 1, 1 + fed, 0, self._bound(position + fed + leaves), leaves=leaves)

    def sample_with(self, draws: Sequence[Draw]) -> int:
        """How the rows of the windows to come are sampled. Returns the width of their lists, for the layout."""
        hows, width = [draw.how for draw in draws], max(draw.width for draw in draws)
        if self._hows[: len(hows)] != hows:  # a sequence is seldom sampled in another way than before
            settings, seeds = pack(hows)
            self._upload(self._buffers.settings, settings)
            self._upload(self._buffers.seeds, seeds)
            self._hows = hows
        if width:
            self._upload(self._buffers.recent, np.stack([draw.table(width) for draw in draws]))
            self._upload(self._buffers.moduli, np.array([draw.modulus for draw in draws], np.int32))
        return width

    def start(self, rows: Rows, wanted: int, recent: int = 0) -> Ticket:
        """Run rows from the host; the state's slots must have room for them (`StatePool.reserve_all`)."""
        self._enter(rows)
        return self._run(self.layout(rows, wanted, recent))

    def step(self, before: Ticket, position: int) -> Ticket:
        """Run the sequences of a window again, each with the id that it sampled; `position`: the largest of them."""
        layout = before.layout
        if not layout.steps:
            raise ValueError(f"{layout} does not say which tokens come next")
        if layout.bound is not None and position >= layout.bound:
            layout = replace(layout, bound=None)
        return self._run(layout)

    def verify(self, rows: Rows, draws: Sequence[Draw], graph: bool = True) -> Ticket:
        """Run known tokens and drafts from the host; a draw for every row. Nobody has counted anything yet: the state
        advances by as many rows of a slot as stay, behind a `replay` unless all do. graph: False is the slow path."""
        self._enter(rows)
        if self._drafter is not None:
            self._drafter.enter([(slot, end - begin) for slot, begin, end in rows.segments.tolist()])
        layout = self.layout(rows, len(rows), self.sample_with(draws), verifies=True)
        return self._run(layout) if graph else self._land(layout, *self.compute(layout))

    def replay(self, ticket: Ticket, slot: int, begin: int, n: int) -> None:
        """Before the slot advances: its recurrent state is to be that of n rows of the window, from row `begin`."""
        segment = np.array([self._state.recurrent.name(slot), 0, n], np.int32)
        self._upload(self._buffers.replayed, segment)
        key, tape = (ticket.layout.rows, begin), self._tapes[ticket.layout]

        def work() -> None:
            tape.replay(begin, ticket.layout.rows - begin, self._buffers.replayed.reshape(1, 3), self._state)

        graph = self._replays.get(key)
        if graph is not None:
            graph.launch()
            return
        work()
        if key not in self._replays:
            self._replays[key] = self._graph_of(work, "states are taken back")

    def round(self, rows: Rows, draw: Draw, leaves: int, draft: Array | None = None) -> Ticket:
        """Run a round from the host, of one slot's known token and drafts. draw: how its tokens are sampled, without
        penalties. The state and the draft layer's pages have room, the latter also for leaves - 1 rows more.

        draft: where the token of the second row lies on the card, which the host does not know; int32 (1,)
        """
        self._enter(rows)
        if draft is not None:
            self._device.copy(self._buffers.inputs[1:2], draft)
        ((slot, begin, end),) = rows.segments.tolist()
        self._enter_round(slot, draw, end - begin, leaves)
        return self._run(self.round_layout(end - begin - 1, leaves, int(rows.positions[0])))

    def first_round(self, slot: int, position: int, draw: Draw, leaves: int) -> Ticket:
        """Run a round without drafts behind a plain window of the slot alone that is under way, or over; `position`: of
        the token that it has sampled. The state has advanced."""
        self._enter_round(slot, draw, 1, leaves)
        return self._run(self.round_layout(0, leaves, position))

    def next_round(self, before: Ticket, position: int, fed: int, leaves: int) -> Ticket:
        """Run the next round of a sequence, with drafts that the one before has left, fed <= `before.layout.leaves`.
        position: the largest that its token can have."""
        if fed > before.layout.leaves:
            raise ValueError(f"{fed} drafts from a round that has left {before.layout.leaves}")
        return self._run(self.round_layout(fed, leaves, position))

    def behind_round(self, slot: int, position: int) -> Ticket:
        """Run a plain window behind a round of the slot that is under way and has not been counted. position: the
        largest that its token can have."""
        name = self._state.recurrent.name(slot)
        self._upload(self._buffers.segment, np.array([name ^ name >> 16, 0, 1], np.int32))
        return self._run(Layout(1, 1, 1, 0, self._bound(position)))

    def eager(self, rows: Rows, wanted: int, recent: int = 0) -> Ticket:
        """`start` without a graph: the slow path that the graphs are compared with."""
        self._enter(rows)
        layout = self.layout(rows, wanted, recent)
        return self._land(layout, *self.compute(layout))

    def draw(self, logits: Array, draws: Sequence[Draw]) -> Ticket:
        """Sample from the logits (n, vocab) of the last pass, a row a draw."""
        layout = Layout(len(draws), len(draws), len(draws), self.sample_with(draws))
        self._upload(self._buffers.drawn, np.array([draw.position for draw in draws], np.int32))
        self.compute_draw(logits, layout)
        return self._land(layout, logits, None)

    def rehearse(self, layout: Layout) -> None:
        """Run the work of a layout on rows that mean nothing: first tokens of slot 0, which must have a page."""
        n = layout.rows
        if layout.verifies and self._drafter is not None:
            self._drafter.enter([(0, n)])
        if layout.leaves:
            self._enter_round(0, Draw(Sampling(), np.empty(0, np.int32), 0), n, layout.leaves)
        zeros = np.zeros(n, np.int32)
        edges = np.linspace(0, n, layout.segments + 1).astype(np.int32)
        segments = np.stack([np.zeros(layout.segments, np.int32), edges[:-1], edges[1:]], 1)
        self._enter(Rows(zeros, zeros, zeros, segments))
        self.sample_with([Draw(Sampling(), zeros[:0], 0)] * n)
        logits, _ = self.compute(layout)
        if logits is not None and not layout.leaves:
            self.compute_draw(logits, layout)

    def rehearse_replay(self, layout: Layout, begin: int) -> None:
        """Capture the replay of a segment that begins at this row, after the rehearsal of a layout."""
        self.replay(Ticket(layout, None, None, self._landings[0], self._events[0]), 0, begin, 1)

    def round_layouts(self) -> list[Layout]:
        """Of all rounds: those that leave as many drafts as they had, or one, and those that leave as many as there may
        be."""
        if self.rounds is None:
            return []
        most, bounds = self.rounds.most, dict.fromkeys([self._bound(0), None])
        pairs = dict.fromkeys((n, leaves) for n in range(1 + most) for leaves in (max(1, n), most))
        return [Layout(1 + fed, 1, 1 + fed, 0, bound, leaves=leaves) for fed, leaves in pairs for bound in bounds]

    def prepare(self, layout: Layout) -> None:
        """Capture a layout before it is needed, after a rehearsal."""
        self.rehearse(layout)
        self._run(layout)

    def compute(self, layout: Layout) -> tuple[Array | None, Array | None]:
        """The work of a window: what a graph is captured of. Logits of the wanted rows, residuals of all; of a round
        none."""
        n, wanted, kernels = layout.rows, layout.wanted, self._device.kernels
        rows, own = self._buffers.rows(n, layout.segments), self._buffers.sampling(layout)
        kernels.bound = layout.bound
        if layout.leaves and self.rounds is not None:
            self.rounds.compute(layout)
            return None, None
        if layout.verifies:
            return self._compute_verify(layout, rows, own)
        if layout.steps and layout.recent:
            window_recent(rows.tokens, rows.positions, self._buffers.moduli[:n], own.recent)
        logits, x = self._model.compute(rows, self._state, np.arange(n - wanted, n))
        if layout.steps:
            kernels.sample_rows(logits, own.settings, own.seeds, rows.positions, own.recent, ahead=1, out=own.ids)
            window_next(own.ids, rows.tokens, rows.positions, rows.segments)
        return logits, x

    def _compute_verify(self, layout: Layout, rows: Rows, own: Sampled) -> tuple[Array | None, Array]:
        """The work of a window that verifies."""
        kernels, n = self._device.kernels, layout.rows
        tape = self._tapes[layout] = CardTape(self._device)
        logits, x = self._model.compute(replace(rows, tape=tape), self._state, np.arange(n))
        kernels.sample_rows(logits, own.settings, own.seeds, rows.positions, own.recent, ahead=1, out=own.ids)
        if self._drafter is not None:
            self._drafter.behind(x, own.ids, rows, *self._buffers.drafts(n))
        return logits, x

    def compute_draw(self, logits: Array, layout: Layout) -> None:
        """The work of a draw."""
        own = self._buffers.sampling(layout)
        positions = self._buffers.drawn[: layout.wanted]
        self._device.kernels.sample_rows(logits, own.settings, own.seeds, positions, own.recent, out=own.ids)

    def _enter(self, rows: Rows) -> None:
        if len(rows) > self.most_rows:
            raise ValueError(f"a window has at most {self.most_rows} rows, got {len(rows)}")
        self._upload(self._buffers.inputs, Buffers.packed(self._state.located(rows), self.most_rows))

    def _enter_round(self, slot: int, draw: Draw, rows: int, leaves: int) -> None:
        """Say where a slot's state and its rows in the draft layer are, and how rounds sample."""
        rounds = self.rounds
        if rounds is None or self.sample_with([draw] * (1 + rounds.most)):
            raise ValueError(f"a round wants a draft layer and no penalties, got {draw}")
        self._upload(rounds.places, rounds.located(slot, self._state.recurrent.name(slot)))
        rounds.drafter.enter_round(slot, rows, leaves - 1)

    def _upload(self, target: Array, values: npt.NDArray[Any]) -> None:
        self._staging.upload(target[: values.size], values)

    def _run(self, layout: Layout) -> Ticket:
        if layout not in self._graphs:
            ticket = self._land(layout, *self.compute(layout))
            self._graphs[layout] = self._captured(layout)
            return ticket
        captured = self._graphs[layout]
        if captured is None:
            return self._land(layout, *self.compute(layout))
        captured.graph.launch()
        self._device.replayed(captured.taken)
        return self._land(layout, captured.logits, captured.x)

    def _captured(self, layout: Layout) -> _Captured | None:
        """The graph of a layout that has just run; None: there is no memory for it."""
        made: list[tuple[Array | None, Array | None]] = []
        graph = self._graph_of(lambda: made.append(self.compute(layout)), f"windows of {layout.rows} rows run")
        return None if graph is None else _Captured(graph, *made[0], self._device.taken)

    def _graph_of(self, work: Callable[[], None], what: str) -> Graph | None:
        """Work that has just run, captured; None: there is no memory for it."""
        try:
            return self._device.driver.capture(work)
        except DeviceError as error:
            log(f"{what} without a graph: {error}; a larger --vram-reserve-mib leaves more")
            return None

    def _land(self, layout: Layout, logits: Array | None, x: Array | None) -> Ticket:
        """Bring the ids to the host behind the work."""
        turn = self._sent % IN_FLIGHT
        self._sent += 1
        if layout.verifies or layout.leaves:
            self._verdicts[turn]()
        elif layout.wanted:
            self._downloads[layout.wanted - 1][turn]()
        if self._count:
            self._count[turn]()
        event = self._events[turn]
        event.record()
        return Ticket(layout, logits, x, self._landings[turn], event, None, self._hits[turn] if self._hits else None)


@dataclass(frozen=True, slots=True, eq=False)
class _Captured:
    """The graph of a layout, where it leaves logits and residuals, and what of the workspace is in use behind it."""

    graph: Graph
    logits: Array | None
    x: Array | None
    taken: int

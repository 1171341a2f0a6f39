"""The experts of a mixture on a card: gate, up and down products of the picked experts, joined in rank order.

A `Bank` is a stack of expert matrices by address: expert e's bytes lie at addresses[e], in device memory or in host
memory that the card reads, so moving an expert changes one entry. Address 0: the expert is not there; its pairs (row,
rank) are skipped and their outputs taken from `given`.

mixture(...)   x (n, H), ids and weights (n, used) -> (n, H) = sum over ranks, in order, of weight * down(silu(gate x) *
               (up x)), acc = fma(weight, y, acc) from 0

Errors   ValueError naming the argument, the wanted and the given
Cost     a window reads each picked expert once for all rows; a prompt sorts the pairs by expert once and runs one
         launch a product over all experts. Scratch of a prompt: used * H floats and used * I int8 a row, and the int8
         of the inputs
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final

import numpy as np

from strata.kernels.check import check, require
from strata.kernels.cuda import card as cards
from strata.kernels.cuda import few_plans, lanes, prompt_plans, row_plans, row_product
from strata.kernels.cuda.arguments import (
    LANES_WINDOW,
    PROMPT,
    Prepared,
    address,
    enter_matrices,
    fill,
    run,
)
from strata.kernels.cuda.card import Card
from strata.kernels.cuda.compile import load_kernel
from strata.kernels.cuda.fetch import Stage
from strata.kernels.cuda.handover import Helper
from strata.kernels.cuda.plans import DENSE, DOWN, GATE_UP, PAIRS, UNTUNED, WINDOW_ROWS, Tuning
from strata.kernels.cuda.product import (
    LANES_BLOCKS,
    LANES_WARPS,
    Quantized,
    QuantizedInputs,
    check_address,
    gated,
    lanes_constants,
    linear,
    room_for_quantized,
    window_inputs,
)
from strata.kernels.cuda.workspace import DeviceArray, Workspace
from strata.kernels.formats import TensorType, Weight

MAX_EXPERTS: Final = 2048
"""Experts that group_rows.cu counts in shared memory."""
PAIRS_OF_A_BLOCK: Final = 4096
"""PAIRS of group_rows.cu."""
MOST_PICKS: Final = 1024
"""MOST_PICKS of count_hits.cu."""
_JOIN_THREADS: Final = 128
"""Threads of a block of join_pairs.cu."""


Prompts = few_plans.FewPlan | prompt_plans.PromptPlan


@dataclass(frozen=True, slots=True, eq=False)
class Tally:
    """hits int32 (2, WINDOW_ROWS) on the device: picks of a window's rows whose expert lies between two addresses, and
    those that the processor computed, over all layers of which one is the `first`. use int32 (experts,): how often the
    layer's experts were picked. reads int32 (2,): how many that lie elsewhere windows have read, each once for all
    rows, and how many the processor computed."""

    hits: DeviceArray
    use: DeviceArray
    reads: DeviceArray
    begin: int
    end: int
    first: bool


@dataclass(frozen=True, slots=True, eq=False)
class Bank:
    """Expert matrices of one type: (rows, cols) each, uint64 addresses (experts,) on the device.

    rounds   of a layer's gate: for a prompt with these ids (rows, used), gate, up and down round by round; between them
             all picked experts have their addresses once. What it yields is valid until it is asked for more. None: one
             round, these banks
    tally    of a layer's gate: where windows count which picks lie in the expert cache
    helper   of a layer's gate: how windows ask the processor for experts. None: the card computes all of them
    stage    of a layer's gate: where windows bring those that lie in RAM. None: they are read in place
    """

    type: TensorType
    rows: int
    cols: int
    addresses: DeviceArray
    rounds: Callable[[DeviceArray], Iterable[tuple[Bank, Bank, Bank]]] | None = None
    tally: Tally | None = None
    helper: Helper | None = None
    stage: Stage | None = None

    @property
    def experts(self) -> int:
        return int(self.addresses.shape[0])


@dataclass(frozen=True, slots=True, eq=False)
class Placed(Weight):
    """A stack whose experts lie where `bank` says; `data` are the file's bytes, which no kernel reads."""

    bank: Bank


@dataclass(frozen=True, slots=True, eq=False)
class Shared:
    """The expert that every row has: its matrices. Of float ones also gate and up as banks of one, and ids
    (WINDOW_ROWS, 1) of zeros on the device."""

    gate: Weight
    up: Weight
    down: Weight
    banks: tuple[Bank, Bank, DeviceArray] | None = None


def stack_addresses(w: Weight) -> np.ndarray:
    """Addresses of the experts of a stack that lies on the device in one piece, uint64 (experts,) on the host."""
    require(len(w.shape) == 3, f"a stack of experts has 3 dimensions, got {w.shape}")
    check_address(w.type, address(w.data))
    step = w.rows * w.type.row_bytes(w.cols)
    return np.uint64(address(w.data)) + np.arange(w.experts, dtype=np.uint64) * np.uint64(step)


def mixture(
    workspace: Workspace,
    gate: Bank,
    up: Bank,
    down: Bank,
    x: DeviceArray,
    ids: DeviceArray,
    weights: DeviceArray,
    given: DeviceArray | None = None,
    shared: tuple[Shared, DeviceArray] | None = None,
    tuning: Tuning = UNTUNED,
    out: DeviceArray | None = None,
) -> DeviceArray:
    """The weighted sum of the picked experts' outputs, a new array or `out` (n, H). given (n * used, H): outputs of the
    pairs whose expert is not there, null when all are. ids outside 0 .. experts - 1 are taken from `given` too; a
    window allows only -1.

    shared: of a window, the shared expert and the logits (n,) of its gate: fma(sigmoid(logit), shared expert's output,
    sum). Its products work beside those of the others, or in the same launches; x must be older than the kernel
    that made the ids.
    """
    size = check(x=(x, "n H", np.float32), ids=(ids, "n used", np.int32), weights=(weights, "n used", np.float32))
    n, width, used = size["n"], size["H"], size["used"]
    shapes = (gate.cols, up.cols, up.rows, down.cols, down.rows)
    if shapes != (width, width, gate.rows, gate.rows, width):
        raise ValueError(
            f"experts must map {width} to I to {width}, got gate {gate.rows, gate.cols}, up {up.rows, up.cols}, "
            f"down {down.rows, down.cols}"
        )
    if given is not None:
        check(given=(given, f"{n * used} {width}", np.float32))
    require(n <= WINDOW_ROWS or given is None, "given is for windows: the experts of a prompt are all computed here")
    require(n <= WINDOW_ROWS or shared is None, "shared is for windows")
    if out is None:
        out = workspace.array((n, width))
    check(out=(out, f"{n} {width}", np.float32))
    if n:
        with workspace.scratch():
            part = _Part(workspace, x, ids, weights, out, used, tuning, shared)
            if n <= WINDOW_ROWS:
                if gate.helper is not None and given is None:
                    given = part.ask(gate.helper, gate.addresses)
                kept, banks = part.ids, (gate, up, down)
                if gate.stage is not None and gate.stage.takes(part.pairs):
                    banks = part.fetch(gate.stage, *banks)
                part.window(*banks, given)
                if gate.tally is not None:
                    count_hits(ids, kept, gate.addresses, gate.tally)
            else:
                part.prompt(gate, up, down)
    return out


@dataclass(slots=True, eq=False)
class _Part:
    """Rows that go through together."""

    workspace: Workspace
    x: DeviceArray
    ids: DeviceArray
    weights: DeviceArray
    out: DeviceArray
    used: int
    tuning: Tuning
    shared: tuple[Shared, DeviceArray] | None = None
    answers: Callable[[], None] | None = None  # to be called before the outputs are joined
    in_place: bool = True  # of a prompt: all experts at once, not round by round

    @property
    def pairs(self) -> int:
        return len(self.x) * self.used

    def ask(self, helper: Helper, addresses: DeviceArray) -> DeviceArray:
        """Have the processor compute some pairs from here on; where their outputs are once `answers` was called."""
        ids, given = self.ids, self.workspace.array((self.pairs, self.x.shape[1]))
        self.ids = kept = helper.ask(self.workspace, self.x, ids, addresses)
        self.answers = lambda: helper.take(ids, kept, given)
        return given

    def fetch(self, stage: Stage, gate: Bank, up: Bank, down: Bank) -> tuple[Bank, Bank, Bank]:
        """Bring experts from RAM; `ids` name entries of these banks from here on."""
        tables = gate.addresses, up.addresses, down.addresses
        self.ids, (first, second, last) = stage.fetch(self.workspace, self.ids, tables)
        return replace(gate, addresses=first), replace(up, addresses=second), replace(down, addresses=last)

    # ------------------------------------------------------------------------------------------------------ windows

    def window(self, gate: Bank, up: Bank, down: Bank, given: DeviceArray | None) -> None:
        """All rows at once, or halves when the card's shared memory does not hold their pairs."""
        n = len(self.x)
        try:
            self._plan(gate, GATE_UP if gate.type is up.type else PAIRS)
            self._plan(down, DOWN)
        except ValueError:
            if n == 1:
                raise
            self._answered()
            for rows in (slice(0, n // 2), slice(n // 2, n)):
                pairs = slice(rows.start * self.used, rows.stop * self.used)
                x, ids, weights, out = (a[rows] for a in (self.x, self.ids, self.weights, self.out))
                shared = None if self.shared is None else (self.shared[0], self.shared[1][rows])
                part = _Part(self.workspace, x, ids, weights, out, self.used, self.tuning, shared)
                part.window(gate, up, down, None if given is None else given[pairs])
            return
        with self.workspace.scratch():
            sides = self._sides(gate, up, down)
            own = None if sides else self._shared_hidden()
            hidden = self.workspace.array((self.pairs, gate.rows))
            if sides:
                self._window_product(gate, GATE_UP, self.x, hidden, second=up.addresses, side=sides[0])
            elif gate.type is up.type:
                self._window_product(gate, GATE_UP, self.x, hidden, second=up.addresses)
            else:
                other = self.workspace.array(hidden.shape)
                self._window_product(gate, PAIRS, self.x, hidden)
                self._window_product(up, PAIRS, self.x, other)
                gate_times_up(hidden, other)
            more: dict[str, Any] = {}
            if self.shared is not None and own is not None:
                linear(self.workspace, [self.shared[0].down], own[0], out=[own[1]], early=True)
                more = {"beside": own[1], "join": self.shared[1]}
            elif self.shared is not None and sides:
                more = {"side": sides[1], "join": self.shared[1]}
            self._answered()
            self._window_product(down, DOWN, hidden, self.out, weights=self.weights, given=given, **more)

    def _answered(self) -> None:
        """What the processor was asked for is there."""
        if self.answers is not None:
            self.answers()

    def _sides(self, gate: Bank, up: Bank, down: Bank) -> tuple[row_product.Side, row_product.Side] | None:
        """The shared expert's products in the launches of the picked ones: two launches less to wait for. None where
        they do not go together."""
        first, last = (self._plan(bank, mode) for bank, mode in ((gate, GATE_UP), (down, DOWN)))
        if self.shared is None or gate.type is not up.type or not first or not last:
            return None
        own, n = self.shared[0], len(self.x)
        if own.gate.type is not own.up.type or own.gate.type.is_float or own.down.type.is_float:
            return None
        plans = (
            row_plans.side_plan(cards.card(), first, own.gate.type, GATE_UP, own.gate.rows, own.gate.cols, n),
            row_plans.side_plan(cards.card(), last, own.down.type, DOWN, own.down.rows, own.down.cols, n),
        )
        given = window_inputs(self.workspace, self.x, own.gate.type)
        if plans[0] is None or plans[1] is None or "x" not in given:
            return None
        hidden = self.workspace.array((n, own.gate.rows))
        both = [(address(w.data), hidden, w.rows) for w in (own.gate, own.up)]
        result = [(address(own.down.data), self.out, own.down.rows)]
        return (
            row_product.Side(own.gate.type, plans[0], GATE_UP, both, {**given, "n": n, "cols": own.gate.cols}),
            row_product.Side(own.down.type, plans[1], DENSE, result, {"x": hidden, "n": n, "cols": own.down.cols}),
        )

    def _shared_hidden(self) -> tuple[DeviceArray, DeviceArray] | None:
        """The shared expert's silu(gate x) * (up x), beside the kernel that made the ids, and an array for its output:
        taken here, since its product works beside the next one and may not lie in scratch that this one gives back."""
        if self.shared is None:
            return None
        shared, n = self.shared[0], len(self.x)
        hidden, y = self.workspace.array((n, shared.gate.rows)), self.workspace.array(self.out.shape)
        if shared.banks is None:
            gated(self.workspace, shared.gate, shared.up, self.x, hidden, True, self.tuning)
        else:
            gate, up, ids = shared.banks
            part = _Part(self.workspace, self.x, ids[:n], self.weights, hidden, 1, self.tuning)
            part._window_product(gate, GATE_UP, self.x, hidden, second=up.addresses, early=1)
        return hidden, y

    def _plan(self, bank: Bank, mode: str) -> row_product.Plan | None:
        if bank.type.is_float:
            return None
        return row_plans.row_plan(
            cards.card(), bank.type, mode, (bank.rows,), bank.cols, len(self.x), self.used, tuning=self.tuning.row
        )

    def _window_product(self, bank: Bank, mode: str, x: DeviceArray, out: DeviceArray, **more: Any) -> None:
        plan, n = self._plan(bank, mode), len(self.x)
        common = {"first": bank.addresses, "ids": self.ids, "n": n, "used": self.used, "cols": bank.cols, **more}
        matrix = [(0, out, bank.rows)]
        if plan is None:
            arguments = fill(LANES_WINDOW, x=x, tiles=bank.rows, **common)
            enter_matrices(arguments, matrix, 1)
            most = LANES_BLOCKS * cards.card().multiprocessors
            blocks = min(most // 2, -(-bank.rows // 2)) if mode == DOWN else most
            shared = 4 * (1 + self.pairs * (4 + WINDOW_ROWS))
            if mode == DOWN:
                shared += 4 * -(-bank.rows // blocks) * self.pairs
            constants = lanes_constants(bank.type, bank.cols, mode, n)
            run("lanes_window", constants, blocks, 32 * LANES_WARPS, arguments, shared)
            return
        with self.workspace.scratch():
            given = window_inputs(self.workspace, x, bank.type)
            common["early"] = int(bool(more.get("early")) and "x" in given)  # a kernel that quantises comes between
            common["older"] = int(self.shared is not None and mode == GATE_UP and "x" in given)
            row_product.experts(plan, bank.type, mode, out, bank.rows, experts=bank.experts, **given, **common)

    # ------------------------------------------------------------------------------------------------------ prompts

    def prompt(self, gate: Bank, up: Bank, down: Bank) -> None:
        """Pairs sorted by expert, then a launch a product and round."""
        groups: dict[int, tuple[DeviceArray, ...]] = {}
        inputs = _Inputs(self.x, QuantizedInputs(self.workspace, self.x), self.used)
        self.in_place = gate.rounds is None
        plan = self._prompt_plan(gate, GATE_UP) if gate.type is up.type and not down.type.is_float else None
        quantizes = plan is not None and plan.quantizes
        made = room_for_quantized(self.workspace, self.pairs, gate.rows, down.type) if quantizes else None
        n_hidden = 0 if plan is not None and gate.rows <= down.rows else 1 if gate.type is up.type else 2
        mark = self.workspace.mark()
        hidden = [self.workspace.array((self.pairs, gate.rows)) for _ in range(max(1, n_hidden))]
        if not n_hidden:  # quantised before there are outputs: the same bytes
            self.workspace.release(mark)
        outputs = self.workspace.array((self.pairs, down.rows))
        for first, second, last in gate.rounds(self.ids) if gate.rounds else ((gate, up, down),):
            if made is not None:
                self._prompt_product(first, GATE_UP, inputs, made.q, groups, second.addresses, (down.type, made))
                self._prompt_product(last, PAIRS, _Inputs(None, made, 1), outputs, groups)
                continue
            self._hidden(first, second, inputs, groups, hidden)
            self._sorted(last, self._prompt_plan(last, PAIRS), groups)  # outlives the round
            with self.workspace.scratch():
                both = _Inputs(hidden[0], QuantizedInputs(self.workspace, hidden[0]), 1)
                self._prompt_product(last, PAIRS, both, outputs, groups)
        join_pairs(outputs, self.weights, self.out)

    def _hidden(
        self,
        gate: Bank,
        up: Bank,
        inputs: _Inputs,
        groups: dict[int, tuple[DeviceArray, ...]],
        hidden: list[DeviceArray],
    ) -> None:
        """silu(gate x) * (up x) of the round's pairs into hidden[0], as float32. Rows of other rounds mean nothing."""
        if gate.type is up.type:
            self._prompt_product(gate, GATE_UP, inputs, hidden[0], groups, up.addresses)
        else:
            self._prompt_product(gate, PAIRS, inputs, hidden[0], groups)
            self._prompt_product(up, PAIRS, inputs, hidden[1], groups)
            gate_times_up(*hidden)

    def _prompt_plan(self, bank: Bank, mode: str) -> Prompts | None:
        if bank.type.is_float:
            return None
        sizes = bank.rows, bank.cols, self.pairs, bank.experts
        return _prompt_plan(cards.card(), bank.type, mode, *sizes, self.in_place, few_plans.limits())

    def _sorted(
        self, bank: Bank, plan: Prompts | None, groups: dict[int, tuple[DeviceArray, ...]]
    ) -> tuple[DeviceArray, ...]:
        """The pairs sorted by expert, in tiles as the plan wants them; once for all products and rounds."""
        columns = lanes.TILE if plan is None else plan.columns
        if columns not in groups:
            groups[columns] = group_rows(self.workspace, self.ids, bank.experts, columns)
        return groups[columns]

    def _prompt_product(
        self,
        bank: Bank,
        mode: str,
        inputs: _Inputs,
        out: DeviceArray,
        groups: dict[int, tuple[DeviceArray, ...]],
        second: DeviceArray | None = None,
        made_for: tuple[TensorType, Quantized] | None = None,
    ) -> None:
        """One product of all pairs; made_for: the result is quantised for this type, into these arrays."""
        kind, plan = bank.type, self._prompt_plan(bank, mode)
        order, tile_list, n_tiles = self._sorted(bank, plan, groups)
        matrices = [(0, out, bank.rows)]
        if plan is None:
            common = {
                "first": bank.addresses, "second": second, "order": order, "tile_list": tile_list, "n_tiles": n_tiles,
                "n": self.pairs, "divide": inputs.divide, "cols": bank.cols,
            }  # fmt: skip
            lanes.launch_prompt(kind, mode, len(tile_list), matrices, x=inputs.x, **common)
            return
        for_type, after = (None, (None, None)) if made_for is None else (made_for[0], (made_for[1].d, made_for[1].sums))
        sizes = bank.rows, bank.cols, self.pairs, inputs.divide, len(tile_list)
        launch, made = _prepared(plan, kind, mode, for_type, *sizes), inputs.of(kind)
        sorted_by = bank.addresses, second, order, tile_list, n_tiles
        launch(matrices, (made.q, made.d, made.sums, None, *sorted_by, *after))


@lru_cache(maxsize=1024)
def _prompt_plan(
    card: Card, kind: TensorType, mode: str, rows: int, cols: int, pairs: int, experts: int, in_place: bool,
    _limits: tuple[int, ...],
) -> Prompts:  # fmt: skip
    """How a product of all pairs is cut; `_limits`: of few_plans.py."""
    way = few_plans.plan if in_place else prompt_plans.prompt_plan
    return way(card, kind, mode, (rows,), cols, prompt_plans.expected(pairs, experts))


@lru_cache(maxsize=1024)
def _prepared(
    plan: Prompts, kind: TensorType, mode: str, for_type: TensorType | None,
    rows: int, cols: int, pairs: int, divide: int, tiles: int,
) -> Prepared:  # fmt: skip
    """The launch of one product of all pairs; for_type: for which the result is quantised; tiles: of pairs, at most."""
    each = plan.rows_of_a_run(mode)
    runs = -(-rows // each)
    return Prepared(
        PROMPT, plan.source, plan.constants(kind, mode, for_type), runs * tiles, plan.threads, plan.shared,
        (rows,), each, n=pairs, divide=divide, cols=cols, run=plan.run, row_tiles=runs, pitch=cols,
    )  # fmt: skip


@dataclass(slots=True, eq=False)
class _Inputs:
    """What a product of pairs reads: float32 rows, their quantised forms, pairs of a row. x is None where only one
    quantised form exists."""

    x: DeviceArray | None
    quantized: QuantizedInputs | Quantized
    divide: int

    def of(self, kind: TensorType) -> Quantized:
        """As a type wants them."""
        return self.quantized if isinstance(self.quantized, Quantized) else self.quantized.of(kind)


def group_rows(workspace: Workspace, ids: DeviceArray, experts: int, tile: int) -> tuple[DeviceArray, ...]:
    """ids (n, used) -> pairs by expert (n * used,), tiles (most, 4) of at most `tile` pairs, their number (1,)."""
    if experts > MAX_EXPERTS:
        raise ValueError(f"a prompt can use up to {MAX_EXPERTS} experts a layer, got {experts}")
    pairs = ids.size
    order = workspace.array((pairs,), np.int32)
    tile_list = workspace.array((pairs // tile + min(experts, pairs), 4), np.int32)
    n_tiles = workspace.array((1,), np.int32)
    blocks = -(-pairs // PAIRS_OF_A_BLOCK)
    counts = workspace.array((blocks, experts), np.int32)
    sizes = pairs, experts
    load_kernel("group_rows.cu", "count_rows")((blocks,), (1024,), (ids, *sizes, counts), shared_mem=0)
    arguments = (ids, counts, *sizes, tile, order, tile_list, n_tiles)
    load_kernel("group_rows.cu", "group_rows")((blocks,), (1024,), arguments, shared_mem=0)
    return order, tile_list, n_tiles


def count_hits(ids: DeviceArray, kept: DeviceArray, addresses: DeviceArray, tally: Tally) -> None:
    """Of ids (n, used), of which a row has each but once, those whose addresses are the tally's, row by row."""
    n, used = ids.shape
    require(n * used <= MOST_PICKS, f"up to {MOST_PICKS} picks of a window are counted, got {n * used}")
    between = np.uint64(tally.begin), np.uint64(tally.end)
    sizes = used, int(tally.first), tally.hits.shape[1]
    arguments = (ids, kept, addresses, *between, *sizes, tally.hits, tally.use, tally.reads)
    load_kernel("count_hits.cu", "count_hits")((1,), (32 * n,), arguments, shared_mem=0)


def gate_times_up(gate: DeviceArray, up: DeviceArray) -> None:
    """gate = silu(gate) * up, in place."""
    kernel = load_kernel("gate_times_up.cu", "gate_times_up")
    n = gate.size
    kernel((-(-n // 256),), (256,), (gate, up, np.int64(n)), shared_mem=0)


def join_pairs(outputs: DeviceArray, weights: DeviceArray, out: DeviceArray) -> None:
    """outputs (n * used, H), weights (n, used) -> out (n, H), in rank order."""
    rows = out.shape[1]
    if rows % 4:
        raise ValueError(f"the experts' width must be a multiple of 4, got {rows}")
    parts = -(-rows // (4 * _JOIN_THREADS))
    kernel = load_kernel("join_pairs.cu", "join_pairs", USED=weights.shape[1])
    kernel((len(out) * parts,), (_JOIN_THREADS,), (outputs, weights, out, rows, parts), shared_mem=0)

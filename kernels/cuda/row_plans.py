"""How a product of a window is cut for a card: constants of product_row.cu, shared memory, blocks. Pure functions.

row_plan(...)   dense matrices with up to 8 rows of activations, and the experts of a window pair by pair

A block owns an equal part of all rows. No plan changes a bit of the result: an output's sum has the order of the row,
whoever computes its terms.

Errors   ValueError when a product does not fit the card's shared memory, with the sizes
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from strata.kernels.cuda import tile_plans
from strata.kernels.cuda.card import Card
from strata.kernels.cuda.plans import (
    ACTIVATION_BLOCK,
    CHUNK,
    DENSE,
    DOWN,
    GATE_UP,
    RowTuning,
    table_bytes,
    table_copies,
)
from strata.kernels.cuda.tile_plans import BULK_ARCH, MOST_BYTES, PAIR, SEGMENT, STATIC, TilePlan
from strata.kernels.formats import TensorType

MOST_COLUMNS: Final = 8
"""Rows of activations that an item is multiplied with."""
LANES: Final = 32
NEIGHBOURS: Final = 8
"""Lanes that read shared memory together, 16 bytes each."""
MOST_PAIRS: Final = 128
"""Of a window: a warp finds four a lane."""
MOST_TURNS: Final = 1 << 16
"""Of a block: product_row.cu divides them by multiplications that are exact below."""
ARRIVED: Final = 4
"""Bytes of a strip in the kernel's tables."""
SMALL_SPANS: Final = (5, 4, 2, 1)
"""Spans of an item of blocks of 32, by preference: an odd number of them keeps the lanes out of each other's banks."""
ENOUGH_TURNS: Final = 12
"""Of a block: fewer leave warps without work, so small blocks make smaller items then."""
TURNS_OF_WHOLE_ITEMS: Final = 16
"""Of a block of one row: with fewer two lanes share an item, and its copies take half of the room."""

SHARES: Final = 11
WITH_TABLE: Final = 6
WITHOUT_TABLE: Final = 5
"""Of these shares of a multiprocessor's shared memory, what a block may take that leaves room for another."""
MOST_BESIDE: Final = 16
"""Warps of a block of one row whose registers leave room for a block of the next kernel, whatever its shared memory."""
ALONE_COLUMNS: Final = 2
ALONE_PAIRS: Final = 32
ALONE_BYTES: Final = 144 << 10
"""Rows of activations of an item, pairs, and bytes of weights of a block, from which a block takes a whole
multiprocessor: its registers, and room for terms and inputs."""

UNTUNED: Final = RowTuning()
PIECE_ROOM: Final = 12 << 10
"""Bytes for the terms of a strip."""
STRIPS_OF_ROOM: Final = 3
"""Strips that the room for terms holds at least, if it is small."""
DOWN_TERMS: Final = 44 << 10
"""Bytes for the terms of DOWN at most, so that the shared expert's product has room beside eight rows of it."""
ENOUGH_STRIPS: Final = 4
"""Held at once: fewer let warps wait for a place."""


@dataclass(frozen=True, slots=True)
class _Way:
    """Warps · copies under way · bytes for terms and for copies of the type's table."""

    warps: int
    depth: int
    terms: int
    table: int


_K: Final = 1 << 10
_LEAST: Final = (_Way(8, 2, 10 * _K, 16 * _K), _Way(8, 1, 5 * _K, 8 * _K), _Way(4, 1, 0, 0))
_BESIDE: Final = (
    _Way(16, 2, 40 * _K, 32 * _K), _Way(16, 2, 22 * _K, 32 * _K), _Way(16, 1, 40 * _K, 32 * _K),
    _Way(16, 1, 22 * _K, 32 * _K), _Way(12, 1, 22 * _K, 16 * _K),
)  # fmt: skip
_ALONE: Final = (
    _Way(24, 2, 60 * _K, 64 * _K), _Way(24, 2, 48 * _K, 64 * _K), _Way(24, 1, 48 * _K, 64 * _K),
    _Way(24, 1, 30 * _K, 64 * _K), _Way(16, 2, 40 * _K, 32 * _K), _Way(16, 1, 40 * _K, 32 * _K),
    _Way(12, 1, 20 * _K, 32 * _K), *_LEAST,
)  # fmt: skip
_MANY_PICKS: Final = (_Way(20, 1, 24 * _K, 64 * _K), *_ALONE)
_ONE_ROW: Final = {
    "picks": (_Way(16, 1, 24 * _K, 32 * _K),),
    DENSE: (_Way(16, 1, 48 * _K, 32 * _K), _Way(16, 1, 22 * _K, 32 * _K)),
    DOWN: (_Way(16, 1, 24 * _K, 32 * _K), _Way(12, 1, 22 * _K, 16 * _K)),
}
"""Ways to use shared memory, from most to least; of gate and up of many pairs (tile_plans.py, FEWEST_PAIRS); of one row
where blocks of the kernel before leave room (H200, 2026-11-29, windows)."""


@dataclass(frozen=True, slots=True)
class RowPlan:
    """spans of an item · rows of activations of an item · lanes that share an item · warps of a block · copies under
    way, whether by one instruction each · blocks that a multiprocessor holds · copies of the table · blocks · items of
    a row · rows of a strip · turns of a strip of one matrix, of both · strips of a block, strips held at once · items
    that are stored twice · byte offsets of the parts of shared memory, their end, and how much a block asks for."""

    spans: int
    columns: int
    lanes: int
    warps: int
    depth: int
    bulk: bool
    beside: int
    copies: int
    aligned: bool
    blocks: int
    items: int
    strip: int
    turns: int
    strip_turns: int
    strips: int
    regions: int
    extra: int
    at_scales: int
    at_sums: int
    at_keys: int
    at_segments: int
    at_arrived: int
    at_terms: int
    at_grid: int
    at_stages: int
    at_y: int
    end: int
    shared: int

    def constants(self, kind: TensorType, mode: str) -> dict[str, int | str]:
        """Macros of product_row.cu."""
        return {
            "TYPE": kind.name,
            "MODE": mode,
            "SPANS": self.spans,
            "ITEMS": self.items,
            "COLUMNS": self.columns,
            "PARTS": self.lanes,
            "WARPS": self.warps,
            "DEPTH": self.depth,
            "BULK": int(self.bulk),
            "BESIDE": self.beside,
            "COPIES": self.copies,
            "ALIGNED": int(self.aligned),
        }

    def arguments(self) -> dict[str, int]:
        """Numbers of the kernel's Arguments; inverses are 2^32 / divisor, rounded up."""
        divisors = {"strip": self.strip, "strip_turn": self.strip_turns, "region": self.regions}
        inverses = {f"{name}_inverse": -(-(1 << 32) // by) if by > 1 else 0 for name, by in divisors.items()}
        signed = {name: value - (1 << 32) if value >> 31 else value for name, value in inverses.items()}
        return {name: getattr(self, name) for name in NUMBERS} | signed


@dataclass(frozen=True, slots=True)
class SidePlan:
    """A product in another's launch (product_row_beside.cu): its plan, where its part of shared memory begins, and the
    size of both together."""

    plan: RowPlan
    at: int
    shared: int

    def constants(self, kind: TensorType, mode: str) -> dict[str, int | str]:
        """Macros of product_row_beside.cu beside those of the other product."""
        own = self.plan.constants(kind, mode)
        return {f"SIDE_{name}": own[name] for name in SIDE_CONSTANTS}


SIDE_CONSTANTS: Final = ("TYPE", "MODE", "SPANS", "ITEMS", "COLUMNS", "PARTS", "DEPTH")
NUMBERS: Final = (
    "strip", "turns", "strip_turns", "strips", "regions", "at_scales", "at_sums", "at_keys",
    "at_segments", "at_arrived", "at_terms", "at_grid", "at_stages", "at_y",
)  # fmt: skip
"""Numbers of a plan that the kernel's Arguments take as they are."""


def _round(n: int, to: int) -> int:
    return -(-n // to) * to


def _odd_quads(floats: int) -> int:
    """A pitch of at least so many floats that is an odd number of 16 bytes."""
    return _round(floats, 4) + (4 - _round(floats, 4)) % 8


def _odd_quads_of_item(floats: int) -> int:
    """Whole quads get an odd number of them."""
    return floats if floats % 4 else _odd_quads(floats)


def aligned(kind: TensorType, addresses: tuple[int, ...]) -> bool:
    """Whether every block of the matrices begins at a multiple of 16."""
    return kind.block_bytes % 16 == 0 and all(a % 16 == 0 for a in addresses)


@lru_cache(maxsize=4096)
def row_plan(
    card: Card,
    kind: TensorType,
    mode: str,
    matrix_rows: tuple[int, ...],
    cols: int,
    n: int = 1,
    used: int = 0,
    wide: bool = False,
    tuning: RowTuning = UNTUNED,
) -> RowPlan | TilePlan:
    """A plan; matrix_rows: rows of each matrix, or of an expert; used: experts of a row, 0 for dense matrices. `wide`:
    see `aligned`. A block with few rows leaves room on its multiprocessor for one of the next kernel, unless it needs
    more: of two one may have a table. Raises ValueError when nothing fits."""
    if n * used > MOST_PAIRS or (n > MOST_COLUMNS and not used):
        most = f"{MOST_PAIRS} pairs of a row and an expert" if used else f"{MOST_COLUMNS} rows"
        raise ValueError(f"a product of a window has at most {most}, got {n * max(used, 1)}: send fewer rows")
    if tile_plans.tiled(card, kind, mode, used, n * used, tuning):
        tiles = tile_plans.tile_plan(card, kind, mode, matrix_rows[0], cols, n, used, tuning)
        if tiles is not None:
            return tiles
    job = _Job(card, kind, mode, matrix_rows, cols, n, used, wide, tuning)
    if job.one_row and card.roomy:
        for way in _ONE_ROW[job.kind_of_row]:
            plan = job.plan(way)
            if plan.shared <= card.shared_block - STATIC:
                # Before picks comes the router, whose blocks lie apart, so that each multiprocessor has room for one.
                pads = job.kind_of_row != "picks" if tuning.apart is None else tuning.apart
                return replace(plan, shared=card.apart(plan.shared, plan.blocks)) if pads else plan
    share = card.shared_multiprocessor * (WITH_TABLE if table_bytes(kind) else WITHOUT_TABLE) // SHARES
    limits = {2: min(share, card.shared_block) - STATIC, 1: card.shared_block - STATIC}
    for beside in (1,) if job.alone else (2, 1):
        for way in _BESIDE if beside == 2 else _MANY_PICKS if job.many_picks else _ALONE:
            plan = job.plan(way)
            if plan.shared <= limits[beside]:
                return replace(plan, shared=card.apart(plan.shared, plan.blocks)) if tuning.apart else plan
    raise ValueError(
        f"{max(n * used, n)} rows of {cols} inputs with {kind.name} take {plan.shared} bytes of shared memory, "
        f"the card gives a block {card.shared_block}; send fewer rows"
    )


@lru_cache(maxsize=256)
def side_plan(
    card: Card, main: RowPlan | TilePlan, kind: TensorType, mode: str, rows: int, cols: int, n: int = 1
) -> SidePlan | None:
    """A plan for the shared expert's product of n rows in the launch of the experts' that `main` cuts: GATE_UP in its
    stages, which are not in use yet; DOWN, the outputs of each block, behind all. None when it does not fit, or has a
    table."""
    if table_bytes(kind) or main.aligned:
        return None
    at = main.at_stages if mode == GATE_UP else main.end
    for spans in (None, 1) if isinstance(main, RowPlan) else (None, 4, 2, 1):  # small items take less room
        tuning = RowTuning(spans=spans, warps=main.warps, bulk=main.bulk, apart=False, tiled=False)
        try:
            own = row_plan(card, kind, mode, (rows,), cols, n, int(mode == DOWN), tuning=tuning)
        except ValueError:
            continue
        shared = max(main.shared, at + own.shared)
        if isinstance(own, RowPlan) and own.blocks == main.blocks and shared <= card.shared_block - STATIC:
            return SidePlan(own, at, shared)
    return None


@dataclass(frozen=True, slots=True)
class _Job:
    card: Card
    kind: TensorType
    mode: str
    matrix_rows: tuple[int, ...]
    cols: int
    n: int
    used: int
    wide: bool
    tuning: RowTuning

    @property
    def columns(self) -> int:
        return 1 if self.used else 1 << (self.n - 1).bit_length()

    @property
    def halves(self) -> int:
        """Matrices of a strip."""
        return 2 if self.mode == GATE_UP else 1

    @property
    def lanes(self) -> int:
        """That share an item: none where a block of one row has enough turns without."""
        if self.kind.block < CHUNK:
            return 1
        alone = self.one_row and self.card.roomy and self.mode == DENSE
        each = -(-self.rows // self.card.multiprocessors) * self.cols // CHUNK
        return self.tuning.lanes or (1 if self.many_picks or (alone and each >= TURNS_OF_WHOLE_ITEMS * LANES) else 2)

    @property
    def one_row(self) -> bool:
        """Whether the window has one row, or hardly more work."""
        return self.columns == 1 and self.n * self.used < ALONE_PAIRS

    @property
    def many_picks(self) -> bool:
        """Whether it is gate and up of so many experts that a block has work for all of its lanes."""
        return self.mode == GATE_UP and self.n * self.used >= ALONE_PAIRS and self.card.roomy

    @property
    def kind_of_row(self) -> str:
        """A key of _ONE_ROW: whether the picks say which weights, or they are known before."""
        return "picks" if self.used and self.mode != DOWN else DOWN if self.mode == DOWN else DENSE

    @property
    def rows(self) -> int:
        """Of all sources, each with one row of outputs."""
        if self.mode == DOWN:
            return self.n * self.matrix_rows[0]
        return sum(self.matrix_rows) * max(self.n * self.used, 1)

    @property
    def alone(self) -> bool:
        """Whether a block takes a whole multiprocessor."""
        each = self.rows * (self.used if self.mode == DOWN else self.halves) * self.kind.row_bytes(self.cols)
        many = self.columns >= ALONE_COLUMNS or self.n * self.used >= ALONE_PAIRS
        return many or each >= ALONE_BYTES * self.card.multiprocessors

    def plan(self, way: _Way) -> RowPlan:
        blocks = self.card.multiprocessors * (self.tuning.blocks or 1)
        while True:
            most = min(way.terms, DOWN_TERMS) if self.mode == DOWN else way.terms
            cut = _Cut(self, blocks, self.tuning.terms_room or most)
            if max(cut.all_turns, cut.each + LANES) < MOST_TURNS and cut.weight_bytes < MOST_BYTES:
                return cut.plan(way)
            blocks *= 2


class _Cut:
    """A block's part of the rows, cut for so many blocks."""

    def __init__(self, job: _Job, blocks: int, terms_room: int) -> None:
        self.job, self.blocks, self.terms_room = job, blocks, terms_room
        sources = len(job.matrix_rows) if job.mode == DENSE or not job.used else job.n * job.used
        self.each = -(-job.rows // blocks)
        """Rows of a block; of DOWN each with the rows of all its pairs."""
        self.tokens = min(job.n, (self.each - 1) // job.matrix_rows[0] + 2)
        self.pairs = self.tokens * job.used if job.mode == DOWN else job.n * job.used
        self.all_rows = self.each * (job.used if job.mode == DOWN else 1)
        self.segments = min(self.pairs if job.mode == DOWN else sources, self.all_rows)
        self.spans = self._spans()
        self.items = job.cols // ACTIVATION_BLOCK // self.spans
        self.strip = self._strip()
        times, each = self.all_rows // self.each, -(-self.each // self.strip)
        self.strips = times * (each + self.segments // times - 1)
        self.all_turns = self.strips * self.turns(self.strip) * job.halves
        self.weight_bytes = self.each * job.kind.row_bytes(job.cols)

    @property
    def item_sums(self) -> int:
        """From item to item, as product_row.cu has it."""
        return _odd_quads_of_item(self.spans * ACTIVATION_BLOCK // self.job.kind.group)

    @property
    def item_terms(self) -> int:
        """From item to item, as product_row.cu has it."""
        kind = self.job.kind
        terms = self.spans * ACTIVATION_BLOCK // kind.group * (1 + kind.has_offset)
        return terms if terms % 16 else terms + 4

    @property
    def term_pitch(self) -> int:
        """Floats of a row's terms."""
        return _odd_quads(self.items * self.item_terms)

    def turns(self, rows: int) -> int:
        """Of so many rows of a matrix."""
        return -(-rows * self.items * self.job.lanes // LANES)

    def _spans(self) -> int:
        """Spans of an item: a block of 256, or as many small blocks as a lane takes and still leave work for all."""
        job = self.job
        spans = job.cols // ACTIVATION_BLOCK
        if job.kind.block == 256:
            return 8
        if job.kind.block == 128:
            return 4
        if job.kind.block == 64:
            return 4 if spans % 4 == 0 else 2
        fits = [s for s in SMALL_SPANS if spans % s == 0]
        if job.tuning.spans in fits:
            return job.tuning.spans
        of_block = self.all_rows * job.halves * spans
        return next((s for s in fits if of_block >= ENOUGH_TURNS * LANES * s), fits[-1])

    def _strip(self) -> int:
        """Rows of a strip: so many that the table holds enough strips, few lanes are empty, and many have a sum."""
        job = self.job
        row = 4 * job.halves * job.columns * self.term_pitch
        room = job.tuning.piece_room or min(PIECE_ROOM, self.terms_room // STRIPS_OF_ROOM)
        most = max(1, min(LANES // job.halves // job.columns, room // row, self.each))

        def cost(rows: int) -> tuple[bool, int, int]:
            few = self.terms_room // (rows * row) < min(-(-self.all_rows // rows), ENOUGH_STRIPS)
            return few, self._turns_of_all(rows), -rows

        return min(range(1, most + 1), key=cost)

    def _turns_of_all(self, strip: int) -> int:
        whole, left = divmod(self.each, strip)
        return whole * self.turns(strip) + self.turns(left)

    def plan(self, way: _Way) -> RowPlan:
        job, kind, tuning = self.job, self.job.kind, self.job.tuning
        turns = self._turns_of_all(self.strip) * job.halves * (self.all_rows // self.each)
        warps = tuning.warps or min(way.warps, max(4, _round(turns, 4)))
        depth = min(tuning.depth or way.depth, -(-turns // warps))  # no more than there is to copy
        inputs = self.pairs if job.mode == DOWN else job.n
        extra = NEIGHBOURS - 1 if self.items > NEIGHBOURS and self.items % NEIGHBOURS else 0
        input_pitch, scale_pitch = (
            (self.items + extra) * (32 * self.spans + 16),
            _odd_quads(job.cols // ACTIVATION_BLOCK),
        )
        sum_pitch = _odd_quads((self.items + extra) * self.item_sums)
        region = job.halves * self.strip * job.columns * self.term_pitch * 4
        regions = max(1, min(self.terms_room // region, self.strips))
        copies = table_copies(kind, tuning.table_room or way.table)
        turn_bytes = LANES // job.lanes * kind.row_bytes(max(self.spans * ACTIVATION_BLOCK, kind.block))
        sizes = {
            "at_inputs": inputs * input_pitch,
            "at_scales": inputs * scale_pitch * 4,
            "at_sums": inputs * sum_pitch * 4,
            "at_keys": _round(self.pairs, 4) * PAIR,
            "at_segments": (self.segments + 1) * SEGMENT,
            "at_arrived": self.strips * ARRIVED,
            "at_terms": regions * region,
            "at_grid": table_bytes(kind) * copies,
            "at_stages": warps * depth * _round(turn_bytes + 15 + 4, 16),
            "at_y": job.used * self.each * 4 if job.mode == DOWN else 0,
        }
        at, begin = {}, 0
        for name, size in sizes.items():
            at[name] = begin
            begin += _round(size, 128)
        del at["at_inputs"]
        return RowPlan(
            spans=self.spans, columns=job.columns, lanes=job.lanes, warps=warps, depth=depth,
            bulk=job.card.arch >= BULK_ARCH if tuning.bulk is None else tuning.bulk,
            beside=2 if job.columns == 1 and warps <= MOST_BESIDE else 1, copies=copies, aligned=job.wide,
            blocks=self.blocks, items=self.items, strip=self.strip, turns=self.turns(self.strip),
            strip_turns=self.turns(self.strip) * job.halves, strips=self.strips, regions=regions, extra=extra,
            end=begin, shared=begin, **at,
        )  # fmt: skip

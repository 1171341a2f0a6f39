"""How a product of a window is cut for a card: constants of product_row.cu, shared memory, blocks. Pure functions.

row_plan(...)   dense matrices with up to 8 rows of activations, and the experts of a window pair by pair

A block owns the same part of the rows of every matrix, and of the expert of every pair. No plan changes a bit of the
result: an output's sum has the order of the row, whoever computes its terms.

Errors   ValueError when a product does not fit the card's shared memory, with the sizes
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Final

from strata.kernels.cuda.card import Card
from strata.kernels.cuda.plans import ACTIVATION_BLOCK, DOWN, GATE_UP, RowTuning, table_bytes, table_copies
from strata.kernels.formats import TensorType

MOST_COLUMNS: Final = 8
"""Rows of activations that an item is multiplied with."""
LANES: Final = 32
UNIT: Final = 8
"""Items that lie side by side in memory and are copied together."""
LANE_COLUMNS: Final = 2
"""Rows of activations that a lane multiplies alone; more take matrix steps."""
SMALL_TURN: Final = 1.15
"""What a weight row costs in a turn of 8 rows, measured by one of 16."""
MOST_REGIONS: Final = 16
MOST_PAIRS: Final = 128
"""Of a window: a thread of the smallest block finds one."""
MOST_TURNS: Final = 1 << 16
"""Of a block: product_row.cu divides them by multiplications that are exact below."""
STATIC: Final = 1024
"""Bytes for the shared variables of the kernel itself, and the KiB that a block takes of a multiprocessor."""
ENTRY: Final = 16
"""Bytes of an entry of the kernel's tables."""
WHOLE_BYTES: Final = 128
"""Bytes of a block of 256 weights that a lane takes as a whole; a turn is as long as one of halves of larger ones."""
BANKS: Final = 32
HALF_BYTES: Final = {"Q6_K": 64, "Q4_K": 64, "Q5_K": 64, "IQ3_S": 32}
"""From the fields of a block's first half to those of its second, where that is not half the block."""
STEP_SPANS: Final = (8, 4, 5, 2, 1)
SMALL_SPANS: Final = (5, 4, 2, 1)
"""Spans of an item of blocks of 32, by preference: an odd number of them keeps the lanes out of each other's banks."""

MOST_BESIDE: Final = 16
"""Warps of a block of one row whose registers leave room for a block of the next kernel, whatever its shared memory."""
ALONE_COLUMNS: Final = 2
ALONE_PAIRS: Final = 32
ALONE_BYTES: Final = 128 << 10
"""Rows of activations of an item, pairs, and bytes of weights of a block, from which a block takes a whole
multiprocessor: its registers, and room for terms and inputs."""

UNTUNED: Final = RowTuning()
SUMMERS: Final = 4
"""Warps that add, at most."""
TABLE_ROOM: Final = {2: 32 << 10, 1: 64 << 10}
TERMS_ROOM: Final = {2: 40 << 10, 1: 88 << 10}
"""By the blocks that a multiprocessor holds."""
PIECE_ROOM: Final = 12 << 10
_BESIDE: Final = ((16, 2, 1), (16, 1, 1), (16, 1, 2), (12, 2, 1), (12, 1, 2), (8, 2, 4), (8, 1, 8), (4, 1, 32))
_ALONE: Final = ((16, 2, 1), (16, 1, 1), (12, 2, 2), (8, 2, 2), (8, 1, 4), (4, 1, 16))
_STEPS: Final = ((20, 2, 1), *_ALONE)
"""Warps, copies under way and what the room for tables is divided by, from most to least shared memory."""


@dataclass(frozen=True, slots=True)
class RowPlan:
    """spans of an item · rows of activations of an item · rows of a turn, 0 for units side by side · bytes from unit to
    unit, or row to row, in a stage · lanes that share an item · warps of a block, those of them that add, sums of their
    lanes · copies under way · blocks that a multiprocessor holds · copies of the table · blocks · items of a row ·
    rows of a strip · pieces of a strip, items of a piece's row · turns of a piece, groups of rows among them · pieces
    held at once · pitches and byte offsets of the parts of shared memory, and its size."""

    spans: int
    columns: int
    tall: int
    pitch: int
    lanes: int
    warps: int
    summers: int
    chains: int
    depth: int
    beside: int
    copies: int
    aligned: bool
    blocks: int
    items: int
    strip: int
    parts: int
    part_items: int
    turns: int
    groups: int
    regions: int
    input_pitch: int
    scale_pitch: int
    sum_pitch: int
    term_pitch: int
    at_scales: int
    at_sums: int
    at_keys: int
    at_strips: int
    at_outs: int
    at_terms: int
    at_grid: int
    at_stages: int
    at_y: int
    shared: int

    def constants(self, kind: TensorType, mode: str) -> dict[str, int | str]:
        """Macros of product_row.cu."""
        return {
            "TYPE": kind.name,
            "MODE": mode,
            "SPANS": self.spans,
            "COLUMNS": self.columns,
            "TALL": self.tall,
            "PITCH": self.pitch,
            "PARTS": self.lanes or 1,
            "WARPS": self.warps,
            "SUMMERS": self.summers,
            "CHAINS": self.chains,
            "DEPTH": self.depth,
            "BESIDE": self.beside,
            "COPIES": self.copies,
            "ALIGNED": int(self.aligned),
        }

    def arguments(self) -> dict[str, int]:
        """Numbers of the kernel's Arguments; inverses are 2^32 / divisor, rounded up."""
        divisors = {"item": self.items, "turn": self.turns, "part": self.parts, "group": self.groups,
                    "region": self.regions}  # fmt: skip
        inverses = {f"{name}_inverse": -(-(1 << 32) // by) if by > 1 else 0 for name, by in divisors.items()}
        signed = {name: value - (1 << 32) if value >> 31 else value for name, value in inverses.items()}
        return {name: getattr(self, name) for name in NUMBERS} | signed


NUMBERS: Final = (
    "items", "turns", "strip", "parts", "part_items", "groups", "regions", "at_scales", "at_sums",
    "at_keys", "at_strips", "at_outs", "at_terms", "at_grid", "at_stages", "at_y", "input_pitch", "scale_pitch",
    "sum_pitch", "term_pitch",
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


def spans_of(kind: TensorType, cols: int, columns: int) -> int:
    """Spans of an item: a block of 256, or as many small blocks as a lane takes, or a matrix step likes."""
    spans = cols // ACTIVATION_BLOCK
    if kind.block == 256:
        return 8
    if kind.block == 64:
        return 4 if spans % 4 == 0 else 2
    return next(s for s in (SMALL_SPANS if columns <= LANE_COLUMNS else STEP_SPANS) if spans % s == 0)


@cache
def _unit_pitch(kind: TensorType, item_bytes: int, lanes: int) -> int:
    """Bytes from unit to unit of a turn: those that let the lanes of a warp meet least in a bank."""
    least = _round(UNIT * item_bytes + 15 + 4, 16)

    def meetings(pitch: int) -> int:
        half = HALF_BYTES.get(kind.name, item_bytes // 2 // 4 * 4)
        units, halves, items = range(LANES // (UNIT * lanes)), range(lanes), range(UNIT)
        words = {(u * pitch + i * item_bytes + h * half) // 4 for u in units for h in halves for i in items}
        banks = [word % BANKS for word in words]
        return max(banks.count(b) for b in banks)

    return min(range(least, least + 128, 16), key=meetings)


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
) -> RowPlan:
    """A plan; matrix_rows: rows of each matrix, or of an expert; used: experts of a row, 0 for dense matrices. `wide`:
    see `aligned`. A block with few rows takes at most half of a multiprocessor, so that one of the next kernel fits
    beside it, unless it needs more. Raises ValueError when nothing fits."""
    if n * used > MOST_PAIRS or (n > MOST_COLUMNS and not used):
        most = f"{MOST_PAIRS} pairs of a row and an expert" if used else f"{MOST_COLUMNS} rows"
        raise ValueError(f"a product of a window has at most {most}, got {n * max(used, 1)}: send fewer rows")
    job = _Job(card, kind, mode, matrix_rows, cols, n, used, wide, tuning)
    half = card.shared_multiprocessor // 2 - 2 * STATIC
    limits = {2: min(half, card.shared_block - STATIC), 1: card.shared_block - STATIC}
    for beside in (1,) if job.alone else (2, 1):
        ways = _BESIDE if beside == 2 else _ALONE if job.lanes else _STEPS
        for way in ways:
            plan = job.plan(*way, beside)
            if plan.shared <= limits[beside]:
                return plan
    raise ValueError(
        f"{max(n * used, n)} rows of {cols} inputs with {kind.name} take {plan.shared} bytes of shared memory, "
        f"the card gives a block {card.shared_block}; send fewer rows"
    )


@dataclass(frozen=True, slots=True)
class _Cut:
    """Blocks · most rows of a block · rows of a strip · pieces of a strip · items of a piece's row · groups of rows of
    a piece, its turns · strips of a block · sums of a lane that adds."""

    blocks: int
    own: int
    strip: int
    parts: int
    part_items: int
    groups: int
    turns: int
    strips: int
    chains: int


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
    def spans(self) -> int:
        return self.tuning.spans or spans_of(self.kind, self.cols, self.columns)

    @property
    def items(self) -> int:
        """Of a row."""
        return self.cols // ACTIVATION_BLOCK // self.spans

    @property
    def columns(self) -> int:
        return 1 if self.used else 1 << (self.n - 1).bit_length()

    @property
    def pairs(self) -> int:
        return self.n * self.used

    @property
    def halves(self) -> int:
        """Matrices of a strip."""
        return 2 if self.mode == GATE_UP else 1

    @property
    def lanes(self) -> int:
        """That share an item; 0: matrix steps."""
        if self.columns > LANE_COLUMNS:
            return 0
        if self.kind.block != 256:
            return 1
        return self.tuning.lanes or (2 if self.kind.block_bytes > WHOLE_BYTES else 1)

    @property
    def item_sums(self) -> int:
        """From item to item, as product_row.cu has it."""
        return _odd_quads_of_item(self.spans * ACTIVATION_BLOCK // self.kind.group)

    @property
    def item_terms(self) -> int:
        """From item to item, as product_row.cu has it."""
        return _odd_quads_of_item(self.spans * ACTIVATION_BLOCK // self.kind.group * (1 + self.kind.has_offset))

    @property
    def item_bytes(self) -> int:
        """Of the blocks of an item."""
        return self.kind.row_bytes(max(self.spans * ACTIVATION_BLOCK, self.kind.block))

    @property
    def alone(self) -> bool:
        """Whether a block takes a whole multiprocessor."""
        each = sum(self.matrix_rows) * self.halves * max(self.pairs, 1) * self.kind.row_bytes(self.cols)
        many = self.columns >= ALONE_COLUMNS or self.pairs >= ALONE_PAIRS
        return many or each >= ALONE_BYTES * self.card.multiprocessors

    @property
    def sums(self) -> int:
        """Lanes of a summer that have different sums."""
        return LANES // self.halves

    def cut(self, part: int) -> _Cut:
        """Rows and columns of strips and pieces; `part`: what the room for terms is divided by."""
        blocks = self.card.multiprocessors * (self.tuning.blocks or 1)
        while True:
            own = [-(-r // blocks) for r in self.matrix_rows]
            cut = self._of_lanes(blocks, own, part) if self.lanes else self._of_steps(blocks, own, part)
            if (cut.strips + SUMMERS) * cut.parts * cut.turns * self.halves < MOST_TURNS:
                return cut
            blocks *= 2

    def _terms_of(self, items: int) -> int:
        """Floats of a piece's row for so many items."""
        return _odd_quads(items * self.item_terms)

    def _room(self, part: int) -> int:
        """Floats of a piece for each matrix."""
        return (self.tuning.piece_room or PIECE_ROOM) // part // (4 * self.halves)

    def _of_lanes(self, blocks: int, own: list[int], part: int) -> _Cut:
        """Whole rows, units side by side."""
        room = self._room(part) // self._terms_of(self.items)
        most = max(1, min(self.sums, room) // self.columns)
        strip = -(-max(own) // -(-max(own) // most))
        strips = sum(-(-r // strip) for r in own) * max(self.pairs, 1)
        return _Cut(blocks, max(own), strip, 1, self.items, 1, -(-strip * self.items // UNIT), strips, 1)

    def _of_steps(self, blocks: int, own: list[int], part: int) -> _Cut:
        """Parts of rows, turns of an item of `tall` rows."""
        tall, rows_of_chain = self.tall(max(own)), self.sums // (self.columns // 2)
        most, strip = 2 * rows_of_chain, max(own)
        if strip > tall:  # as many strips as can be added at a time
            strip = min(most, _round(-(-strip // min(SUMMERS, -(-strip // tall))), tall))
        part_items = 1
        while part_items < self.items and strip * self.columns * self._terms_of(part_items + 1) <= self._room(part):
            part_items += 1
        parts = -(-self.items // part_items)
        part_items = -(-self.items // parts)
        groups, strips = -(-strip // tall), sum(-(-r // strip) for r in own)
        chains = 2 * -(-strip // rows_of_chain)
        return _Cut(blocks, max(own), strip, parts, part_items, groups, groups * part_items, strips, chains)

    def tall(self, own: int) -> int:
        """Rows of a strip in a turn: 16, unless 8 leave fewer of them empty."""
        if self.lanes:
            return 0
        return 16 if self.halves == 1 and SMALL_TURN * _round(own, 8) > _round(own, 16) else 8

    @property
    def pitch(self) -> int:
        """Bytes from unit to unit, or from row to row, in a stage, at any alignment and with a word past the end."""
        if self.lanes:
            return _unit_pitch(self.kind, self.item_bytes, self.lanes)
        return ((self.item_bytes + 15 + 4 + 15) // 16 | 1) * 16  # an odd number of 16s spreads the banks

    def stage_bytes(self, tall: int) -> int:
        """Of a warp's turn."""
        return self.pitch * (tall * self.halves if tall else LANES // (UNIT * self.lanes))

    def plan(self, warps: int, depth: int, part: int, beside: int) -> RowPlan:
        """With so many warps and copies under way; `part`: what the room for tables is divided by."""
        tuning, kind, columns = self.tuning, self.kind, self.columns
        warps, depth, cut = tuning.warps or warps, tuning.depth or depth, self.cut(part)
        summers = min(tuning.summers or SUMMERS, cut.strips, max(1, warps // 3))
        pieces = (_round(cut.strips, summers) if cut.parts > 1 else cut.strips) * cut.parts
        tall = self.tall(cut.own)
        all_turns = pieces * cut.turns if tall else -(-pieces * cut.turns * self.halves * self.lanes // 4)
        depth = min(depth, max(1, -(-all_turns // (warps - summers))))  # no more than there is to copy
        inputs = self.pairs if self.mode == DOWN else self.n
        input_pitch, scale_pitch = self.items * (32 * self.spans + 16), _odd_quads(self.cols // ACTIVATION_BLOCK)
        term_pitch, sum_pitch = self._terms_of(cut.part_items), _odd_quads(self.items * self.item_sums)
        region = self.halves * cut.strip * columns * term_pitch * 4
        terms_room = (tuning.terms_room or TERMS_ROOM[beside]) // part
        regions = max(1, min(MOST_REGIONS, pieces, terms_room // region))
        copies = table_copies(kind, (tuning.table_room or TABLE_ROOM[beside]) // max(1, part // 2))
        sizes = {
            "at_inputs": inputs * input_pitch,
            "at_scales": inputs * scale_pitch * 4,
            "at_sums": inputs * sum_pitch * 4,
            "at_keys": _round(self.pairs, 4) * 4,
            "at_strips": cut.strips * self.halves * ENTRY,
            "at_outs": cut.strips * ENTRY,
            "at_terms": regions * region,
            "at_grid": table_bytes(kind) * copies,
            "at_stages": (warps - summers) * depth * self.stage_bytes(tall),
            "at_y": self.pairs * cut.own * 4 if self.mode == DOWN else 0,
        }
        at, begin = {}, 0
        for name, size in sizes.items():
            at[name] = begin
            begin += _round(size, 128)
        del at["at_inputs"]
        return RowPlan(
            spans=self.spans, columns=columns, tall=tall, pitch=self.pitch, lanes=self.lanes, warps=warps,
            summers=summers, chains=cut.chains, depth=depth, copies=copies, aligned=self.wide,
            beside=2 if columns == 1 and warps <= MOST_BESIDE else 1,
            blocks=cut.blocks, items=self.items, strip=cut.strip, parts=cut.parts, part_items=cut.part_items,
            turns=cut.turns, groups=cut.groups, regions=regions, input_pitch=input_pitch, scale_pitch=scale_pitch,
            sum_pitch=sum_pitch, term_pitch=term_pitch, shared=begin, **at,
        )  # fmt: skip

"""How a product with single rows of activations is cut for a card: constants of product_row.cu, shared memory, blocks.

row_plan(...)   for a window of one row (DENSE) and for the experts of a window (GATE_UP, DOWN, PAIRS)

A block owns the same part of the rows of every matrix, and of the expert of every pair. No plan changes a bit of the
result: an output's sum has the order of the row, whoever computes its terms.

Errors   ValueError when a product does not fit the card's shared memory, with the sizes
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from strata.kernels.cuda.card import Card
from strata.kernels.cuda.plans import (
    ACTIVATION_BLOCK,
    DOWN,
    GATE_UP,
    RowTuning,
    table_bytes,
    table_copies,
)
from strata.kernels.formats import TensorType

UNIT: Final = 8
"""Items whose bytes eight lanes copy together."""
UNITS_OF_A_WARP: Final = 4
MOST_REGIONS: Final = 16
MOST_PAIRS: Final = 128
"""Of a window: a thread of the smallest block finds one."""
MOST_UNITS: Final = 1 << 16
"""Of a block: product_row.cu divides them by multiplications that are exact below."""
STATIC: Final = 1024
"""Bytes for the shared variables of the kernel itself, and the KiB that a block takes of a multiprocessor."""
PART_BYTES: Final = 16
SMALL_SPANS: Final = (5, 4, 2, 1)
"""Spans of an item of blocks of 32, by preference: an odd number of them keeps the lanes out of each other's banks."""


UNTUNED: Final = RowTuning()
SUMMERS: Final = 1
TABLE_ROOM: Final = 32 << 10
TERMS_ROOM: Final = 32 << 10
PIECE_ROOM: Final = 12 << 10
_LESS: Final = ((16, 2, 1), (16, 2, 2), (12, 2, 1), (12, 2, 2), (16, 1, 2), (8, 2, 4), (8, 1, 8), (4, 1, 32))
"""Warps, copies under way and what the room for tables is divided by, from most to least shared memory."""


@dataclass(frozen=True, slots=True)
class RowPlan:
    """spans of an item · warps of a block, those of them that add · copies under way · copies of the table · blocks ·
    items of a row · rows of a piece, units of its rows of one matrix · pieces held at once · pitches and byte
    offsets of the parts of shared memory, and its size."""

    spans: int
    warps: int
    summers: int
    depth: int
    copies: int
    aligned: bool
    blocks: int
    items: int
    piece: int
    units: int
    regions: int
    input_pitch: int
    scale_pitch: int
    sum_pitch: int
    term_pitch: int
    at_scales: int
    at_sums: int
    at_keys: int
    at_parts: int
    at_pieces: int
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
            "WARPS": self.warps,
            "SUMMERS": self.summers,
            "DEPTH": self.depth,
            "COPIES": self.copies,
            "ALIGNED": int(self.aligned),
        }

    def arguments(self) -> dict[str, int]:
        """Numbers of the kernel's Arguments; inverses are 2^32 / divisor, rounded up."""
        names = ("items", "piece", "units", "regions", "input_pitch", "scale_pitch", "sum_pitch", "term_pitch")
        parts = ("at_scales", "at_sums", "at_keys", "at_parts", "at_pieces", "at_terms", "at_grid", "at_stages", "at_y")
        divisors = {"item_inverse": self.items, "unit_inverse": self.units, "region_inverse": self.regions}
        inverses = {name: -(-(1 << 32) // by) if by > 1 else 0 for name, by in divisors.items()}
        signed = {name: value - (1 << 32) if value >> 31 else value for name, value in inverses.items()}
        return {name: getattr(self, name) for name in (*names, *parts)} | signed


def _round(n: int, to: int) -> int:
    return -(-n // to) * to


def _odd_quads(floats: int) -> int:
    """A pitch of at least so many floats that is an odd number of 16 bytes."""
    return _round(floats, 4) + (4 - _round(floats, 4)) % 8


def spans_of(kind: TensorType, cols: int) -> int:
    """Spans of an item."""
    spans = cols // ACTIVATION_BLOCK
    if kind.block == 256:
        return 4
    if kind.block == 64:
        return 4 if spans % 4 == 0 else 2
    return next(s for s in SMALL_SPANS if spans % s == 0)


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
    """A plan; matrix_rows: rows of each matrix, or of an expert. `wide`: see `aligned`. A block takes at most half of a
    multiprocessor, so that one of the next kernel fits beside it, unless it needs more. Raises ValueError when nothing
    fits."""
    if n * used > MOST_PAIRS:
        raise ValueError(
            f"a window has at most {MOST_PAIRS} pairs of a row and an expert, got {n * used}; send fewer rows"
        )
    half = card.shared_multiprocessor // 2 - 2 * STATIC
    for limit in (min(half, card.shared_block - STATIC), card.shared_block - STATIC):
        for way in _LESS:
            plan = _layout(card, kind, mode, matrix_rows, cols, n, used, wide, way, tuning)
            if plan.shared <= limit:
                return plan
    raise ValueError(
        f"{max(n * used, n)} rows of {cols} inputs with {kind.name} take {plan.shared} bytes of shared memory, "
        f"the card gives a block {card.shared_block}; send fewer rows"
    )


@dataclass(frozen=True, slots=True)
class _Cut:
    """How the rows are cut: blocks · rows of a block at most · of a piece · units of a piece's rows of one matrix ·
    pieces of a block."""

    blocks: int
    own: int
    piece: int
    units: int
    pieces: int


def _cut(matrix_rows: tuple[int, ...], pairs: int, items: int, halves: int, most: int, blocks: int) -> _Cut:
    """Pieces of at most `most` rows for a grid of so many blocks, or of more where a block has too many units."""
    while True:
        own = [-(-r // blocks) for r in matrix_rows]
        piece = -(-max(own) // -(-max(own) // most))
        units = -(-piece * items // UNIT)
        pieces = sum(-(-r // piece) for r in own) * max(pairs, 1)
        if pieces * units * halves < MOST_UNITS:
            return _Cut(blocks, max(own), piece, units, pieces)
        blocks *= 2


def _stage_bytes(kind: TensorType, spans: int) -> int:
    """The units of a warp's turn, at any alignment."""
    blocks = UNIT * spans // 8 if kind.block == 256 else UNIT * spans * 32 // kind.block
    return UNITS_OF_A_WARP * ((blocks * kind.block_bytes + 15 + 4 + 15) // 16 * 16)


def _layout(
    card: Card,
    kind: TensorType,
    mode: str,
    matrix_rows: tuple[int, ...],
    cols: int,
    n: int,
    used: int,
    wide: bool,
    way: tuple[int, int, int],
    tuning: RowTuning,
) -> RowPlan:
    warps, depth, part = tuning.warps or way[0], tuning.depth or way[1], way[2]
    spans, summers = tuning.spans or spans_of(kind, cols), tuning.summers or SUMMERS
    pairs, halves, groups = n * used, 2 if mode == GATE_UP else 1, cols // kind.group
    inputs, items = pairs if mode == DOWN else n, cols // ACTIVATION_BLOCK // spans
    term_pitch = _odd_quads(groups * (1 + kind.has_offset))
    scale_pitch, input_pitch = _odd_quads(cols // ACTIVATION_BLOCK), items * (32 * spans + 16)

    most = max(1, min(32 // halves, (tuning.piece_room or PIECE_ROOM) // part // (4 * term_pitch * halves)))
    cut = _cut(matrix_rows, pairs, items, halves, most, card.multiprocessors * (tuning.blocks or 1))
    region = halves * cut.piece * term_pitch * 4
    regions = max(1, min(MOST_REGIONS, cut.pieces, (tuning.terms_room or TERMS_ROOM) // part // region))
    copies = table_copies(kind, (tuning.table_room or TABLE_ROOM) // part)
    sizes = {
        "at_inputs": inputs * input_pitch,
        "at_scales": inputs * scale_pitch * 4,
        "at_sums": inputs * groups * 4,
        "at_keys": _round(pairs, 4) * 4,
        "at_parts": cut.pieces * halves * PART_BYTES,
        "at_pieces": cut.pieces * PART_BYTES,
        "at_terms": regions * region,
        "at_grid": table_bytes(kind) * copies,
        "at_stages": (warps - summers) * depth * _stage_bytes(kind, spans),
        "at_y": pairs * cut.own * 4 if mode == DOWN else 0,
    }
    at, begin = {}, 0
    for name, size in sizes.items():
        at[name] = begin
        begin += _round(size, 128)
    del at["at_inputs"]
    return RowPlan(
        spans=spans, warps=warps, summers=summers, depth=depth, copies=copies, aligned=wide, blocks=cut.blocks,
        items=items, piece=cut.piece, units=cut.units, regions=regions, input_pitch=input_pitch,
        scale_pitch=scale_pitch, sum_pitch=groups, term_pitch=term_pitch, shared=begin, **at,
    )  # fmt: skip

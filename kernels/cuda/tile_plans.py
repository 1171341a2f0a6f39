"""How experts of a window are cut into tiles for matrix steps: constants of tile_job.cuh. Pure functions.

tile_plan(...)   experts pair by pair, or None where row_plans.py has them: other types, few pairs, small cards

A block owns an equal part of all rows, a warp of it tiles of 16. No plan changes a bit of the result.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Final

from strata.kernels.cuda.card import Card
from strata.kernels.cuda.plans import ACTIVATION_BLOCK, CHUNK, DOWN, GATE_UP, RowTuning, table_bytes, table_copies
from strata.kernels.formats import TensorType

TILE_ROWS: Final = 16
TERMS: Final = 2 * TILE_ROWS * 12 * 4
"""Bytes of a warp's terms: two chunks of eight spans."""
MOST_ROWS: Final = 1 << 15
"""Of a block: segments.cuh divides them by multiplications that are exact below."""
MOST_BYTES: Final = 1 << 31
"""Of the weights of a pair, or of a block of row_plans.py: the kernels count them in 32 bits."""
STATIC: Final = 1024
"""Bytes for the shared variables of the kernel itself."""
SEGMENT: Final = 48
PAIR: Final = 28
"""Bytes of a segment and of a pair in the kernel's tables."""
BULK_ARCH: Final = 90
"""The first architecture that copies a run of bytes by one instruction."""
TABLE_ROOM: Final = 32 << 10
"""Bytes for copies of a type's table."""
FEWEST_PAIRS: Final = {DOWN: 32}
"""Pairs of a window from which a mode goes this way; the others only when asked to. H200, 2026-11-30, a window of eight
rows: 8,086 us with both by tiles, 7,904 with gate and up by row_plans.py, 7,801 with 16 warps for `down` as well."""
BLOCK_WARPS: Final = 16
"""Of a block at least: those that take no tiles help with what comes before, and with the shared expert."""

UNTUNED: Final = RowTuning()
Ways = tuple[tuple[int, int], ...]
_WIDE: Final[Ways] = ((8, 1), (7, 1), (6, 1), (4, 1))
_NARROW: Final[Ways] = ((16, 1), (10, 2), (10, 1), (8, 2), (8, 1), (4, 1))
"""Warps that take tiles and tiles under way of each, from most to least: of gate and up, whose rows are long, and of
others: there is room for the shared expert beside them."""


@dataclass(frozen=True, slots=True)
class TilePlan:
    """spans of a row · warps of a block · those that take tiles, tiles under way of each, whether by one instruction ·
    copies of the table · rows of a tile, of one matrix · tiles of a block, where all are full · blocks · byte offsets
    of the parts of shared memory, their end, and how much a block asks for."""

    items: int
    warps: int
    tilers: int
    depth: int
    bulk: bool
    copies: int
    strip: int
    tiles: int
    blocks: int
    at_scales: int
    at_keys: int
    at_segments: int
    at_terms: int
    at_grid: int
    at_stages: int
    at_y: int
    end: int
    shared: int

    aligned = False

    @property
    def fewest_tilers(self) -> int:
        """With as many turns of the last one to end: one more tile of a single warp would leave the memory idle."""
        return -(-self.tiles // -(-self.tiles // self.tilers))

    def constants(self, kind: TensorType, mode: str) -> dict[str, int | str]:
        """Macros of product_row.cu."""
        return {
            "TILED": 1,
            "TYPE": kind.name,
            "MODE": mode,
            "SPANS": 1,
            "ITEMS": self.items,
            "COLUMNS": 1,
            "WARPS": self.warps,
            "TILERS": self.tilers,
            "DEPTH": self.depth,
            "BULK": int(self.bulk),
            "BESIDE": 1,
            "COPIES": self.copies,
            "ALIGNED": 0,
        }

    def arguments(self) -> dict[str, int]:
        """Numbers of the kernel's Arguments; the inverse is 2^32 / divisor."""
        offsets = {f.name: getattr(self, f.name) for f in fields(self) if f.name.startswith("at_")}
        return {"strip": self.strip, "strip_inverse": (1 << 32) // self.strip, "strip_turns": 1} | offsets


def tiled(card: Card, kind: TensorType, mode: str, used: int, pairs: int, tuning: RowTuning = UNTUNED) -> bool:
    """Whether experts of this type and so many pairs are cut into tiles."""
    fits = bool(used) and card.roomy and kind.group == ACTIVATION_BLOCK and not kind.has_offset
    wanted = pairs >= FEWEST_PAIRS.get(mode, pairs + 1) if tuning.tiled is None else tuning.tiled
    return fits and wanted


def _round(n: int, to: int) -> int:
    return -(-n // to) * to


@lru_cache(maxsize=256)
def tile_plan(
    card: Card, kind: TensorType, mode: str, rows: int, cols: int, n: int, used: int, tuning: RowTuning = UNTUNED
) -> TilePlan | None:
    """A plan for n rows of activations with `used` experts each, of `rows` rows; None when nothing fits."""
    ways: Ways = _WIDE if mode == GATE_UP else _NARROW
    if tuning.warps:
        ways = ((tuning.warps, tuning.depth or 1),)
    elif tuning.depth:
        ways = tuple(dict.fromkeys((tilers, tuning.depth) for tilers, _ in ways))
    for tilers, depth in ways:
        plan = _plan(card, kind, mode, rows, cols, n, used, tilers, depth, tuning)
        if plan is not None and plan.shared <= card.shared_block - STATIC:
            least = tilers if tuning.warps else plan.fewest_tilers
            return plan if least == tilers else _plan(card, kind, mode, rows, cols, n, used, least, depth, tuning)
    return None


def _plan(
    card: Card, kind: TensorType, mode: str, rows: int, cols: int, n: int, used: int, tilers: int, depth: int,
    tuning: RowTuning,
) -> TilePlan | None:  # fmt: skip
    blocks = card.multiprocessors * (tuning.blocks or 1)
    sources = n if mode == DOWN else n * used
    each, halves, row_bytes = -(-sources * rows // blocks), 2 if mode == GATE_UP else 1, kind.row_bytes(cols)
    if each > MOST_ROWS or each * row_bytes >= MOST_BYTES:
        return None
    pairs = used * min(n, (each - 1) // rows + 2) if mode == DOWN else n * used  # whose inputs or keys a block has
    segments = pairs if mode == DOWN else min(pairs, each)
    inputs, items = pairs if mode == DOWN else n, cols // ACTIVATION_BLOCK
    strip = TILE_ROWS // halves
    copies = table_copies(kind, tuning.table_room or TABLE_ROOM)
    sizes = {
        "at_inputs": inputs * cols,
        "at_scales": inputs * (-(-items // 4) | 1) * 16,
        "at_keys": _round(pairs, 4) * PAIR,
        "at_segments": (segments + 1) * SEGMENT,
        "at_terms": tilers * TERMS,
        "at_grid": table_bytes(kind) * copies,
        "at_stages": tilers * depth * halves * _round(strip * row_bytes + 15, 16)
        + CHUNK // kind.block * kind.block_bytes,
        "at_y": used * each * 4 if mode == DOWN else 0,
    }
    at, begin = {}, 0
    for name, size in sizes.items():
        at[name] = begin
        begin += _round(size, 128)
    del at["at_inputs"]
    bulk = card.arch >= BULK_ARCH if tuning.bulk is None else tuning.bulk
    tiles = -(-each // strip) * (used if mode == DOWN else 1)
    return TilePlan(
        items,
        max(tilers, BLOCK_WARPS),
        tilers,
        depth,
        bulk,
        copies,
        strip,
        tiles,
        blocks,
        **at,
        end=begin,
        shared=begin,
    )

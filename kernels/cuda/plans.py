"""How a product is cut for a card: constants of the kernels, shared memory, blocks. Pure functions of sizes.

window_plan(...)   product_window.cu, for large matrices; small ones and experts: row_plans.py; prompts: prompt_plans.py

No plan changes a bit of the result: an output's sum has the order of the row, whoever computes it.
Errors   ValueError when a product does not fit the card's shared memory, with the sizes
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from strata.kernels.cuda.card import Card
from strata.kernels.cuda.tables import GRID_OF, table
from strata.kernels.formats import TensorType

DENSE: Final = "DENSE"
GATE_UP: Final = "GATE_UP"
DOWN: Final = "DOWN"
PAIRS: Final = "PAIRS"

WINDOW_ROWS: Final = 16
"""Most rows of a window."""
CHUNK: Final = 256
"""Columns that are unpacked together."""
STATIC: Final = 256
"""Bytes for the shared variables that a window kernel declares itself."""
ACTIVATION_BLOCK: Final = 32

ORDERS: Final = {"Q2_0": "EVEN_ODD"} | dict.fromkeys(("IQ2_XXS", "IQ3_XXS", "IQ3_S", "IQ1_S"), "EIGHT")
"""Orders of formats.cuh other than NATIVE, by type."""
HALF_LOOKUPS: Final = ("IQ2_XS", "IQ2_S", "IQ1_M")
"""Types that read half an entry of their table at a time."""


def order(kind: TensorType) -> str:
    """The order in which activations must be stored for a type."""
    return ORDERS.get(kind.name, "NATIVE")


def _round(n: int, to: int) -> int:
    return -(-n // to) * to


def table_bytes(kind: TensorType) -> int:
    """Bytes of a copy of the type's table, 0 without one."""
    return table(kind.name).nbytes if kind.name in GRID_OF else 0


def chunk_pitch(kind: TensorType) -> int:
    """Bytes of a raw row in a stage: a chunk at any alignment, rounded to an odd number of 16s."""
    return ((CHUNK // kind.block * kind.block_bytes + 15 + 4 + 15) // 16 | 1) * 16


def own_pitch(kind: TensorType) -> int:
    """Bytes of the scales and offsets of a row's chunk, rounded to an odd number of 16s."""
    return (CHUNK // kind.group * (1 + kind.has_offset) * 4 // 16 | 1) * 16


def table_copies(kind: TensorType, room: int) -> int:
    """Copies of the type's table side by side: one a lane keeps lookups out of each other's banks, if there is room."""
    size = table_bytes(kind)
    if not size:
        return 1
    copies = 32 if table(kind.name).ndim == 1 or table(kind.name).shape[1] == 1 else 16
    while copies > 1 and copies * size > room:
        copies //= 2
    return copies


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """rows of a tile · eights of activation rows · warps of a block · warps of a ring · stages of a warp · copies of
    the table · blocks · pitches and byte offsets of the parts of shared memory, and its size."""

    rows: int
    eights: int
    warps: int
    ring: int
    stages: int
    copies: int
    blocks: int
    tiles: int
    input_pitch: int
    scale_pitch: int
    sum_pitch: int
    at_scales: int
    at_sums: int
    at_mail: int
    at_own: int
    at_grid: int
    at_stages: int
    shared: int

    def constants(self, kind: TensorType) -> dict[str, int | str]:
        """Macros of product_window.cu."""
        return {
            "TYPE": kind.name,
            "ROWS": self.rows,
            "NT": self.eights,
            "WARPS": self.warps,
            "STAGES": self.stages,
            "COPIES": self.copies,
        }


@dataclass(frozen=True, slots=True)
class RowTuning:
    """What may be set from outside of row_plans.py, by the bench: None leaves it to the plan. table_room, terms_room
    and piece_room: bytes for the copies of the type's table, for the terms of all strips held at once and of one strip;
    `blocks`: of a multiprocessor; `bulk`: a copy is one instruction; `apart`: a block asks for so much shared memory
    that no other of its launch comes to the same multiprocessor; `tiled`: experts by matrix steps
    (tile_plans.py), for which warps (those that take tiles), depth, blocks, table_room and bulk count."""

    spans: int | None = None
    lanes: int | None = None
    warps: int | None = None
    depth: int | None = None
    blocks: int | None = None
    table_room: int | None = None
    terms_room: int | None = None
    piece_room: int | None = None
    bulk: bool | None = None
    apart: bool | None = None
    tiled: bool | None = None


@dataclass(frozen=True, slots=True)
class Tuning:
    """What may be set from outside, by the bench: None leaves it to the plan. `row`: of products by product_row.cu.
    `together`: by product_window.cu, see `together`."""

    rows: int | None = None
    warps: int | None = None
    ring: int | None = None
    stages: int | None = None
    table_room: int | None = None
    row: RowTuning = RowTuning()
    together: bool | None = None


UNTUNED: Final = Tuning()

LARGE: Final = 3 << 20
"""Bytes of the weights of a launch from which several rows are faster by product_window.cu, whose warps unpack tiles
together, than by product_row.cu. H200, 2026-11-29, us of product_row | product_window, eight rows: 16384 x 2560 Q6_K
(34 MB) 27.0 | 22.1, 2560 x 6144 Q6_K (13 MB) 20.7 | 17.7, 248320 x 2560 Q5_K 268 | 209, 10240 x 320 Q8_0 (3.5 MB)
6.4 | 5.0, 320 x 10240 Q6_K (2.7 MB) 18.0 | 18.8. One row, whose lanes work alone: 16.2 | 17.8, 9.3 | 11.0, 130 | 162,
3.3 | 4.5."""


def together(n_bytes: int, n: int, tuning: Tuning = UNTUNED) -> bool:
    """Whether matrices of n_bytes in one launch and n rows go through product_window.cu rather than product_row.cu."""
    if tuning.together is not None:
        return tuning.together
    return n > 1 and n_bytes >= LARGE


def _scale_pitch(blocks: int) -> int:
    """Floats of a row of scales: whole chunks, and 4 past a multiple of 16, so that the four lanes of a quad, which
    read every other row, meet different banks."""
    pitch = _round(blocks, CHUNK // ACTIVATION_BLOCK)
    return pitch + (4 - pitch) % 16


@lru_cache(maxsize=4096)
def window_plan(
    card: Card, kind: TensorType, matrix_rows: tuple[int, ...], cols: int, n: int, tuning: Tuning = UNTUNED
) -> WindowPlan:
    """A plan for n rows; matrix_rows: rows of each matrix. Raises ValueError when nothing fits."""
    for warps in (tuning.warps,) if tuning.warps else (16, 8, 4) if n <= 8 else (8, 4):
        for stages in (tuning.stages,) if tuning.stages else (3, 2) if card.arch >= 80 else (2, 1):
            plan = _window_layout(card, kind, matrix_rows, cols, n, warps, stages, tuning)
            if plan.shared <= card.shared_block - STATIC:
                return plan
    raise ValueError(
        f"{n} rows of {cols} inputs with {kind.name} take {plan.shared} bytes of shared memory, "
        f"the card gives a block {card.shared_block}; send fewer rows"
    )


MOST_RING: Final = 4
TILES_OF_A_MULTIPROCESSOR: Final = 8
"""Warps of a ring at most, and tiles times warps of a ring that keep a multiprocessor busy. On an H200, 8 rows of Q6_K:
10240 x 2560 (10 tiles a multiprocessor) 1,142 GB/s with rings of 1, 1,084 of 4; 2560 x 6144 (2.4 tiles) 493 of 1, 651
of 4, 515 of 8."""


def _ring(card: Card, tiles: int) -> int:
    """Warps of a ring: the fewest that keep a card's warps busy."""
    ring = 1
    while ring < MOST_RING and tiles * ring < TILES_OF_A_MULTIPROCESSOR * card.multiprocessors:
        ring *= 2
    return ring


def _window_layout(
    card: Card,
    kind: TensorType,
    matrix_rows: tuple[int, ...],
    cols: int,
    n: int,
    warps: int,
    stages: int,
    tuning: Tuning,
) -> WindowPlan:
    rows, eights = tuning.rows or 8, 1 if n <= 8 else 2
    tiles = sum(-(-r // rows) for r in matrix_rows)
    ring = min(tuning.ring or _ring(card, tiles), warps)
    blocks = min(card.multiprocessors, tiles)
    room = tuning.table_room or (64 << 10 if card.shared_block >= 160 << 10 else 16 << 10)
    copies = table_copies(kind, room)

    input_pitch = cols + (ACTIVATION_BLOCK - cols) % 128
    scale_pitch = _scale_pitch(cols // ACTIVATION_BLOCK)
    groups = cols // kind.group
    sum_pitch = groups + (4 - groups) % 32 if kind.has_offset else 0
    sizes = {
        "inputs": n * input_pitch,
        "scales": n * scale_pitch * 4,
        "sums": n * sum_pitch * 4,
        "mail": warps * 32 * (rows // 8 * 2 * eights) * 4 if ring > 1 else 0,
        "own": warps * rows * own_pitch(kind),
        "grid": table_bytes(kind) * copies,
        "stages": warps * stages * rows * chunk_pitch(kind),
    }
    at, begin = {}, 0
    for name, size in sizes.items():
        at[name] = begin
        begin += _round(size, 128)
    return WindowPlan(
        rows, eights, warps, ring, stages, copies, blocks, tiles,
        input_pitch, scale_pitch, sum_pitch,
        at["scales"], at["sums"], at["mail"], at["own"], at["grid"], at["stages"], begin,
    )  # fmt: skip

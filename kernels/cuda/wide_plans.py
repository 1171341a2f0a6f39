"""A long product of a prompt by matrix steps of four warps: constants of prompt_wide.cu, sizes of its operands. Pure.

    wide_plan(card, kind, rows, cols, n)     None where the card has no such steps, or where that does not pay

Weights and inputs are written as halves first (wide.cuh); the bits of the result are those of product_prompt.cu.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from strata.kernels.cuda.card import Card
from strata.kernels.cuda.plans import ACTIVATION_BLOCK, chunk_pitch, table_bytes
from strata.kernels.formats import TensorType

ARCH: Final = 90
"""The architecture whose warps multiply by four, out of shared memory."""
STEP: Final = 64
"""Columns of a step."""
ROWS: Final = 128
"""Weight rows of a tile, and COLUMNS activation rows: of a team of four warps TEAM."""
COLUMNS: Final = 192
TEAM: Final = 64
OCTET: Final = 8
"""Rows whose operands lie together."""
HALF: Final = 2
FLOAT: Final = 4
STAGES: Final = 4
"""Steps whose operands a block has in shared memory."""
BAND: Final = 8
"""Column tiles whose blocks follow each other, so that blocks which work at the same time share rows and columns. H200,
2026-11-30: 4 to 43 are alike."""
LEAST_WORK: Final = 20_000_000_000
"""Multiply-adds from which writing halves first pays; LEAST_ROWS of the matrices, for those of the inputs, and
LEAST_COLS of a row, for the beginning and the end of a tile. H200, 2026-11-30, us with 8,192 rows, by tiles | this way
without what is written: 16384 x 2560 Q6_K 3,483 | 2,754, 2560 x 6144 1,327 | 1,055 (2,048 rows: 366 | 313), 1280 x 2560
Q8_0 197 | 198, 2560 x 640 114 | 121; what is written takes 64, 65, 44, 44 and 29, unpacking for tiles some 13."""
LEAST_ROWS: Final = 2048
LEAST_COLS: Final = 1024
LEAST_BUSY: Final = 0.8
"""Part of the multiprocessors that have a tile, on the average: where it is less, the smaller tiles of
product_prompt.cu leave fewer waiting."""


@dataclass(frozen=True, slots=True)
class WidePlan:
    """stages of operands · blocks · column tiles of a band · bytes of shared memory."""

    stages: int
    blocks: int
    band: int
    shared: int

    source = "prompt_wide"
    threads = COLUMNS // TEAM * 128

    def constants(self, kind: TensorType) -> dict[str, int | str]:
        """Macros of prompt_wide.cu; SHARED is checked there against its own layout."""
        return {"GROUP": kind.group, "STAGES": self.stages, "SHARED": self.shared}


def unpacking(kind: TensorType) -> tuple[dict[str, int | str], int]:
    """Macros of prompt_wide_weights.cu, bytes of its shared memory."""
    return {"TYPE": kind.name}, ROWS * chunk_pitch(kind) + table_bytes(kind)


def row_tiles(rows: tuple[int, ...]) -> int:
    """Of all matrices."""
    return sum(-(-r // ROWS) for r in rows)


def step_of_weights(kind: TensorType) -> int:
    """Bytes: halves and the scales of groups."""
    return ROWS * STEP * HALF + STEP // kind.group * ROWS * FLOAT


def step_of_inputs() -> int:
    """Bytes: halves and the scales of spans."""
    return COLUMNS * STEP * HALF + STEP // ACTIVATION_BLOCK * COLUMNS * FLOAT


def bytes_of_weights(kind: TensorType, rows: int, cols: int) -> int:
    """Of a matrix as prompt_wide_weights.cu writes it."""
    return row_tiles((rows,)) * (cols // STEP) * step_of_weights(kind)


def bytes_of_inputs(n: int, cols: int) -> int:
    """Of inputs as prompt_wide_inputs.cu writes them."""
    return -(-n // COLUMNS) * (cols // STEP) * step_of_inputs()


def possible(card: Card, kind: TensorType, cols: int) -> bool:
    """Whether the card, the type and the columns allow it."""
    return card.arch == ARCH and not kind.is_float and not kind.has_offset and cols % STEP == 0


def pays(card: Card, rows: tuple[int, ...], cols: int, n: int) -> bool:
    """Whether it is quicker than product_prompt.cu."""
    if sum(rows) * cols * n < LEAST_WORK or sum(rows) < LEAST_ROWS or cols < LEAST_COLS:
        return False
    tiles = row_tiles(rows) * -(-n // COLUMNS)
    turns = -(-tiles // card.multiprocessors)
    return sum(rows) * n / (turns * card.multiprocessors * ROWS * COLUMNS) >= LEAST_BUSY


def wide_plan(card: Card, kind: TensorType, rows: tuple[int, ...], cols: int, n: int) -> WidePlan | None:
    """Of matrices of one type with these rows, and n activation rows."""
    if not possible(card, kind, cols) or not pays(card, rows, cols, n):
        return None
    shared = STAGES * (step_of_weights(kind) + step_of_inputs() + 2 * 8)
    tiles = row_tiles(rows) * -(-n // COLUMNS)
    return WidePlan(STAGES, min(tiles, card.multiprocessors), BAND, shared) if shared <= card.shared_block else None

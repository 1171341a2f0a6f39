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
"""The architecture whose four warps multiply together out of shared memory."""
STEP: Final = 64
"""Columns of a step."""
ROWS: Final = 192
"""Weight rows of a tile, and COLUMNS activation rows."""
COLUMNS: Final = 128
TEAM: Final = 64
"""Rows of four warps."""
HALF: Final = 2
FLOAT: Final = 4
STAGES: Final = 4
"""Steps whose operands a block has in shared memory."""
BAND: Final = 8
"""Column tiles whose blocks follow each other: blocks that work at the same time share rows and columns."""
LEAST_WORK: Final = 8_000_000_000
"""Multiply-adds from which writing halves first pays."""


@dataclass(frozen=True, slots=True)
class WidePlan:
    """stages of operands · blocks · column tiles of a band · bytes of shared memory."""

    stages: int
    blocks: int
    band: int
    shared: int

    source = "prompt_wide"
    threads = 2 * ROWS

    def constants(self, kind: TensorType) -> dict[str, int | str]:
        """Macros of prompt_wide.cu; SHARED is checked there against its own layout."""
        return {"TYPE": kind.name, "STAGES": self.stages, "SHARED": self.shared}


def unpacking(kind: TensorType) -> tuple[dict[str, int | str], int]:
    """Macros of prompt_wide_weights.cu, bytes of its shared memory."""
    return {"TYPE": kind.name}, ROWS * chunk_pitch(kind) + table_bytes(kind)


def step_of_weights(kind: TensorType) -> int:
    """Bytes: halves and the scales of groups."""
    return ROWS * STEP * HALF + STEP // kind.group * ROWS * FLOAT


def step_of_inputs() -> int:
    """Bytes: halves and the scales of spans."""
    return COLUMNS * STEP * HALF + STEP // ACTIVATION_BLOCK * COLUMNS * FLOAT


def bytes_of_weights(kind: TensorType, rows: int, cols: int) -> int:
    """Of a matrix as prompt_wide_weights.cu writes it."""
    return -(-rows // ROWS) * (cols // STEP) * step_of_weights(kind)


def bytes_of_inputs(n: int, cols: int) -> int:
    """Of inputs as prompt_wide_inputs.cu writes them."""
    return -(-n // COLUMNS) * (cols // STEP) * step_of_inputs()


def wide_plan(card: Card, kind: TensorType, rows: tuple[int, ...], cols: int, n: int) -> WidePlan | None:
    """Of matrices of one type with these rows, and n activation rows."""
    if card.arch != ARCH or kind.is_float or kind.has_offset or cols % STEP:
        return None
    if sum(rows) * cols * n < LEAST_WORK:
        return None
    shared = STAGES * (step_of_weights(kind) + step_of_inputs() + 2 * 8)
    if shared > card.shared_block:
        return None
    tiles = sum(-(-r // ROWS) for r in rows) * -(-n // COLUMNS)
    return WidePlan(STAGES, min(tiles, card.multiprocessors), BAND, shared)

"""Float weights with many rows: which kernel takes them, and how the work is cut.

launch_prompt(...)   DENSE matrices, or experts, of one float type; chooses between
    lanes_prompt.cu  tiles of 16 rows and 16 columns; the columns of a block stay in shared memory where they fit
    lanes_thin.cu    matrices of few rows: bound by reading the inputs once

No plan changes a bit of the result. Errors: none of its own
Cost   10.7 G multiply-adds (512 x 2560, 8,192 rows) read 2.7 GB from the L2; lanes_thin reads its inputs once
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np

from strata.kernels.cuda import card as cards
from strata.kernels.cuda.arguments import LANES_PROMPT, enter_matrices, fill, run
from strata.kernels.cuda.card import Card
from strata.kernels.cuda.plans import DENSE, GATE_UP
from strata.kernels.cuda.workspace import DeviceArray
from strata.kernels.formats import TensorType

TILE: Final = 16
"""Rows, and columns, of a tile of lanes_prompt.cu."""
THIN_ROWS: Final = 8
"""Rows of a matrix up to which lanes_thin.cu reads the inputs once for every THIN_TILE of them."""
THIN_TILE: Final = 4
THIN_COLUMNS: Final = 16
"""Columns of a block of lanes_thin.cu."""

_THREADS: Final = 256
_THIN_THREADS: Final = 128
_STEP: Final = 128
_MAIL: Final = 16 << 10
_START: Final = 0.5
"""Row tiles that the begin of a block costs: the first one waits for device memory."""
_WAVES: Final = 4

Matrices = list[tuple[int, DeviceArray, int]]
"""Address, output and rows of each."""


@dataclass(frozen=True, slots=True)
class LanesPlan:
    """Columns stay in shared memory? · steps of 128 columns a stage · stages · bytes of shared memory · row tiles of a
    block."""

    resident: bool
    steps: int
    stages: int
    shared: int
    each: int

    def constants(self, kind: TensorType, mode: str, cols: int) -> dict[str, int | str]:
        """Macros of lanes_prompt.cu."""
        return {
            "TYPE": kind.name,
            "MODE": mode,
            "VEC": vector_width(cols),
            "RESIDENT": int(self.resident),
            "STEPS": self.steps,
            "STAGES": self.stages,
            "WHOLE": int(cols % (self.steps * _STEP) == 0),
        }


def vector_width(cols: int) -> int:
    """Columns that the kernels for float weights read at once."""
    return 4 if cols % 4 == 0 else 1


@lru_cache(maxsize=4096)
def lanes_plan(card: Card, kind: TensorType, cols: int, row_tiles: int, column_tiles: int) -> LanesPlan:
    """The first way that fits the card's shared memory; 48 KiB of it always do."""
    own, whole = TILE * _STEP * kind.block_bytes, TILE * _STEP * 4
    for resident, steps, stages in ((True, 2, 3), (True, 2, 2), (False, 2, 3), (False, 2, 2), (False, 1, 2)):
        inputs = -(-cols // (steps * _STEP)) * steps * whole if resident else 0
        shared = stages * steps * (own + (0 if resident else whole)) + inputs + _MAIL
        if shared <= card.shared_block:
            break
    return LanesPlan(resident, steps, stages, shared, _each(card, row_tiles, column_tiles, resident))


def _each(card: Card, row_tiles: int, column_tiles: int, resident: bool) -> int:
    """Row tiles of a block: what ends first when every multiprocessor takes a block at a time."""
    start = _START if resident else 0.0

    def time(parts: int) -> float:
        each = -(-row_tiles // parts)
        blocks = column_tiles * -(-row_tiles // each)
        return -(-blocks // card.multiprocessors) * (each + start)

    most = min(row_tiles, max(1, -(-_WAVES * card.multiprocessors // max(column_tiles, 1))))
    return -(-row_tiles // min(range(1, most + 1), key=time))


def launch_prompt(kind: TensorType, mode: str, columns: int, matrices: Matrices, **given: Any) -> None:
    """Queue the product. columns: activation rows (DENSE), or tiles of pairs at most; given: fields of LANES_PROMPT."""
    arguments = fill(LANES_PROMPT, **given)
    cols = int(given["cols"])
    if mode == DENSE and all(rows <= THIN_ROWS for _, _, rows in matrices):
        _thin(kind, cols, columns, matrices, arguments)
        return
    tiles = enter_matrices(arguments, matrices, TILE // 2 if mode == GATE_UP else TILE)
    column_tiles = -(-columns // TILE) if mode == DENSE else columns
    plan = lanes_plan(cards.card(), kind, cols, tiles, column_tiles)
    arguments["row_tiles"], arguments["each"] = tiles, plan.each
    blocks = column_tiles * -(-tiles // plan.each)
    run("lanes_prompt", plan.constants(kind, mode, cols), blocks, _THREADS, arguments, plan.shared)


def _thin(kind: TensorType, cols: int, columns: int, matrices: Matrices, arguments: np.ndarray) -> None:
    tiles = enter_matrices(arguments, matrices, THIN_TILE)
    arguments["row_tiles"] = tiles
    constants: dict[str, int | str] = {"TYPE": kind.name, "VEC": vector_width(cols)}
    run("lanes_thin", constants, tiles * -(-columns // THIN_COLUMNS), _THIN_THREADS, arguments)

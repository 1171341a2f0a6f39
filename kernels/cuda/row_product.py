"""Launches of product_row.cu: the rows of a window with dense matrices, and its experts pair by pair.

plan(...), dense(...)   matrices of one type with up to 8 rows     experts(...)   one product of the picked experts

Arrays and errors as in product.py and mixture.py, which check them.

Cost     weights are read once a pair; pairs of the same expert read them about the same time, from the cache
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from strata.kernels.cuda import card as cards
from strata.kernels.cuda import row_plans
from strata.kernels.cuda.arguments import enter_matrices, fill, run, structure
from strata.kernels.cuda.plans import DENSE, GATE_UP, RowTuning
from strata.kernels.cuda.row_plans import RowPlan, SidePlan
from strata.kernels.cuda.tile_plans import TilePlan
from strata.kernels.cuda.workspace import DeviceArray
from strata.kernels.formats import TensorType

ROW: Final = structure(
    ("x", "q", "d", "join", "first", "second", "ids", "weights", "given", "beside"),
    ("early", "older", "n", "used", "experts", "cols", "matrices", "strip", "strip_inverse", "turns", "strip_turns",
     "strip_turn_inverse", "strips", "regions", "region_inverse", "at_scales", "at_sums", "at_keys", "at_segments",
     "at_arrived", "at_terms", "at_grid", "at_stages", "at_y"),
)  # fmt: skip
"""Arguments of product_row.cu."""

Plan = RowPlan | TilePlan
Matrices = Sequence[tuple[int, DeviceArray, int]]
"""(address, output, rows) of each."""


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """The shared expert's product in a launch of the experts': its type, plan, mode and matrices, and what else its
    Arguments hold. Beside gate and up: gate and up; beside down: down, whose output is only joined."""

    kind: TensorType
    plan: SidePlan
    mode: str
    matrices: Matrices
    given: dict[str, Any]


def plan(kind: TensorType, matrices: Matrices, n: int, cols: int, tuning: RowTuning, mode: str = DENSE) -> Plan:
    """For n rows of activations and dense matrices. Raises ValueError when the card does not hold so many rows."""
    wide = row_plans.aligned(kind, tuple(at for at, _, _ in matrices))
    rows = tuple(rows for _, _, rows in _outputs(matrices, mode))
    return row_plans.row_plan(cards.card(), kind, mode, rows, cols, n, wide=wide, tuning=tuning)


def _outputs(matrices: Matrices, mode: str) -> Matrices:
    """Those with an output of their own: of gate and up only the first."""
    return matrices[:1] if mode == GATE_UP else matrices


def dense(plan: Plan, kind: TensorType, matrices: Matrices, mode: str, **more: Any) -> None:
    """Rows of activations, `x` or their quantised form, times matrices of one type."""
    _launch(plan, kind, mode, matrices, len(_outputs(matrices, mode)), **more)


def experts(
    plan: Plan, kind: TensorType, mode: str, out: DeviceArray, rows: int, side: Side | None = None, **more: Any
) -> None:
    """One product of the picked experts: their rows times the rows of the window, or the pairs' own (DOWN)."""
    if side is None:
        _launch(plan, kind, mode, [(0, out, rows)], 1, **more)
        return
    own = _arguments(plan, [(0, out, rows)], 1, **more)
    other = _arguments(side.plan.plan, side.matrices, 1, **side.given)
    constants = plan.constants(kind, mode) | side.plan.constants(side.kind, side.mode)
    behind = (other, np.int32(side.plan.at))
    run("product_row_beside", constants, plan.blocks, 32 * plan.warps, own, side.plan.shared, more=behind)


def _launch(plan: Plan, kind: TensorType, mode: str, matrices: Matrices, sources: int, **more: Any) -> None:
    arguments = _arguments(plan, matrices, sources, **more)
    run("product_row", plan.constants(kind, mode), plan.blocks, 32 * plan.warps, arguments, plan.shared)


def _arguments(plan: Plan, matrices: Matrices, sources: int, **more: Any) -> np.ndarray:
    more.pop("sums", None)  # the kernel makes them
    arguments = fill(ROW, matrices=sources, **plan.arguments(), **more)
    enter_matrices(arguments, matrices, 1)
    return arguments

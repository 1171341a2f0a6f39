"""Launches of product_row.cu: a window of one row with dense matrices, and the experts of a window pair by pair.

dense(...)     matrices of one type and one row of activations          experts(...)   one product of the picked experts

Arrays and errors as in product.py and mixture.py, which check them.

Cost     weights are read once a pair; pairs of the same expert read them about the same time, from the cache
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from strata.kernels.cuda import card as cards
from strata.kernels.cuda import row_plans
from strata.kernels.cuda.arguments import enter_matrices, fill, run, structure
from strata.kernels.cuda.plans import DENSE, RowTuning
from strata.kernels.cuda.row_plans import RowPlan
from strata.kernels.cuda.workspace import DeviceArray
from strata.kernels.formats import TensorType

ROW: Final = structure(
    ("x", "q", "d", "join", "first", "second", "ids", "weights", "given", "beside"),
    ("early", "n", "used", "cols", "matrices", "items", "item_inverse", "units", "unit_inverse", "piece", "regions",
     "region_inverse", "at_scales", "at_sums", "at_keys", "at_parts", "at_pieces", "at_terms", "at_grid",
     "at_stages", "at_y", "input_pitch", "scale_pitch", "sum_pitch", "term_pitch"),
)  # fmt: skip
"""Arguments of product_row.cu."""

Matrices = Sequence[tuple[int, DeviceArray, int]]
"""(address, output, rows) of each."""


def dense(kind: TensorType, matrices: Matrices, cols: int, tuning: RowTuning, **more: Any) -> None:
    """One row of activations, `x` (1, cols) or its quantised form, times matrices of one type."""
    wide = row_plans.aligned(kind, tuple(at for at, _, _ in matrices))
    rows = tuple(rows for _, _, rows in matrices)
    plan = row_plans.row_plan(cards.card(), kind, DENSE, rows, cols, wide=wide, tuning=tuning)
    _launch(plan, kind, DENSE, matrices, n=1, cols=cols, **more)


def experts(plan: RowPlan, kind: TensorType, mode: str, out: DeviceArray, rows: int, **more: Any) -> None:
    """One product of the picked experts: their rows times the rows of the window, or the pairs' own (DOWN)."""
    _launch(plan, kind, mode, [(0, out, rows)], **more)


def _launch(plan: RowPlan, kind: TensorType, mode: str, matrices: Matrices, **more: Any) -> None:
    more.pop("sums", None)  # the kernel makes them
    arguments = fill(ROW, matrices=len(matrices), **plan.arguments(), **more)
    enter_matrices(arguments, matrices, 1)
    run("product_row", plan.constants(kind, mode), plan.blocks, 32 * plan.warps, arguments, plan.shared)

"""Float weights with the rows of a window: how chains.cuh is cut, and the launch of dense matrices.

chains_plan(...)      what a block takes; pure
router_plan(...)      the same for route_window.cu
launch_dense(...)     chains_window.cu

No plan changes a bit of the result. Errors: none of its own
Cost   every weight is read once for the activation rows of a part, and every activation once for `rows` weight rows
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from strata.kernels.cuda.arguments import CHAINS_WINDOW, enter_matrices, fill, run
from strata.kernels.cuda.lanes import Matrices
from strata.kernels.cuda.workspace import DeviceArray
from strata.kernels.formats import TensorType
from strata.kernels.ops import LANES

ROWS: Final = 4
"""Weight rows of a group."""
MOST_INPUTS: Final = 2
"""Activation rows of a group at once: a router of 8 rows takes 5.0 us with two, 7.4 with eight (H200, 2026-11-29)."""
MOST_GROUPS: Final = 4
"""Groups, or parts, for the activation rows."""
MOST_STEPS: Final = 20
"""Elements of a chain under way: all of 2560 columns."""


@dataclass(frozen=True, slots=True)
class ChainsPlan:
    """Weight rows and activation rows of a group · groups of a block · blocks for all weight rows · parts of the
    activation rows that blocks of their own take."""

    rows: int
    inputs: int
    groups: int
    blocks: int
    parts: int

    @property
    def threads(self) -> int:
        return LANES * self.groups

    def constants(self, kind: TensorType, cols: int) -> dict[str, int | str]:
        """Macros of chains.cuh."""
        steps = max(1, min(MOST_STEPS, cols // LANES))
        return {"TYPE": kind.name, "ROWS": self.rows, "INPUTS": self.inputs, "GROUPS": self.groups, "STEPS": steps}


def _cut(n: int) -> tuple[int, int]:
    """Activation rows of a group, and groups for n of them, at most MOST_GROUPS."""
    inputs = min(n, MOST_INPUTS)
    return inputs, min(MOST_GROUPS, -(-n // inputs))


def chains_plan(rows: int, n: int) -> ChainsPlan:
    """For `rows` weight rows and n activation rows; blocks of one group."""
    inputs, parts = _cut(n)
    return ChainsPlan(ROWS, inputs, 1, -(-rows // ROWS), parts)


def router_plan(rows: int, n: int) -> ChainsPlan:
    """For a router of `rows` rows and n activation rows, all of them in every block: its last one picks for all."""
    inputs, groups = _cut(n)
    return ChainsPlan(ROWS, inputs, groups, -(-rows // ROWS), 1)


def launch_dense(
    kind: TensorType, matrices: Matrices, x: DeviceArray, join: DeviceArray | None = None, early: bool = False
) -> None:
    """x (n, cols) with every matrix of one type, into their outputs; `join` and `early` as in `product.linear`."""
    n, cols = x.shape
    arguments = fill(CHAINS_WINDOW, x=x, join=join, early=int(early), n=n, cols=cols)
    rows = enter_matrices(arguments, matrices, 1)
    arguments["rows"] = rows
    plan = chains_plan(rows, n)
    run("chains_window", plan.constants(kind, cols), plan.blocks, plan.threads, arguments, parts=plan.parts)

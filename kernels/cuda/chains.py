"""Float weights with the rows of a window: how chains.cuh is cut, and the launch of dense matrices.

chains_plan(...)      what a block takes; pure
router_plan(...)      the same for route_window.cu
launch_dense(...)     chains_window.cu

No plan changes a bit of the result. Errors: none of its own
Cost   every weight is read once for the activation rows of a part, and every activation once for `rows` weight rows
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from strata.kernels.cuda import card as cards
from strata.kernels.cuda.arguments import CHAINS_WINDOW, enter_matrices, fill, run
from strata.kernels.cuda.lanes import Matrices
from strata.kernels.cuda.workspace import DeviceArray
from strata.kernels.formats import TensorType
from strata.kernels.ops import LANES

MOST_ROWS: Final = 4
"""Weight rows of a group."""
MOST_INPUTS: Final = 8
"""Activation rows of a group at once."""
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


@lru_cache(maxsize=256)
def chains_plan(multiprocessors: int, rows: int, n: int) -> ChainsPlan:
    """For `rows` weight rows and n activation rows: as many blocks as there are multiprocessors, if the work is small.

    Parts come first: a block then waits for fewer activations, and what it reads of the weights again is early.
    """
    of_group, inputs, parts = MOST_ROWS, min(MOST_INPUTS, 1 << (n - 1).bit_length()), 1
    while 2 * parts * -(-rows // of_group) <= multiprocessors and (inputs > 1 or of_group > 1):
        if inputs > 1:
            inputs, parts = inputs // 2, 2 * parts
        else:
            of_group //= 2
    return ChainsPlan(of_group, inputs, 1, -(-rows // of_group), parts)


def router_plan(rows: int, n: int) -> ChainsPlan:
    """For a router of `rows` rows and n activation rows, all of them in every block: two groups share many of them, and
    have a warp for each to pick."""
    inputs, groups = min(MOST_INPUTS, 1 << (n - 1).bit_length()), 1
    if inputs > 2:
        inputs, groups = inputs // 2, 2
    return ChainsPlan(MOST_ROWS, inputs, groups, -(-rows // MOST_ROWS), 1)


def launch_dense(
    kind: TensorType, matrices: Matrices, x: DeviceArray, join: DeviceArray | None = None, early: bool = False
) -> None:
    """x (n, cols) with every matrix of one type, into their outputs; `join` and `early` as in `product.linear`."""
    n, cols = x.shape
    arguments = fill(CHAINS_WINDOW, x=x, join=join, early=int(early), n=n, cols=cols)
    rows = enter_matrices(arguments, matrices, 1)
    arguments["rows"] = rows
    plan = chains_plan(cards.card().multiprocessors, rows, n)
    run("chains_window", plan.constants(kind, cols), plan.blocks, plan.threads, arguments, parts=plan.parts)

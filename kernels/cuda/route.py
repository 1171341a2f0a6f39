"""The experts of a row: the best logits and their softmax. Contract: `ops.Kernels.route`.

route         from logits
route_window  of a window: the router's products with it, in one launch

Cost     a warp a row: the logits are read once; some hundred instructions while few logits come near the best ones
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from strata.kernels.check import check
from strata.kernels.cuda import card as cards
from strata.kernels.cuda import chains
from strata.kernels.cuda.launch import F32, I32, launch
from strata.kernels.cuda.workspace import DeviceArray, Workspace
from strata.kernels.formats import Weight
from strata.kernels.ops import MAX_TOP_K

MAX_EXPERTS: Final = 2048
"""Logits of a row: 64 registers of a lane."""
WINDOW_ROWS: Final = 16
_LANES: Final = 32
_ROWS: Final = 4
"""Rows of a block."""


def _check_picks(experts: int, used: int) -> None:
    if experts > MAX_EXPERTS:
        raise ValueError(f"logits must have at most {MAX_EXPERTS} experts, got {experts}")
    if not 1 <= used <= min(experts, MAX_TOP_K):
        raise ValueError(f"used must be in 1 to {min(experts, MAX_TOP_K)}, got {used}")


def _per_lane(experts: int) -> int:
    return 1 << (-(-experts // _LANES) - 1).bit_length()


def route(workspace: Workspace, logits: DeviceArray, used: int) -> tuple[DeviceArray, DeviceArray]:
    """logits (n, E) -> the `used` best experts of every row, int32 (n, used), and their weights."""
    size = check(logits=(logits, "n E", F32))
    n, experts = size["n"], size["E"]
    _check_picks(experts, used)
    picked, weights = workspace.array((n, used), I32), workspace.array((n, used))
    launch(
        "route.cu", "route", (-(-n // _ROWS),), (_LANES * _ROWS,),
        logits, picked, weights, n, experts, used, PER_LANE=_per_lane(experts),
    )  # fmt: skip
    return picked, weights


def fits_window(router: Weight, shared: Weight, n: int) -> bool:
    """Whether `route_window` takes n rows: float matrices of one type."""
    return router.type.is_float and router.type is shared.type and 1 <= n <= WINDOW_ROWS


def route_window(
    workspace: Workspace,
    ended: DeviceArray,
    router: Weight,
    shared: Weight,
    x: DeviceArray,
    used: int,
) -> tuple[DeviceArray, DeviceArray, DeviceArray]:
    """x (n, H) -> experts int32 (n, used), their weights, and the logits (n,) of the shared expert's gate.

    `ended`: uint32 (1,), 0 before and after. Rows that `fits_window` allows. The scores stay in the workspace.
    """
    n = check(x=(x, f"n {router.cols}", F32), ended=(ended, "1", np.uint32))["n"]
    experts = router.rows
    _check_picks(experts, used)
    logits, shared_logits = workspace.array((n, experts)), workspace.array((n,))
    picked, weights = workspace.array((n, used), I32), workspace.array((n, used))
    plan, card = chains.router_plan(experts + 1, n), cards.card()
    constants: dict[str, Any] = plan.constants(router.type, router.cols)
    launch(
        "route_window.cu", "route_window", (plan.blocks,), (plan.threads,),
        router.data, shared.data, x, logits, shared_logits, picked, weights, ended,
        n, experts, router.cols, used,
        shared=card.apart(0, plan.blocks),  # so that blocks of the product behind it, which come meanwhile, lie apart
        PER_LANE=_per_lane(experts), **constants,
    )  # fmt: skip
    return picked, weights, shared_logits

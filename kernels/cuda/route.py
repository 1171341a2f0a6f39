"""The experts of a row: the best logits and their softmax. Contract: `ops.Kernels.route`.

Cost   a warp a row: the logits are read once, then `used` steps of two exchanges
"""

from __future__ import annotations

from typing import Final

from strata.kernels.check import check, require
from strata.kernels.cuda.launch import F32, I32, launch
from strata.kernels.cuda.workspace import DeviceArray, Workspace
from strata.kernels.ops import MAX_TOP_K

MAX_EXPERTS: Final = 2048
"""Logits of a row: 64 registers of a lane."""
_LANES: Final = 32
_ROWS: Final = 4
"""Rows of a block."""


def route(workspace: Workspace, logits: DeviceArray, used: int) -> tuple[DeviceArray, DeviceArray]:
    """logits (n, E) -> the `used` best experts of every row, int32 (n, used), and their weights."""
    size = check(logits=(logits, "n E", F32))
    n, experts = size["n"], size["E"]
    require(experts <= MAX_EXPERTS, f"logits must have at most {MAX_EXPERTS} experts, got {experts}")
    limit = min(experts, MAX_TOP_K)
    require(1 <= used <= limit, f"used must be in 1 to {limit}, got {used}")
    picked, weights = workspace.array((n, used), I32), workspace.array((n, used))
    per_lane = 1 << (-(-experts // _LANES) - 1).bit_length()
    launch(
        "route.cu", "route", (-(-n // _ROWS),), (_LANES * _ROWS,),
        logits, picked, weights, I32(n), I32(experts), I32(used), PER_LANE=per_lane,
    )  # fmt: skip
    return picked, weights

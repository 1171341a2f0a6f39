"""Root mean square norm with a factor per element. Contract: `ops.Kernels.rms_norm`.

Cost   x is read once from memory, once from the cache, and written once
"""

from __future__ import annotations

from math import prod

from strata.kernels.check import check, require
from strata.kernels.cuda.launch import F32, launch
from strata.kernels.cuda.workspace import DeviceArray, Workspace
from strata.kernels.ops import LANES


def rms_norm(workspace: Workspace, x: DeviceArray, w: DeviceArray, eps: float) -> DeviceArray:
    """rms(x) * w over the last axis: x (..., N), w (N,), or w (G, N) for x (n, G, N)."""
    fits = w.ndim in (1, 2) and x.ndim >= w.ndim and x.shape[x.ndim - w.ndim :] == w.shape
    require(fits, f"w must have the last sizes of x {x.shape}, got {w.shape}")
    n = x.shape[-1]
    rows = prod(x.shape[:-1])
    check(x=(x.reshape(-1), "all", F32), w=(w.reshape(-1), "factors", F32))
    y = workspace.array(x.shape)
    launch("norm.cu", "rms_norm", (rows,), (LANES,), x, w, y, n, w.size // n, eps)
    return y

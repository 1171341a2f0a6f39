"""Root mean square norm with a factor per element. Contract: `ops.Kernels.rms_norm`."""

from __future__ import annotations

import numpy as np

from strata.kernels.ops import F32
from strata.kernels.reference.scalar import rms


def rms_norm(x: F32, w: F32, eps: float) -> F32:
    """rms(x) * w over the last axis: x (..., N), w (N,), or w (G, N) for x (n, G, N)."""
    if w.ndim not in (1, 2) or x.ndim < w.ndim or x.shape[x.ndim - w.ndim :] != w.shape:
        raise ValueError(f"w must have the last sizes of x {x.shape}, got {w.shape}")
    return (rms(x.astype(np.float64), eps) * w).astype(np.float32)

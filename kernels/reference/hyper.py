"""Hyper-connections: C residual streams mixed into one block input, and a block's output added back.

Contracts: `ops.Kernels.hyper_mix`, `ops.Kernels.hyper_add`. The gate multiplies the normed streams; what is added to
afterwards is the raw residual.
"""

from __future__ import annotations

import numpy as np

from strata.kernels.check import check
from strata.kernels.ops import F32, Hyper
from strata.kernels.reference.linear import linear
from strata.kernels.reference.norm import rms_norm
from strata.kernels.reference.scalar import sigmoid, silu


def hyper_mix(x: F32, hc: Hyper, eps: float) -> tuple[F32, F32 | None]:
    """x (n, C, H) -> the block's input u (n, H), and beta (n, C) when the module injects."""
    size = check(x=(x, "n C H", np.float32), norm=(hc.norm, "C H", np.float32))
    n, c = size["n"], size["C"]
    normed = rms_norm(x, hc.norm, eps)
    flat = normed.reshape(n, -1)
    products = linear([hc.down] if hc.inject is None else [hc.down, hc.inject], flat)
    a = silu(products[0].astype(np.float64) / c).astype(np.float32)
    gate = sigmoid(linear([hc.up], a)[0].astype(np.float64)).reshape(x.shape)
    u = (gate * normed).sum(1) / c
    beta = None if hc.inject is None else (2 * sigmoid(products[1].astype(np.float64) / c)).astype(np.float32)
    return u.astype(np.float32), beta


def hyper_add(x: F32, beta: F32, y: F32) -> None:
    """x[c] = x[c] + beta[c] * y, in place."""
    check(x=(x, "n C H", np.float32), beta=(beta, "n C", np.float32), y=(y, "n H", np.float32))
    x[...] = x + beta.astype(np.float64)[:, :, None] * y[:, None, :]

"""Hyper-connections: C residual streams mixed into one block input, and a block's output added back.

Contracts: `ops.Kernels.hyper_mix`, `ops.Kernels.hyper_add`. The gate multiplies the normed streams; what is added to
afterwards is the raw residual.

hyper_mix, hyper_add   the formulas
ordered_down           the product with `down` in its written order, bit for bit: for tests
"""

from __future__ import annotations

import numpy as np

from strata.kernels.check import check
from strata.kernels.formats import Weight
from strata.kernels.ops import F32, Hyper, streams_of_a_part
from strata.kernels.reference.linear import linear, ordered_linear
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


def ordered_down(down: Weight, normed: F32) -> F32:
    """normed (n, C, H) -> (n, rows of down), the sums of a row in their parts."""
    n, streams, width = normed.shape
    together = streams_of_a_part(down.type, streams, width)
    total = None
    for begin in range(0, streams, together):
        end = min(begin + together, streams)
        bytes_of = slice(down.type.row_bytes(begin * width), down.type.row_bytes(end * width))
        part = Weight(down.type, (down.rows, (end - begin) * width), np.ascontiguousarray(down.data[:, bytes_of]))
        (made,) = ordered_linear([part], np.ascontiguousarray(normed[:, begin:end]).reshape(n, -1))
        total = made if total is None else total + made
    assert total is not None
    return total


def hyper_add(x: F32, beta: F32, y: F32) -> None:
    """x[c] = x[c] + beta[c] * y, in place."""
    check(x=(x, "n C H", np.float32), beta=(beta, "n C", np.float32), y=(y, "n H", np.float32))
    x[...] = x + beta.astype(np.float64)[:, :, None] * y[:, None, :]

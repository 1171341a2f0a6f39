"""Products with the weights of a file, and rows of them as float32.

dequantize, linear   the formulas: weights to float32, then a float32 matrix product in whatever order BLAS likes
ordered_linear       the steps of `ops.py` ("One arithmetic"), bit for bit: what every fast backend must give

Shapes   x float32 (n, cols) -> one float32 (n, rows) for each weight
Errors   ValueError naming the argument, the wanted and the given shape
Cost     linear holds one dequantised matrix at a time, 4 * rows * cols bytes; ordered_linear is for tests
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from strata.kernels.formats import Weight
from strata.kernels.ops import ACT_BLOCK, F32, I64, LANES
from strata.kernels.reference.fma import fma
from strata.kernels.reference.quant import quantize, unpack


def dequantize(w: Weight, rows: I64) -> F32:
    """Rows of a matrix as float32, code * scale + offset in one fma: rows (n,) -> (n, cols)."""
    if len(w.shape) != 2 or rows.ndim != 1:
        raise ValueError(f"dequantize wants a matrix and a list of rows, got {w.shape} and {rows.shape}")
    if rows.size and not (rows.min() >= 0 and rows.max() < w.rows):
        raise ValueError(f"rows must be in 0 to {w.rows - 1}, got {rows.min()} to {rows.max()}")
    return _values(w, w.data[rows])


def linear(weights: Sequence[Weight], x: F32) -> list[F32]:
    """Several matrices with one input, in float32: x (n, cols) -> [(n, rows_i)]."""
    _check(weights, x)
    return [x @ _values(w, w.data).T for w in weights]


def ordered_linear(weights: Sequence[Weight], x: F32) -> list[F32]:
    """The same products in the written order: `quantize` and `product` for blocks, `lanes` for float weights."""
    _check(weights, x)
    return [_ordered_float(w, x) if w.type.is_float else _ordered_blocks(w, x) for w in weights]


def lanes(a: F32, b: F32 | None = None) -> F32:
    """`lanes` of `ops.py` over the last axis: the sum of a, or of the products a * b."""
    a, b = np.broadcast_arrays(a, np.float32(1) if b is None else b)
    n = a.shape[-1]
    p = np.zeros((*a.shape[:-1], LANES), np.float32)
    for at in range(0, n, LANES):
        k = min(LANES, n - at)
        p[..., :k] = fma(a[..., at : at + k], b[..., at : at + k], p[..., :k])
    while p.shape[-1] > 1:
        half = p.shape[-1] // 2
        p = p[..., :half] + p[..., half:]
    return p[..., 0]


def _check(weights: Sequence[Weight], x: F32) -> None:
    if x.dtype != np.float32 or x.ndim != 2:
        raise ValueError(f"x must be float32 (n, cols), got {x.dtype} {x.shape}")
    for w in weights:
        if len(w.shape) != 2 or w.cols != x.shape[1]:
            raise ValueError(f"a weight for x {x.shape} must be (rows, {x.shape[1]}), got {w.shape}")


def _values(w: Weight, data: np.ndarray) -> F32:
    """Rows of a weight's bytes as float32."""
    if w.type.name == "F32":
        return np.ascontiguousarray(data).view("<f4")
    if w.type.name == "F16":
        return np.ascontiguousarray(data).view("<f2").astype(np.float32)
    if w.type.name == "BF16":
        return (np.ascontiguousarray(data).view("<u2").astype(np.uint32) << 16).view(np.float32)
    codes, scales, offsets = unpack(w.type, data)
    spread = np.repeat(scales, w.type.group, axis=-1)
    if offsets is None:
        return codes.astype(np.float32) * spread
    return fma(codes, spread, np.repeat(offsets, w.type.group, axis=-1))


def _ordered_float(w: Weight, x: F32) -> F32:
    values = _values(w, w.data)
    return np.stack([lanes(values, row[None]) for row in x]) if len(x) else np.empty((0, w.rows), np.float32)


def _ordered_blocks(w: Weight, x: F32) -> F32:
    q, d = quantize(x)
    codes, scales, offsets = unpack(w.type, w.data)
    group = w.type.group
    acc = np.zeros((len(x), w.rows), np.float32)
    for g in range(w.cols // group):
        part = slice(g * group, (g + 1) * group)
        block = d[:, g * group // ACT_BLOCK, None]
        mine = q[:, part].astype(np.int32)
        dot = mine @ codes[:, part].astype(np.int32).T
        acc = fma(dot.astype(np.float32) * scales[None, :, g], block, acc)
        if offsets is not None:
            total = mine.sum(1, dtype=np.int32)[:, None]
            acc = fma(total.astype(np.float32) * offsets[None, :, g], block, acc)
    return acc

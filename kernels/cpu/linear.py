"""Products with the weights of a file, and rows of them as float32. Contracts: `ops.Kernels.linear`, `dequantize`.

Cost   a weight is read, packed, once for every 128 rows of a call; 2 bytes an input for its records, see `product`
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from strata.kernels.check import check
from strata.kernels.cpu.dequantize import rows_job
from strata.kernels.cpu.jobs import address, run
from strata.kernels.cpu.product import Inputs, product_job
from strata.kernels.cpu.quantize import quantized
from strata.kernels.formats import Weight
from strata.kernels.ops import F32, I64
from strata.kernels.reference.linear import dequantize as float_rows


def linear(weights: Sequence[Weight], x: F32) -> list[F32]:
    """Several matrices with one input: x (n, cols) -> [(n, rows_i)]."""
    return linear_in_parts(weights, [0] * len(weights), x)


def linear_in_parts(weights: Sequence[Weight], parts: Sequence[int], x: F32) -> list[F32]:
    """The same, the sums of each matrix in parts of so many inputs: `product_job`."""
    n = check(x=(x, "n cols", np.float32))["n"]
    for w in weights:
        if len(w.shape) != 2 or w.cols != x.shape[1]:
            raise ValueError(f"a weight for x {x.shape} must be (rows, {x.shape[1]}), got {w.shape}")
    outs = [np.empty((n, w.rows), np.float32) for w in weights]
    if n:
        records = quantized(x, weights)
        inputs = Inputs(address(x), address(records))
        jobs = [product_job(w, inputs, 0, n, address(o), p) for w, o, p in zip(weights, outs, parts, strict=True)]
        run(jobs, n * sum(w.rows * w.cols for w in weights))
    return outs


def dequantize(w: Weight, rows: I64) -> F32:
    """Rows of a matrix as float32: rows int64 (n,) -> (n, cols)."""
    if w.type.is_float:
        return float_rows(w, rows)
    check(rows=(rows, "n", np.int64))
    if len(w.shape) != 2:
        raise ValueError(f"w must be a matrix, got {w.shape}")
    if rows.size and not (rows.min() >= 0 and rows.max() < w.rows):
        raise ValueError(f"rows must be in 0 to {w.rows - 1}, got {rows.min()} to {rows.max()}")
    out = np.empty((len(rows), w.cols), np.float32)
    run([rows_job(w, address(rows), len(rows), address(out))], out.size)
    return out

"""Activations to the records that products read; `quantize` of `ops.py`.

quantized(x, weights)   float32 (n, cols), cols a multiple of 32 -> uint8 (n, cols / 32, RECORD), see `product`
Cost           one read of the row, twice its bytes written as half
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from strata.kernels.cpu.jobs import ARGUMENTS, address, function, job, run
from strata.kernels.cpu.memory import word
from strata.kernels.cpu.product import BIAS, BIAS_HALVES, RECORD, SUM, SUM_HALVES, D
from strata.kernels.cpu.simd import FLOAT, FLOATS, I8, I32, VECTOR, WIDTH, Emitter, Value
from strata.kernels.formats import Weight
from strata.kernels.ops import ACT_BLOCK, F32

Q_X, Q_BLOCKS, Q_OUT = range(ARGUMENTS, ARGUMENTS + 3)


def _halving(e: Emitter, value: Value, combine: Any) -> Value:
    """All lanes of a vector combined into one scalar."""
    while value.type.count > 1:
        half = value.type.count // 2
        value = combine(e.shuffle(value, value, range(half)), e.shuffle(value, value, range(half, 2 * half)))
    return e.b.extract_element(value, ir.Constant(I32, 0))


@intrinsic
def quantize_block(typing_context, x, record):
    """32 floats at an address to one record."""

    def codegen(context, builder, signature, arguments):
        e, b = Emitter(builder), builder
        source, record = arguments
        halves = [e.load(FLOATS, source, 4 * WIDTH * i) for i in range(2)]

        def larger(u: Value, v: Value) -> Value:
            return e.call(f"llvm.maximum.v{u.type.count}f32", u.type, u, v)

        magnitude = larger(*(e.call("llvm.fabs.v16f32", FLOATS, h) for h in halves))
        amax = _halving(e, magnitude, larger)
        small = b.fcmp_ordered("<", amax, ir.Constant(FLOAT, np.float32(1e-30)))
        zero, levels = ir.Constant(FLOAT, 0.0), ir.Constant(FLOAT, 127.0)
        inv = e.splat(b.select(small, zero, b.fdiv(levels, b.select(small, levels, amax))))
        e.store(b.select(small, zero, b.fdiv(amax, levels)), record, D)
        sums = []
        for i, half in enumerate(halves):
            q = b.fptosi(e.call("llvm.roundeven.v16f32", FLOATS, b.fmul(half, inv)), VECTOR)
            e.store(b.trunc(q, ir.VectorType(I8, WIDTH)), record, WIDTH * i)
            sums.append(_halving(e, q, b.add))
        for at_bias, at_sum, total in (
            (BIAS, SUM, b.add(*sums)),
            (BIAS_HALVES, SUM_HALVES, sums[0]),
            (BIAS_HALVES + 4, SUM_HALVES + 4, sums[1]),
        ):
            e.store(b.mul(total, ir.Constant(I32, -128)), record, at_bias)
            e.store(b.sitofp(total, FLOAT), record, at_sum)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


def quantize_entry(variant, job, begin, end, scratch):
    """Rows [begin, end)."""
    blocks = word(job, Q_BLOCKS)
    x, out = word(job, Q_X), word(job, Q_OUT)
    for i in range(begin * blocks, end * blocks):
        quantize_block(x + 4 * ACT_BLOCK * i, out + RECORD * i)


def quantized(x: F32, weights: Sequence[Weight]) -> npt.NDArray[np.uint8]:
    """The records of every row of x; none when all the weights are floats and will not read them."""
    n, cols = x.shape
    if all(w.type.is_float for w in weights):
        return np.empty((0, 0, RECORD), np.uint8)
    records = np.empty((n, cols // ACT_BLOCK, RECORD), np.uint8)
    run([job(function(quantize_entry), n, 16, address(x), cols // ACT_BLOCK, address(records))], x.size)
    return records

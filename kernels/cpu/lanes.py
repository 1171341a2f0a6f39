"""Sums over lanes of `ops.py`, and element access without tests, for numba kernels.

get(a, i), put(a, i, x)    one element; unlike a[i] without the test for a negative i, which keeps loops scalar
lanes_dot(a, i, b, j, n)   lanes(a[i + k] * b[j + k] for k < n)
lanes_sum(a, i, n)         lanes(a[i + k] for k < n)
peak(a, i, n)              the largest of n > 0 elements
aligned_floats(n)          an array that begins at a cache line: a vector that crosses lines costs two accesses

Arrays are one-dimensional contiguous float32, positions are in elements, nothing is checked: the wrappers do that.
Cost   n / 16 fma, then 11 additions and 4 shuffles
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from strata.kernels.cpu import vector
from strata.kernels.cpu.math import JIT
from strata.kernels.cpu.vector import FLOAT, INDEX, POINTER, WIDTH, constant, move
from strata.kernels.ops import LANES

_CHAINS: Final = LANES // WIDTH
_LINE: Final = 16
"""Floats of a cache line."""


@njit("float32[::1](int64)", **JIT)
def aligned_floats(n):
    memory = np.empty(n + _LINE, np.float32)
    skip = (-(memory.ctypes.data // memory.itemsize)) % _LINE
    return memory[skip : skip + n]


def _lanes(module: ir.Module, products: bool) -> ir.Function:
    """float(float* a, float* b, i64 n): lanes(a * b), or lanes(a) where b is not read."""
    function = vector.internal_function(module, f"lanes_{products}", FLOAT, [POINTER, POINTER, INDEX])
    if function.blocks:
        return function
    a, b, n = function.args
    builder: Any = ir.IRBuilder(function.append_basic_block())
    chains = vector.Accumulators(builder, _CHAINS)

    def step(j: int, load: Any) -> Any:
        return vector.fma(builder, load(a), load(b), chains[j]) if products else builder.fadd(chains[j], load(a))

    whole = builder.and_(n, constant(-LANES))
    with vector.loop(builder, constant(0), whole, LANES) as i:
        for j in range(_CHAINS):
            chains[j] = step(j, lambda x, at=j * WIDTH: vector.load(builder, move(builder, x, i, at)))
    rest = builder.sub(n, whole)
    with builder.if_then(builder.icmp_signed(">", rest, constant(0))):
        for j in range(_CHAINS):
            mask = vector.mask_of_rest(builder, rest, j * WIDTH)
            new = step(j, lambda x, at=j * WIDTH, m=mask: vector.load_masked(builder, move(builder, x, whole, at), m))
            chains[j] = builder.select(mask, new, chains[j])
    builder.ret(vector.fold(builder, chains.all()))
    return function


def _peak(module: ir.Module) -> ir.Function:
    """float(float* a, i64 n): the maximum, 16 lanes at a time; the order does not matter to a maximum."""
    function = vector.internal_function(module, "peak", FLOAT, [POINTER, INDEX])
    if function.blocks:
        return function
    a, n = function.args
    builder: Any = ir.IRBuilder(function.append_basic_block())
    best = vector.Accumulators(builder, 1)
    best[0] = vector.splat(builder, builder.load(a))
    with vector.loop(builder, constant(0), n, WIDTH) as i:
        mask = vector.mask_of_rest(builder, builder.sub(n, i), 0)
        values = vector.load_masked(builder, builder.gep(a, [i]), mask)
        larger = builder.and_(mask, builder.fcmp_ordered(">", values, best[0]))
        best[0] = builder.select(larger, values, best[0])
    lanes = [builder.extract_element(best[0], ir.Constant(ir.IntType(32), j)) for j in range(WIDTH)]
    while len(lanes) > 1:
        pairs = zip(lanes[::2], lanes[1::2], strict=True)
        lanes = [builder.select(builder.fcmp_ordered(">", x, y), x, y) for x, y in pairs]
    builder.ret(lanes[0])
    return function


@intrinsic
def peak(typing_context, a, i, n):
    if not vector.is_floats(a):
        return None

    def codegen(context, builder, signature, arguments):
        return builder.call(_peak(builder.module), [vector.address(context, builder, a, *arguments[:2]), arguments[2]])

    return types.float32(a, types.int64, types.int64), codegen


@intrinsic
def lanes_dot(typing_context, a, i, b, j, n):
    if not vector.is_floats(a, b):
        return None

    def codegen(context, builder, signature, arguments):
        x = vector.address(context, builder, a, *arguments[:2])
        y = vector.address(context, builder, b, *arguments[2:4])
        return builder.call(_lanes(builder.module, True), [x, y, arguments[4]])

    return types.float32(a, types.int64, b, types.int64, types.int64), codegen


@intrinsic
def lanes_sum(typing_context, a, i, n):
    if not vector.is_floats(a):
        return None

    def codegen(context, builder, signature, arguments):
        x = vector.address(context, builder, a, *arguments[:2])
        return builder.call(_lanes(builder.module, False), [x, x, arguments[2]])

    return types.float32(a, types.int64, types.int64), codegen


@intrinsic
def get(typing_context, array, i):
    if not vector.is_floats(array):
        return None

    def codegen(context, builder, signature, arguments):
        return builder.load(vector.address(context, builder, array, *arguments))

    return types.float32(array, types.int64), codegen


@intrinsic
def put(typing_context, array, i, value):
    if not vector.is_floats(array):
        return None

    def codegen(context, builder, signature, arguments):
        builder.store(arguments[2], vector.address(context, builder, array, *arguments[:2]))
        return context.get_dummy_value()

    return types.none(array, types.int64, types.float32), codegen

"""The scalar steps of `ops.py` for numba loops: fma, rounding, exp and what is made of it.

Shapes   scalars, float32 in and out. Every function is a chain of branch-free operations, so LLVM turns a plain loop
         over arrays into full vectors of the machine; the bits are those of the scalar form.
Errors   none; NaN gives NaN
Source   `ops.py`, "One arithmetic"
Cost     exp is 12 operations and one select; sigmoid adds one division

Callers compile with `JIT` (or at least error_model="numpy": numba's default tests every divisor for zero, which keeps
a loop from becoming vectors) and never with fastmath, which would reassociate and flush.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from strata.kernels.ops import EXP_POLY, LOG1P_POLY

JIT: Final[dict[str, Any]] = {"cache": True, "nogil": True, "error_model": "numpy", "boundscheck": False}
"""Options of every kernel here."""

_F32 = types.float32
_I32 = types.int32

_ZERO: Final = np.float32(0.0)
_ONE: Final = np.float32(1.0)
_TWO: Final = np.float32(2.0)
_LOG2_E: Final = np.float32(1.44269504)
_LN2_HIGH: Final = np.float32(0.693145751953125)
_LN2_LOW: Final = np.float32(1.42860677e-6)
_EXP_MIN: Final = np.float32(-87.3)
_EXP_MAX: Final = np.float32(88.3)
_E0, _E1, _E2, _E3, _E4, _E5 = (np.float32(c) for c in EXP_POLY)
_L0, _L1, _L2, _L3, _L4, _L5, _L6 = (np.float32(c) for c in LOG1P_POLY)


def _declare(builder: ir.IRBuilder, name: str, result: ir.Type, arguments: list[ir.Type]) -> ir.Function:
    """A function of the module by name, declared at its first use."""
    known = builder.module.globals.get(name)
    return known if known is not None else ir.Function(builder.module, ir.FunctionType(result, arguments), name)


@intrinsic
def fma(typing_context, a, b, c):
    """a * b + c, rounded once."""

    def codegen(context, builder, signature, arguments):
        f = ir.FloatType()
        return builder.call(_declare(builder, "llvm.fma.f32", f, [f, f, f]), arguments)

    return _F32(_F32, _F32, _F32), codegen


@intrinsic
def round_even(typing_context, x):
    """The nearest integer as float32, halves to the even one."""

    def codegen(context, builder, signature, arguments):
        f = ir.FloatType()
        return builder.call(_declare(builder, "llvm.roundeven.f32", f, [f]), arguments)

    return _F32(_F32), codegen


@intrinsic
def sqrt_f32(typing_context, x):
    """The correctly rounded square root; NaN below zero."""

    def codegen(context, builder, signature, arguments):
        f = ir.FloatType()
        return builder.call(_declare(builder, "llvm.sqrt.f32", f, [f]), arguments)

    return _F32(_F32), codegen


@intrinsic
def _power_of_two(typing_context, n):
    """2^n for a whole n in [-126, 127], by its exponent bits."""

    def codegen(context, builder, signature, arguments):
        word = ir.IntType(32)
        whole = builder.fptosi(arguments[0], word)
        bits = builder.shl(builder.add(whole, ir.Constant(word, 127)), ir.Constant(word, 23))
        return builder.bitcast(bits, ir.FloatType())

    return _F32(_F32), codegen


@intrinsic
def select(typing_context, condition, a, b):
    """a where the condition holds, else b; both are computed."""

    def codegen(context, builder, signature, arguments):
        return builder.select(arguments[0], arguments[1], arguments[2])

    return _F32(types.boolean, _F32, _F32), codegen


@njit("float32(float32)", **JIT)
def exp_f32(x):
    """`exp` of ops.py."""
    y = select(x > _EXP_MAX, _EXP_MAX, x)
    n = round_even(y * _LOG2_E)
    r = fma(-n, _LN2_HIGH, y)
    r = fma(-n, _LN2_LOW, r)
    p = fma(_E0, r, _E1)
    p = fma(p, r, _E2)
    p = fma(p, r, _E3)
    p = fma(p, r, _E4)
    p = fma(p, r, _E5)
    return select(x < _EXP_MIN, _ZERO, (fma(p, r * r, r) + _ONE) * _power_of_two(n))


@njit("float32(float32)", **JIT)
def sigmoid_f32(x):
    """1 / (1 + exp(-x))."""
    return _ONE / (_ONE + exp_f32(-x))


@njit("float32(float32)", **JIT)
def silu_f32(x):
    """x / (1 + exp(-x))."""
    return x / (_ONE + exp_f32(-x))


@njit("float32(float32)", **JIT)
def softplus_f32(x):
    """max(x, 0) + log1p(exp(-|x|))."""
    y = exp_f32(-abs(x))
    z = y / (_TWO + y)
    s = z * z
    p = fma(_L0, s, _L1)
    p = fma(p, s, _L2)
    p = fma(p, s, _L3)
    p = fma(p, s, _L4)
    p = fma(p, s, _L5)
    p = fma(p, s, _L6)
    return select(x > _ZERO, x, _ZERO) + (_TWO * z) * p

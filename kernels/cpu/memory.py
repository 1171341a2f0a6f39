"""Numbers in memory by address, for functions that work on tables of addresses. Nothing is checked.

word, put_word             int64 at address + 8 * index
float_at, put_float        float32 at address + 4 * index
int32_at, byte_at          an int32 at address + 4 * index, a uint8 at address + index
clear_floats, copy_floats  runs of float32
add_floats                 target = target + source
prefetch                   ask for the cache line of an address; never a fault
nanoseconds                since some time, monotonic; 0 where the system has no POSIX clock
ask_ahead                  have the system read bytes of a mapped file in the background, where it has the call
seen, show                 an int32 that another thread, or a card, writes or reads: acquire, release
count, counted             an int64 that threads add to and wait for: release, acquire
"""

from __future__ import annotations

import mmap
import time
from typing import Final

import llvmlite.binding
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from strata.kernels.cpu.math import JIT

_MONOTONIC = getattr(time, "CLOCK_MONOTONIC", 1)
AHEAD: Final = 128 << 10
"""Bytes that one call asks for: systems read no more ahead at once than this, or somewhat more."""
_WILL_NEED, _PAGE = getattr(mmap, "MADV_WILLNEED", 3), mmap.PAGESIZE
_I8, _I32, _I64, _F32 = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType()


def _pointer(builder, kind, address, index):
    return builder.gep(builder.inttoptr(address, kind.as_pointer()), [index])


def _reader(kind, result, align=4):
    def codegen(context, builder, signature, arguments):
        value = builder.load(_pointer(builder, kind, *arguments))
        value.align = align
        return value

    return result(types.int64, types.int64), codegen


def _writer(kind, argument):
    def codegen(context, builder, signature, arguments):
        builder.store(arguments[2], _pointer(builder, kind, *arguments[:2])).align = 4
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, argument), codegen


@intrinsic
def word(typing_context, address, index):
    return _reader(_I64, types.int64)


@intrinsic
def put_word(typing_context, address, index, value):
    return _writer(_I64, types.int64)


@intrinsic
def int32_at(typing_context, address, index):
    return _reader(_I32, types.int32)


@intrinsic
def byte_at(typing_context, address, index):
    return _reader(_I8, types.uint8, 1)


@intrinsic
def float_at(typing_context, address, index):
    return _reader(_F32, types.float32)


@intrinsic
def put_float(typing_context, address, index, value):
    return _writer(_F32, types.float32)


@intrinsic
def prefetch(typing_context, address):
    def codegen(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], _I8.as_pointer())
        flags = [ir.Constant(_I32, n) for n in (0, 2, 1)]  # a read, second-level cache, data
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, _I32, _I32, _I32])
        name = "llvm.prefetch.p0"
        known = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
        builder.call(known, [pointer, *flags])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@njit("void(int64, int64)", **JIT)
def clear_floats(address, n):
    for i in range(n):
        put_float(address, i, 0.0)


@njit("void(int64, int64, int64)", **JIT)
def copy_floats(target, source, n):
    for i in range(n):
        put_float(target, i, float_at(source, i))


@njit("void(int64, int64, int64)", **JIT)
def add_floats(target, source, n):
    for i in range(n):
        put_float(target, i, float_at(target, i) + float_at(source, i))


@intrinsic
def seen(typing_context, address):
    def codegen(context, builder, signature, arguments):
        return builder.load_atomic(builder.inttoptr(arguments[0], _I32.as_pointer()), "acquire", 4)

    return types.int32(types.int64), codegen


@intrinsic
def show(typing_context, address, value):
    def codegen(context, builder, signature, arguments):
        builder.store_atomic(arguments[1], builder.inttoptr(arguments[0], _I32.as_pointer()), "release", 4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int32), codegen


@intrinsic
def count(typing_context, address, n):
    def codegen(context, builder, signature, arguments):
        builder.atomic_rmw("add", builder.inttoptr(arguments[0], _I64.as_pointer()), arguments[1], "release")
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def count_on(typing_context, address, n):
    """Add to a counter; what it was before. Who adds last sees what all others wrote before they added."""

    def codegen(context, builder, signature, arguments):
        return builder.atomic_rmw("add", builder.inttoptr(arguments[0], _I64.as_pointer()), arguments[1], "acq_rel")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def counted(typing_context, address):
    def codegen(context, builder, signature, arguments):
        return builder.load_atomic(builder.inttoptr(arguments[0], _I64.as_pointer()), "acquire", 8)

    return types.int64(types.int64), codegen


@intrinsic
def _advise(typing_context, address, n, advice):
    def codegen(context, builder, signature, arguments):
        if llvmlite.binding.address_of_symbol("madvise"):
            known = builder.module.globals.get("madvise")
            kind = ir.FunctionType(_I32, [_I64, _I64, _I32])
            builder.call(known or ir.Function(builder.module, kind, "madvise"), arguments)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int32), codegen


@njit("void(int64, int64)", **JIT)
def ask_ahead(address, n):
    begin, end = address // _PAGE * _PAGE, address + n
    while begin < end:
        _advise(begin, min(AHEAD, end - begin), _WILL_NEED)
        begin += AHEAD


@intrinsic
def nanoseconds(typing_context):
    def codegen(context, builder, signature, arguments):
        if not llvmlite.binding.address_of_symbol("clock_gettime"):
            return ir.Constant(_I64, 0)
        place = cgutils.alloca_once(builder, ir.ArrayType(_I64, 2))
        known = builder.module.globals.get("clock_gettime")
        kind = ir.FunctionType(_I32, [_I32, place.type])
        clock = known or ir.Function(builder.module, kind, "clock_gettime")
        builder.call(clock, [ir.Constant(_I32, _MONOTONIC), place])
        seconds, rest = (builder.load(cgutils.gep_inbounds(builder, place, 0, i)) for i in range(2))
        return builder.add(builder.mul(seconds, ir.Constant(_I64, 10**9)), rest)

    return types.int64(), codegen

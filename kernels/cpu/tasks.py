"""How an operation is spread over threads: a kernel does one numbered task, threads claim the numbers one by one.

A kernel is a C function (task, address of its arguments), compiled once. The one parallel loop of this folder calls it
through its address: compiling a parallel loop per operation would optimise every kernel three times over. What a
row's bits are never depends on the split, so the split may follow the clock: tasks may differ in length (rows of a
prompt see more and more tokens) and a thread that the system holds up delays only its own task.

    ARGUMENTS = types.Tuple([...])                     # numba types
    @kernel
    def _work(task, arguments):
        a, b = unpack(arguments, ARGUMENTS)
    @njit(signature, **JIT)
    def _run(address, a, b, tasks, threads):
        run_tasks(address, pack((a, b)), tasks, threads)

Cost   waking the threads takes some 10 us: work of few floats stays on the calling thread (`threads_for`)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numba
import numpy as np
from llvmlite import ir
from numba import cfunc, njit, prange, types
from numba.core import cgutils
from numba.extending import intrinsic

from strata.kernels.cpu.math import JIT

SERIAL_FLOATS: Final = 1 << 17
"""Elements of an elementwise operation that one thread handles in about the time of waking another."""

_WORD: Final = ir.IntType(64)


def threads_for(tasks: int, floats: int = SERIAL_FLOATS + 1) -> int:
    """Threads for this many tasks that touch this many float32 in all."""
    return min(numba.get_num_threads(), tasks) if floats > SERIAL_FLOATS else 1


def kernel(function: Callable[[Any, Any], None]) -> Any:
    """Compile `function(task, arguments)` as a task kernel; `.address` is what `run_tasks` wants."""
    options = {name: value for name, value in JIT.items() if name != "nogil"}
    return cfunc(types.void(types.int64, types.int64), **options)(function)


@intrinsic
def pack(typing_context, arguments):  # type: ignore[no-untyped-def]
    """The address of a tuple of arguments, on the caller's stack: valid until the caller returns."""
    if not isinstance(arguments, types.BaseTuple):
        return None

    def codegen(context, builder, signature, values):  # type: ignore[no-untyped-def]
        place = cgutils.alloca_once_value(builder, values[0])
        return builder.ptrtoint(place, _WORD)

    return types.int64(arguments), codegen


def _borrowed(context: Any, builder: Any, kind: types.Type, pointer: Any) -> Any:
    """The value at a pointer, member by member so that what a kernel does not use costs nothing.

    Arrays come without their owner: the caller of `run_tasks` keeps them, and no task counts references.
    """
    if isinstance(kind, types.BaseTuple):
        members = [
            _borrowed(context, builder, member, cgutils.gep_inbounds(builder, pointer, 0, i))
            for i, member in enumerate(kind.types)
        ]
        return context.make_tuple(builder, kind, members)
    if not isinstance(kind, types.Array):
        return builder.load(pointer)
    whole, value = context.make_array(kind)(context, builder, ref=pointer), context.make_array(kind)(context, builder)
    for name in ("data", "nitems", "itemsize", "shape", "strides"):
        setattr(value, name, getattr(whole, name))
    value.meminfo, value.parent = (cgutils.get_null_value(getattr(value, name).type) for name in ("meminfo", "parent"))
    return value._getvalue()


@intrinsic
def unpack(typing_context, address, kind):  # type: ignore[no-untyped-def]
    """The tuple of this type at an address made by `pack`."""
    if not isinstance(kind, types.TypeRef):
        return None
    wanted = kind.instance_type

    def codegen(context, builder, signature, values):  # type: ignore[no-untyped-def]
        pointer = builder.inttoptr(values[0], context.get_value_type(wanted).as_pointer())
        return _borrowed(context, builder, wanted, pointer)

    return wanted(types.int64, kind), codegen


@intrinsic
def _call(typing_context, address, task, arguments):  # type: ignore[no-untyped-def]
    def codegen(context, builder, signature, values):  # type: ignore[no-untyped-def]
        kind = ir.FunctionType(ir.VoidType(), [_WORD, _WORD])
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), values[1:])
        return context.get_dummy_value()

    return types.none(types.int64, types.int64, types.int64), codegen


@intrinsic
def _claim(typing_context, counter):  # type: ignore[no-untyped-def]
    """The next number of a shared counter: 0, 1, 2, ... each to one caller."""

    def codegen(context, builder, signature, values):  # type: ignore[no-untyped-def]
        data = context.make_array(counter)(context, builder, values[0]).data
        return builder.atomic_rmw("add", data, ir.Constant(_WORD, 1), "monotonic")

    return types.int64(counter), codegen


@njit("void(int64, int64, int64, int64)", parallel=True, **JIT)
def _run_parallel(address, arguments, tasks, threads):
    counter = np.zeros(1, np.int64)
    for _ in prange(threads):
        task = _claim(counter)
        while task < tasks:
            _call(address, task, arguments)
            task = _claim(counter)


@njit("void(int64, int64, int64, int64)", **JIT)
def run_tasks(address, arguments, tasks, threads):
    """Call the kernel at `address` for every task below `tasks`, on at most `threads` threads."""
    if threads <= 1:
        for task in range(tasks):
            _call(address, task, arguments)
    else:
        _run_parallel(address, arguments, tasks, threads)

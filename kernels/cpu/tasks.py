"""How an operation is spread over threads: a kernel does one numbered task, threads claim the numbers one by one.

A kernel is a C function (task, address of its arguments), compiled once; `team.spread` calls it through its address.
(A `prange` per operation would have numba optimise every kernel three times over.) What a row's bits are never depends
on the split, so the split may follow the clock: tasks may differ in length, as rows of a prompt see ever more tokens.

    ARGUMENTS = types.Tuple([...])                     # numba types
    @kernel
    def _work(task, arguments):
        a, b = unpack(arguments, ARGUMENTS)
    @njit(signature, **JIT)
    def _run(address, a, b, tasks, threads):
        spread(address, pack((a, b)), tasks, threads)      # threads as `threads_for` gives them
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from llvmlite import ir
from numba import cfunc, types
from numba.core import cgutils
from numba.extending import intrinsic

from strata.kernels.cpu.math import JIT
from strata.kernels.cpu.team import wake

SERIAL_FLOATS: Final = 1 << 17
"""Elements of an elementwise operation that are not worth a second thread."""

_WORD: Final = ir.IntType(64)


def threads_for(tasks: int, floats: int = SERIAL_FLOATS + 1) -> int:
    """Threads for this many tasks that touch this many float32 in all; the team is woken where it is more than one."""
    return wake(tasks) if floats > SERIAL_FLOATS else 1


def kernel(function: Callable[[Any, Any], None]) -> Any:
    """Compile `function(task, arguments)` as a task kernel; `.address` is what `spread` wants."""
    options = {name: value for name, value in JIT.items() if name != "nogil"}
    return cfunc(types.void(types.int64, types.int64), **options)(function)


@intrinsic
def pack(typing_context, arguments):
    """The address of a tuple of arguments, on the caller's stack: valid until the caller returns."""
    if not isinstance(arguments, types.BaseTuple):
        return None

    def codegen(context, builder, signature, values):
        place = cgutils.alloca_once_value(builder, values[0])
        return builder.ptrtoint(place, _WORD)

    return types.int64(arguments), codegen


def _borrowed(context: Any, builder: Any, kind: Any, pointer: Any) -> Any:
    """The value at a pointer, member by member so that what a kernel does not use costs nothing.

    Arrays come without their owner: the caller of `spread` keeps them, and no task counts references.
    """
    inner: Any = getattr(kind, "types", None)  # of a tuple
    if inner is not None:
        members = [
            _borrowed(context, builder, member, cgutils.gep_inbounds(builder, pointer, 0, i))
            for i, member in enumerate(inner)
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
def unpack(typing_context, address, kind):
    """The tuple of this type at an address made by `pack`."""
    if not isinstance(kind, types.TypeRef):
        return None
    wanted = kind.instance_type

    def codegen(context, builder, signature, values):
        pointer = builder.inttoptr(values[0], context.get_value_type(wanted).as_pointer())
        return _borrowed(context, builder, wanted, pointer)

    return wanted(types.int64, kind), codegen

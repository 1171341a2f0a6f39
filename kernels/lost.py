"""A mapped file that cannot be read any more ends the process with a line, not with a bare signal.

The system answers a read of a mapped page that the file no longer has, or that its disk does not give, with SIGBUS in
whatever thread that was; nothing of the process can go on from there. The handler is compiled code that writes what was
prepared and leaves: no thread of it needs Python.

    tell_of_lost_files([(fd, b"line\n"), ...], code)

Errors   none; on a system without SIGBUS there is nothing to tell
Cost     a function to compile at the first start, kept in numba's cache
"""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Sequence
from typing import Final

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba import cfunc, types
from numba.extending import intrinsic

MOST: Final = 4
"""Lines."""
_NAME: Final = "strata_last_lines"
_STATE: Final = np.zeros(2 + 3 * MOST, np.int64)
"""The exit code, the number of lines, and of each its descriptor, address and length."""
llvmlite.binding.add_symbol(_NAME, _STATE.ctypes.data)
_I32, _I64 = ir.IntType(32), ir.IntType(64)


@intrinsic
def _word(typing_context, i):
    """A word of the state, which compiled code knows by name."""

    def codegen(context, builder, signature, values):
        kind = ir.ArrayType(_I64, len(_STATE))
        known = builder.module.globals.get(_NAME) or ir.GlobalVariable(builder.module, kind, _NAME)
        return builder.load(builder.gep(known, [ir.Constant(_I64, 0), values[0]]))

    return types.int64(types.int64), codegen


@intrinsic
def _write(typing_context, fd, at, n):
    def codegen(context, builder, signature, values):
        kind = ir.FunctionType(_I64, [_I32, _I64, _I64])
        known = builder.module.globals.get("write") or ir.Function(builder.module, kind, "write")
        builder.call(known, [builder.trunc(values[0], _I32), *values[1:]])
        return context.get_dummy_value()

    return types.none(types.int64, types.int64, types.int64), codegen


@intrinsic
def _leave(typing_context, code):
    def codegen(context, builder, signature, values):
        kind = ir.FunctionType(ir.VoidType(), [_I32])
        known = builder.module.globals.get("_exit") or ir.Function(builder.module, kind, "_exit")
        builder.call(known, [builder.trunc(values[0], _I32)])
        return context.get_dummy_value()

    return types.none(types.int64), codegen


def _on_signal(number):
    for i in range(2, 2 + 3 * _word(1), 3):
        _write(_word(i), _word(i + 1), _word(i + 2))
    _leave(_word(0))


def tell_of_lost_files(lines: Sequence[tuple[int, bytes]], code: int) -> None:
    """From now on SIGBUS writes these lines, each to a descriptor, and ends the process with this code."""
    if not hasattr(signal, "SIGBUS"):
        return
    if len(lines) > MOST:
        raise ValueError(f"at most {MOST} lines, got {len(lines)}")
    handler = cfunc(types.void(types.int32), cache=True)(_on_signal)
    _HANDLERS.append(handler)
    for i, (fd, line) in enumerate(lines):
        kept = ctypes.create_string_buffer(line, len(line))
        _BUFFERS.append(kept)
        _STATE[2 + 3 * i : 5 + 3 * i] = fd, ctypes.addressof(kept), len(line)
    _STATE[:2] = code, len(lines)
    ctypes.CDLL(None).signal(int(signal.SIGBUS), ctypes.c_void_p(handler.address))


_HANDLERS: Final[list[object]] = []
_BUFFERS: Final[list[object]] = []
"""In use as long as the process lives."""

"""The threads of this folder: a team that waits for the next operation by spinning a while, then asleep.

An operation is a number of tasks. The calling thread does them itself, one after the other, and whoever of the team
is awake joins in; the operation is over when every task is done, not when every thread has shown up. A thread that
the system does not let run therefore delays nothing but the task it is in: on a busy machine a barrier of all threads
costs milliseconds, many times an operation of decoding.

The state is one block of words in memory, known to compiled code by name. TICKET holds the operation's number and
how many tasks are left; a task is claimed by exchanging the ticket for one with a task less, which fails when
anything has changed since the words beside it were read. Those words change only between operations.

Cost   an operation on awake threads some 1 us beyond its tasks; waking a sleeping one some 10 us of the caller's
       time, and it joins some 50 us later. Threads spin for about `PATIENCE` turns, a fraction of a millisecond
"""

from __future__ import annotations

import ctypes
import platform
import threading
from typing import Any, Final

import llvmlite.binding
import numba
import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from strata.kernels.cpu.math import JIT

_SETTINGS: Final[Any] = numba.config
_NAME: Final = "strata_team"
TICKET, FUNCTION, ARGUMENTS, TASKS, THREADS = 0, 16, 17, 18, 19
FINISHED, BUSY, AWAKE = 32, 48, 64
"""Words of the state: what threads write at the same time lies two cache lines apart. AWAKE + i: thread i is."""
MOST_THREADS: Final = 256
PATIENCE: Final = 1 << 13
"""Turns without work before a thread sleeps."""
_POLITE: Final = 1 << 6
"""Turns of waiting between two offers of the processor to others: a thread that is woken may have been put on the
processor of the caller, who cannot go on while it waits for work."""
_LEFT: Final = (1 << 32) - 1

_WORD: Final = ir.IntType(64)
_STATE: Final = np.zeros(AWAKE + MOST_THREADS, np.int64)
# Never freed: threads that are awake while the interpreter ends still read it, and write it when they fall asleep.
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_STATE))
llvmlite.binding.add_symbol(_NAME, _STATE.ctypes.data)


def _place(builder: Any, i: Any) -> Any:
    """Word i of the state."""
    kind = ir.ArrayType(_WORD, len(_STATE))
    state = builder.module.globals.get(_NAME) or ir.GlobalVariable(builder.module, kind, _NAME)
    return builder.gep(state, [ir.Constant(_WORD, 0), i])


@intrinsic
def _read(typing_context, i):
    def codegen(context, builder, signature, values):
        return builder.load_atomic(_place(builder, values[0]), "acquire", 8)

    return types.int64(types.int64), codegen


@intrinsic
def _write(typing_context, i, value):
    def codegen(context, builder, signature, values):
        builder.store_atomic(values[1], _place(builder, values[0]), "release", 8)
        return context.get_dummy_value()

    return types.none(types.int64, types.int64), codegen


@intrinsic
def _add_one(typing_context, i):
    def codegen(context, builder, signature, values):
        builder.atomic_rmw("add", _place(builder, values[0]), ir.Constant(_WORD, 1), "acq_rel")
        return context.get_dummy_value()

    return types.none(types.int64), codegen


@intrinsic
def _exchange(typing_context, i, old, new):
    """Replace the word if it still is `old`; whether it was."""

    def codegen(context, builder, signature, values):
        result = builder.cmpxchg(_place(builder, values[0]), values[1], values[2], "acq_rel", "acquire")
        return builder.extract_value(result, 1)

    return types.boolean(types.int64, types.int64, types.int64), codegen


@intrinsic
def _rest(typing_context):
    """Tell the processor that this is a waiting loop."""
    names = {"x86_64": "llvm.x86.sse2.pause", "AMD64": "llvm.x86.sse2.pause"}

    def codegen(context, builder, signature, values):
        name = names.get(platform.machine())
        if name is not None:
            known = builder.module.globals.get(name)
            builder.call(known or ir.Function(builder.module, ir.FunctionType(ir.VoidType(), []), name), [])
        return context.get_dummy_value()

    return types.none(), codegen


@intrinsic
def _offer(typing_context):
    """Let the system run another thread on this processor, where it has the POSIX call for that."""

    def codegen(context, builder, signature, values):
        if llvmlite.binding.address_of_symbol("sched_yield"):
            known = builder.module.globals.get("sched_yield")
            kind = ir.FunctionType(ir.IntType(32), [])
            builder.call(known or ir.Function(builder.module, kind, "sched_yield"), [])
        return context.get_dummy_value()

    return types.none(), codegen


@intrinsic
def _call(typing_context, address, task, arguments):
    def codegen(context, builder, signature, values):
        kind = ir.FunctionType(ir.VoidType(), [_WORD, _WORD])
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), values[1:])
        return context.get_dummy_value()

    return types.none(types.int64, types.int64, types.int64), codegen


@njit("void(int64, int64)", **JIT)
def _take_part(thread, operation):
    """Do tasks of an operation until none is left or it is no longer the current one."""
    while True:
        ticket = _read(TICKET)
        left = ticket & _LEFT
        if ticket >> 32 != operation or left == 0:
            return
        function, arguments, tasks, threads = _read(FUNCTION), _read(ARGUMENTS), _read(TASKS), _read(THREADS)
        if thread >= threads:
            return
        if _exchange(TICKET, ticket, ticket - 1):
            _call(function, tasks - left, arguments)
            _add_one(FINISHED)


@njit("void(int64)", **JIT)
def _wait(turn):
    """One turn of a waiting loop."""
    if turn % _POLITE == 0:
        _offer()
    else:
        _rest()


@njit("void(int64, int64)", **JIT)
def _serve(thread, patience):
    """Take part in one operation after the other until there has been none for a while."""
    known, turns = np.int64(-1), 0
    while turns < patience:
        operation = _read(TICKET) >> 32
        if operation == known:
            turns += 1
            _wait(turns)
        else:
            _take_part(thread, operation)
            known, turns = operation, 0
    _write(AWAKE + thread, 0)


@njit("void(int64, int64, int64, int64)", **JIT)
def spread(function, arguments, tasks, threads):
    """Call void(task, arguments) at an address for every task below `tasks`, on at most `threads` threads.

    Where the team is at work already, on a call from another thread or from within a task, the caller is alone.
    """
    if threads <= 1 or tasks <= 1 or not _exchange(BUSY, 0, 1):
        for task in range(tasks):
            _call(function, task, arguments)
        return
    operation = ((_read(TICKET) >> 32) + 1) & 0x7FFFFFFF
    _write(FUNCTION, function)
    _write(ARGUMENTS, arguments)
    _write(TASKS, tasks)
    _write(THREADS, threads)
    _write(FINISHED, 0)
    _write(TICKET, (operation << 32) | tasks)
    _take_part(0, operation)
    turns = 0
    while _read(FINISHED) < tasks:
        turns += 1
        _wait(turns)
    _write(BUSY, 0)


@njit("boolean(int64)", **JIT)
def awake(n):
    """Whether n threads, the caller among them, take part at once."""
    there = True
    for i in range(1, n):
        there &= _read(AWAKE + i) != 0
    return there


@njit("void(int64)", **JIT)
def pause(turn):
    """One turn of a waiting loop, as the team waits."""
    _wait(turn)


@intrinsic
def sleep_us(typing_context, n):
    """Sleep for some microseconds, where the system has the POSIX call for that."""

    def codegen(context, builder, signature, values):
        if llvmlite.binding.address_of_symbol("usleep"):
            known = builder.module.globals.get("usleep")
            number = ir.IntType(32)
            builder.call(known or ir.Function(builder.module, ir.FunctionType(number, [number]), "usleep"), values)
        return context.get_dummy_value()

    return types.none(types.int32), codegen


class _Threads:
    """Threads of the team beside the calling one. Each sleeps on a lock of its own and is woken by its release."""

    def __init__(self) -> None:
        self.limit = min(int(_SETTINGS.NUMBA_NUM_THREADS), MOST_THREADS)
        self._beds: list[threading.Lock] = []
        self._waking = threading.Lock()

    def wake(self, n: int) -> None:
        """Have n threads, the caller among them, awake or on their way."""
        if len(self._beds) + 1 < n or not _STATE[AWAKE + 1 : AWAKE + n].all():
            with self._waking:
                for i in range(1, n):
                    self._wake_one(i)

    def _wake_one(self, i: int) -> None:
        if i > len(self._beds):
            self._beds.append(threading.Lock())
            self._beds[-1].acquire()
            threading.Thread(target=self._live, args=(i,), name=f"kernels-{i}", daemon=True).start()
        if not _STATE[AWAKE + i]:
            _STATE[AWAKE + i] = 1
            self._beds[i - 1].release()

    def _live(self, i: int) -> None:
        while True:
            self._beds[i - 1].acquire()
            _serve(i, PATIENCE)


_THREADS: Final = _Threads()


def set_threads(n: int) -> None:
    """Bound the threads of all operations, whatever thread calls them: at most n and one a processor."""
    if n < 1:
        raise ValueError(f"threads must be at least 1, got {n}")
    _THREADS.limit = min(n, int(_SETTINGS.NUMBA_NUM_THREADS), MOST_THREADS)


def threads() -> int:
    """How many threads an operation may use."""
    return _THREADS.limit


def wake(n: int) -> int:
    """Wake the team for an operation that can use n threads; how many it may use."""
    n = min(n, _THREADS.limit)
    _THREADS.wake(n)
    return n

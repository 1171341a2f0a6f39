"""Work of unequal pieces on all threads: a table of jobs, each a compiled function over a range of items.

A job is a row of int64: what function, how many items, how many of them a thread takes at once, and the function's own
arguments, mostly addresses. Threads take the next piece from one counter until the table is empty, in the order of the
table; a piece is the same computation whoever takes it. Functions are compiled by `function`; one table may hold
several of them, so that a layer's small products wake the threads once.

Arrays whose addresses stand in a table must outlive `run`; the callers keep them in local names.
Errors   none; the callers check
Cost     that of `team.spread`; a table with little work stays on the calling thread
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import cfunc, types
from numba.core.datamodel import models
from numba.extending import intrinsic, register_model

from strata.kernels.cpu.memory import word
from strata.kernels.cpu.tasks import kernel
from strata.kernels.cpu.team import spread, threads, wake

FUNCTION, ITEMS, GRAIN, ARGUMENTS = 0, 1, 2, 3
"""Words of a job; its arguments follow."""
JOB_WORDS: Final = 16
HEADER: Final = 3
"""Words of a table before its jobs."""

SCRATCH_BYTES: Final = 1 << 15
"""Scratch of a thread."""
SERIAL_COST: Final = 1 << 17
"""Work, in multiplications, that is not worth a second thread."""

Jobs = npt.NDArray[np.int64]


class Variant(types.Type):
    """What a function is compiled for, as the type of its first argument: one version and one cache entry for each.

    The argument itself is a null pointer. `facts` are for the intrinsics that see the type.
    """

    def __init__(self, **facts: Any) -> None:
        super().__init__(name=f"Variant({', '.join(f'{k}={v}' for k, v in facts.items())})")
        self.facts = facts


register_model(Variant)(models.OpaqueModel)


@cache
def function(entry: Callable[..., None], **facts: Any) -> int:
    """The address of void(variant, int64, int64, int64, int64), compiled at its first use."""
    compiled = cfunc(types.void(Variant(**facts), *[types.int64] * 4), cache=True)(entry)
    _COMPILED.append(compiled)
    return int(compiled.address or 0)


_COMPILED: Final[list[Any]] = []
"""Compiled functions live as long as the process: their addresses stand in tables."""


@intrinsic
def call(typing_context, function, a, b, c, d):
    """Call the function at an address, a job's or another of four words."""

    def codegen(context, builder, signature, arguments):
        variant, number = ir.IntType(8).as_pointer(), ir.IntType(64)
        kind = ir.FunctionType(ir.VoidType(), [variant, *[number] * 4])
        target = builder.inttoptr(arguments[0], kind.as_pointer())
        builder.call(target, [ir.Constant(variant, None), *arguments[1:]])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), codegen


@intrinsic
def _claim(typing_context, counter):
    """The next number of a shared counter, an int64 in memory: 0, 1, 2, ... each to one caller."""

    def codegen(context, builder, signature, arguments):
        number = ir.IntType(64)
        place = builder.inttoptr(arguments[0], number.as_pointer())
        return builder.atomic_rmw("add", place, ir.Constant(number, 1), "monotonic")

    return types.int64(types.int64), codegen


def _work(thread, table):
    """Take pieces of a table until none is left. Its header: number of jobs, next piece, address of the scratch."""
    count, counter, scratch = word(table, 0), table + 8, word(table, 2) + thread * SCRATCH_BYTES
    jobs = table + 8 * HEADER
    job, before = 0, 0
    while job < count:
        piece = _claim(counter) - before
        while job < count:
            mine = jobs + 8 * JOB_WORDS * job
            pieces = (word(mine, ITEMS) + word(mine, GRAIN) - 1) // word(mine, GRAIN)
            if piece < pieces:
                begin = piece * word(mine, GRAIN)
                call(word(mine, FUNCTION), mine, begin, min(begin + word(mine, GRAIN), word(mine, ITEMS)), scratch)
                break
            piece, before, job = piece - pieces, before + pieces, job + 1


@cache
def worker() -> int:
    """The task that takes pieces of the table whose address is its argument."""
    return int(kernel(_work).address)


class _Memory:
    """The table and the threads' scratch of the run in progress, whose lock it is; both grow to the largest run."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._scratch, self._table = np.empty(0, np.uint8), np.empty(0, np.int64)
        self._scratch_at = self._table_at = 0

    def table(self, jobs: Jobs, threads: int) -> int:
        """The address of a table of these jobs: a header of HEADER words, then the jobs."""
        if self._scratch.size < threads * SCRATCH_BYTES + 64:
            self._scratch = np.zeros(threads * SCRATCH_BYTES + 64, np.uint8)
            self._scratch_at = -(-address(self._scratch) // 64) * 64
        if self._table.size < HEADER + jobs.size:
            self._table = np.zeros(2 * (HEADER + jobs.size), np.int64)
            self._table_at = address(self._table)
        self._table[:HEADER] = (len(jobs), 0, self._scratch_at)
        self._table[HEADER : HEADER + jobs.size] = jobs.reshape(-1)
        return self._table_at


_MEMORY: Final = _Memory()


def address(array: npt.NDArray[Any]) -> int:
    """Where an array's first element lies."""
    return int(array.__array_interface__["data"][0])


def job(function: int, items: int, grain: int, *arguments: int) -> list[int]:
    """A row of a table."""
    row = [function, items, max(grain, 1), *arguments]
    return row + [0] * (JOB_WORDS - len(row))


def run(jobs: Jobs | list[list[int]], cost: int) -> None:
    """Do all jobs of a table; `cost` about how many multiplications they are."""
    rows = np.asarray(jobs, np.int64)
    n = wake(threads()) if cost > SERIAL_COST else 1
    with _MEMORY.lock:
        spread(worker(), _MEMORY.table(rows, n), n, n)

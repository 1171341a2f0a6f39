"""The processor's side of a row desk (kernels/cuda/mapped_rows.py): it copies rows of a mapped table that a card wants.

A thread looks at the desk without Python, so a request is seen within a microsecond. While requests keep coming it
spins; some milliseconds behind the last one it looks every 50 us, a second behind it every 500. No call of it waits for
the driver, so a card that waits for the thread cannot keep it.

Rows of pages that the system has in memory are copied one after the other. Where AT_ONCE rows took longer, the next
ones are all asked for before the first of them is copied, so that the disk reads them side by side.

Exact    bytes of the file
Errors   none; rows that the table does not have are counted, and nothing is copied for them
Cost     a request some 0.1 us a row in memory; a core while windows run
"""

from __future__ import annotations

import threading
import weakref
from typing import Final

import numpy as np
import numpy.typing as npt
from numba import njit, types

from strata.kernels.cpu.jobs import address
from strata.kernels.cpu.math import JIT
from strata.kernels.cpu.memory import ask_ahead, nanoseconds, put_word, seen, show, word
from strata.kernels.cpu.team import pause, sleep_us
from strata.kernels.formats import Weight
from strata.kernels.row_desk import ANSWERED, ASKED, COUNT, RowDesk

STOP, WRONG, COPIED = 0, 1, 2
"""Words of the state: whether there are to be no more requests, how many rows were none of the table, and how many were
copied."""
HOT: Final = 1 << 17
"""Turns of waiting behind a request before the thread naps: some milliseconds."""
NAP_US: Final = 50
NAPS: Final = 1 << 14
LONG_NAP_US: Final = 500
AT_ONCE: Final = 256
"""Rows whose time decides how the next ones are copied."""
COLD_NS: Final = 2000
"""A row that takes longer was not in memory: a fault of a page that is takes half a microsecond."""

_BYTES = types.Array(types.uint8, 2, "C")
_TABLE = types.Array(types.uint8, 2, "C", readonly=True)
_IDS = types.Array(types.int64, 1, "C")


@njit(types.int64(_TABLE, types.int64, _IDS, _BYTES, types.int64, types.int64, types.boolean), **JIT)
def gather(table, table_at, ids, out, begin, end, ahead):
    """Copy these rows; how many of them the table does not have. ahead: have the system read all of them first."""
    rows, row_bytes = table.shape
    wrong = 0
    for i in range(begin, end if ahead else begin):
        if 0 <= ids[i] < rows:
            ask_ahead(table_at + ids[i] * row_bytes, row_bytes)
    for i in range(begin, end):
        row = ids[i]
        if 0 <= row < rows:
            for j in range(row_bytes):
                out[i, j] = table[row, j]
        else:
            wrong += 1
    return wrong


@njit(types.void(types.int64, types.int64, _TABLE, types.int64, _IDS, _BYTES), **JIT)
def serve(state, desk, table, table_at, ids, out):
    """Answer requests until there are to be no more."""
    last, turns, cold = seen(desk + 4 * ANSWERED), 0, True
    while seen(state + 8 * STOP) == 0:
        number = seen(desk + 4 * ASKED)
        if number == last:
            turns += 1
            if turns > HOT + NAPS:
                sleep_us(LONG_NAP_US)
            elif turns > HOT:
                sleep_us(NAP_US)
            else:
                pause(turns)
            continue
        n = min(max(seen(desk + 4 * COUNT), 0), len(ids))
        for begin in range(0, n, AT_ONCE):
            end, begun = min(begin + AT_ONCE, n), nanoseconds()
            wrong = gather(table, table_at, ids, out, begin, end, cold)
            put_word(state, WRONG, word(state, WRONG) + wrong)
            cold = nanoseconds() - begun > COLD_NS * (end - begin)
        put_word(state, COPIED, word(state, COPIED) + n)
        last = number
        show(desk + 4 * ANSWERED, number)
        turns = 0


class RowServer:
    """Answers at a desk in a thread of its own, which ends with the last reference to this object."""

    def __init__(self, desk: RowDesk, table: Weight) -> None:
        self._state = np.zeros(3, np.int64)
        self._desk = desk
        self._table = table.data
        self._thread: threading.Thread | None = None

    @property
    def copied(self) -> int:
        """Rows so far."""
        return int(self._state[COPIED])

    @property
    def wrong(self) -> int:
        """Rows that were asked for and are none of the table."""
        return int(self._state[WRONG])

    def start(self) -> None:
        """Answer from now on."""
        weakref.finalize(self, _stop, self._state)
        kept = self._state, self._desk, self._table
        self._thread = threading.Thread(target=_run, args=kept, name="n-gram rows", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Answer no more: a request that is being answered is the last one, and waited for."""
        _stop(self._state)
        if self._thread is not None:
            self._thread.join()


def _run(state: npt.NDArray[np.int64], desk: RowDesk, table: npt.NDArray[np.uint8]) -> None:
    serve(address(state), address(desk.words), table, address(table), desk.ids, desk.rows)


def _stop(state: npt.NDArray[np.int64]) -> None:
    state[STOP] = 1

"""The processor's side of a desk (kernels/cuda/handover.py): it computes the experts that a card asks for.

A thread looks at the desk without Python, so a request is seen within a microsecond: `serve` returns only to be called
again when threads of the team must be woken, or for good. While requests keep coming the thread spins and keeps the
team awake; some milliseconds behind the last one it looks every 50 us, a second behind it every 500.

An expert lies where its address says, or in the mapped file (`IN_FILE`), of which what a request needs is asked for
before the first product: the system reads it side by side, not one fault after the other. Not so what was used a moment
ago: the system still has it, and to ask walks all its pages for nothing.

Exact    the bits are those of `moe` (request.py)
Errors   none; the wrapper checks
Cost     a request some 5 us beside the products of its experts, each of which is read once for all its rows
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from numba import njit

from strata.kernels.cpu.jobs import HEADER, JOB_WORDS, SCRATCH_BYTES, address, worker
from strata.kernels.cpu.math import JIT
from strata.kernels.cpu.memory import nanoseconds, put_word, seen, show, word
from strata.kernels.cpu.product import RECORD
from strata.kernels.cpu.request import (
    FEW,
    LAYER_WORDS,
    LINE,
    S_AT,
    S_BUSY_NS,
    S_COUNTS,
    S_DESK,
    S_DONE,
    S_EXPERTS,
    S_FILE_BYTES,
    S_FILED,
    S_GATE,
    S_INNER,
    S_LAST,
    S_LAYERS,
    S_OUT,
    S_PARTS,
    S_PLACES,
    S_PRODUCTS,
    S_RECORDS,
    S_ROWS,
    S_SCRATCH,
    S_SLOTS,
    S_STOP,
    S_TABLE,
    S_THREADS,
    S_UP,
    S_WORKER,
    S_X,
    STATE_WORDS,
    answer,
    entries,
    layer_words,
)
from strata.kernels.cpu.tasks import kernel
from strata.kernels.cpu.team import awake, pause, sleep_us, spread, threads, wake
from strata.kernels.desk import ANSWERED, ASKED, MOST_PAIRS, Desk
from strata.kernels.formats import Weight
from strata.kernels.ops import ACT_BLOCK

HOT: Final = 1 << 17
"""Turns of waiting behind a request before the thread naps: some milliseconds."""
KEEP_AWAKE: Final = 1 << 10
"""Turns between two empty operations that keep the team from falling asleep."""
NAP_US: Final = 50
NAPS: Final = 1 << 14
LONG_NAP_US: Final = 500
"""How long it sleeps behind so many short naps, about a second of them: then nobody generates."""


def _nothing(task, arguments):
    """What keeps the team awake."""


@njit("boolean(int64, int64)", **JIT)
def serve(state, nothing):
    """Answer requests until the team has to be woken for one: true, or there are to be no more: false."""
    desk, turns = word(state, S_DESK), 0
    while seen(state + 8 * S_STOP) == 0:
        number, n = seen(desk + 4 * ASKED), word(state, S_THREADS)
        if number == word(state, S_LAST):
            turns += 1
            if turns > HOT + NAPS:
                sleep_us(LONG_NAP_US)
            elif turns > HOT:
                sleep_us(NAP_US)
            elif turns % KEEP_AWAKE == 0 and awake(n):
                spread(nothing, 0, n, n)
            else:
                pause(turns)
            continue
        if not awake(n):
            return True
        begun = nanoseconds()
        answer(state)
        put_word(state, S_BUSY_NS, word(state, S_BUSY_NS) + nanoseconds() - begun)
        put_word(state, S_LAST, number)
        show(desk + 4 * ANSWERED, number)
        turns = 0
    return False


class Server:
    """Answers at a desk in a thread of its own, which ends with the last reference to this object.

    layers   most layers · rows, pairs: most of a window · inner: the widest hidden values · n: threads, the caller's
             among them; those of all other operations wait while a request is under way
    """

    def __init__(self, desk: Desk, layers: int, inner: int, n: int = 0) -> None:
        rows, width = desk.x.shape
        self._desk = desk
        self._threads = min(n or threads(), threads())
        self._layers = np.zeros((layers, LAYER_WORDS), np.int64)
        self._kept: list[object] = []
        memory = {
            S_TABLE: 8 * (HEADER + JOB_WORDS * (rows + 2 * MOST_PAIRS)),
            S_PRODUCTS: 8 * JOB_WORDS * 3 * MOST_PAIRS,
            S_DONE: LINE * (1 + MOST_PAIRS),
            S_ROWS: 4 * MOST_PAIRS,
            S_RECORDS: rows * width // ACT_BLOCK * RECORD,
            S_GATE: 4 * MOST_PAIRS * inner,
            S_UP: 4 * MOST_PAIRS * inner,
            S_INNER: MOST_PAIRS * inner // ACT_BLOCK * RECORD,
            S_SLOTS: 8 * MOST_PAIRS,
            S_EXPERTS: 8 * MOST_PAIRS,
            S_COUNTS: 8 * MOST_PAIRS,
            S_SCRATCH: SCRATCH_BYTES * self._threads,
            S_PARTS: 8 * FEW * self._threads,
        }
        self._state = np.zeros(STATE_WORDS, np.int64)
        self._memory = np.zeros(sum(map(_lines, memory.values())) + LINE, np.uint8)
        at = -(-address(self._memory) // LINE) * LINE
        for name, size in memory.items():
            self._state[name] = at
            at += _lines(size)
        arrays: dict[int, npt.NDArray[Any]] = {
            S_DESK: desk.words,
            S_AT: desk.at,
            S_PLACES: desk.places,
            S_X: desk.x,
            S_OUT: desk.out,
        }
        for name, array in {**arrays, S_LAYERS: self._layers}.items():
            self._state[name] = address(array)
        self._state[S_WORKER], self._state[S_THREADS] = worker(), self._threads
        for name, entry in entries().items():
            self._state[name] = entry
        self._thread: threading.Thread | None = None

    @property
    def busy_ms(self) -> float:
        """Time in which it has computed answers so far."""
        return int(self._state[S_BUSY_NS]) / 1e6

    @property
    def filed(self) -> tuple[int, int]:
        """Experts that it has read in the file so far, once for all rows of a request, and their bytes."""
        return int(self._state[S_FILED]), int(self._state[S_FILE_BYTES])

    def layer(self, number: int, stacks: Sequence[Weight], begins: Sequence[int]) -> None:
        """Gate, up and down of a layer, as the host has them, and where an expert's begin behind the address it is
        asked for by."""
        used = np.zeros(stacks[0].experts, np.int64)
        self._layers[number] = layer_words(stacks, begins, used)
        self._kept.append((tuple(stacks), used))

    def use(self, n: int) -> None:
        """Answer on n threads from the next request on, at most those that were given."""
        self._state[S_THREADS] = min(max(n, 1), self._threads)

    def start(self) -> None:
        """Answer from now on."""
        kept = self._state, self._threads, (self._desk, self._layers, self._memory, self._kept)
        weakref.finalize(self, _stop, self._state)
        self._thread = threading.Thread(target=_run_server, args=kept, name="experts", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Answer no more: a request that is being computed is the last one, and waited for."""
        _stop(self._state)
        if self._thread is not None:
            self._thread.join()


def _run_server(state: npt.NDArray[np.int64], n: int, memory: object) -> None:
    """memory: what the addresses in the state belong to."""
    idle = int(kernel(_nothing).address)
    while serve(address(state), idle):
        wake(n)


def _stop(state: npt.NDArray[np.int64]) -> None:
    state[S_STOP] = 1


def _lines(n_bytes: int) -> int:
    return -(-n_bytes // LINE) * LINE

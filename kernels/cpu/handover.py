"""The processor's side of a desk (kernels/cuda/handover.py): it computes the experts that a card asks for.

A thread looks at the desk without Python, so a request is seen within a microsecond: `serve` returns only to be called
again when threads of the team must be woken, or for good. While requests keep coming the thread spins and keeps the
team awake; some milliseconds behind the last one it looks every 50 us, a second behind it every 500.

An expert lies where its address says, or in the mapped file (`IN_FILE`), of which the pieces that a request needs are
all asked for before the first product: the system reads them side by side, not one fault after the other.

Exact    the products, their order and silu are those of `moe`; outputs are not weighted, the card joins them
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

from strata.kernels.check import require
from strata.kernels.cpu.jobs import (
    ARGUMENTS,
    FUNCTION,
    GRAIN,
    HEADER,
    ITEMS,
    JOB_WORDS,
    SCRATCH_BYTES,
    address,
    function,
    worker,
)
from strata.kernels.cpu.math import JIT
from strata.kernels.cpu.memory import ask_ahead, int32_at, nanoseconds, put_word, seen, show, word
from strata.kernels.cpu.moe import A_GATE, A_RECORDS, A_UP, A_WIDTH, gate_entry
from strata.kernels.cpu.product import A_INDEX, A_N, A_OUT, A_WEIGHT, A_X, RECORD, Inputs, product_job
from strata.kernels.cpu.quantize import Q_BLOCKS, Q_OUT, Q_X, quantize_entry
from strata.kernels.cpu.tasks import kernel
from strata.kernels.cpu.team import awake, pause, sleep_us, spread, threads, wake
from strata.kernels.desk import ANSWERED, ASKED, IN_FILE, LAYER, MOST_PAIRS, PAIRS, USED, Desk
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
QUANTIZE_GRAIN: Final = 16
FINER: Final = 4
"""Of the pieces of a prompt's products: a request is a few experts, and over when its last piece is."""
LINE: Final = 64

# Words of a server's state: addresses, and behind them numbers.
(S_DESK, S_AT, S_PLACES, S_X, S_OUT, S_LAYERS, S_TABLE, S_ROWS, S_RECORDS, S_GATE, S_UP, S_INNER, S_SLOTS) = range(13)
(S_EXPERTS, S_COUNTS, S_SCRATCH, S_WORKER, S_QUANTIZE, S_SILU, S_THREADS, S_STOP, S_LAST, S_BUSY_NS) = range(13, 23)
S_FILED, S_FILE_BYTES, S_AHEAD = range(23, 26)
STATE_WORDS: Final = 26
FILE_EXPERT: Final = IN_FILE - 1
"""Bits of the number beside IN_FILE."""

# Words of a layer: templates of the jobs of gate, up and down; where they begin behind an address; widths; where they
# lie in the file, and an expert's bytes there. Words of a job that asks for these.
L_GATE, L_UP, L_DOWN = 0, JOB_WORDS, 2 * JOB_WORDS
L_AT, L_INNER, L_HIDDEN = (3 * JOB_WORDS + n for n in (0, 3, 4))
L_FILE, L_BYTES = 3 * JOB_WORDS + 5, 3 * JOB_WORDS + 8
LAYER_WORDS: Final = 4 * JOB_WORDS
GATE, UP, DOWN = range(3)
A_FILE, A_BYTES = ARGUMENTS, ARGUMENTS + 3


@njit("void(int64, int64)", **JIT)
def _run(state, jobs):
    """Do the first jobs of the table."""
    table = word(state, S_TABLE)
    put_word(table, 0, jobs)
    put_word(table, 1, 0)
    put_word(table, 2, word(state, S_SCRATCH))
    spread(word(state, S_WORKER), table, word(state, S_THREADS), word(state, S_THREADS))


@njit("int64(int64, int64)", **JIT)
def _place(state, i):
    """Where the i-th job of the table stands."""
    return word(state, S_TABLE) + 8 * (HEADER + i * JOB_WORDS)


@njit("int64(int64, int64, int64, int64, int64)", **JIT)
def _product(state, i, template, weight, count):
    """The i-th job: a template's product with the matrix at an address, for so many rows. Where it stands."""
    to = _place(state, i)
    for k in range(JOB_WORDS):
        put_word(to, k, word(template, k))
    put_word(to, GRAIN, max(word(template, GRAIN) // (FINER * count), 1))
    put_word(to, A_WEIGHT, weight)
    put_word(to, A_N, count)
    return to


@njit("int64(int64, int64, int64)", **JIT)
def _matrix(layer, at, part):
    """Where gate, up or down of an expert lies that was asked for by this."""
    if at > 0:
        return at + word(layer, L_AT + part)
    return word(layer, L_FILE + part) + (at & FILE_EXPERT) * word(layer, L_BYTES + part)


def _ahead_entry(variant, job, begin, end, scratch):
    """Ask for an expert's matrices in the file."""
    for part in range(begin, end):
        ask_ahead(word(job, A_FILE + part), word(job, A_BYTES + part))


@njit("void(int64, int64, int64)", **JIT)
def _ask_ahead(state, layer, found):
    """Ask for all that the request needs of the file, and count it."""
    filed = 0
    for e in range(found):
        at = word(word(state, S_EXPERTS), e)
        if at > 0:
            continue
        to = _place(state, filed)
        put_word(to, FUNCTION, word(state, S_AHEAD))
        put_word(to, ITEMS, 3)
        put_word(to, GRAIN, 3)
        for part in range(3):
            put_word(to, A_FILE + part, _matrix(layer, at, part))
            put_word(to, A_BYTES + part, word(layer, L_BYTES + part))
        filed += 1
    if filed:
        _run(state, filed)
    each = word(layer, L_BYTES) + word(layer, L_BYTES + 1) + word(layer, L_BYTES + 2)
    put_word(state, S_FILED, word(state, S_FILED) + filed)
    put_word(state, S_FILE_BYTES, word(state, S_FILE_BYTES) + filed * each)


@njit("int64(int64, int64, int64)", **JIT)
def _sort(state, pairs, used):
    """The distinct experts of a request, the rows of one after those of another, and the places of all pairs."""
    at, experts, counts, slots = word(state, S_AT), word(state, S_EXPERTS), word(state, S_COUNTS), word(state, S_SLOTS)
    found = 0
    for p in range(pairs):
        put_word(slots, p, -1)
        if word(at, p) == 0:
            continue
        e = 0
        while e < found and word(experts, e) != word(at, p):
            e += 1
        if e == found:
            put_word(experts, e, word(at, p))
            put_word(counts, e, 0)
            found += 1
        put_word(slots, p, e)
        put_word(counts, e, word(counts, e) + 1)
    place = 0
    for e in range(found):
        for p in range(pairs):
            if word(slots, p) == e:
                show(word(state, S_ROWS) + 4 * place, np.int32(p // used))
                show(word(state, S_PLACES) + 4 * p, np.int32(place))
                place += 1
    return found


@njit("void(int64, int64, int64)", **JIT)
def _quantize(state, rows, hidden):
    """The records of the rows on the desk."""
    blocks = hidden // ACT_BLOCK
    for r in range(rows):
        to = _place(state, r)
        put_word(to, FUNCTION, word(state, S_QUANTIZE))
        put_word(to, ITEMS, blocks)
        put_word(to, GRAIN, QUANTIZE_GRAIN)
        put_word(to, Q_X, word(state, S_X) + 4 * hidden * r)
        put_word(to, Q_BLOCKS, 1)
        put_word(to, Q_OUT, word(state, S_RECORDS) + RECORD * blocks * r)
    _run(state, rows)


@njit("int64(int64, int64, int64)", **JIT)
def _hidden(state, layer, found):
    """silu(gate x) * (up x) of all pairs, as records. How many pairs there are."""
    inner, before = word(layer, L_INNER), 0
    for e in range(found):
        count, at = word(word(state, S_COUNTS), e), word(word(state, S_EXPERTS), e)
        for half in range(2):
            template = layer + 8 * (L_UP if half else L_GATE)
            to = _product(state, 2 * e + half, template, _matrix(layer, at, UP if half else GATE), count)
            put_word(to, A_X, word(state, S_RECORDS))
            put_word(to, A_INDEX, word(state, S_ROWS) + 4 * before)
            put_word(to, A_OUT, word(state, S_UP if half else S_GATE) + 4 * inner * before)
        before += count
    _run(state, 2 * found)
    to = _place(state, 0)
    put_word(to, FUNCTION, word(state, S_SILU))
    put_word(to, ITEMS, before)
    put_word(to, GRAIN, 1)
    put_word(to, A_GATE, word(state, S_GATE))
    put_word(to, A_UP, word(state, S_UP))
    put_word(to, A_WIDTH, inner)
    put_word(to, A_RECORDS, word(state, S_INNER))
    _run(state, 1)
    return before


@njit("void(int64)", **JIT)
def _answer(state):
    """Compute what stands on the desk."""
    desk = word(state, S_DESK)
    layer = word(state, S_LAYERS) + 8 * LAYER_WORDS * int32_at(desk, LAYER)
    pairs, used = int32_at(desk, PAIRS), int32_at(desk, USED)
    inner, hidden = word(layer, L_INNER), word(layer, L_HIDDEN)
    found = _sort(state, pairs, used)
    _ask_ahead(state, layer, found)
    _quantize(state, pairs // used, hidden)
    _hidden(state, layer, found)
    before = 0
    for e in range(found):
        count, at = word(word(state, S_COUNTS), e), word(word(state, S_EXPERTS), e)
        to = _product(state, e, layer + 8 * L_DOWN, _matrix(layer, at, DOWN), count)
        put_word(to, A_X, word(state, S_INNER) + RECORD * (inner // ACT_BLOCK) * before)
        put_word(to, A_OUT, word(state, S_OUT) + 4 * hidden * before)
        before += count
    _run(state, found)


def _nothing(task, arguments):
    """What keeps the team awake."""


@njit("boolean(int64, int64)", **JIT)
def serve(state, nothing):
    """Answer requests until the team has to be woken for one: true, or there are to be no more: false."""
    desk, n, turns = word(state, S_DESK), word(state, S_THREADS), 0
    while seen(state + 8 * S_STOP) == 0:
        number = seen(desk + 4 * ASKED)
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
        _answer(state)
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
        self._stacks: list[tuple[Weight, ...]] = []
        memory = {
            S_TABLE: HEADER * 8 + 8 * JOB_WORDS * 2 * MOST_PAIRS,
            S_ROWS: 4 * MOST_PAIRS,
            S_RECORDS: rows * width // ACT_BLOCK * RECORD,
            S_GATE: 4 * MOST_PAIRS * inner,
            S_UP: 4 * MOST_PAIRS * inner,
            S_INNER: MOST_PAIRS * inner // ACT_BLOCK * RECORD,
            S_SLOTS: 8 * MOST_PAIRS,
            S_EXPERTS: 8 * MOST_PAIRS,
            S_COUNTS: 8 * MOST_PAIRS,
            S_SCRATCH: SCRATCH_BYTES * self._threads,
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
        self._state[S_QUANTIZE], self._state[S_SILU] = function(quantize_entry), function(gate_entry)
        self._state[S_AHEAD] = function(_ahead_entry)

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
        gate, up, down = stacks
        require(not any(w.type.is_float for w in stacks), "experts of float weights are computed on the card only")
        row = self._layers[number]
        for at, stack in ((L_GATE, gate), (L_UP, up), (L_DOWN, down)):
            one = Weight(stack.type, stack.shape[1:], stack.data[0])
            row[at : at + JOB_WORDS] = product_job(one, Inputs(0, 0), 0, 1, 0)
        row[L_AT : L_AT + 3], row[L_INNER], row[L_HIDDEN] = begins, gate.rows, gate.cols
        row[L_FILE : L_FILE + 3] = [address(stack.data) for stack in stacks]
        row[L_BYTES : L_BYTES + 3] = [stack.data[0].nbytes for stack in stacks]
        self._stacks.append(tuple(stacks))

    def stop(self) -> None:
        """Answer no more."""
        _stop(self._state)

    def start(self) -> None:
        """Answer from now on."""
        kept = self._state, self._threads, (self._desk, self._layers, self._memory, self._stacks)
        weakref.finalize(self, _stop, self._state)
        threading.Thread(target=_run_server, args=kept, name="experts", daemon=True).start()


def _run_server(state: npt.NDArray[np.int64], n: int, memory: object) -> None:
    """memory: what the addresses in the state belong to."""
    idle = int(kernel(_nothing).address)
    while serve(address(state), idle):
        wake(n)


def _stop(state: npt.NDArray[np.int64]) -> None:
    state[S_STOP] = 1


def _lines(n_bytes: int) -> int:
    return -(-n_bytes // LINE) * LINE

"""What the processor does for a request at a desk: the experts that the card asks for, as jobs of one table.

Threads take the pieces of a table in its order: records of the rows, then blocks of hidden values of one expert after
the other - gate, up, silu and their records together - then rows of down. Where blocks are few for the threads, pieces
are halves of them, and who has the second half makes the records. A piece waits for what it needs by a counter
of the pieces before it, so there is no barrier between, and who has nothing left goes on with the next expert. Pieces
that are waited for have all been taken by somebody before, so the wait ends, on one thread as on many.

state    words of a server (handover.py makes them) · layer: words of a layer
Exact    the products, their order and silu are those of `moe`; outputs are not weighted, the card joins them
Errors   none; the server checks
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

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
    address,
    call,
    function,
)
from strata.kernels.cpu.math import JIT, silu_f32
from strata.kernels.cpu.memory import (
    ask_ahead,
    count,
    count_on,
    counted,
    float_at,
    int32_at,
    nanoseconds,
    put_float,
    put_word,
    show,
    word,
)
from strata.kernels.cpu.product import A_INDEX, A_N, A_OUT, A_WEIGHT, A_X, RECORD, Inputs, expect_tile, product_job
from strata.kernels.cpu.quantize import quantize_block
from strata.kernels.cpu.simd import WIDTH
from strata.kernels.cpu.team import pause, spread
from strata.kernels.desk import IN_FILE, LAYER, PAIRS, USED
from strata.kernels.formats import Weight
from strata.kernels.ops import ACT_BLOCK

QUANTIZE_GRAIN: Final = 16
ROUNDS: Final = 3
"""Pieces of a kind that each thread should find at least: a request is over when its last piece is."""
LINE: Final = 64
KEPT_NS: Final = 10 * 10**9
"""Experts of the file that were used so lately are not asked for."""
TILES: Final = ACT_BLOCK // WIDTH
"""Of a product, that are a block of records."""
FEW: Final = 2
"""Blocks a thread, below which they are halved. 20 blocks of one expert on 15 threads: two of 28 us for some of them,
and 97 us in all, where an expert of many takes 57 (host of an H200, 2026-11-30)."""
FILE_EXPERT: Final = IN_FILE - 1
"""Bits of the number beside IN_FILE."""

# Words of a server's state: addresses, and behind them numbers.
(S_DESK, S_AT, S_PLACES, S_X, S_OUT, S_LAYERS, S_TABLE, S_ROWS, S_RECORDS, S_GATE, S_UP, S_INNER, S_SLOTS) = range(13)
(S_EXPERTS, S_COUNTS, S_SCRATCH, S_PRODUCTS, S_DONE, S_WORKER, S_QUANTIZE, S_HIDDEN, S_DOWN, S_AHEAD) = range(13, 23)
(S_THREADS, S_STOP, S_LAST, S_BUSY_NS, S_FILED, S_FILE_BYTES, S_PARTS) = range(23, 30)
STATE_WORDS: Final = 30

# Words of a layer: templates of the jobs of gate, up and down; where they begin behind an address; widths; where they
# lie in the file, an expert's bytes there, and when each was used last.
L_GATE, L_UP, L_DOWN = 0, JOB_WORDS, 2 * JOB_WORDS
L_AT, L_INNER, L_HIDDEN = (3 * JOB_WORDS + n for n in (0, 3, 4))
L_FILE, L_BYTES, L_USED = (3 * JOB_WORDS + n for n in (5, 8, 11))
LAYER_WORDS: Final = 4 * JOB_WORDS
GATE, UP, DOWN = range(3)

# Arguments of jobs: of those that ask for the file; of records: from where, to where, a counter to add to; of hidden
# values and of down: products, where records go, a counter to wait for and how far, one to add to, those of a block's
# tiles.
A_FILE, A_BYTES = ARGUMENTS, ARGUMENTS + 3
Q_X, Q_OUT, Q_DONE = range(ARGUMENTS, ARGUMENTS + 3)
(H_GATE, H_UP, H_RECORDS, H_WAIT, H_UNTIL, H_DONE, H_PARTS) = range(ARGUMENTS, ARGUMENTS + 7)
(W_DOWN, W_WAIT, W_UNTIL) = range(ARGUMENTS, ARGUMENTS + 3)


# ------------------------------------------------------------------------------------------------------------- pieces


@njit("void(int64, int64)", **JIT)
def _wait_for(counter, until):
    turns = 0
    while counted(counter) < until:
        turns += 1
        pause(turns)


def ahead_entry(variant, job, begin, end, scratch):
    """Ask for an expert's matrices in the file."""
    for part in range(begin, end):
        ask_ahead(word(job, A_FILE + part), word(job, A_BYTES + part))


def records_entry(variant, job, begin, end, scratch):
    """Blocks [begin, end) of a row."""
    for b in range(begin, end):
        quantize_block(word(job, Q_X) + 4 * ACT_BLOCK * b, word(job, Q_OUT) + RECORD * b)
    count(word(job, Q_DONE), end - begin)


@njit("void(int64, int64, int64)", **JIT)
def _hidden_records(job, begin, end):
    """Blocks [begin, end) of hidden values of all rows as records."""
    gate, blocks = word(job, H_GATE), word(job, ITEMS) // TILES
    for row in range(word(gate, A_N)):
        for b in range(row * blocks + begin, row * blocks + end):
            quantize_block(word(gate, A_OUT) + 4 * ACT_BLOCK * b, word(job, H_RECORDS) + RECORD * b)
    count(word(job, H_DONE), end - begin)


def hidden_entry(variant, job, begin, end, scratch):
    """Tiles [begin, end) of an expert's silu(gate x) * (up x), of all its rows, and records of whole blocks."""
    gate, up = word(job, H_GATE), word(job, H_UP)
    expect_tile(gate, begin)
    _wait_for(word(job, H_WAIT), word(job, H_UNTIL))
    if end - begin > 1:
        call(word(gate, FUNCTION), gate, begin, end - 1, scratch)
        expect_tile(gate, end - 1)
    expect_tile(up, begin)
    call(word(gate, FUNCTION), gate, end - 1, end, scratch)
    call(word(up, FUNCTION), up, begin, end, scratch)
    rows, width = word(gate, A_N), WIDTH * word(job, ITEMS)
    for row in range(rows):
        x, y = word(gate, A_OUT) + 4 * width * row, word(up, A_OUT) + 4 * width * row
        for i in range(WIDTH * begin, WIDTH * end):
            put_float(x, i, silu_f32(float_at(x, i)) * float_at(y, i))
    if word(job, H_PARTS):
        b = begin // TILES
        if count_on(word(job, H_PARTS) + 8 * b, end - begin) + end - begin == TILES:
            _hidden_records(job, b, b + 1)
    else:
        _hidden_records(job, begin // TILES, end // TILES)


def down_entry(variant, job, begin, end, scratch):
    """Tiles [begin, end) of an expert's outputs, of all its rows."""
    down = word(job, W_DOWN)
    expect_tile(down, begin)
    _wait_for(word(job, W_WAIT), word(job, W_UNTIL))
    call(word(down, FUNCTION), down, begin, end, scratch)


# ------------------------------------------------------------------------------------------------------------ a table


@njit("void(int64, int64)", **JIT)
def _run(state, jobs):
    """Do the first jobs of the table."""
    table = word(state, S_TABLE)
    put_word(table, 0, jobs)
    put_word(table, 1, 0)
    put_word(table, 2, word(state, S_SCRATCH))
    spread(word(state, S_WORKER), table, word(state, S_THREADS), word(state, S_THREADS))


@njit("int64(int64, int64, int64, int64, int64)", **JIT)
def _job(state, i, entry, items, grain):
    """The i-th job of the table; where it stands."""
    to = word(state, S_TABLE) + 8 * (HEADER + i * JOB_WORDS)
    put_word(to, FUNCTION, entry)
    put_word(to, ITEMS, items)
    put_word(to, GRAIN, grain)
    return to


@njit("int64(int64, int64, int64)", **JIT)
def _grain(state, items, experts):
    """Items of a piece, where every expert has so many."""
    return max(items * experts // (ROUNDS * word(state, S_THREADS)), 1)


@njit("int64(int64, int64, int64, int64, int64)", **JIT)
def _product(state, i, template, weight, rows):
    """The i-th product: a template's with the matrix at an address, for so many rows. Where it stands."""
    to = word(state, S_PRODUCTS) + 8 * i * JOB_WORDS
    for k in range(JOB_WORDS):
        put_word(to, k, word(template, k))
    put_word(to, A_WEIGHT, weight)
    put_word(to, A_N, rows)
    return to


@njit("int64(int64, int64, int64)", **JIT)
def _matrix(layer, at, part):
    """Where gate, up or down of an expert lies that was asked for by this."""
    if at > 0:
        return at + word(layer, L_AT + part)
    return word(layer, L_FILE + part) + (at & FILE_EXPERT) * word(layer, L_BYTES + part)


@njit("void(int64, int64, int64)", **JIT)
def _ask_ahead(state, layer, found):
    """Ask for what the request needs of the file, and count it."""
    filed, asked, now = 0, 0, nanoseconds()
    for e in range(found):
        at = word(word(state, S_EXPERTS), e)
        if at > 0:
            continue
        filed += 1
        used = word(word(layer, L_USED), at & FILE_EXPERT)
        put_word(word(layer, L_USED), at & FILE_EXPERT, now)
        if used and now - used < KEPT_NS:
            continue
        to = _job(state, asked, word(state, S_AHEAD), 3, 3)
        for part in range(3):
            put_word(to, A_FILE + part, _matrix(layer, at, part))
            put_word(to, A_BYTES + part, word(layer, L_BYTES + part))
        asked += 1
    if asked:
        _run(state, asked)
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


@njit("int64(int64, int64, int64, int64)", **JIT)
def _records(state, rows, hidden, done):
    """Jobs of the records of the rows on the desk; how many blocks they are."""
    blocks = hidden // ACT_BLOCK
    for r in range(rows):
        to = _job(state, r, word(state, S_QUANTIZE), blocks, QUANTIZE_GRAIN)
        put_word(to, Q_X, word(state, S_X) + 4 * hidden * r)
        put_word(to, Q_OUT, word(state, S_RECORDS) + RECORD * blocks * r)
        put_word(to, Q_DONE, done)
    return rows * blocks


@njit("void(int64, int64, int64, int64, int64, int64)", **JIT)
def _hidden(state, layer, i, found, wait, until):
    """Jobs of the hidden values of all pairs, from the i-th on, behind a counter."""
    inner, before = word(layer, L_INNER), 0
    blocks = inner // ACT_BLOCK
    halved = blocks * found < FEW * word(state, S_THREADS)
    for b in range(blocks * found if halved else 0):
        put_word(word(state, S_PARTS), b, 0)
    for e in range(found):
        rows, at = word(word(state, S_COUNTS), e), word(word(state, S_EXPERTS), e)
        grain = 1 if halved else TILES * _grain(state, blocks, found)
        to = _job(state, i + e, word(state, S_HIDDEN), TILES * blocks, grain)
        put_word(to, H_PARTS, word(state, S_PARTS) + 8 * blocks * e if halved else 0)
        for half in range(2):
            template = layer + 8 * (L_UP if half else L_GATE)
            of = _product(state, 3 * e + half, template, _matrix(layer, at, UP if half else GATE), rows)
            put_word(of, A_X, word(state, S_RECORDS))
            put_word(of, A_INDEX, word(state, S_ROWS) + 4 * before)
            put_word(of, A_OUT, word(state, S_UP if half else S_GATE) + 4 * inner * before)
            put_word(to, H_UP if half else H_GATE, of)
        put_word(to, H_RECORDS, word(state, S_INNER) + RECORD * blocks * before)
        put_word(to, H_WAIT, wait)
        put_word(to, H_UNTIL, until)
        put_word(to, H_DONE, word(state, S_DONE) + LINE * (1 + e))
        before += rows


@njit("void(int64, int64, int64, int64)", **JIT)
def _down(state, layer, i, found):
    """Jobs of the outputs of all pairs, from the i-th on, each behind its expert's hidden values."""
    inner, hidden, before = word(layer, L_INNER), word(layer, L_HIDDEN), 0
    blocks = inner // ACT_BLOCK
    for e in range(found):
        rows, at = word(word(state, S_COUNTS), e), word(word(state, S_EXPERTS), e)
        of = _product(state, 3 * e + 2, layer + 8 * L_DOWN, _matrix(layer, at, DOWN), rows)
        put_word(of, A_X, word(state, S_INNER) + RECORD * blocks * before)
        put_word(of, A_OUT, word(state, S_OUT) + 4 * hidden * before)
        to = _job(state, i + e, word(state, S_DOWN), word(of, ITEMS), _grain(state, word(of, ITEMS), found))
        put_word(to, W_DOWN, of)
        put_word(to, W_WAIT, word(state, S_DONE) + LINE * (1 + e))
        put_word(to, W_UNTIL, blocks)
        before += rows


@njit("void(int64)", **JIT)
def answer(state):
    """Compute what stands on the desk."""
    desk = word(state, S_DESK)
    layer = word(state, S_LAYERS) + 8 * LAYER_WORDS * int32_at(desk, LAYER)
    pairs, used = int32_at(desk, PAIRS), int32_at(desk, USED)
    found, rows, done = _sort(state, pairs, used), pairs // used, word(state, S_DONE)
    _ask_ahead(state, layer, found)
    for e in range(1 + found):
        put_word(done + LINE * e, 0, 0)
    blocks = _records(state, rows, word(layer, L_HIDDEN), done)
    _hidden(state, layer, rows, found, done, blocks)
    _down(state, layer, rows + found, found)
    _run(state, rows + 2 * found)


# ------------------------------------------------------------------------------------------------------------ a state


def entries() -> dict[int, int]:
    """The compiled pieces, by the state's words that hold their addresses."""
    known = {S_QUANTIZE: records_entry, S_HIDDEN: hidden_entry, S_DOWN: down_entry, S_AHEAD: ahead_entry}
    return {name: function(entry) for name, entry in known.items()}


def layer_words(stacks: Sequence[Weight], begins: Sequence[int], used: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The words of a layer: gate, up and down as the host has them, and where an expert's begin behind its address.
    used (experts,): of the caller, zeros."""
    gate, up, down = stacks
    require(not any(w.type.is_float for w in stacks), "experts of float weights are computed on the card only")
    row = np.zeros(LAYER_WORDS, np.int64)
    for at, stack in ((L_GATE, gate), (L_UP, up), (L_DOWN, down)):
        one = Weight(stack.type, stack.shape[1:], stack.data[0])
        row[at : at + JOB_WORDS] = product_job(one, Inputs(0, 0), 0, 1, 0)
    row[L_AT : L_AT + 3], row[L_INNER], row[L_HIDDEN] = begins, gate.rows, gate.cols
    row[L_FILE : L_FILE + 3] = [address(stack.data) for stack in stacks]
    row[L_USED] = address(used)
    row[L_BYTES : L_BYTES + 3] = [stack.data[0].nbytes for stack in stacks]
    return row

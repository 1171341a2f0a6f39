"""Products of packed weights with quantised activations: the order of `ops.py`, sixteen output rows in a vector.

A job is one matrix; of weights in blocks its items are tiles of 16 output rows. A tile walks along its rows a chunk at
a time: the type's unpacker (`unpack`) turns the chunk into bytes once, then every activation row adds its terms, four
rows at once. An output's chain of fused multiply-adds lives in one lane and sees the groups in order, so its bits do
not depend on the tile, the number of rows or the thread. Sixteen chains in a vector hide their latency.

Activations are records of RECORD bytes a block of 32 inputs (one cache line):

    q int8[32] · d float32 · -128 * sum q int32, of each half int32[2] · sum q float32, of each half float32[2]

The weights come as code + 128, an unsigned byte, because processors multiply unsigned by signed bytes; starting the
integer sum at -128 * sum q takes the 128 out again, exactly.

Of float weights a job's items are weight rows, and the order is `lanes` of the products.

Errors   none; the callers check
Cost     an unpacked block of 32 x 16 weights takes 8 dot instructions and 3 float ones for each activation row
Speed    one core of an EPYC with AVX-512 VNNI: one row 15 to 20 GB/s of Q8_0, IQ4_NL, Q4_K to Q6_K and 6 to 8 GB/s of
         the IQ2 and IQ3 types; 64 rows and more 120 to 150 G multiply-adds a second of any type
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from strata.kernels.cpu.jobs import (
    ARGUMENTS,
    GRAIN,
    JOB_WORDS,
    SCRATCH_BYTES,
    Jobs,
    Variant,
    address,
    call,
    function,
    job,
)
from strata.kernels.cpu.math import JIT
from strata.kernels.cpu.memory import (
    add_floats,
    clear_floats,
    copy_floats,
    int32_at,
    prefetch,
    put_float,
    put_word,
    word,
)
from strata.kernels.cpu.simd import FLOAT, FLOATS, I16, I32, VECTOR, WIDTH, WORD64, Emitter, Value, constant
from strata.kernels.cpu.unpack import CHUNK, CHUNK_BYTES, CODES, OFFSETS, SCALES, unpacker
from strata.kernels.formats import Weight
from strata.kernels.ops import ACT_BLOCK, I64, LANES

RECORD: Final = 64
D, BIAS, BIAS_HALVES, SUM, SUM_HALVES = 32, 36, 40, 48, 52
"""Bytes of a record after its codes."""

PANEL: Final = 128
"""Activation rows of one walk along a tile: their records (5 KiB a row of 2,560) stay in the second-level cache."""
TOGETHER: Final = 4
"""Activation rows that share the loads of the weights."""

PIECE_BYTES: Final = 1 << 18
"""Weight bytes, times activation rows, that a thread takes at once: some 10 us."""

_SUMS_AT: Final = CHUNK_BYTES
_TABLE_AT: Final = _SUMS_AT + PANEL * 4 * WIDTH
_RECORDS_AT: Final = _TABLE_AT + 8 * WIDTH
_TOTALS_AT: Final = _RECORDS_AT + 8 * PANEL
_END: Final = _TOTALS_AT + PANEL * 4 * WIDTH
assert _END <= SCRATCH_BYTES
_BLOCKS_OF_CHUNK: Final = CHUNK // ACT_BLOCK

# Arguments of a job; the last three of block types only.
(A_WEIGHT, A_ROW_BYTES, A_ROWS, A_COLS, A_X, A_INDEX, A_N, A_OUT, A_STRIDE, A_UNPACK, A_CHUNK_BYTES, A_PART) = range(
    ARGUMENTS, ARGUMENTS + 12
)


# ------------------------------------------------------------------------------------------------- quantised weights


def _add_block(
    e: Emitter, variant: Variant, sums: list[Value], weights: Value, scales: Value, records: list[Value]
) -> None:
    """Add one block of 32 to the running sums of some activation rows, in place of the list."""
    halves = variant.facts["group"] == 16
    groups = [(range(4), 0), (range(4, 8), 1)] if halves else [(range(8), 0)]
    for columns, half in groups:
        codes = [e.load(VECTOR, weights, CODES + 64 * c) for c in columns]
        scale = e.load(FLOATS, scales, SCALES + 64 * half)
        offset = e.load(FLOATS, scales, OFFSETS + 64 * half) if variant.facts["offset"] else None
        for i, record in enumerate(records):
            bias_at, sum_at = (BIAS_HALVES + 4 * half, SUM_HALVES + 4 * half) if halves else (BIAS, SUM)
            total = e.splat(e.load(I32, record, bias_at))
            for c, code in zip(columns, codes, strict=True):
                total = e.dot4(total, code, e.splat(e.load(I32, record, 4 * c)))
            d = e.splat(e.load(FLOAT, record, D))
            sums[i] = e.fma(e.b.fmul(e.to_float(total), scale), d, sums[i])
            if offset is not None:
                total = e.splat(e.load(FLOAT, record, sum_at))
                sums[i] = e.fma(e.b.fmul(total, offset), d, sums[i])


@intrinsic
def _add_chunk(typing_context, variant, rows, chunk, blocks, records, start, sums):
    """sums[i] += the products of a chunk with activation row i, for `rows` (a literal) rows.

    records: the address of the rows' first records; start: the byte of the chunk's first record in each.
    """
    if not isinstance(rows, types.IntegerLiteral):
        return None
    n = rows.literal_value

    def codegen(context, builder, signature, arguments):
        e = Emitter(builder, variant.facts["only"])
        chunk, blocks, table, start, sums = arguments[2:]
        bases = [e.plus_i64(e.load(WORD64, table, 8 * i), start) for i in range(n)]
        running = [cgutils.alloca_once_value(builder, e.load(FLOATS, sums, 64 * i)) for i in range(n)]
        with e.repeat(blocks) as b:
            values = [builder.load(r) for r in running]
            weights = e.plus_i64(chunk, e.times(b, 512))
            scales = e.plus_i64(chunk, e.times(b, 64 * ACT_BLOCK // variant.facts["group"]))
            _add_block(e, variant, values, weights, scales, [e.plus_i64(x, e.times(b, RECORD)) for x in bases])
            for r, value in zip(running, values, strict=True):
                builder.store(value, r)
        for i, r in enumerate(running):
            e.store(builder.load(r), sums, 64 * i)
        return context.get_dummy_value()

    return types.void(variant, rows, *[types.int64] * 5), codegen


@njit("int64(int64, int64)", **JIT)
def _input_row(job, i):
    """The number of the i-th activation row of a job."""
    index = word(job, A_INDEX)
    return int32_at(index, i) if index != 0 else i


@njit("void(int64, int64, int64)", **JIT)
def _fetch(start, size, first):
    """Ask for every other cache line of a run of bytes, from line `first` on."""
    for i in range(64 * first, size, 128):
        prefetch(start + i)


@njit("void(int64, int64)", **JIT)
def expect_tile(job, tile):
    """Ask for the weights of a tile of a job, which `_blocks_entry` does only for those behind its first one."""
    size, row = word(job, A_ROW_BYTES), min(tile * WIDTH, word(job, A_ROWS))
    start = word(job, A_WEIGHT) + row * size
    for i in range(0, min(WIDTH, word(job, A_ROWS) - row) * size, 64):
        prefetch(start + i)


@njit("void(int64, int64, int64)", **JIT)
def _find_rows(job, tile, table):
    """The addresses of a tile's sixteen weight rows; behind the last row of the matrix they repeat it."""
    for r in range(WIDTH):
        row = min(tile * WIDTH + r, word(job, A_ROWS) - 1)
        put_word(table, r, word(job, A_WEIGHT) + row * word(job, A_ROW_BYTES))


@njit("void(int64, int64, int64, int64)", **JIT)
def _end_part(totals, sums, n, first):
    """The sums of a part are added to those of the parts before it; the next one begins from 0."""
    if first:
        copy_floats(totals, sums, n)
    else:
        add_floats(totals, sums, n)
    clear_floats(sums, n)


def _blocks_entry(variant, job, begin, end, scratch):
    """Tiles [begin, end) of a matrix.

    A tile's bytes lie together, so while one is unpacked the next is fetched, as many bytes for each chunk as the chunk
    has, in two halves: sixteen rows are more streams than a processor follows by itself, and all the lines at once fill
    its queue of misses in front of the loads that are waited for.
    """
    rows, blocks, n = word(job, A_ROWS), word(job, A_COLS) // ACT_BLOCK, word(job, A_N)
    records, table, sums = scratch + _RECORDS_AT, scratch + _TABLE_AT, scratch + _SUMS_AT
    totals, chunks, part = scratch + _TOTALS_AT, -(-blocks // _BLOCKS_OF_CHUNK), word(job, A_PART)
    chunk_bytes, tile_bytes = word(job, A_CHUNK_BYTES), WIDTH * word(job, A_ROW_BYTES)
    for panel in range(0, n, PANEL):
        count = min(PANEL, n - panel)
        for i in range(count):
            put_word(records, i, word(job, A_X) + _input_row(job, panel + i) * blocks * RECORD)
        for tile in range(begin, end):
            _find_rows(job, tile, table)
            clear_floats(sums, count * WIDTH)
            following = word(table, 0) + tile_bytes
            fetched = WIDTH * chunk_bytes if tile + 1 < end else 0  # the piece behind this one is another thread's
            for chunk in range(chunks):
                first = chunk * _BLOCKS_OF_CHUNK
                taken = min(_BLOCKS_OF_CHUNK, blocks - first)
                _fetch(following + chunk * fetched, fetched, 0)
                call(word(job, A_UNPACK), table, chunk * chunk_bytes, taken, scratch)
                _fetch(following + chunk * fetched, fetched, 1)
                whole = count // TOGETHER * TOGETHER
                for i in range(0, whole, TOGETHER):
                    _add_chunk(variant, TOGETHER, scratch, taken, records + 8 * i, first * RECORD, sums + 64 * i)
                for i in range(whole, count):
                    _add_chunk(variant, 1, scratch, taken, records + 8 * i, first * RECORD, sums + 64 * i)
                if part and ((chunk + 1) % part == 0 or chunk + 1 == chunks):
                    _end_part(totals, sums, count * WIDTH, chunk < part)
            made = totals if part else sums
            for i in range(count):
                out = word(job, A_OUT) + 4 * ((panel + i) * word(job, A_STRIDE) + tile * WIDTH)
                copy_floats(out, made + 64 * i, min(WIDTH, rows - tile * WIDTH))


# ------------------------------------------------------------------------------------------------------ float weights


def _load_floats(e: Emitter, name: str, base: Value, offset: Value, count: int) -> Value:
    """Weights as float32, `count` of them from element `offset`."""
    at = e.plus_i64(base, e.times(offset, 4 if name == "F32" else 2))
    if name == "F32":
        return e.load(ir.VectorType(FLOAT, count), at)
    words = e.load(ir.VectorType(I16, count), at)
    floats = ir.VectorType(FLOAT, count)
    if name == "F16":
        return e.b.fpext(e.b.bitcast(words, ir.VectorType(ir.HalfType(), count)), floats)
    wide = ir.VectorType(I32, count)
    return e.b.bitcast(e.b.shl(e.b.zext(words, wide), constant(wide, 16)), floats)


def _fold(e: Emitter, chains: list[Value]) -> Value:
    """The fold of `lanes`, down to a scalar."""
    while len(chains) > 1:
        half = len(chains) // 2
        chains = [e.b.fadd(x, y) for x, y in zip(chains[:half], chains[half:], strict=True)]
    (value,) = chains
    while value.type.count > 1:
        half = value.type.count // 2
        low, high = e.shuffle(value, value, range(half)), e.shuffle(value, value, range(half, 2 * half))
        value = e.b.fadd(low, high)
    return e.b.extract_element(value, ir.Constant(I32, 0))


@intrinsic
def _lanes_product(typing_context, variant, weights, x, cols):
    """lanes(weights[i] * x[i]) for i < cols, from the addresses of both rows."""
    name = variant.facts["type"]

    def codegen(context, builder, signature, arguments):
        e = Emitter(builder)
        weights, x, cols = arguments[1:]
        whole = builder.and_(cols, ir.Constant(WORD64, -LANES))
        array = cgutils.alloca_once_value(builder, constant(ir.VectorType(FLOAT, LANES), 0.0))
        lane = builder.ptrtoint(array, WORD64)
        width = ir.Constant(WORD64, LANES)
        parts = LANES // WIDTH
        with builder.if_then(builder.icmp_signed(">", whole, ir.Constant(WORD64, 0))):
            chains = [cgutils.alloca_once_value(builder, constant(FLOATS, 0.0)) for _ in range(parts)]
            with e.repeat(builder.sdiv(whole, width)) as step:
                for j, chain in enumerate(chains):
                    at = e.plus_i64(builder.mul(step, width), WIDTH * j)
                    w = _load_floats(e, name, weights, at, WIDTH)
                    value = e.load(FLOATS, x, e.times(at, 4))
                    builder.store(e.fma(w, value, builder.load(chain)), chain)
            for j, chain in enumerate(chains):
                e.store(builder.load(chain), lane, 4 * WIDTH * j)
        rest = builder.sub(cols, whole)
        with builder.if_then(builder.icmp_signed(">", rest, ir.Constant(WORD64, 0))), e.repeat(rest) as k:
            at = builder.add(whole, k)
            one = ir.VectorType(FLOAT, 1)
            chain = e.plus_i64(lane, e.times(k, 4))
            w = _load_floats(e, name, weights, at, 1)
            e.store(e.fma(w, e.load(one, x, e.times(at, 4)), e.load(one, chain)), chain)
        return _fold(e, [e.load(FLOATS, lane, 4 * WIDTH * j) for j in range(parts)])

    return types.float32(variant, types.int64, types.int64, types.int64), codegen


def _floats_entry(variant, job, begin, end, scratch):
    """Weight rows [begin, end) of a matrix."""
    cols = word(job, A_COLS)
    for row in range(begin, end):
        weights = word(job, A_WEIGHT) + row * word(job, A_ROW_BYTES)
        for i in range(word(job, A_N)):
            value = _lanes_product(variant, weights, word(job, A_X) + 4 * cols * _input_row(job, i), cols)
            put_float(word(job, A_OUT), i * word(job, A_STRIDE) + row, value)


# --------------------------------------------------------------------------------------------------------------- jobs


@dataclass(frozen=True, slots=True)
class Inputs:
    """Activation rows of a product by address: float32 [rows][cols], and their records for weights in blocks."""

    floats: int
    records: int


def product_job(w: Weight, x: Inputs, index: int, n: int, out: int, part: int = 0) -> list[int]:
    """The product of a matrix, or the first of a stack, with n activation rows: out float32 [n][rows of w].

    index: the address of the int32 numbers of the rows, or 0 for rows 0 .. n - 1. part: of weights in blocks, the
    inputs of a part of a sum, a multiple of CHUNK: every part is a product from 0, and they are added in their order;
    0: the sum has no parts.
    """
    kind, row_bytes = w.type, w.type.row_bytes(w.cols)
    inputs = x.floats if kind.is_float else x.records
    common = (address(w.data), row_bytes, w.rows, w.cols, inputs, index, n, out, w.rows)
    if kind.is_float:
        return job(function(_floats_entry, type=kind.name), w.rows, PIECE_BYTES // (row_bytes * n), *common)
    entry = function(_blocks_entry, group=kind.group, offset=kind.has_offset, only=None)
    grain = PIECE_BYTES // (WIDTH * row_bytes * n)
    chunk_bytes = CHUNK // kind.block * kind.block_bytes
    return job(entry, -(-w.rows // WIDTH), grain, *common, unpacker(kind), chunk_bytes, part // CHUNK)


@njit("void(int64[:, ::1], int64[::1], int64[::1], int64[::1], int64, int64, int64, int64)", **JIT)
def _each_expert(jobs, template, experts, counts, matrix_bytes, out_bytes, inputs, input_bytes):
    """A job for each expert: its matrix, and the rows behind those of the experts before it."""
    before = 0
    for i in range(len(experts)):
        for k in range(JOB_WORDS):
            jobs[i, k] = template[k]
        jobs[i, GRAIN] = max(template[GRAIN] // counts[i], 1)
        jobs[i, A_WEIGHT] += experts[i] * matrix_bytes
        jobs[i, A_N] = counts[i]
        jobs[i, A_OUT] += before * out_bytes
        jobs[i, inputs] += before * input_bytes
        before += counts[i]


def expert_jobs(jobs: Jobs, w: Weight, x: Inputs, index: int, experts: I64, counts: I64, out: int) -> None:
    """The products of some experts of a stack, each with its own activation rows, one expert's after another's.

    jobs: written, a row an expert; experts, counts: which, and how many rows each; index as in `product_job`; out
    float32 [sum of counts][rows].
    """
    template = np.array(product_job(w, x, index, 1, out), np.int64)
    row_bytes = w.type.row_bytes(w.cols)
    if index:
        inputs, input_bytes = A_INDEX, 4
    else:
        inputs, input_bytes = A_X, w.cols * 4 if w.type.is_float else w.cols // ACT_BLOCK * RECORD
    _each_expert(jobs, template, experts, counts, w.rows * row_bytes, 4 * w.rows, inputs, input_bytes)

"""Rows of a packed matrix as float32: an unpacked chunk at a time, code * scale or fma(code, scale, offset).

A job's items are groups of 16 of the wanted rows.
Cost   about a nanosecond a weight; embeddings are a few rows a token
"""

from __future__ import annotations

import numpy as np
from numba import njit

from strata.kernels.cpu.jobs import ARGUMENTS, address, call, function, job
from strata.kernels.cpu.math import JIT, fma
from strata.kernels.cpu.memory import byte_at, float_at, put_float, put_word, word
from strata.kernels.cpu.simd import WIDTH
from strata.kernels.cpu.unpack import CHUNK, CHUNK_BYTES, CODES, OFFSETS, SCALES, unpacker
from strata.kernels.formats import Weight
from strata.kernels.ops import ACT_BLOCK

(A_WEIGHT, A_ROW_BYTES, A_COLS, A_ROWS, A_N, A_OUT, A_UNPACK, A_CHUNK_BYTES, A_GROUP, A_OFFSET) = range(
    ARGUMENTS, ARGUMENTS + 10
)


@njit("void(int64, int64, int64, int64, int64, int64)", **JIT)
def _write_row(chunk, r, count, group, has_offset, out):
    """Row r of a chunk: count weights to `out`."""
    for i in range(count):
        vector = WIDTH * (i // group) + r
        code = np.float32(np.int64(byte_at(chunk + CODES, i // 4 * 4 * WIDTH + 4 * r + i % 4)) - 128)
        scale = float_at(chunk + SCALES, vector)
        put_float(out, i, fma(code, scale, float_at(chunk + OFFSETS, vector)) if has_offset else code * scale)


def _rows_entry(variant, job, begin, end, scratch):
    """Groups [begin, end) of 16 of the wanted rows."""
    cols, n = word(job, A_COLS), word(job, A_N)
    table = scratch + CHUNK_BYTES
    for first in range(begin * WIDTH, min(end * WIDTH, n), WIDTH):
        for r in range(WIDTH):
            row = word(word(job, A_ROWS), min(first + r, n - 1))
            put_word(table, r, word(job, A_WEIGHT) + row * word(job, A_ROW_BYTES))
        for at in range(0, cols, CHUNK):
            count = min(CHUNK, cols - at)
            call(word(job, A_UNPACK), table, at // CHUNK * word(job, A_CHUNK_BYTES), count // ACT_BLOCK, scratch)
            for r in range(min(WIDTH, n - first)):
                out = word(job, A_OUT) + 4 * ((first + r) * cols + at)
                _write_row(scratch, r, count, word(job, A_GROUP), word(job, A_OFFSET), out)


def rows_job(w: Weight, rows: int, n: int, out: int) -> list[int]:
    """n rows, int64 numbers at the address `rows`, of a quantised matrix to float32 [n][cols] at `out`."""
    kind = w.type
    return job(
        function(_rows_entry),
        -(-n // WIDTH),
        1,
        address(w.data),
        kind.row_bytes(w.cols),
        w.cols,
        rows,
        n,
        out,
        unpacker(kind),
        CHUNK // kind.block * kind.block_bytes,
        kind.group,
        int(kind.has_offset),
    )

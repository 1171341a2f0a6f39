"""Weight blocks to bytes that a dot product can use, sixteen rows at a time; `formats.py` in vector code.

A *chunk* is what one call unpacks: up to 8 blocks of 32 weights of 16 rows, written to a buffer of `CHUNK_BYTES`:

    CODES    uint8 [block 8][column 8][row 16][4]   code + 128 of weights 4 * column .. + 3
    SCALES   float32 [group 16][row 16]             one vector a scale group, in order along the row
    OFFSETS  float32 [group 16][row 16]             written by types with offsets only

unpacker(type) gives the address of void(dummy, rows, at, blocks, out): `rows` the address of 16 row addresses, `at` the
byte in a row where the chunk starts, `blocks` the number of blocks of 32 (8 for types with blocks of 256). Compiled at
the first use of a type. Codes are the exact ones of `formats.py`, scales and offsets are exact products.

Source   the block layouts of ggml; the tables of the IQ types come from the `gguf` package (`reference.quant`)
Cost     3 to 10 vector operations for 64 weights
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Final

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from strata.kernels.cpu.jobs import function
from strata.kernels.cpu.simd import (
    BYTE_TABLES,
    BYTES,
    FLOATS,
    I8,
    I16,
    VECTOR,
    WIDTH,
    WORD64,
    Emitter,
    Offset,
    Value,
    constant,
)
from strata.kernels.formats import BY_NAME, TensorType
from strata.kernels.reference.quant import IQ4_VALUES, MXFP4_VALUES, grid

CHUNK: Final = 256
"""Weights of a row in a chunk."""
CODES, SCALES, OFFSETS, CHUNK_BYTES = 0, 4096, 5120, 6144

_BYTES = 0x01010101
"""A number times this has it in all four bytes of a lane."""


class Block:
    """One block of sixteen rows: where it is read, and where its parts are written.

    `at` the byte of a row where the block starts; `out` the chunk buffer; `first` the number of the block in the chunk.
    """

    def __init__(self, e: Emitter, kind: TensorType, table: Value, at: Value, out: Value, first: Value) -> None:
        self.e, self._table, self._at = e, table, at
        self._codes = e.plus_i64(out, e.times(first, kind.block // 32 * 512))
        self._groups = e.plus_i64(out, e.times(first, kind.block // kind.group * 64))

    def columns(self, offset: Offset, count: int) -> list[Value]:
        """`count` columns from byte `offset` of the block."""
        return self.e.columns(self.e.rows(self._table), self.e.plus_i64(self._at, offset), count)

    def words(self, offset: Offset, kind: Value = I16) -> Value:
        """One 16-bit word (or byte) of every row, zero-extended."""
        return self.e.b.zext(self.e.words(self.e.rows(self._table), self.e.plus_i64(self._at, offset), kind), VECTOR)

    def half(self, offset: int) -> Value:
        return self.e.half(self.e.rows(self._table), self.e.plus_i64(self._at, offset))

    def code(self, block: Offset, column: int, value: Value) -> None:
        """Column `column` of block `block` of 32: bytes of code + 128."""
        self._write(value, self._codes, CODES + 64 * column, block, 512)

    def scale(self, group: Offset, value: Value) -> None:
        self._write(value, self._groups, SCALES, group, 64)

    def offset(self, group: Offset, value: Value) -> None:
        self._write(value, self._groups, OFFSETS, group, 64)

    def _write(self, value: Value, base: Value, at: int, index: Offset, step: int) -> None:
        where = at + step * index if isinstance(index, int) else self.e.plus_i64(self.e.times(index, step), at)
        self.e.store(value, base, where)

    def pairs(self) -> AbstractContextManager[Value]:
        """A loop over the four pairs of blocks of 32 of a super-block; gives the number of the pair."""
        return self.e.repeat(ir.Constant(WORD64, 4))


def _nibbles(e: Emitter, columns: Sequence[Value]) -> list[Value]:
    """The low nibbles of columns, then the high ones."""
    return [e.both(x, 0x0F * _BYTES) for x in columns] + [e.field(x, 4, 0x0F * _BYTES) for x in columns]


def _signed_byte(e: Emitter, columns: Sequence[Value], index: int) -> Value:
    """Byte `index` of neighbouring columns, sign-extended."""
    return e.b.ashr(e.left(columns[index // 4], 24 - 8 * (index % 4)), constant(VECTOR, 24))


def _scaled(e: Emitter, d: Value, s: Value) -> Value:
    """d times a small integer."""
    return e.b.fmul(d, e.to_float(s))


# ------------------------------------------------------------------------------------------------ blocks of 32 and 64


def _q8_0(k: Block) -> None:
    k.scale(0, k.half(0))
    for c in (0, 4):
        for i, x in enumerate(k.columns(2 + 4 * c, 4)):
            k.code(0, c + i, k.e.b.xor(x, constant(VECTOR, 0x80 * _BYTES)))


def _q2_0(k: Block) -> None:
    e, d = k.e, k.half(0)
    raw = k.columns(2, 4)
    for i in range(16):  # a byte holds four neighbouring weights: a whole column
        x = e.byte(raw, i)
        spread = e.both(e.either(x, e.left(x, 6), e.left(x, 12), e.left(x, 18)), 0x03 * _BYTES)
        k.code(i // 8, i % 8, e.plus(spread, 127 * _BYTES))
    k.scale(0, d)
    k.scale(1, d)


def _q4_0(k: Block) -> None:
    k.scale(0, k.half(0))
    for c, x in enumerate(_nibbles(k.e, k.columns(2, 4))):
        k.code(0, c, k.e.plus(x, 120 * _BYTES))


def _halves(k: Block, head: Value) -> None:
    """Scale and offset as two half-precision numbers in one column."""
    k.scale(0, k.e.half_of(head))
    k.offset(0, k.e.half_of(head, 16))


def _q4_1(k: Block) -> None:
    _halves(k, k.columns(0, 1)[0])
    for c, x in enumerate(_nibbles(k.e, k.columns(4, 4))):
        k.code(0, c, k.e.plus(x, 128 * _BYTES))


def _five_bits(k: Block, columns: Sequence[Value], high: Value, bias: int) -> None:
    """Nibbles and the 32 fifth bits of a block."""
    for c, x in enumerate(_nibbles(k.e, columns)):
        k.code(0, c, k.e.where(k.e.bits(high, c), k.e.plus(x, (bias + 16) * _BYTES), k.e.plus(x, bias * _BYTES)))


def _q5_0(k: Block) -> None:
    k.scale(0, k.half(0))
    _five_bits(k, k.columns(6, 4), k.columns(2, 1)[0], 112)


def _q5_1(k: Block) -> None:
    head, high = k.columns(0, 2)
    _halves(k, head)
    _five_bits(k, k.columns(8, 4), high, 128)


def _iq4_nl(k: Block) -> None:
    k.scale(0, k.half(0))
    for c, x in enumerate(_nibbles(k.e, k.columns(2, 4))):
        k.code(0, c, k.e.table16(IQ4_VALUES.view(np.uint8) ^ 0x80, x))


def _mxfp4(k: Block) -> None:
    e, b = k.e, k.e.b
    power = k.words(0, I8)
    tiny = e.b.shl(constant(VECTOR, 0x00200000), power)
    normal = e.left(e.plus(power, -1), 23)
    bits = b.select(b.icmp_unsigned("<", power, constant(VECTOR, 2)), tiny, normal)
    k.scale(0, b.bitcast(bits, FLOATS))
    for c, x in enumerate(_nibbles(e, k.columns(1, 4))):
        k.code(0, c, e.table16(MXFP4_VALUES.view(np.uint8) ^ 0x80, x))


# ------------------------------------------------------------------------------------------------------ K super-blocks


def _q2_k(k: Block) -> None:
    e = k.e
    head = k.columns(80, 1)[0]
    d, dmin = e.half_of(head), e.b.fneg(e.half_of(head, 16))
    scales = k.columns(0, 4)
    for g in range(16):
        s = e.byte(scales, g)
        k.scale(g, _scaled(e, d, e.both(s, 15)))
        k.offset(g, _scaled(e, dmin, e.right(s, 4)))
    for half in range(2):
        for c in (0, 4):
            for i, x in enumerate(k.columns(16 + 32 * half + 4 * c, 4)):
                for j in range(4):
                    k.code(4 * half + j, c + i, e.plus(e.field(x, 2 * j, 0x03 * _BYTES), 128 * _BYTES))


def _q3_k(k: Block) -> None:
    e = k.e
    tail = k.columns(94, 4)  # two bytes of codes, twelve of scales, d
    d = e.half_of(tail[3], 16)
    for g in range(16):
        low = e.byte(tail, 2 + g % 8)
        low = e.both(low, 15) if g < 8 else e.right(low, 4)
        high = e.both(e.right(e.byte(tail, 10 + g % 4), 2 * (g // 4)), 3)
        k.scale(g, _scaled(e, d, e.plus(e.either(low, e.left(high, 4)), -32)))
    for c in (0, 4):
        high = k.columns(4 * c, 4)
        for half in range(2):
            for i, x in enumerate(k.columns(32 + 32 * half + 4 * c, 4)):
                for j in range(4):
                    third = _moved(e, high[i], 4 * half + j, 2)
                    code = e.either(e.field(x, 2 * j, 0x03 * _BYTES), third)
                    k.code(4 * half + j, c + i, e.plus(code, 124 * _BYTES))


def _moved(e: Emitter, x: Value, source: int, target: int) -> Value:
    """Bit `source` of every byte as bit `target`, all others zero."""
    moved = e.right(x, source - target) if source > target else e.left(x, target - source)
    return e.both(moved, (1 << target) * _BYTES)


def _k_scales(k: Block) -> None:
    """The first sixteen bytes of Q4_K and Q5_K: d, dmin, eight 6-bit scales and eight 6-bit minima."""
    e = k.e
    head = k.columns(0, 4)
    d, dmin = e.half_of(head[0]), e.b.fneg(e.half_of(head[0], 16))
    for g in range(8):
        s, m, rest = (e.byte(head[i : i + 1], g % 4) for i in (1, 2, 3))
        if g < 4:
            scale, minimum = e.both(s, 63), e.both(m, 63)
        else:
            scale = e.either(e.both(rest, 15), e.field(s, 2, 48))
            minimum = e.either(e.right(rest, 4), e.field(m, 2, 48))
        k.scale(g, _scaled(e, d, scale))
        k.offset(g, _scaled(e, dmin, minimum))


def _q4_k(k: Block) -> None:
    _k_scales(k)
    for pair in range(4):
        for c in (0, 4):
            for i, x in enumerate(_nibbles(k.e, k.columns(16 + 32 * pair + 4 * c, 4))):
                k.code(2 * pair + i // 4, c + i % 4, k.e.plus(x, 128 * _BYTES))


def _q5_k(k: Block) -> None:
    _k_scales(k)
    e = k.e
    for c in (0, 4):
        high = k.columns(16 + 4 * c, 4)
        for pair in range(4):
            for i, x in enumerate(_nibbles(e, k.columns(48 + 32 * pair + 4 * c, 4))):
                block = 2 * pair + i // 4
                code = e.either(x, _moved(e, high[i % 4], block, 4))
                k.code(block, c + i % 4, e.plus(code, 128 * _BYTES))


def _q6_k(k: Block) -> None:
    e = k.e
    d = k.half(208)
    scales = k.columns(192, 4)
    for g in range(16):
        k.scale(g, _scaled(e, d, _signed_byte(e, scales, g)))
    for half in range(2):
        for c in (0, 4):
            high = k.columns(128 + 32 * half + 4 * c, 4)
            for odd in range(2):
                low = _nibbles(e, k.columns(64 * half + 32 * odd + 4 * c, 4))
                for i, x in enumerate(low):
                    block = odd + 2 * (i // 4)
                    top = e.left(e.field(high[i % 4], 2 * block, 0x03 * _BYTES), 4)
                    k.code(4 * half + block, c + i % 4, e.plus(e.either(x, top), 96 * _BYTES))


# ----------------------------------------------------------------------------------------------------- IQ super-blocks


def _iq4_xs(k: Block) -> None:
    e = k.e
    head, low = k.columns(0, 2)
    d = e.half_of(head)
    for g in range(8):
        high = e.left(e.field(head, 16 + 2 * g, 3), 4)
        k.scale(g, _scaled(e, d, e.plus(e.either(e.field(low, 4 * g, 15), high), -32)))
        for c, x in enumerate(_nibbles(e, k.columns(8 + 16 * g, 4))):
            k.code(g, c, e.table16(IQ4_VALUES.view(np.uint8) ^ 0x80, x))


def _odd_scale(e: Emitter, d: Value, s: Value, divisor: int) -> Value:
    """d * (2s + 1) / divisor; the divisor is a power of two, so nothing is rounded."""
    part = e.b.fmul(d, constant(FLOATS, 1 / divisor))
    return _scaled(e, part, e.plus(e.left(s, 1), 1))


def _words(e: Emitter, name: str, codes: npt.NDArray[np.int8]) -> ir.GlobalVariable:
    """The codes of a grid as 32-bit words of four."""
    return e.words_table(f"grid_{name}", lambda: codes.reshape(-1).view("<u4").tolist())


def _numbers(e: Emitter, index: Value, high: Sequence[Value]) -> list[Value]:
    """The numbers of four entries: the four bytes of a lane, and flags for the bits above."""
    columns = [e.b.bitcast(e.b.zext(flag, BYTES), VECTOR) for flag in high]
    return [
        e.either(e.byte([index], i), *(e.left(e.byte([x], i), 8 + j) for j, x in enumerate(columns))) for i in range(4)
    ]


def _entries(e: Emitter, fields: npt.NDArray, width: int, index: Value, high: Sequence[Value]) -> Value:
    """The bytes of four entries by byte tables: the fields of an entry (entries, 8 / width), lowest bits first."""
    shifts = np.arange(0, 8, width)
    masks = [e.b.icmp_signed("<", e.b.bitcast(index, BYTES), constant(BYTES, 0)), *high]
    return e.table128((fields.astype(np.int64) << shifts).sum(1).tolist(), index, masks)


def _grid4(e: Emitter, name: str, index: Value, high: Sequence[Value] = ()) -> list[Value]:
    """Four columns: an entry of four codes for every byte of the lanes, `high` the bits of its number above 7.

    With byte tables an entry is four nibbles in two bytes: numbers of the at most eight codes that occur.
    """
    codes = grid(name)
    if BYTE_TABLES not in e.features:
        return [e.lookup(_words(e, name, codes), n) for n in _numbers(e, index, high)]
    values, numbers = np.unique(codes, return_inverse=True)
    small = values[-1] < 16
    fields: npt.NDArray = codes if small else numbers.reshape(codes.shape)
    low, top = (_entries(e, fields[:, i : i + 2], 4, index, high) for i in (0, 2))
    columns = []
    for i in range(4):
        order = [4 * r + i + half for r in range(WIDTH) for half in (0, 0, 4 * WIDTH, 4 * WIDTH)]
        x = e.b.bitcast(e.shuffle(low, top, order), VECTOR)
        nibbles = e.either(e.both(x, 0x000F000F), e.field(x, 4, 0x0F000F00))
        columns.append(nibbles if small else e.table16(np.resize(values, 16), nibbles))
    return columns


def _grid8(e: Emitter, name: str, codes: npt.NDArray[np.int8], index: Value, high: Sequence[Value] = ()) -> list[Value]:
    """Eight columns: an entry of eight codes for every byte of the lanes, `high` the bits of its number above 7.

    With byte tables an entry is eight 2-bit numbers of the three codes that occur, in two bytes.
    """
    if BYTE_TABLES not in e.features:
        table = _words(e, name, codes)
        return [e.lookup(table, e.plus(e.left(n, 1), i)) for n in _numbers(e, index, high) for i in range(2)]
    values, fields = np.unique(codes, return_inverse=True)
    fields = fields.reshape(codes.shape)
    parts = [e.b.bitcast(_entries(e, fields[:, i : i + 4], 2, index, high), VECTOR) for i in (0, 4)]
    table = [values[max(n & 3, n >> 2) % 3] for n in range(16)]  # a number is in either half of a nibble
    columns = []
    for i in range(4):
        for part in parts:
            x = e.both(e.picked(part, [i] * 4), 0xC0300C03)
            columns.append(e.table16(table, e.both(e.either(x, e.right(x, 4)), 0x0F * _BYTES)))
    return columns


def _parity(e: Emitter, x: Value) -> Value:
    """Four bytes of seven sign bits, with the eighth bit that makes their number even."""
    folded = e.b.xor(x, e.field(x, 4, 0x0F * _BYTES))
    folded = e.b.xor(folded, e.field(folded, 2, 0x03 * _BYTES))
    folded = e.b.xor(folded, e.field(folded, 1, 0x01 * _BYTES))
    return e.either(x, e.left(e.both(folded, _BYTES), 7))


def _sevens(e: Emitter, x: Value) -> Value:
    """Four fields of seven sign bits in the low 28 bits to 32 signs."""
    parts = [e.both(e.left(x, i), 0x7F << 8 * i) for i in range(4)]
    return _parity(e, e.either(*parts))


def _signed_codes(k: Block, block: Value, words: Sequence[Value], signs: Value) -> None:
    for c, x in enumerate(words):
        k.code(block, c, k.e.flipped(k.e.bits(signs, c), x))


def _iq2_xxs(k: Block) -> None:
    e, d = k.e, k.half(0)
    with k.pairs() as pair:
        columns = k.columns(e.plus_i64(e.times(pair, 16), 2), 4)
        for odd in range(2):
            block = e.plus_i64(e.times(pair, 2), odd)
            index, rest = columns[2 * odd : 2 * odd + 2]
            _signed_codes(k, block, _grid8(e, "IQ2_XXS", grid("IQ2_XXS"), index), _sevens(e, rest))
            k.scale(block, _odd_scale(e, d, e.right(rest, 28), 8))


def _nibble_scales(k: Block, d: Value, scales: Sequence[Value]) -> None:
    """Sixteen 4-bit scales."""
    for g in range(16):
        k.scale(g, _odd_scale(k.e, d, k.e.both(k.e.right(k.e.byte(scales, g // 2), 4 * (g % 2)), 15), 8))


def _iq2_xs(k: Block) -> None:
    e = k.e
    _nibble_scales(k, k.half(0), k.columns(66, 2))
    with k.pairs() as pair:
        columns = k.columns(e.plus_i64(e.times(pair, 16), 2), 4)
        for odd in range(2):
            # Words 0, 1 and 2, 3 of nine bits of a number and seven signs, brought to bytes in the order 0, 2, 1, 3.
            x, y = columns[2 * odd : 2 * odd + 2]
            low, even = 0x00FF00FF, 0x00FE00FE
            index = e.either(e.both(x, low), e.left(e.both(y, low), 8))
            top = e.either(e.both(e.right(x, 8), low), e.both(y, low << 8))
            found = _grid8(e, "IQ2_XS", grid("IQ2_XS"), index, [e.flags(top, range(4), [1] * 4)])
            words = [found[2 * i + j] for i in (0, 2, 1, 3) for j in range(2)]
            seven = e.picked(e.right(e.both(top, even | even << 8), 1), (0, 2, 1, 3))
            _signed_codes(k, e.plus_i64(e.times(pair, 2), odd), words, _parity(e, seven))


def _iq2_s(k: Block) -> None:
    e = k.e
    _nibble_scales(k, k.half(0), k.columns(74, 2))
    with k.pairs() as pair:
        low, signs = (k.columns(e.plus_i64(e.times(pair, 8), at), 2) for at in (2, 34))
        both = k.words(e.plus_i64(e.times(pair, 2), 66))
        for odd in range(2):
            high = [e.flags(both, [odd] * 4, [1 << (2 * i + j) for i in range(4)]) for j in range(2)]
            words = _grid8(e, "IQ2_S", grid("IQ2_S"), low[odd], high)
            _signed_codes(k, e.plus_i64(e.times(pair, 2), odd), words, signs[odd])


def _iq3_xxs(k: Block) -> None:
    e, d = k.e, k.half(0)
    with k.pairs() as pair:
        columns = k.columns(e.plus_i64(e.times(pair, 16), 2), 4)
        rest = k.columns(e.plus_i64(e.times(pair, 8), 66), 2)
        for odd in range(2):
            block = e.plus_i64(e.times(pair, 2), odd)
            words = [w for x in columns[2 * odd : 2 * odd + 2] for w in _grid4(e, "IQ3_XXS", x)]
            _signed_codes(k, block, words, _sevens(e, rest[odd]))
            k.scale(block, _odd_scale(e, d, e.right(rest[odd], 28), 4))


def _iq3_s(k: Block) -> None:
    e, d = k.e, k.half(0)
    (scales,) = k.columns(106, 1)
    for g in range(8):
        k.scale(g, _odd_scale(e, d, e.field(scales, 4 * g, 15), 1))
    with k.pairs() as pair:
        columns = k.columns(e.plus_i64(e.times(pair, 16), 2), 4)
        signs = k.columns(e.plus_i64(e.times(pair, 8), 74), 2)
        high = k.words(e.plus_i64(e.times(pair, 2), 66))
        words = [w for i, x in enumerate(columns) for w in _grid4(e, "IQ3_S", x, [e.bits(high, i)])]
        for odd in range(2):
            _signed_codes(k, e.plus_i64(e.times(pair, 2), odd), words[8 * odd : 8 * odd + 8], signs[odd])


def _with_delta(k: Block, block: Value, index: Value, high: Sequence[Value], negative: Value) -> None:
    """A block of codes 8 * grid +- 1: flags for the bits of an entry's number above 7 and for a negative 1."""
    e = k.e
    words = _grid8(e, "IQ1", 8 * grid("IQ1_S") + 8, index, high)
    delta = e.b.select(negative, constant(BYTES, 119), constant(BYTES, 121))  # 128 - 8 -+ 1
    for c, x in enumerate(words):
        k.code(block, c, e.b.add(x, e.picked(e.b.bitcast(delta, VECTOR), [c // 2] * 4)))


def _iq1_s(k: Block) -> None:
    e, d = k.e, k.half(0)
    with k.pairs() as pair:
        low = k.columns(e.plus_i64(e.times(pair, 8), 2), 2)
        (both,) = k.columns(e.plus_i64(e.times(pair, 4), 34), 1)
        for odd in range(2):
            block, at = e.plus_i64(e.times(pair, 2), odd), 2 * odd
            places = [[3 * i + j for i in range(4)] for j in range(3)]
            high = [e.flags(both, [at + p // 8 for p in bits], [1 << p % 8 for p in bits]) for bits in places]
            _with_delta(k, block, low[odd], high, e.flags(both, [at + 1] * 4, [128] * 4))
            k.scale(block, _odd_scale(e, d, e.field(both, 16 * odd + 12, 7), 8))


def _iq1_m(k: Block) -> None:
    e = k.e
    scales = k.columns(48, 2)
    fields = [e.field(x, s, 0xFFFF) for x in scales for s in (0, 16)]
    d = e.half_of(e.either(*(e.left(e.right(x, 12), 4 * i) for i, x in enumerate(fields))))
    for g in range(16):
        k.scale(g, _odd_scale(e, d, e.both(e.right(fields[g // 4], 3 * (g % 4)), 7), 8))
    with k.pairs() as pair:
        low = k.columns(e.times(pair, 8), 2)
        (both,) = k.columns(e.plus_i64(e.times(pair, 4), 32), 1)
        for odd in range(2):
            nibbles = [2 * odd, 2 * odd, 2 * odd + 1, 2 * odd + 1]
            high = [e.flags(both, nibbles, [1 << j, 16 << j] * 2) for j in range(4)]
            _with_delta(k, e.plus_i64(e.times(pair, 2), odd), low[odd], high[:3], high[3])


_BLOCKS: Final[dict[str, Callable[[Block], None]]] = {
    "Q8_0": _q8_0,
    "Q2_0": _q2_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
    "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
    "MXFP4": _mxfp4,
}


@intrinsic
def _unpack(typing_context, variant, rows, at, blocks, out):
    kind = BY_NAME[variant.facts["type"]]

    def codegen(context, builder, signature, arguments):
        e = Emitter(builder, variant.facts["only"])
        table, start, count, buffer = arguments[1:]
        with e.repeat(builder.udiv(count, ir.Constant(WORD64, kind.block // 32))) as i:
            begin = e.plus_i64(start, e.times(i, kind.block_bytes))
            _BLOCKS[kind.name](Block(e, kind, table, begin, buffer, i))
        return context.get_dummy_value()

    return types.void(variant, types.int64, types.int64, types.int64, types.int64), codegen


def _entry(variant, rows, at, blocks, out):
    _unpack(variant, rows, at, blocks, out)


def unpacker(kind: TensorType, only: str | None = None) -> int:
    """The address of the function that unpacks a chunk of this type; `only`: see `Emitter`."""
    return function(_entry, type=kind.name, only=only)

"""LLVM vector code for sixteen weight rows at once: what `unpack` and `product` are written with.

A vector has one 32-bit lane per weight row. Bytes of a block are read as *columns*: lane r of a column holds four
neighbouring bytes of row r, so a column of codes is four consecutive weights of sixteen rows, and every field of a
block (nibbles, sign bits, scales) is taken out of all sixteen rows by one instruction.

`Emitter` wraps an IR builder. It emits plain LLVM IR, which any processor compiles; three operations have no good
general form and use the instruction where the processor has it: `dot4` (vpdpbusd of VNNI), `table16` (pshufb)
and `table128` (vpermi2b of AVX-512 VBMI). All are integer operations: the bits are the same everywhere.

Addresses are i64 values, offsets Python ints or i64 values. Loads and stores need no alignment, and a load never
touches a byte that was not asked for: weights may end at the last byte of a mapped file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

import llvmlite.binding
import numba
from llvmlite import ir

WIDTH: Final = 16
"""Weight rows of a vector."""

I8, I16, I32, WORD64 = (ir.IntType(n) for n in (8, 16, 32, 64))
FLOAT = ir.FloatType()
VECTOR = ir.VectorType(I32, WIDTH)
FLOATS = ir.VectorType(FLOAT, WIDTH)
BYTES = ir.VectorType(I8, 4 * WIDTH)

Value = Any
Offset = Any


@cache
def features() -> frozenset[str]:
    """Names of the instruction sets that numba compiles for."""
    config: Any = numba.config
    if config.CPU_NAME or config.CPU_FEATURES:  # compiling for another processor: only what is asked for
        return frozenset(f[1:] for f in (config.CPU_FEATURES or "").split(",") if f.startswith("+"))
    return frozenset(name for name, has in llvmlite.binding.get_host_cpu_features().items() if has)


def constant(kind: ir.VectorType, value: float | Sequence[int]) -> ir.Constant:
    """A vector constant; a single number fills all lanes, and integers may be written signed or unsigned."""
    lanes = list(value) if isinstance(value, Sequence) else [value] * kind.count
    if isinstance(kind.element, ir.IntType):
        top = 1 << (kind.element.width - 1)
        lanes = [(int(lane) + top) % (2 * top) - top for lane in lanes]
    return ir.Constant(kind, lanes)


class Emitter:
    """Emits operations on sixteen rows at the builder's position."""

    def __init__(self, builder: ir.IRBuilder, only: str | None = None) -> None:
        """`only`: the instruction sets that may be used, with commas; as a rule those of the processor."""
        self.b = builder
        self.features = features() if only is None else frozenset(only.split(","))

    # ------------------------------------------------------------------------------------------------ memory, loops

    def plus_i64(self, base: Value, offset: Offset) -> Value:
        """base + offset of addresses and sizes."""
        return self.b.add(base, ir.Constant(WORD64, offset) if isinstance(offset, int) else offset)

    def times(self, x: Value, n: int) -> Value:
        """n * x of sizes."""
        return self.b.mul(x, ir.Constant(WORD64, n))

    def load(self, kind: ir.Type, base: Value, offset: Offset = 0, align: int = 1) -> Value:
        value = self.b.load(self.b.inttoptr(self.plus_i64(base, offset), kind.as_pointer()))
        value.align = align
        return value

    def store(self, value: Value, base: Value, offset: Offset = 0) -> None:
        self.b.store(value, self.b.inttoptr(self.plus_i64(base, offset), value.type.as_pointer())).align = 4

    @contextmanager
    def repeat(self, count: Value) -> Iterator[Value]:
        """The body runs for i = 0 .. count - 1; count must be at least 1."""
        b = self.b
        before, body = b.block, b.append_basic_block("body")
        after = b.append_basic_block("after")
        b.branch(body)
        b.position_at_end(body)
        i = b.phi(WORD64)
        i.add_incoming(ir.Constant(WORD64, 0), before)
        yield i
        following = b.add(i, ir.Constant(WORD64, 1))
        i.add_incoming(following, b.block)
        b.cbranch(b.icmp_signed("<", following, count), body, after)
        b.position_at_end(after)

    def call(self, name: str, result: ir.Type, *arguments: Value) -> Value:
        """A function of LLVM by name, declared at its first use."""
        module = self.b.module
        function = module.globals.get(name)
        if function is None:
            function = ir.Function(module, ir.FunctionType(result, [a.type for a in arguments]), name)
        return self.b.call(function, arguments)

    # ------------------------------------------------------------------------------------------- lanes and constants

    def splat(self, x: Value, count: int = WIDTH) -> Value:
        """One scalar in all lanes."""
        kind = ir.VectorType(x.type, count)
        one = self.b.insert_element(ir.Constant(kind, ir.Undefined), x, ir.Constant(I32, 0))
        return self.b.shuffle_vector(one, one, constant(ir.VectorType(I32, count), 0))

    def shuffle(self, x: Value, y: Value, lanes: Sequence[int]) -> Value:
        return self.b.shuffle_vector(x, y, constant(ir.VectorType(I32, len(lanes)), lanes))

    def join(self, parts: Sequence[Value]) -> Value:
        """Vectors one after another; their number is a power of two."""
        values = list(parts)
        while len(values) > 1:
            count = 2 * values[0].type.count
            values = [self.shuffle(x, y, range(count)) for x, y in zip(values[::2], values[1::2], strict=True)]
        return values[0]

    def both(self, x: Value, mask: int) -> Value:
        """x & mask in every lane."""
        return self.b.and_(x, constant(VECTOR, mask))

    def field(self, x: Value, shift: int, mask: int) -> Value:
        """(x >> shift) & mask in every lane."""
        return self.both(self.right(x, shift), mask)

    def right(self, x: Value, shift: int) -> Value:
        return self.b.lshr(x, constant(VECTOR, shift)) if shift else x

    def left(self, x: Value, shift: int) -> Value:
        return self.b.shl(x, constant(VECTOR, shift)) if shift else x

    def plus(self, x: Value, n: int) -> Value:
        return self.b.add(x, constant(VECTOR, n))

    def either(self, *values: Value) -> Value:
        """The bitwise or of all."""
        result = values[0]
        for value in values[1:]:
            result = self.b.or_(result, value)
        return result

    # ------------------------------------------------------------------------------------------------------- columns

    def rows(self, table: Value) -> list[Value]:
        """The sixteen row addresses of a table in memory."""
        return [self.load(WORD64, table, 8 * r, align=8) for r in range(WIDTH)]

    def columns(self, rows: Sequence[Value], offset: Offset, count: int) -> list[Value]:
        """`count` (1, 2 or 4) neighbouring columns: bytes [offset, offset + 4 * count) of every row."""
        if count == 1:
            parts = [self.load(ir.VectorType(I32, 1), row, offset) for row in rows]
            return [self.join(parts)]
        parts = [self.load(ir.VectorType(I32, count), row, offset) for row in rows]
        if count == 2:
            low, high = self.join(parts[:8]), self.join(parts[8:])
            return [self.shuffle(low, high, range(c, 2 * WIDTH, 2)) for c in range(2)]
        # A 4 x 4 transposition in each quarter: vector i holds rows i, i + 4, i + 8, i + 12.
        a, b, c, d = (self.join(parts[i::4]) for i in range(4))
        low = [q + s for q in range(0, WIDTH, 4) for s in (0, WIDTH, 1, WIDTH + 1)]
        high = [lane + 2 for lane in low]
        first = [q + s for q in range(0, WIDTH, 4) for s in (0, 1, WIDTH, WIDTH + 1)]
        second = [lane + 2 for lane in first]
        ab, cd = self.shuffle(a, b, low), self.shuffle(c, d, low)
        ab_high, cd_high = self.shuffle(a, b, high), self.shuffle(c, d, high)
        return [
            self.shuffle(ab, cd, first),
            self.shuffle(ab, cd, second),
            self.shuffle(ab_high, cd_high, first),
            self.shuffle(ab_high, cd_high, second),
        ]

    def words(self, rows: Sequence[Value], offset: Offset, kind: ir.Type = I16) -> Value:
        """One 16-bit word (or byte) of every row, as it is."""
        vector = ir.Constant(ir.VectorType(kind, WIDTH), ir.Undefined)
        for r, row in enumerate(rows):
            vector = self.b.insert_element(vector, self.load(kind, row, offset), ir.Constant(I32, r))
        return vector

    def half(self, rows: Sequence[Value], offset: Offset) -> Value:
        """A half-precision number of every row as float32."""
        return self._widen(self.words(rows, offset))

    def half_of(self, column: Value, shift: int = 0) -> Value:
        """The half-precision number in the low or high 16 bits of a column as float32."""
        return self._widen(self.b.trunc(self.right(column, shift), ir.VectorType(I16, WIDTH)))

    def _widen(self, words: Value) -> Value:
        return self.b.fpext(self.b.bitcast(words, ir.VectorType(ir.HalfType(), WIDTH)), FLOATS)

    def byte(self, columns: Sequence[Value], index: int) -> Value:
        """Byte `index` of neighbouring columns, zero-extended."""
        return self.field(columns[index // 4], 8 * (index % 4), 255)

    def picked(self, column: Value, lane_bytes: Sequence[int]) -> Value:
        """Every lane's bytes in another order, four numbers of 0..3."""
        data = self.b.bitcast(column, BYTES)
        order = [4 * r + k for r in range(WIDTH) for k in lane_bytes]
        return self.b.bitcast(self.shuffle(data, data, order), VECTOR)

    def flags(self, column: Value, lane_bytes: Sequence[int], masks: Sequence[int]) -> Value:
        """A truth value per byte: whether byte lane_bytes[i] of the lane has a bit of masks[i], for i = 0 .. 3."""
        spread = self.b.bitcast(self.picked(column, lane_bytes), BYTES)
        masked = self.b.and_(spread, constant(BYTES, [*masks] * WIDTH))
        return self.b.icmp_unsigned("!=", masked, constant(BYTES, 0))

    def bits(self, column: Value, c: int) -> Value:
        """Bits 4c .. 4c + 3 of every lane: signs or high bits of column c of a block."""
        return self.flags(column, [c // 2] * 4, [1 << (4 * (c % 2) + k) for k in range(4)])

    def where(self, mask: Value, x: Value, y: Value) -> Value:
        """Bytes of x where the mask holds, else of y."""
        return self.b.bitcast(self.b.select(mask, self.b.bitcast(x, BYTES), self.b.bitcast(y, BYTES)), VECTOR)

    def flipped(self, mask: Value, x: Value) -> Value:
        """128 + x or, where the mask holds, 128 - x, byte by byte; x in 0..127."""
        data = self.b.bitcast(x, BYTES)
        middle = constant(BYTES, 128)
        return self.b.bitcast(self.b.select(mask, self.b.sub(middle, data), self.b.add(middle, data)), VECTOR)

    # ---------------------------------------------------------------------------------------------------- arithmetic

    def to_float(self, x: Value) -> Value:
        return self.b.sitofp(x, FLOATS)

    def fma(self, x: Value, y: Value, z: Value) -> Value:
        return self.call(f"llvm.fma.v{x.type.count}f32", x.type, x, y, z)

    def dot4(self, total: Value, codes: Value, q: Value) -> Value:
        """total + the sum of the four products of each lane: codes are unsigned bytes, q signed bytes."""
        for feature, width, name in _DOTS:
            if feature in self.features:
                kind = ir.VectorType(I32, width)
                parts = [
                    self.call(name, kind, *(self.shuffle(v, v, range(i, i + width)) for v in (total, codes, q)))
                    for i in range(0, WIDTH, width)
                ]
                return self.join(parts)
        # Two multiplications of 16-bit pairs, pmaddwd of x86.
        b, pairs, wide = self.b, ir.VectorType(I16, 2 * WIDTH), ir.VectorType(I32, 2 * WIDTH)
        eight = constant(pairs, 8)
        x, y = b.bitcast(codes, pairs), b.bitcast(q, pairs)
        even = b.and_(x, constant(pairs, 255)), b.ashr(b.shl(y, eight), eight)
        odd = b.lshr(x, eight), b.ashr(y, eight)
        for u, v in (even, odd):
            product = b.mul(b.sext(u, wide), b.sext(v, wide))
            first = self.shuffle(product, product, range(0, 2 * WIDTH, 2))
            second = self.shuffle(product, product, range(1, 2 * WIDTH, 2))
            total = b.add(total, b.add(first, second))
        return total

    def table16(self, table: Iterable[int], index: Value) -> Value:
        """A signed byte for every byte of the index, 0..15."""
        data, entries = self.b.bitcast(index, BYTES), [int(v) for v in table]
        for feature, width, name in _SHUFFLES:
            if feature in self.features:
                kind = ir.VectorType(I8, width)
                parts = [self.shuffle(data, data, range(i, i + width)) for i in range(0, 4 * WIDTH, width)]
                found = [self.call(name, kind, constant(kind, entries * (width // 16)), part) for part in parts]
                return self.b.bitcast(self.join(found), VECTOR)
        # One bit of the index after another chooses between halves of the table.
        values = [constant(BYTES, v) for v in entries]
        for bit in (1, 2, 4, 8):
            chosen = self.b.icmp_unsigned("!=", self.b.and_(data, constant(BYTES, bit)), constant(BYTES, 0))
            values = [self.b.select(chosen, y, x) for x, y in zip(values[::2], values[1::2], strict=True)]
        return self.b.bitcast(values[0], VECTOR)

    def lookup(self, table: ir.GlobalVariable, index: Value) -> Value:
        """A 32-bit entry of a table for every lane."""
        b = self.b
        result = ir.Constant(VECTOR, ir.Undefined)
        zero = ir.Constant(I32, 0)
        for r in range(WIDTH):
            lane = ir.Constant(I32, r)
            entry = b.load(b.gep(table, [zero, b.extract_element(index, lane)]))
            result = b.insert_element(result, entry, lane)
        return result

    def table128(self, table: Sequence[int], index: Value, masks: Sequence[Value]) -> Value:
        """A byte for every byte of the index, in a table of 128 * 2^len(masks): bits 0 to 6 of the number are the
        index's own, each mask tells the next one. Only where the processor has `BYTE_TABLES`.
        """
        data, name = self.b.bitcast(index, BYTES), "llvm.x86.avx512.vpermi2var.qi.512"
        parts = [constant(BYTES, table[i : i + 64]) for i in range(0, len(table), 64)]
        found = [self.call(name, BYTES, x, data, y) for x, y in zip(parts[::2], parts[1::2], strict=True)]
        for mask in masks:
            found = [self.b.select(mask, y, x) for x, y in zip(found[::2], found[1::2], strict=True)]
        return found[0]

    def words_table(self, name: str, words: Callable[[], Sequence[int]]) -> ir.GlobalVariable:
        """A constant table of 32-bit words in the module, made at its first use."""
        known = self.b.module.globals.get(name)
        if known is not None:
            return known
        entries = list(words())
        kind = ir.ArrayType(I32, len(entries))
        table = ir.GlobalVariable(self.b.module, kind, name)
        table.linkage, table.global_constant, table.align = "internal", True, 64
        table.initializer = ir.Constant(kind, entries)
        return table


_DOTS: Final = (
    ("avx512vnni", 16, "llvm.x86.avx512.vpdpbusd.512"),
    ("avxvnni", 8, "llvm.x86.avx512.vpdpbusd.256"),
)
"""Instruction set, lanes of a vector and intrinsic of the dot product of bytes, widest first."""

_SHUFFLES: Final = (
    ("avx512bw", 64, "llvm.x86.avx512.pshuf.b.512"),
    ("avx2", 32, "llvm.x86.avx2.pshuf.b"),
    ("ssse3", 16, "llvm.x86.ssse3.pshuf.b.128"),
)
"""Instruction set, bytes of a vector and intrinsic of the byte shuffle, widest first."""

BYTE_TABLES: Final = "avx512vbmi"
"""The instruction set with lookups in tables of 128 bytes."""

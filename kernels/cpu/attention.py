"""Blocks of attention in vectors: queries times keys, and weighted sums of values. Contract: `ops.Kernels.qsa_attend`.

groups_of(heads)                    groups of DOT_HEADS query heads that hold so many
interleave(heads, d, x, q, at, head)
    Put the query x of one of `heads` heads where `products` wants it: the groups lie one after the other from q[at],
    in a group every CHAINS dims of all its heads. The last head fills its group with zeros.
products(groups, q, q_at, d, rows, r_at, count, keys, k_at, k_stride, scale, out, after, a_at)
    All interleaved heads times `count` > 0 keys, key t at keys[k_at + rows[r_at + t] * k_stride]:
    dot4(q, k) * scale goes to out[head * SCORES + t], count <= ATTENTION_PART; what lies after the last one, up to a
    multiple of _KEYS, is overwritten. Asks for the same rows of `after`, which the caller reads next. d % LINE == 0.
weighted(heads, d, e, rows, r_at, count, v, v_at, v_stride, out, at, stride)
    fma chain over `count` tokens of e[head * SCORES + t] * v[v_at + rows[r_at + t] * v_stride + c], c < d, to
    out[at + head * stride + c]. d % WEIGH_COLUMNS == 0.

Why so: a vector holds the chains of DOT_HEADS heads, a load of CHAINS elements of a key serves all of them without a
shuffle, and a key or value that is loaded once serves as many heads as the registers can hold the sums of. The order
of every sum is that of `ops.py`. Keys and values of kept tokens lie scattered, so they are asked for ahead: a prompt
over a long context, whose rows keep different tokens, is bound by that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from strata.kernels.cpu import vector
from strata.kernels.cpu.lanes import get, put
from strata.kernels.cpu.math import JIT
from strata.kernels.cpu.vector import FLOAT, INDEX, POINTER, WIDTH, constant, move
from strata.kernels.ops import ATTENTION_PART

CHAINS: Final = 4
"""Chains of a dot4."""
DOT_HEADS: Final = WIDTH // CHAINS
MOST_GROUPS: Final = 3
"""Groups of DOT_HEADS heads that are multiplied with a key at once."""
WEIGH_COLUMNS: Final = 2 * WIDTH
SCORES: Final = ATTENTION_PART + 16
"""Floats between the scores of two heads: a power of two would put those of all heads into the same cache sets."""
LINE: Final = 16
"""Floats of a cache line."""
_KEYS: Final = 8
_WORD: Final = ir.IntType(32)
_ZERO: Final = np.float32(0.0)


def _dots(module: ir.Module, groups: int) -> ir.Function:
    """void(float* q, i64 d, i32* rows, i64 count, float* k, float* after, i64 stride, float scale, float* out)."""
    arguments = [POINTER, INDEX, _WORD.as_pointer(), INDEX, POINTER, POINTER, INDEX, FLOAT, POINTER]
    function = vector.internal_function(module, f"dots_{groups}", ir.VoidType(), arguments)
    if function.blocks:
        return function
    function.attributes.add("noinline")
    q, d, rows, count, k, after, stride, scale, out = function.args
    builder: Any = ir.IRBuilder(function.append_basic_block())
    factor = vector.splat(builder, scale)
    queries = [move(builder, q, builder.mul(d, constant(DOT_HEADS * g))) for g in range(groups)]
    sums = vector.Accumulators(builder, groups * _KEYS)
    with vector.loop(builder, constant(0), count, _KEYS) as first:
        listed = [_row(builder, rows, count, first, j, stride) for j in range(2 * _KEYS)]
        keys = [move(builder, k, row) for row in listed]
        wanted = keys[_KEYS:] + [move(builder, after, row) for row in listed[:_KEYS]]
        sums.clear()
        with vector.loop(builder, constant(0), d, LINE) as line:
            for place in wanted:
                vector.prefetch(builder, move(builder, place, line))
            for at in range(0, LINE, CHAINS):
                i = builder.add(line, constant(at))
                loaded = [vector.load(builder, move(builder, x, builder.mul(i, constant(DOT_HEADS)))) for x in queries]
                for j, key in enumerate(keys[:_KEYS]):
                    four = _load_four(builder, move(builder, key, i))
                    for g, x in enumerate(loaded):
                        sums[g * _KEYS + j] = vector.fma(builder, x, four, sums[g * _KEYS + j])
        totals = sums.all()
        for i in range(0, len(totals), CHAINS):
            scaled = builder.fmul(_joined(builder, totals[i : i + CHAINS]), factor)
            g, j = divmod(i, _KEYS)
            for h in range(DOT_HEADS):
                place = move(builder, out, first, (g * DOT_HEADS + h) * SCORES + j)
                four = _pick(builder, scaled, scaled, range(h * CHAINS, h * CHAINS + CHAINS))
                builder.store(four, builder.bitcast(place, four.type.as_pointer())).align = 4
    builder.ret_void()
    return function


def _row(builder: Any, rows: Any, count: Any, first: Any, j: int, stride: Any) -> Any:
    """The offset of row `first + j` of a list; after the last one, that of the last one."""
    i, last = builder.add(first, constant(j)), builder.sub(count, constant(1))
    i = builder.select(builder.icmp_signed("<", i, last), i, last)
    return builder.mul(builder.sext(builder.load(builder.gep(rows, [i])), INDEX), stride)


def _load_four(builder: Any, pointer: Any) -> Any:
    """Four elements, once for each head of a vector."""
    value = builder.load(builder.bitcast(pointer, ir.VectorType(FLOAT, CHAINS).as_pointer()))
    value.align = 4
    return _pick(builder, value, value, list(range(CHAINS)) * DOT_HEADS)


def _joined(builder: Any, sums: Sequence[Any]) -> Any:
    """(c0 + c1) + (c2 + c3) of the chains of four keys: four keys of a head side by side, then the next head."""
    while len(sums) > 1:
        sums = [_add_pairs(builder, a, b) for a, b in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0]


def _add_pairs(builder: Any, a: Any, b: Any) -> Any:
    """Of each head, the sums of a's two pairs of neighbours, then those of b's."""
    first = [side + h * CHAINS + j for h in range(DOT_HEADS) for side in (0, WIDTH) for j in (0, 2)]
    return builder.fadd(_pick(builder, a, b, first), _pick(builder, a, b, [i + 1 for i in first]))


def _pick(builder: Any, a: Any, b: Any, lanes: Sequence[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_WORD, len(lanes)), list(lanes)))


def _weigh(module: ir.Module, heads: int) -> ir.Function:
    """void(float* e, i32* rows, i64 count, float* v, i64 v stride, float* out, i64 stride)."""
    arguments = [POINTER, _WORD.as_pointer(), INDEX, POINTER, INDEX, POINTER, INDEX]
    function = vector.internal_function(module, f"weigh_{heads}", ir.VoidType(), arguments)
    if function.blocks:
        return function
    function.attributes.add("noinline")
    e, rows, count, v, v_stride, out, stride = function.args
    builder: Any = ir.IRBuilder(function.append_basic_block())
    vectors = WEIGH_COLUMNS // WIDTH
    weights = [move(builder, e, constant(h * SCORES)) for h in range(heads)]
    sums = vector.Accumulators(builder, heads * vectors)
    with vector.loop(builder, constant(0), count) as token:
        row = builder.sext(builder.load(builder.gep(rows, [token])), INDEX)
        value = builder.gep(v, [builder.mul(row, v_stride)])
        loaded = [vector.load(builder, move(builder, value, constant(c * WIDTH))) for c in range(vectors)]
        for h, weight in enumerate(weights):
            factor = vector.load_splat(builder, builder.gep(weight, [token]))
            for c, values in enumerate(loaded):
                sums[h * vectors + c] = vector.fma(builder, factor, values, sums[h * vectors + c])
    for i, total in enumerate(sums.all()):
        h, c = divmod(i, vectors)
        vector.store(builder, total, move(builder, out, builder.mul(stride, constant(h)), c * WIDTH))
    builder.ret_void()
    return function


@intrinsic
def _dots_of(typing_context, groups, q, q_at, d, rows, r_at, count, keys, k_at, after, a_at, stride, scale, out, at):
    if not vector.is_floats(q, keys, after, out) or not isinstance(groups, types.IntegerLiteral):
        return None

    def codegen(context, builder, signature, arguments):
        def pointer(array: int) -> Any:
            return vector.address(context, builder, signature.args[array], arguments[array], arguments[array + 1])

        _, _, _, d, _, _, count, _, _, _, _, stride, scale, _, _ = arguments
        values = [pointer(1), d, pointer(4), count, pointer(7), pointer(9), stride, scale, pointer(13)]
        builder.call(_dots(builder.module, groups.literal_value), values)
        return context.get_dummy_value()

    i = types.int64
    return types.none(groups, q, i, i, rows, i, i, keys, i, after, i, i, types.float32, out, i), codegen


@intrinsic
def _weigh_of(typing_context, heads, e, e_at, rows, r_at, count, v, v_at, v_stride, out, at, stride):
    if not vector.is_floats(e, v, out) or not isinstance(heads, types.IntegerLiteral):
        return None

    def codegen(context, builder, signature, arguments):
        def pointer(array: int) -> Any:
            return vector.address(context, builder, signature.args[array], arguments[array], arguments[array + 1])

        _, _, _, _, _, count, _, _, v_stride, _, _, stride = arguments
        values = [pointer(1), pointer(3), count, pointer(6), v_stride, pointer(9), stride]
        builder.call(_weigh(builder.module, heads.literal_value), values)
        return context.get_dummy_value()

    i = types.int64
    return types.none(heads, e, i, rows, i, i, v, i, i, out, i, i), codegen


@njit("int64(int64)", **JIT)
def groups_of(heads):
    return -(-heads // DOT_HEADS)


@njit("void(int64, int64, float32[::1], float32[::1], int64, int64)", **JIT)
def interleave(heads, d, x, q, at, head):
    to, lane = at + head // DOT_HEADS * DOT_HEADS * d, head % DOT_HEADS * CHAINS
    for i in range(0, d, CHAINS):
        for j in range(CHAINS):
            put(q, to + i * DOT_HEADS + lane + j, get(x, i + j))
        if head == heads - 1:
            for j in range(lane + CHAINS, WIDTH):
                put(q, to + i * DOT_HEADS + j, _ZERO)


@njit(**JIT)
def products(groups, q, q_at, d, rows, r_at, count, keys, k_at, k_stride, scale, out, after, a_at):
    group = 0
    while group < groups:
        at, to = q_at + group * DOT_HEADS * d, group * DOT_HEADS * SCORES
        if groups - group >= 3:
            _dots_of(3, q, at, d, rows, r_at, count, keys, k_at, after, a_at, k_stride, scale, out, to)
            group += 3
        elif groups - group == 2:
            _dots_of(2, q, at, d, rows, r_at, count, keys, k_at, after, a_at, k_stride, scale, out, to)
            group += 2
        else:
            _dots_of(1, q, at, d, rows, r_at, count, keys, k_at, after, a_at, k_stride, scale, out, to)
            group += 1


@njit(**JIT)
def weighted(heads, d, e, rows, r_at, count, v, v_at, v_stride, out, at, stride):
    for column in range(0, d, WEIGH_COLUMNS):
        head = 0
        while head < heads:
            e_at, values, to = head * SCORES, v_at + column, at + head * stride + column
            if heads - head >= 12:
                _weigh_of(12, e, e_at, rows, r_at, count, v, values, v_stride, out, to, stride)
                head += 12
            elif heads - head >= 4:
                _weigh_of(4, e, e_at, rows, r_at, count, v, values, v_stride, out, to, stride)
                head += 4
            else:
                _weigh_of(1, e, e_at, rows, r_at, count, v, values, v_stride, out, to, stride)
                head += 1

"""Blocks of attention in vectors: queries times keys, and weighted sums of values. Contract: `ops.Kernels.qsa_attend`.

dots(n, q, q_at, keys, k0, k1, scale, out, at, stride)
    DOT_HEADS queries of n values, one after the other from q[q_at], times the keys at keys[k0] and keys[k1]:
    lanes(q * k) * scale goes to out[at + head * stride] and, for the second key, the element after it.
    n is one of DOT_SIZES, written as a number.
weigh(heads, e, e_at, e_stride, rows, r_at, count, v, v_at, v_stride, out, at, stride)
    fma chain over `count` tokens of e[head][token] * v[rows[token]], WEIGH_COLUMNS columns, to out[at + head * stride].
    heads is 1 or WEIGH_HEADS, written as a number.

Why blocks: a key or value that is loaded once serves several queries, so the fma units wait for no loads, and the last
folds of eight sums are done together. The order of every sum is that of `ops.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from strata.kernels.cpu import vector
from strata.kernels.cpu.vector import FLOAT, INDEX, POINTER, WIDTH, constant, move
from strata.kernels.ops import LANES

DOT_SIZES: Final = (128, 256)
DOT_HEADS: Final = 4
WEIGH_HEADS: Final = 4
WEIGH_COLUMNS: Final = 2 * WIDTH
_KEYS: Final = 2
_WORD: Final = ir.IntType(32)


def _chain_sums(builder: Any, queries: Sequence[Any], keys: Sequence[Any], n: int, first: int) -> list[Any]:
    """For every (query, key): the vector of chains that begins at `first`."""
    totals = [vector.ZEROS] * (len(queries) * len(keys))
    for i in range(first, n, LANES):
        loaded = [vector.load(builder, move(builder, k, constant(i))) for k in keys]
        for h, query in enumerate(queries):
            q = vector.load(builder, move(builder, query, constant(i)))
            for t, k in enumerate(loaded):
                at = h * len(keys) + t
                totals[at] = vector.fma(builder, q, k, totals[at])
    return totals


def _folded(builder: Any, queries: Sequence[Any], keys: Sequence[Any], n: int, first: int, step: int) -> list[Any]:
    """The folds of whole vectors, depth first so that few partial sums are alive at a time."""
    if step == LANES:
        return _chain_sums(builder, queries, keys, n, first)
    low = _folded(builder, queries, keys, n, first, 2 * step)
    high = _folded(builder, queries, keys, n, first + step, 2 * step)
    return [builder.fadd(a, b) for a, b in zip(low, high, strict=True)]


def _fold_together(builder: Any, sums: list[Any]) -> Any:
    """The folds by 8, 4, 2 and 1 of several vectors at once -> one lane a vector, in their order.

    A fold adds the upper half of each vector's lanes to the lower; the halves of two vectors fill one register.
    """
    groups = 1
    while len(sums) > 1:
        sums = [_fold_pair(builder, a, b, groups) for a, b in zip(sums[::2], sums[1::2], strict=True)]
        groups *= 2
    v = sums[0]
    while v.type.count > groups:
        size = v.type.count // groups
        low = [g * size + j for g in range(groups) for j in range(size // 2)]
        v = builder.fadd(_pick(builder, v, v, low), _pick(builder, v, v, [j + size // 2 for j in low]))
    return v


def _fold_pair(builder: Any, a: Any, b: Any, groups: int) -> Any:
    """Halve each of `groups` groups of lanes of a and of b; a's groups come first."""
    size = WIDTH // groups
    low = [side * WIDTH + g * size + j for side in (0, 1) for g in range(groups) for j in range(size // 2)]
    return builder.fadd(_pick(builder, a, b, low), _pick(builder, a, b, [j + size // 2 for j in low]))


def _pick(builder: Any, a: Any, b: Any, lanes: Sequence[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_WORD, len(lanes)), list(lanes)))


def _dots(module: ir.Module, n: int) -> ir.Function:
    """void(float* q, float* k0, float* k1, float scale, float* out, i64 stride)."""
    arguments = [POINTER, POINTER, POINTER, FLOAT, POINTER, INDEX]
    function = vector.internal_function(module, f"dots_{n}", ir.VoidType(), arguments)
    if function.blocks:
        return function
    function.attributes.add("noinline")
    q, k0, k1, scale, out, stride = function.args
    builder: Any = ir.IRBuilder(function.append_basic_block())
    queries = [move(builder, q, constant(h * n)) for h in range(DOT_HEADS)]
    sums = _fold_together(builder, _folded(builder, queries, [k0, k1], n, 0, WIDTH))
    scaled = builder.fmul(sums, _pick(builder, vector.splat(builder, scale), vector.ZEROS, [0] * sums.type.count))
    for h in range(DOT_HEADS):
        pair = _pick(builder, scaled, scaled, [h * _KEYS, h * _KEYS + 1])
        place = builder.gep(out, [builder.mul(stride, constant(h))])
        builder.store(pair, builder.bitcast(place, pair.type.as_pointer())).align = 4
    builder.ret_void()
    return function


def _weigh(module: ir.Module, heads: int) -> ir.Function:
    """void(float* e, i64 e stride, i32* rows, i64 count, float* v, i64 v stride, float* out, i64 stride)."""
    arguments = [POINTER, INDEX, _WORD.as_pointer(), INDEX, POINTER, INDEX, POINTER, INDEX]
    function = vector.internal_function(module, f"weigh_{heads}", ir.VoidType(), arguments)
    if function.blocks:
        return function
    function.attributes.add("noinline")
    e, e_stride, rows, count, v, v_stride, out, stride = function.args
    builder: Any = ir.IRBuilder(function.append_basic_block())
    vectors = WEIGH_COLUMNS // WIDTH
    weights = [builder.gep(e, [builder.mul(e_stride, constant(h))]) for h in range(heads)]
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
def dots(typing_context, n, q, q_at, keys, k0, k1, scale, out, at, stride):
    if not vector.is_floats(q, keys, out) or not isinstance(n, types.IntegerLiteral):
        return None

    def codegen(context, builder, signature, arguments):
        def pointer(array: int, offset: Any) -> Any:
            return vector.address(context, builder, signature.args[array], arguments[array], offset)

        first, second = pointer(3, arguments[4]), pointer(3, arguments[5])
        values = [pointer(1, arguments[2]), first, second, arguments[6], pointer(7, arguments[8]), arguments[9]]
        builder.call(_dots(builder.module, n.literal_value), values)
        return context.get_dummy_value()

    i = types.int64
    return types.none(n, q, i, keys, i, i, types.float32, out, i, i), codegen


@intrinsic
def weigh(typing_context, heads, e, e_at, e_stride, rows, r_at, count, v, v_at, v_stride, out, at, stride):
    if not vector.is_floats(e, v, out) or not isinstance(heads, types.IntegerLiteral):
        return None

    def codegen(context, builder, signature, arguments):
        def pointer(array: int, offset: Any) -> Any:
            return vector.address(context, builder, signature.args[array], arguments[array], offset)

        values = [
            pointer(1, arguments[2]),
            arguments[3],
            pointer(4, arguments[5]),
            arguments[6],
            pointer(7, arguments[8]),
            arguments[9],
            pointer(10, arguments[11]),
            arguments[12],
        ]
        builder.call(_weigh(builder.module, heads.literal_value), values)
        return context.get_dummy_value()

    i = types.int64
    return types.none(heads, e, i, i, rows, i, i, v, i, i, out, i, i), codegen

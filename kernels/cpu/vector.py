"""Vectors of 16 float32 in LLVM IR: what the code generators of this folder are written with.

A <16 x float> is the vectors of the machine whatever LLVM's vectoriser makes of a loop: one register with AVX-512,
two with AVX2. Inner loops written this way also compile several times faster than the same loops through numba's
type inference. `builder` is llvmlite's IRBuilder; addresses are float*, 4 bytes aligned; offsets are in elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.core import cgutils

WIDTH: Final = 16
FLOAT: Final = ir.FloatType()
POINTER: Final = FLOAT.as_pointer()
VECTOR: Final = ir.VectorType(FLOAT, WIDTH)
INDEX: Final = ir.IntType(64)
ZEROS: Final = ir.Constant(VECTOR, [0.0] * WIDTH)
_WORD: Final = ir.IntType(32)


def is_floats(*arguments: types.Type) -> bool:
    """Whether these numba types are one-dimensional contiguous float32 arrays."""
    return all(isinstance(a, types.Array) and (a.dtype, a.ndim, a.layout) == (types.float32, 1, "C") for a in arguments)


def address(context: Any, builder: Any, array_type: types.Array, array: Any, offset: Any) -> Any:
    """Where array[offset] lies."""
    return builder.gep(context.make_array(array_type)(context, builder, array).data, [offset])


def constant(n: int) -> ir.Constant:
    return ir.Constant(INDEX, n)


def move(builder: Any, pointer: Any, offset: Any, plus: int = 0) -> Any:
    """The address `offset + plus` elements further."""
    return builder.gep(pointer, [builder.add(offset, constant(plus)) if plus else offset])


def load(builder: Any, pointer: Any) -> Any:
    value = builder.load(builder.bitcast(pointer, VECTOR.as_pointer()))
    value.align = 4
    return value


def load_splat(builder: Any, pointer: Any) -> Any:
    """One element in all lanes."""
    return splat(builder, builder.load(pointer))


def store(builder: Any, value: Any, pointer: Any) -> None:
    builder.store(value, builder.bitcast(pointer, VECTOR.as_pointer())).align = 4


def prefetch(builder: Any, pointer: Any) -> None:
    """Ask for the cache line of an address, into the second-level cache; never a fault."""
    byte, word = builder.bitcast(pointer, ir.IntType(8).as_pointer()), ir.IntType(32)
    name = "llvm.prefetch.p0"
    known = builder.module.globals.get(name)
    if known is None:
        known = ir.Function(builder.module, ir.FunctionType(ir.VoidType(), [byte.type, word, word, word]), name)
    builder.call(known, [byte, *(ir.Constant(word, n) for n in (0, 2, 1))])  # a read, second level, data


def splat(builder: Any, x: Any) -> Any:
    one = builder.insert_element(ir.Constant(ir.VectorType(x.type, WIDTH), ir.Undefined), x, ir.Constant(_WORD, 0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(_WORD, WIDTH), [0] * WIDTH))


def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c lane by lane, rounded once."""
    name = f"llvm.fma.v{WIDTH}f32"
    known = builder.module.globals.get(name)
    if known is None:
        known = ir.Function(builder.module, ir.FunctionType(VECTOR, [VECTOR] * 3), name)
    return builder.call(known, [a, b, c])


def fold(builder: Any, chains: Sequence[Any]) -> Any:
    """The fold of `ops.py`: whole vectors halve their number, then the lanes of the last one."""
    chains = list(chains)
    while len(chains) > 1:
        half = len(chains) // 2
        chains = [builder.fadd(a, b) for a, b in zip(chains[:half], chains[half:], strict=True)]
    v = chains[0]
    while v.type.count > 2:
        v = builder.fadd(_half(builder, v, 0), _half(builder, v, 1))
    low, high = (builder.extract_element(v, ir.Constant(_WORD, j)) for j in (0, 1))
    return builder.fadd(low, high)


def _half(builder: Any, v: Any, which: int) -> Any:
    n = v.type.count // 2
    lanes = ir.Constant(ir.VectorType(_WORD, n), list(range(which * n, which * n + n)))
    return builder.shuffle_vector(v, ir.Constant(v.type, ir.Undefined), lanes)


def mask_of_rest(builder: Any, rest: Any, skipped: int) -> Any:
    """Which lanes have an element when `rest` are left, `skipped` of them in vectors before this one."""
    lanes = ir.Constant(ir.VectorType(INDEX, WIDTH), [skipped + j for j in range(WIDTH)])
    return builder.icmp_signed("<", lanes, splat(builder, rest))


def load_masked(builder: Any, pointer: Any, mask: Any) -> Any:
    """The elements that the mask names, zero elsewhere; memory of the others is not touched."""
    name = f"llvm.masked.load.v{WIDTH}f32.p0"
    known = builder.module.globals.get(name)
    if known is None:
        kind = ir.FunctionType(VECTOR, [VECTOR.as_pointer(), _WORD, mask.type, VECTOR])
        known = ir.Function(builder.module, kind, name)
    return builder.call(known, [builder.bitcast(pointer, VECTOR.as_pointer()), ir.Constant(_WORD, 4), mask, ZEROS])


class Accumulators:
    """Vectors that live over the turns of loops; LLVM keeps them in registers."""

    def __init__(self, builder: Any, n: int) -> None:
        self._builder = builder
        self._places = [cgutils.alloca_once(builder, VECTOR) for _ in range(n)]
        self.clear()

    def clear(self) -> None:
        for place in self._places:
            self._builder.store(ZEROS, place)

    def __getitem__(self, i: int) -> Any:
        return self._builder.load(self._places[i])

    def __setitem__(self, i: int, value: Any) -> None:
        self._builder.store(value, self._places[i])

    def all(self) -> list[Any]:
        return [self._builder.load(place) for place in self._places]


@contextmanager
def loop(builder: Any, begin: Any, end: Any, step: int = 1) -> Iterator[Any]:
    """for i in range(begin, end, step): the body is built inside, with i as the value."""
    with cgutils.for_range_slice(builder, begin, end, constant(step)) as (i, _):
        yield i


def internal_function(module: ir.Module, name: str, result: ir.Type, arguments: Sequence[ir.Type]) -> ir.Function:
    """The module's own function of this name. It has no blocks yet when it is new: the caller builds them once."""
    known = module.globals.get(name)
    if known is None:
        known = ir.Function(module, ir.FunctionType(result, arguments), name)
        known.linkage = "internal"
    return known

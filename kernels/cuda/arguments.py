"""Arguments of the product kernels: one struct by value, laid out as the .cu files declare it.

structure(fields...)   a NumPy dtype with C alignment         address(array)   device address, 0 for None
run(...)               launch of a kernel that takes one struct
Prepared(...)          such a launch of which only addresses change, as from layer to layer

Errors   those of the loader
Cost     some microseconds of host time a launch; nothing when a graph is replayed
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import numpy as np

from strata.kernels.cuda.compile import Constants, load_kernel
from strata.kernels.cuda.workspace import DeviceArray

MATRICES: Final = 8
"""Matrices of one launch."""

_POINTER: Final = np.uint64
_INT: Final = np.int32

MATRIX: Final = np.dtype([("data", _POINTER), ("out", _POINTER), ("rows", _INT), ("last_tile", _INT)], align=True)
_MATRICES: Final = tuple(struct.Struct("<" + n * "QQii") for n in range(MATRICES + 1))
"""As many of them as a launch has."""
_MATRIX_BYTES: Final = MATRIX.itemsize
_PLACES: Final = struct.Struct("<QQ")
"""Of a matrix, what changes from layer to layer: its data, its output."""


def structure(pointers: Sequence[str], integers: Sequence[str]) -> np.dtype[Any]:
    """Eight matrices, then pointers, then 32-bit integers: the Arguments of every product kernel."""
    fields: list[Any] = [("matrix", MATRIX, MATRICES)]
    fields += [(name, _POINTER) for name in pointers] + [(name, _INT) for name in integers]
    return np.dtype(fields, align=True)


WINDOW: Final = structure(
    ("x", "q", "d", "sums", "join"),
    ("early", "n", "cols", "tiles", "ring", "at_scales", "at_sums", "at_mail", "at_own", "at_grid", "at_stages",
     "input_pitch", "scale_pitch", "sum_pitch"),
)  # fmt: skip
PROMPT: Final = structure(
    ("q", "d", "sums", "join", "first", "second", "order", "tile_list", "n_tiles", "next_d", "next_sums"),
    ("n", "divide", "cols", "row_tiles", "run", "pitch", "apart"),
)
NO_ADDRESSES: Final = (None,) * 11
"""All addresses of PROMPT, and NO_PAIRS first to next_sums: of a launch that has none."""
NO_PAIRS: Final = NO_ADDRESSES[4:]
LANES_WINDOW: Final = structure(
    ("x", "join", "first", "second", "ids", "weights", "given", "beside"), ("early", "n", "used", "cols", "tiles")
)
CHAINS_WINDOW: Final = structure(("x", "join"), ("early", "n", "cols", "rows"))
LANES_PROMPT: Final = structure(
    ("x", "join", "first", "second", "order", "tile_list", "n_tiles"), ("n", "divide", "cols", "row_tiles", "each")
)


def address(array: DeviceArray | None) -> int:
    """Where an array begins on its device."""
    if array is None:
        return 0
    return int(array.ctypes.data) if isinstance(array, np.ndarray) else int(array.data.ptr)


def fill(kind: np.dtype[Any], **values: Any) -> np.ndarray:
    """One struct; arrays are entered by their addresses."""
    layout, zeros = _layout(kind)
    entered = zeros | values
    if len(entered) != len(zeros):
        raise ValueError(f"there are no arguments {', '.join(values.keys() - zeros.keys())}")
    buffer = bytearray(layout.size)
    layout.pack_into(buffer, 0, *[v if isinstance(v, int) else address(v) for v in entered.values()])
    return np.ndarray((), kind, buffer)


@cache
def _layout(kind: np.dtype[Any]) -> tuple[struct.Struct, dict[str, Any]]:
    """How the fields behind the matrices are packed, and 0 for each: some microseconds less than NumPy takes."""
    names = {name: "Q" if kind[name] == _POINTER else "i" for name in (kind.names or ())[1:]}
    packed = f"<{kind['matrix'].itemsize}x{''.join(names.values())}"
    return struct.Struct(f"{packed}{kind.itemsize - struct.calcsize(packed)}x"), dict.fromkeys(names, 0)


def enter_matrices(arguments: Any, matrices: Sequence[tuple[int, DeviceArray, int]], rows_of_a_tile: int) -> int:
    """Enter (address, output, rows) of each matrix into what `fill` has made; returns the tiles of all."""
    tiles = 0
    entered: list[int] = []
    for data, out, rows in matrices:
        tiles += -(-rows // rows_of_a_tile)
        entered += (data, address(out), rows, tiles)
    _MATRICES[len(matrices)].pack_into(arguments.base, 0, *entered)
    return tiles


def run(
    source: str,
    constants: Constants,
    blocks: int,
    threads: int,
    arguments: np.ndarray,
    shared: int = 0,
    parts: int = 1,
    more: tuple[Any, ...] = (),
) -> None:
    """Queue the kernel of src/`source`.cu on the current stream, over a grid of blocks x parts. `more`: its arguments
    behind the first."""
    kernel = load_kernel(f"{source}.cu", source, **constants)
    kernel((blocks, parts), (threads,), (arguments, *more), shared_mem=shared)


class Prepared:
    """A launch of src/`source`.cu with all that its struct holds but addresses.

    kind: the struct · rows: of each matrix · rows_of_a_tile: as for `enter_matrices` · integers: of the struct
    """

    def __init__(
        self,
        kind: np.dtype[Any],
        source: str,
        constants: Constants,
        blocks: int,
        threads: int,
        shared: int,
        rows: Sequence[int],
        rows_of_a_tile: int,
        **integers: int,
    ) -> None:
        arguments = fill(kind, **integers)
        enter_matrices(arguments, [(0, None, each) for each in rows], rows_of_a_tile)
        self._bytes = arguments.tobytes()
        names = [name for name in (kind.names or ())[1:] if kind[name] == _POINTER]
        self._pointers = struct.Struct(f"<{len(names)}Q")
        self._begin = kind.fields[names[0]][1] if kind.fields else 0
        self._kind = kind
        self._launch = source, constants, blocks, threads
        self._shared = shared

    def __call__(
        self, matrices: Sequence[tuple[int, DeviceArray, int]], pointers: Sequence[DeviceArray | None]
    ) -> None:
        """Queue it. matrices: as for `enter_matrices`; pointers: all of the struct's, in its order."""
        buffer = bytearray(self._bytes)
        at = 0
        for data, out, _ in matrices:
            _PLACES.pack_into(buffer, at, data, address(out))
            at += _MATRIX_BYTES
        self._pointers.pack_into(buffer, self._begin, *[0 if a is None else address(a) for a in pointers])
        run(*self._launch, np.ndarray((), self._kind, buffer), self._shared)

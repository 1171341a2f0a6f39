"""Weights on their way to the second level of the cache while small kernels, which hardly read memory, compute.

    hint = ahead.struct(weights)         # an argument by value
    more = ahead.blocks(hint, threads)   # blocks

A kernel that takes an `Ahead` (ahead.cuh) has so many more blocks; they ask for the bytes and end. It is a hint:
nothing waits for it, and cards before compute capability 9.0 ignore it.

Errors   ValueError for more matrices than a hint holds
Cost     no time of the kernel that brings it, some bandwidth beside it
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from strata.kernels.check import require
from strata.kernels.cuda.arguments import address
from strata.kernels.formats import Weight

MOST: Final = 4
"""Matrices of a hint."""
PIECE: Final = 4096
"""Bytes that a thread asks for."""
AHEAD: Final = np.dtype([("first", np.uint64, MOST), ("pieces", np.int32, MOST)], align=True)

NOTHING: Final = np.zeros((), AHEAD)


def struct(weights: Sequence[Weight]) -> np.ndarray:
    """The hint for whole matrices; what is past the last whole piece of one is left out."""
    require(len(weights) <= MOST, f"a hint holds {MOST} matrices, got {len(weights)}")
    made = np.zeros((), AHEAD)
    for i, w in enumerate(weights):
        begin = -(-address(w.data) // 16) * 16
        made["first"][i], made["pieces"][i] = begin, (address(w.data) + w.data.nbytes - begin) // PIECE
    return made


def blocks(hint: np.ndarray, threads: int) -> int:
    """Blocks of `threads` threads that ask for it."""
    return -(-int(hint["pieces"].sum()) // threads)

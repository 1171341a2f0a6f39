"""A matrix on its way to the second level of the cache while the kernel before its product, which hardly reads memory,
computes.

    hint = ahead.struct(weight)      # an argument by value: `Ahead` of ahead.cuh

The blocks of the kernel ask for the bytes among them and go on. It is a hint: nothing waits for it, and cards before
compute capability 9.0 ignore it.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from strata.kernels.cuda.arguments import address
from strata.kernels.formats import Weight

PIECE: Final = 4096
"""Bytes that a thread asks for."""
AHEAD: Final = np.dtype([("first", np.uint64), ("pieces", np.int32)], align=True)

NOTHING: Final = np.zeros((), AHEAD)


def struct(w: Weight) -> np.ndarray:
    """The hint for a whole matrix; what is past its last whole piece is left out."""
    begin = -(-address(w.data) // 16) * 16
    return np.array((begin, max(0, (address(w.data) + w.data.nbytes - begin) // PIECE)), AHEAD)

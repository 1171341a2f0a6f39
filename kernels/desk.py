"""A desk: page-locked RAM over which a card asks the processor for experts of a window, and gets its answers.

The card writes a request and then its number to ASKED; the processor writes the answers and then the number to
ANSWERED. One request is under way at a time. kernels/cuda/handover.py and kernels/cpu/handover.py are the two sides.

Units    words are int32; those that ring lie in cache lines of their own
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

MOST_PAIRS: Final = 256
"""Pairs (row, rank) of a window at most."""
ASKED, ANSWERED, FAILED, LAYER, PAIRS, USED = 0, 32, 64, 96, 97, 98
"""Words of a desk: numbers of requests, 1 + the layer whose answer did not come in time, and what the request is."""
DESK_WORDS: Final = 128
IN_FILE: Final = 1 << 63
"""In place of an address, with an expert's number: it lies in the file, where only the processor reads it."""


@dataclass(frozen=True, slots=True, eq=False)
class Desk:
    """Page-locked RAM that card and processor see, as the host's arrays.

    words int32 (DESK_WORDS,) · at uint64 (MOST_PAIRS,): addresses of experts that are asked for, or IN_FILE and
    a number, 0 = none · x float32
    (rows, width) · places int32 (MOST_PAIRS,) of the answers in out float32 (MOST_PAIRS, width)
    """

    words: npt.NDArray[np.int32]
    at: npt.NDArray[np.uint64]
    x: npt.NDArray[np.float32]
    places: npt.NDArray[np.int32]
    out: npt.NDArray[np.float32]

    @staticmethod
    def n_bytes(rows: int, width: int) -> int:
        return 4 * DESK_WORDS + 8 * MOST_PAIRS + 4 * rows * width + 4 * MOST_PAIRS + 4 * MOST_PAIRS * width

    @classmethod
    def within(cls, memory: npt.NDArray[np.uint8], rows: int, width: int) -> Desk:
        """A desk in memory of n_bytes, all zero."""
        sizes = (4 * DESK_WORDS, 8 * MOST_PAIRS, 4 * rows * width, 4 * MOST_PAIRS, 4 * MOST_PAIRS * width)
        ends = np.cumsum(sizes).tolist()
        memory[: ends[-1]] = 0
        words, at, x, places, out = (memory[end - size : end] for end, size in zip(ends, sizes, strict=True))
        return cls(
            words.view(np.int32),
            at.view(np.uint64),
            x.view(np.float32).reshape(rows, width),
            places.view(np.int32),
            out.view(np.float32).reshape(MOST_PAIRS, width),
        )

    @property
    def failed(self) -> int | None:
        """The layer whose answer did not come."""
        return int(self.words[FAILED]) - 1 if self.words[FAILED] else None

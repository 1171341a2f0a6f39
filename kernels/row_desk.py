"""A desk for rows of a table in a mapped file: a card asks for them in page-locked RAM, and a thread brings them there.

The card writes numbers of rows and then that of the request to ASKED; the thread copies the rows and then writes the
number to ANSWERED. One request is under way at a time. kernels/cuda/mapped_rows.py and kernels/cpu/mapped_rows.py are
the two sides.

Units    words are int32; those that ring lie in cache lines of their own
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

ASKED, ANSWERED, FAILED, COUNT = 0, 32, 64, 96
"""Words of a desk: numbers of requests, whether an answer did not come in time, and how many rows are asked for."""
DESK_WORDS: Final = 128
MOST_ROWS: Final = 16 << 10
"""Table rows of a request: those of 1,024 tokens with 16 heads. A multiple of 16: pieces begin at whole words."""
_WORD: Final = 16


@dataclass(frozen=True, slots=True, eq=False)
class RowDesk:
    """Page-locked RAM that card and processor see, as the host's arrays.

    words int32 (DESK_WORDS,) · ids int64 (MOST_ROWS,): rows that are asked for · rows uint8 (MOST_ROWS, row_bytes)
    """

    words: npt.NDArray[np.int32]
    ids: npt.NDArray[np.int64]
    rows: npt.NDArray[np.uint8]

    @staticmethod
    def n_bytes(row_bytes: int) -> int:
        return 4 * DESK_WORDS + 8 * MOST_ROWS + MOST_ROWS * row_bytes + _WORD

    @classmethod
    def within(cls, memory: npt.NDArray[np.uint8], row_bytes: int) -> RowDesk:
        """A desk in memory of n_bytes, all zero."""
        memory[:] = 0
        ids, rows = 4 * DESK_WORDS, 4 * DESK_WORDS + 8 * MOST_ROWS
        return cls(
            memory[:ids].view(np.int32),
            memory[ids:rows].view(np.int64),
            memory[rows : rows + MOST_ROWS * row_bytes].reshape(MOST_ROWS, row_bytes),
        )

    @property
    def failed(self) -> bool:
        """Whether an answer did not come in time."""
        return bool(self.words[FAILED])

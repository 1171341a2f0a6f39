"""Where the buffers of a read lie in borrowed slots, and what a chunk of it takes of them. Pure.

The last bytes of the cache are the ring, where a chunk streams experts; before it lie the two parts of the pass
(engine/device/cuda.py). Short reads and windows have memory of their own, so a few tokens borrow nothing.

    buffers = Buffers(price, most, ring, stream_min, beside)
    buffers(2048)                    # bytes of the last slots that chunks of up to 2,048 rows take
    plan = BorrowPlan(buffers, chunk, lent_bytes, stays, own_bytes)

Units    bytes, tokens
Errors   none
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Final, Protocol

from strata.engine.device.arena import padded
from strata.engine.memory.loan import Priced, beside
from strata.engine.memory.prompt import GRID
from strata.engine.pack import ModelSpec


class Windowed(Priced, Protocol):
    """Bytes of a chunk's workspace, and of windows."""

    @property
    def windows(self) -> int: ...


STAYS: Final = 32
"""Rows of a read, at most, that borrows nothing: they take about as much as windows do."""
DRAFT_ROWS: Final = 256
"""Rows of a pass of the draft layer, at most, beside a chunk that streams experts."""
SHORT: Final = (32, 64, 128)
"""Steps below a whole one."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Bytes of what lives for a whole pass, of what blocks of layers work in, and of the ring."""

    whole: int
    work: int
    ring: int

    @property
    def n_bytes(self) -> int:
        return self.whole + self.work + self.ring


class Buffers:
    """most: rows of a chunk at most · ring: bytes of the ring, of chunks of `stream_min` rows and more · beside: bytes
    that a draft layer takes of the first part."""

    def __init__(self, price: Priced, most: int, ring: int, stream_min: int, beside: int = 0) -> None:
        self.most = most
        self.ring = ring
        self._steps = [*(n for n in (*SHORT, *range(GRID, most, GRID)) if n < most), most]
        self._parts: list[Parts] = []
        whole = work = 0
        for rows in self._steps:
            whole, work = map(max, (whole, work), price.parts(rows))
            streams = ring if rows >= stream_min else 0
            self._parts.append(Parts(padded(whole + beside), padded(work), streams))

    def parts(self, rows: int) -> Parts:
        """Of a chunk of so many rows, which has what the next step has."""
        return self._parts[bisect_left(self._steps, min(rows, self.most))]

    def __call__(self, rows: int) -> int:
        return self.parts(rows).n_bytes


def draft_beside(spec: ModelSpec | None, rows: int) -> int:
    """Bytes that a draft layer of this model takes beside a chunk of so many rows, at most DRAFT_ROWS at once."""
    return 0 if spec is None else beside(min(rows, DRAFT_ROWS), spec.wide, spec.hidden)


def own_bytes(price: Windowed, rows: int, more: int) -> int:
    """Of memory for windows and for reads of up to so many rows, which take `more` of what lives for a whole pass."""
    whole, work = price.parts(rows)
    return padded(max(whole + more, price.windows)) + padded(work)


@dataclass(frozen=True, slots=True, eq=False)
class BorrowPlan:
    """chunk: rows of the longest one · lent_bytes: of the slots that it borrows, at the end of the cache · stays: rows
    up to which a read borrows nothing · own_bytes: of memory of windows and such reads."""

    buffers: Buffers
    chunk: int
    lent_bytes: int
    stays: int
    own_bytes: int

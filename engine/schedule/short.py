"""Short reads: pieces of a prompt that go through decode windows, where these are quicker than a prompt pass. Pure.

A piece is what is left of a prompt up to the next place where its read must stop. A window reads a few tokens of it and
takes a few milliseconds; a prompt pass has a price of its own, whatever its length. Which is quicker for how many
tokens depends on the card and on where the experts lie, so both are timed at the start. Text never depends on it.

Units    milliseconds, tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np


@dataclass(frozen=True, slots=True)
class ShortReads:
    """most: tokens of a piece that windows read, 0: none · rows: tokens of a window"""

    most: int = 0
    rows: int = 1

    def unit(self, left: int, chunk: int) -> int:
        """Tokens that are read next, where `left` of a piece are left and a chunk has at most so many."""
        return min(left, chunk, self.rows if left <= self.most else chunk)


NO_SHORT: Final = ShortReads()
"""No piece goes through windows."""


@dataclass(frozen=True, slots=True)
class ReadTimes:
    """What was timed: a window of one row, a window of `rows`, prompt passes of (tokens, milliseconds), ascending."""

    one: float
    full: float
    rows: int
    passes: Sequence[tuple[int, float]]

    def windows(self, n: int) -> float:
        """Of n tokens in windows."""
        whole, rest = divmod(n, self.rows)
        each = (self.full - self.one) / max(1, self.rows - 1)
        return whole * self.full + (self.one + (rest - 1) * each if rest else 0.0)

    def a_pass(self, n: int) -> float:
        """Of n tokens in a prompt pass."""
        lengths, times = zip(*self.passes, strict=True)
        return float(np.interp(n, lengths, times))

    def short(self, most: int) -> ShortReads:
        """Up to `most` tokens go through windows, but no more than is quicker like that; one window always is."""
        n = min(most, self.rows)
        while n < most and self.windows(n + 1) < self.a_pass(n + 1):
            n += 1
        return ShortReads(n, self.rows)

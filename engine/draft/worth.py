"""Whether a slot's draft is worth its row in a window that all slots share. Pure: times in, and what was kept.

That windows with drafts pay is a matter of all slots (`draft.policy`). Where they do, a request whose drafts are seldom
kept still makes the window longer for all by a row: its drafts are left out as long as they give less than that takes.

Units    milliseconds of any clock; shares of drafts that are kept
"""

from __future__ import annotations

from typing import Final

from strata.engine.draft.policy import OUTLIER
from strata.engine.draft.reach import FOLLOW_TIME, WindowTimes

FOLLOW: Final = 0.1
"""How fast a request's share follows its text."""
LOOK: Final = 16
"""Windows without a draft of a request behind which it has one, to see how they do now."""
MOST_BAR: Final = 0.5
"""The highest bar: that drafts which are kept more often do not pay is said by the balance of all slots, not by times
that scatter."""


class RowTimes:
    """What windows of so many slots take, by their number of drafts, and what a token takes in them."""

    def __init__(self) -> None:
        self._windows: dict[int, WindowTimes] = {}
        self._token_ms: dict[int, float] = {}

    def saw(self, n: int, drafts: int, ms: float, tokens: int) -> None:
        """A window of n slots with so many drafts gave so many tokens."""
        self._windows.setdefault(n, WindowTimes()).saw(drafts, ms)
        before = self._token_ms.get(n, ms / tokens)
        self._token_ms[n] = before + FOLLOW_TIME * (min(ms / tokens, OUTLIER * before) - before)

    def bar(self, n: int) -> float:
        """The share of drafts that must be kept so that one more pays; 0 as long as that is not known."""
        slope = self._windows[n].slope() if n in self._windows else None
        return 0.0 if slope is None else min(slope / self._token_ms[n], MOST_BAR)


class Kept:
    """Of the drafts of a request."""

    def __init__(self) -> None:
        self.share = 1.0
        self._without = 0

    def wants(self, bar: float) -> bool:
        """Whether the next window has a draft of it."""
        self._without = 0 if self.share >= bar or self._without >= LOOK else self._without + 1
        return not self._without

    def saw(self, kept: bool) -> None:
        """A draft was checked."""
        self.share += FOLLOW * (kept - self.share)

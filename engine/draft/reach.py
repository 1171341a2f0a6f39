"""How many tokens the draft layer proposes: as many as make a token cheapest, by what was measured. Pure.

The first proposal comes out of the window before it; each further one is a pass of the draft layer, and is kept only
when all before it are. So what is worth proposing is a matter of the text and of the machine: shares of drafts that
are kept, by how deep they stand, and times of windows, by how many drafts they had.

Units    milliseconds of any clock; `n` counts drafts of a window that the layer proposed
"""

from __future__ import annotations

from math import prod
from typing import Final

from strata.engine.draft.policy import OUTLIER

FOLLOW: Final = 0.05
"""How fast the share of a depth follows the text. Twice as fast, shares scatter more than texts differ, and a few
drafts that happen to be wrong keep deep ones away until the next look."""
CARRIED: Final = 0.2
"""What a request begins with: the shares of all before it, to which the last one adds so much. With those of the last
one alone, a text that suits drafts behind one that does not had one at a time for its first hundred tokens."""
FOLLOW_TIME: Final = 0.2
"""How fast times follow the machine."""
MEASURED: Final = 3
"""Windows with one draft, and with all, that are timed before anything is chosen."""
LOOK: Final = 16
"""Windows between two with all drafts, which tell how the deeper ones do now: they go on while all of them are kept."""
MOST_LOOK: Final = 64
"""The same behind looks that were for nothing: each time twice as many, up to so many."""
ASKED: Final = 2
"""Windows that a look takes at most."""


class WindowTimes:
    """Milliseconds of a window, by its number of drafts; 0 drafts: the window finds the first ones."""

    def __init__(self) -> None:
        self._ms: dict[int, float] = {}
        self._n: dict[int, int] = {}

    def saw(self, n: int, ms: float) -> None:
        """A window with n drafts took so long. The first of a kind may have captured its graph: it is not counted."""
        seen = self._n[n] = self._n.get(n, 0) + 1
        if seen > 1:
            before = self._ms.get(n, ms)
            self._ms[n] = before + FOLLOW_TIME * (min(ms, OUTLIER * before) - before)

    def known(self, n: int) -> bool:
        return self._n.get(n, 0) > MEASURED

    def slope(self) -> float | None:
        """What a draft more takes, between the fewest and the most that were measured; None: these are the same."""
        fewest, most = min(self._ms, default=0), max(self._ms, default=0)
        return (self._ms[most] - self._ms[fewest]) / (most - fewest) if most > fewest else None

    def of(self, n: int) -> float:
        """What a window with n drafts takes: measured, or on the line through those next to it. One must be known."""
        if n in self._ms:
            return self._ms[n]
        below = max((k for k in self._ms if k < n), default=None)
        above = min((k for k in self._ms if k > n), default=None)
        if above is None:
            return self._ms[max(self._ms)]
        if below is None:
            return self._ms[above]
        share = (n - below) / (above - below)
        return self._ms[below] + share * (self._ms[above] - self._ms[below])


class Reach:
    """Of one request. `times` is shared; `before`: the request before, with whose shares it begins, as CARRIED says.

    A look at deeper drafts takes two windows where the next one is decided about before the last one is known: the
    first leaves all drafts, the second has them. Until it is known what became of them, no other look begins.
    """

    def __init__(self, times: WindowTimes, before: Reach | None = None) -> None:
        self._times = times
        self._kept: list[float] = [] if before is None else before._carried()
        self._begun = list(self._kept)
        self._look: int = LOOK if before is None else before._look
        self._since: int = LOOK if before is None else before._since
        self._asked = 0  # windows with all drafts since one was known

    def _carried(self) -> list[float]:
        """What the next request begins with."""
        begun = self._begun + self._kept[len(self._begun) :]
        return [was + CARRIED * (is_now - was) for was, is_now in zip(begun, self._kept, strict=True)]

    def want(self, most: int) -> int:
        """How many drafts the next window should have, 1 to most."""
        if most < 2:
            return most
        if not self._times.known(1):
            return 1
        if not self._times.known(most):
            return most
        if self._since >= self._look:
            self._asked += 1
            if self._asked <= ASKED:
                return most
        return self._best(most)[0]

    def best_ms(self, most: int) -> float | None:
        """Milliseconds of a token with as many drafts as pay; None: not all that decides has been measured."""
        return self._best(most)[1] if most and self._times.known(1) and self._times.known(most) else None

    def ms_of(self, n: int) -> float | None:
        """Milliseconds of a token with n drafts; None: no such window has been measured."""
        return self._times.of(n) / self._tokens(n) if self._times.known(n) else None

    def _best(self, most: int) -> tuple[int, float]:
        """The drafts that make a token cheapest, and its milliseconds."""
        ms, n = min((self._times.of(n) / self._tokens(n), n) for n in range(1, most + 1))
        return n, ms

    def _tokens(self, n: int) -> float:
        """What a window with n drafts gives, by the shares that were kept."""
        kept = (self._kept + [1.0] * n)[:n]
        return sum(prod(kept[:depth]) for depth in range(n + 1))

    def saw(self, n: int, kept: int, most: int) -> None:
        """A window had n drafts of the layer, of which the first `kept` were right; it might have had `most`."""
        for depth in range(min(n, kept + 1)):
            if depth == len(self._kept):
                self._kept.append(1.0)
            self._kept[depth] += FOLLOW * ((depth < kept) - self._kept[depth])
        self._since += 1
        if n >= most or self._since > 2 * self._look:
            self._asked = 0
        if n >= most and kept < n:
            self._since, self._look = 0, min(2 * self._look, MOST_LOOK)
        elif n >= most:
            self._look = LOOK

    def timed(self, n: int, ms: float) -> None:
        """A window with n drafts of the layer, and no others, took so long. n = 0: it has none, but finds some."""
        self._times.saw(n, ms)

    def start_ms(self) -> float | None:
        """Milliseconds of a window that has no drafts and finds some; None: none has been measured."""
        return self._times.of(0) if self._times.known(0) else None

"""How often windows have picked each expert, as far back as their text is about the same.

The counts of single experts are small: at the edge of a cache that holds a quarter, an expert is picked once in some
hundred tokens, so counts that last find more of those that matter, and swap less for nothing. But counts of another
subject are worse than none. So picks last until clearly less of the latest ones lay in the cache than of those before;
then these count no more than the latest. Over all layers they are thousands, which tell it within a few rounds.

With `decay` or `min_gain` given, counts shrink behind each round instead, whatever they say.

Errors   none
Cost     a few passes over all pairs, a round
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from strata.engine.experts.adapt import F64, AdaptRules

KEPT: Final = 0.998
"""Factor on lasting counts behind a round: those of 350 rounds ago count half."""
LATELY: Final = 0.75
"""The same on the latest picks: about four rounds."""
LONG: Final = 0.95
"""The same on the hits that the latest are compared with: about twenty rounds."""
FALL: Final = 0.05
"""Of the picks, that hits must have lost for another subject."""
DEVIATIONS: Final = 4.0
"""The same in standard deviations of a share, where the latest picks are few."""


class Use:
    """counts float64 (layers, experts) · forgot: how often another subject was seen."""

    def __init__(self, shape: tuple[int, ...], rules: AdaptRules) -> None:
        self._rules = rules
        self.counts: F64 = np.zeros(shape)
        self._new = np.zeros(shape, np.int64)
        self._latest: F64 = np.zeros(shape)
        self._lately = self._long = np.zeros(2)  # hits and picks
        self.forgot = 0

    def add(self, picks: npt.NDArray[np.int64]) -> None:
        """Picks (layers, experts) of windows."""
        self._new += picks

    def begin(self, resident: npt.NDArray[np.bool_]) -> F64:
        """A round begins, with these experts in the cache since the one before -> the counts for it."""
        new, self._new = self._new, np.zeros_like(self._new)
        self.counts += new
        if self._rules.lasts:
            self._latest = LATELY * self._latest + new
            hits = np.array([new[resident].sum(), new.sum()], float)
            self._lately = LATELY * self._lately + hits
            if self._has_fallen:
                self._forget()
            self._long = LONG * self._long + hits
        return self.counts

    def end(self) -> None:
        """The round is over."""
        self.counts *= KEPT if self._rules.lasts else self._rules.factor

    @property
    def _has_fallen(self) -> bool:
        """Whether clearly less of the latest picks were in the cache than of those before."""
        (hits, picks), (hits_before, picks_before) = self._lately, self._long
        if not min(picks, picks_before):
            return False
        bar = max(FALL, DEVIATIONS * 0.5 / np.sqrt(picks))
        return bool(hits_before / picks_before - hits / picks > bar)

    def _forget(self) -> None:
        """What was before the latest picks counts as much as these at most."""
        before = self.counts - self._latest
        self.counts = self._latest + before * min(1.0, self._latest.sum() / max(before.sum(), 1.0))
        self._long = self._lately
        self.forgot += 1

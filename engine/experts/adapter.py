"""Rounds of swaps between windows, queued behind the work that is under way.

Exact    where an expert lies never changes a bit, so neither do rounds
Cost     of a round, the swapped bytes over PCIe, both ways, before the next window
"""

from __future__ import annotations

import numpy as np

from strata.engine.experts.adapt import AdaptRules, choose
from strata.engine.experts.counts import I64
from strata.engine.experts.store import ExpertStore


class Adapter:
    """rounds, swaps: so far · moved: bytes that swaps have sent over PCIe, both ways."""

    def __init__(self, store: ExpertStore, rules: AdaptRules) -> None:
        self._store = store
        self._rules = rules
        self._use = np.zeros(store.placement.begins.shape)
        self.rounds = self.swaps = self.moved = 0

    def __str__(self) -> str:
        return f"{self.swaps} experts have changed places in {self.rounds} rounds"

    def round(self, picks: I64) -> None:
        """Move experts by what has been picked since the last round."""
        self._use += picks
        swaps = choose(self._use, self._store.resident, self._rules)
        if swaps:
            self._store.swap(swaps)
        self.rounds += 1
        self.swaps += len(swaps)
        self.moved += 2 * sum(self._store.placement.sizes[each.layer].n_bytes for each in swaps)
        self._use *= self._rules.decay

"""Rounds of swaps between windows: counts come from the card behind a window, swaps are queued behind the next one.

Exact    where an expert lies never changes a bit, so neither do rounds
Cost     a copy of the counts every `every` windows; of a round, the swapped bytes over PCIe before the next window
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from strata.engine.device.driver import Driver
from strata.engine.experts.adapt import AdaptRules, choose
from strata.engine.experts.store import ExpertStore


class Adapter:
    """rounds, swaps: so far."""

    def __init__(self, driver: Driver, store: ExpertStore, rules: AdaptRules) -> None:
        self._store = store
        self._rules = rules
        self._counts = driver.pinned(store.use.nbytes).view(np.int32).reshape(store.use.shape)
        self._download = driver.downloader(self._counts, store.use)
        self._landed = driver.event()
        self._pending = False
        self._before: npt.NDArray[np.int64] | None = None
        self._use = np.zeros(store.use.shape)
        self._windows = self.rounds = self.swaps = 0

    def __str__(self) -> str:
        return f"{self.swaps} experts have changed places in {self.rounds} rounds"

    def window(self) -> None:
        """A window is over, and the next one may be queued already."""
        if self._pending:
            self._landed.wait()  # it was queued behind that window
            self._round()
        self._windows += 1
        self._pending = self._windows % self._rules.every == 0
        if self._pending:
            self._download()
            self._landed.record()

    def _round(self) -> None:
        counts = self._counts.astype(np.int64)
        before, self._before = self._before, counts
        if before is None:  # what was counted until now was no text
            return
        self._use += (counts - before) % (1 << 32)
        swaps = choose(self._use, self._store.resident, self._rules)
        if swaps:
            self._store.swap(swaps)
        self.rounds += 1
        self.swaps += len(swaps)
        self._use *= self._rules.decay

"""Rounds of swaps between windows: queued behind the work that is under way, or beside it (exchange.py).

Exact    where an expert lies never changes a bit, so neither do rounds
Cost     of a round, the swapped bytes over PCIe, both ways; the next window waits for them unless they go beside it
"""

from __future__ import annotations

from collections.abc import Callable

from strata.engine.experts.adapt import AdaptRules, Swap, choose, dropping
from strata.engine.experts.counts import I64
from strata.engine.experts.exchange import Exchange
from strata.engine.experts.store import ExpertStore
from strata.engine.experts.use import Use


class Adapter:
    """still: says when nothing may begin to move.

    rounds, swaps   so far · moved: bytes that swaps have sent over PCIe, both ways"""

    def __init__(
        self,
        store: ExpertStore,
        rules: AdaptRules,
        exchange: Exchange | None = None,
        still: Callable[[], bool] = lambda: False,
    ) -> None:
        self._store = store
        self._rules = rules
        self._exchange = exchange
        self._still = still
        self._use = Use(store.placement.begins.shape, rules)
        self.rounds = self.swaps = self.moved = 0

    def __str__(self) -> str:
        return f"{self.swaps} experts have changed places in {self.rounds} rounds"

    def round(self, picks: I64) -> None:
        """Move experts by what has been picked since the last round."""
        self._use.add(picks)
        if self._still() or (self._exchange is not None and self._exchange.moving):
            return  # what was picked counts for the next one
        resident = self._store.resident
        use = self._use.begin(resident)
        swaps = choose(use, resident, self._rules)
        if self._exchange is not None:
            swaps = _few(swaps, [len(self._store.homes(layer).free) for layer in range(len(use))])
        swaps = dropping(swaps, use, self._store.in_ram)
        if swaps:
            (self._store.swap if self._exchange is None else self._exchange.fetch)(swaps)
        self.rounds += 1
        self.swaps += len(swaps)
        self.moved += 2 * sum(self._store.placement.sizes[each.layer].n_bytes for each in swaps)
        self._use.end()

    def step(self) -> None:
        """A window has been queued: what goes beside windows goes on."""
        if self._exchange is not None:
            self._exchange.step()


def _few(swaps: list[Swap], most: list[int]) -> list[Swap]:
    """The first swaps of each layer, as many as it may have."""
    found = []
    for each in swaps:
        if most[each.layer] > 0:
            most[each.layer] -= 1
            found.append(each)
    return found

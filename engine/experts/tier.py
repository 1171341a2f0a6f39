"""What follows the windows of an engine whose experts do not all lie in VRAM: counts, swaps, the learned order.

Cost     between two windows a comparison; every few windows a copy of the counts, and a round where experts move
"""

from __future__ import annotations

from typing import Final

import numpy as np

from strata.engine.device.arena import MIB
from strata.engine.device.driver import Driver
from strata.engine.experts.adapt import AdaptRules
from strata.engine.experts.adapter import Adapter
from strata.engine.experts.counts import ExpertCounts
from strata.engine.experts.exchange import Exchange
from strata.engine.experts.learned import Keeping, Learned
from strata.engine.experts.lending import Lending
from strata.engine.experts.store import ExpertStore

LOOK_EVERY: Final = 16
"""Windows between two looks at the counts where nothing moves."""


class Tier:
    """picks, reads, read_bytes, helped: of windows so far, as far as their counts have come to the host."""

    def __init__(
        self,
        driver: Driver,
        store: ExpertStore,
        rules: AdaptRules,
        keeping: Keeping | None,
        lending: Lending | None = None,
    ) -> None:
        placement = store.placement
        moves = rules.on and placement.missing > 0 and placement.in_cache > 0
        self._store = store
        self._counts = ExpertCounts(driver, store.counters)
        self._sizes = np.array([size.n_bytes for size in placement.sizes], np.int64)
        self._every = rules.every if moves else LOOK_EVERY
        exchange = Exchange(driver, store) if placement.spare else None
        if lending is not None and exchange is not None:
            lending.before = exchange.finish
        self._lending = lending
        self._adapter = Adapter(store, rules, exchange, self._is_still) if moves else None
        picks = np.zeros(placement.begins.shape, np.int64)
        self._learned = None if keeping is None else Learned(keeping, picks, placement.in_cache)
        self._windows = self._asked_at = self._before = 0
        self.picks = self.reads = self.read_bytes = self.helped = 0

    def __str__(self) -> str:
        """For --stats."""
        read = f"{self.reads} of {self.picks} picked experts were read from RAM, {self.read_bytes / MIB:.0f} MiB"
        if self.helped:
            took = 0 if self._store.helpers is None else self._store.helpers.busy_ms
            read = f"{read}; the processor has computed {self.helped} in {took} ms"
        n, n_bytes = self._filed
        if self._store.reads_file:
            copied = self._store.read_in_file / MIB
            read = f"{read}, {n} of them in the file, {n_bytes / MIB:.0f} MiB; the card got {copied:.0f} MiB from there"
        if self._lending is not None:
            read = f"{read}; {self._lending}"
        return read if self._adapter is None else f"{read}; {self._adapter}"

    @property
    def _filed(self) -> tuple[int, int]:
        """Experts that the processor has read in the file for windows, and their bytes."""
        return (0, 0) if self._store.helpers is None else self._store.helpers.filed

    def _is_still(self) -> bool:
        """Whether a prompt has slots, so that nothing moves."""
        return self._lending is not None and self._lending.lent

    def begin(self) -> None:
        """What start has counted was no text."""
        self._counts.ask()
        self._counts.take()
        if self._lending is not None:
            self._lending.forget()

    def window(self) -> None:
        """A window is over, and the next one may be queued already. Raises DeviceError when it waited in vain."""
        if self._store.helpers is not None:
            self._store.helpers.window_over()
        if self._adapter is not None:
            self._adapter.step()
        self._look()
        self._windows += 1
        if self._windows % self._every == 0:
            self._ask()

    def check(self) -> None:
        """A window that read a piece of a prompt is over. Raises DeviceError when it waited in vain."""
        if self._store.helpers is not None:
            self._store.helpers.check()

    def figures(self) -> dict[str, int]:
        """What INFO says of experts, beside what never changes."""
        adapter, lending = self._adapter, self._lending
        lent = {}
        if lending is not None:
            lent = {
                "lent_slots": lending.most,
                "lent_reads": lending.reads,
                "lent_refilled_mib": lending.refilled // MIB,
                "lent_waited_ms": round(lending.waited_ms),
            }
        return {
            **lent,
            "expert_picks": self.picks,
            "expert_reads": self.reads,
            "expert_read_mib": self.read_bytes // MIB,
            "expert_helped": self.helped,
            "expert_helped_ms": 0 if self._store.helpers is None else self._store.helpers.busy_ms,
            **self._of_file(),
            "expert_streamed_mib": self._store.streamed // MIB,
            "expert_rounds": 0 if adapter is None else adapter.rounds,
            "expert_swaps": 0 if adapter is None else adapter.swaps,
            "expert_swapped_mib": 0 if adapter is None else adapter.moved // MIB,
        }

    def _of_file(self) -> dict[str, int]:
        """The figures of experts that lie in the file only, where there are some."""
        if not self._store.reads_file:
            return {}
        n, n_bytes = self._filed
        copied = self._store.read_in_file
        return {"expert_filed": n, "expert_filed_mib": n_bytes // MIB, "expert_file_sent_mib": copied // MIB}

    def request_over(self) -> None:
        """The last line of a request is out."""
        if self._learned is not None:
            self._learned.request_over()

    def close(self) -> None:
        """The engine leaves, with nothing under way."""
        if self._learned is not None:
            self._ask()
            self._look(rounds=False)
            self._learned.write()

    def _ask(self) -> None:
        self._counts.ask()
        self._before, self._asked_at = self._asked_at, self._windows

    def _look(self, rounds: bool = True) -> None:
        """At the counts, where some have come."""
        came = self._counts.take()
        if came is None:
            return
        self.picks += int(came.picks.sum())
        self.reads += int(came.reads.sum())
        self.helped += int(came.helped.sum())
        self.read_bytes += int(came.reads @ self._sizes)
        if self._learned is not None:
            self._learned.add(came.picks, self._asked_at - self._before)
        if rounds and self._adapter is not None:
            self._adapter.round(came.picks)

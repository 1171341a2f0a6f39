"""The order of hot experts that windows have shown, and the file that keeps it.

Errors   none: what cannot be written is said in the log once, and tried again later
Cost     a sort of all pairs and a file of 4 bytes a pair
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from strata.engine.experts.counts import I64
from strata.engine.experts.placement import Pair, by_number
from strata.engine.log import log
from strata.engine.memory.profile import Profile, write_profile

LEAST_WINDOWS: Final = 64
"""An order that fewer windows have shown is mostly chance: the file stays as it is."""


def ordered(picks: I64, former: tuple[Pair, ...] | None) -> tuple[Pair, ...]:
    """All pairs, those picked most first; of those picked equally often, in the order of before, or by number.

    picks (layers, experts)
    """
    layers, experts = picks.shape
    everything = by_number(layers, experts)
    known = dict.fromkeys(former or ())
    before = [*known, *(pair for pair in everything if pair not in known)]
    return tuple(sorted(before, key=lambda pair: -int(picks[pair])))


@dataclass(frozen=True, slots=True)
class Keeping:
    """path: where the order goes · every: requests between two writes · former: the order at the start."""

    path: Path
    every: int
    former: tuple[Pair, ...] | None = None


@dataclass(slots=True, eq=False)
class Learned:
    """Counts of all windows since the start. slots: experts that the cache holds."""

    keeping: Keeping
    picks: I64
    slots: int
    windows: int = 0
    _requests: int = 0
    _written: int = 0
    _failed: bool = field(default=False)

    def add(self, picks: I64, windows: int) -> None:
        self.picks += picks
        self.windows += windows

    def request_over(self) -> None:
        """Write the order behind every so many requests."""
        self._requests += 1
        if self._requests % self.keeping.every == 0:
            self.write()

    def write(self) -> None:
        """Write the order if windows have shown something that the file does not say."""
        if self.windows < LEAST_WINDOWS or self.windows == self._written:
            return
        layers, experts = self.picks.shape
        profile = Profile(layers, experts, self.slots, ordered(self.picks, self.keeping.former))
        try:
            write_profile(self.keeping.path, profile)
        except OSError as error:
            if not self._failed:
                log(f"--expert-profile-save: {self.keeping.path}: {error.strerror or error}; it is tried again later")
            self._failed = True
            return
        self._failed = False
        self._written = self.windows
        log(
            f"expert profile: the order of {np.count_nonzero(self.picks)} experts that {self.windows} windows have used"
        )

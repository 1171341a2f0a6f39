"""What windows picked and read, as the card has counted it, on the host some windows later.

Units    picks: (row, rank) pairs that named an expert · reads: missing experts that a window read, once for all rows
         · helped: those that the processor computed for it
Cost     a copy of 4 bytes an expert to the host, when asked
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from strata.engine.device.driver import Array, Driver

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Counted:
    """picks int64 (layers, experts) · reads, helped int64 (layers,)."""

    picks: I64
    reads: I64
    helped: I64


class ExpertCounts:
    """`counters` int32 (layers, experts + 2) on the card, which wrap around: picks, behind them the layer's reads and
    those that the processor has computed."""

    def __init__(self, driver: Driver, counters: Array) -> None:
        self._landing = driver.pinned(counters.nbytes).view(np.int32).reshape(counters.shape)
        self._download = driver.downloader(self._landing, counters)
        self._landed = driver.event()
        self._asked = False
        self._before: I64 | None = None

    def ask(self) -> None:
        """Bring what has been counted by what was queued so far."""
        self._download()
        self._landed.record()
        self._asked = True

    def take(self) -> Counted | None:
        """What was counted between the last two times that somebody asked, once; None: nobody has asked anew, or it was
        the first time."""
        if not self._asked:
            return None
        self._asked = False
        self._landed.wait()
        now = self._landing.astype(np.int64)
        before, self._before = self._before, now
        if before is None:
            return None
        came = (now - before) % (1 << 32)
        return Counted(came[:, :-2], came[:, -2], came[:, -1])

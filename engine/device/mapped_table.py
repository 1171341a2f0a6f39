"""A table that stays in its mapped file: the processor reads rows of it while the card waits.

Errors   DeviceError from `check` when rows did not come in time
Cost     a core that spins while windows run; 1 MiB of page-locked RAM and MOST_ROWS rows
"""

from __future__ import annotations

from typing import Final

from strata.engine.device.driver import Array, Driver
from strata.kernels.cuda.compile import DeviceError
from strata.kernels.cuda.mapped_rows import MappedRows
from strata.kernels.formats import Weight
from strata.kernels.row_desk import RowDesk

LIMIT_S: Final = 5.0
"""A pass waits so long for its rows."""


class MappedTable:
    """`weight`: what kernels look rows up in. own: uint32 (OWN_WORDS,) of zeros on the card."""

    def __init__(self, driver: Driver, own: Array, w: Weight) -> None:
        from strata.kernels.cpu.mapped_rows import RowServer  # only here: a card by itself needs no host kernels

        row_bytes = w.type.row_bytes(w.cols)
        self._desk = RowDesk.within(driver.pinned(RowDesk.n_bytes(row_bytes)), row_bytes)
        self.weight = MappedRows(w.type, w.shape, w.data, self._desk, own, LIMIT_S)
        self._server = RowServer(self._desk, w)
        self._server.start()

    @property
    def read(self) -> int:
        """Rows so far."""
        return self._server.copied

    def check(self) -> None:
        """Raises DeviceError when the rows of a pass that has ended did not come in time: passes since mean nothing."""
        if self._desk.failed:
            raise DeviceError(
                f"the processor has not read rows of the n-gram table from the file within {LIMIT_S:.0f} s; a faster "
                "disk helps, or --ple-io ram or vram"
            )
        if self._server.wrong:
            raise RuntimeError(f"{self._server.wrong} rows were asked for that the n-gram table does not have")

    def close(self) -> None:
        """No pass comes any more."""
        self._server.stop()

"""Memory that prompts have only while they are read: what a loan of the output head and one of expert slots have in
common.

    loan.fit_own(run, share), loan.fit_lent(run)   # workspaces of windows and short reads, and of lent reads
    loan.loaded()                             # the weights are there
    loan.lend(rows)                           # before a chunk: whether it has the lent memory
    loan.logits(model, x[-1:])                # behind the last one, in the memory of windows
    loan.before_window()
    loan.over()                               # a read has ended or was given up

Nothing is freed, so graphs keep their addresses. All of it is queued on the stream of the work.

Units    bytes, tokens
Errors   DeviceError for memory that is not there
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from math import prod

import numpy as np

from strata.engine.device.arena import shown
from strata.engine.device.cuda import CudaDevice
from strata.engine.device.driver import Array
from strata.engine.experts.store import ExpertStore
from strata.engine.memory.loan import steps
from strata.engine.model.model import Model
from strata.kernels.cuda.compile import DeviceError
from strata.kernels.cuda.workspace import OutOfWorkspace


class PromptLoan(ABC):
    """stays: rows up to which a chunk borrows nothing · most: rows of a chunk · lent: whether prompts have the lent
    memory now · where: what is lent, in a word. own_bytes: of memory of windows and short reads · row: shape of a
    residual · remedy: a flag."""

    where: str

    def __init__(
        self, device: CudaDevice, own_bytes: int, stays: int, most: int, row: tuple[int, int, int], remedy: str
    ) -> None:
        self.stays = stays
        self.most = most
        self.lent = False
        self._device = device
        self._remedy = remedy
        self._own = device.account.take(own_bytes, "the memory of prompts", remedy)
        self._own_parts: list[Array] = []
        self._row = device.fixed(4 * prod(row)).view(np.float32).reshape(row)

    # --------------------------------------------------------------------------------------------------------- start

    @property
    @abstractmethod
    def ring(self) -> Array | int:
        """Memory of the ring, whose experts only lent reads stream; a number: that many bytes at the cache's end."""

    @property
    @abstractmethod
    def read_bytes(self) -> int:
        """Of the longest chunk's memory, ring and all."""

    @abstractmethod
    def follow(self, store: ExpertStore) -> None:
        """The store that has `ring`."""

    @abstractmethod
    def loaded(self) -> None:
        """All weights are there, but what lies in memory that may be lent."""

    def fit_own(self, run: Callable[[int], None], share: Callable[[int], float]) -> int:
        """The workspace of chunks that borrow nothing, which is in use from now on; their rows. run: passes of so many
        rows at most, and windows."""
        for rows in steps(self.stays):
            parts = self._device.fit_in(self._own, lambda n=rows: run(n), share(rows))  # type: ignore[misc]
            if parts is not None:
                self._own_parts, self.stays = parts, rows
                return rows
        raise DeviceError(
            f"the workspace of a prompt chunk of {rows} does not fit {shown(int(self._own.size))}; use a smaller "
            f"--max-context, or {self._remedy}"
        )

    def fit_lent(self, run: Callable[[int], None]) -> int:
        """The rows of chunks that have the lent memory, behind a pass of so many."""
        for rows in self._lent_steps():
            self._device.use(self._lent_parts(rows))
            try:
                run(rows)
            except OutOfWorkspace:
                continue
            finally:
                self._device.driver.synchronize()
                self._device.use(self._own_parts)
            self.most = rows
            return rows
        raise DeviceError(f"no prompt chunk fits the memory that it borrows; {self._remedy}")

    def _lent_steps(self) -> Iterator[int]:
        return (rows for rows in steps(self.most) if rows > self.stays)

    @abstractmethod
    def _lent_parts(self, rows: int) -> list[Array]:
        """The parts of a pass of so many rows, from now on lent."""

    # --------------------------------------------------------------------------------------------------------- reads

    @abstractmethod
    def lend(self, rows: int) -> bool:
        """A chunk of so many rows comes. Whether it has the lent memory: from the first long one of a read on."""

    def logits(self, model: Model, x: Array) -> Array:
        """Logits (1, vocab) of the residual (1, C, H) of a pass's last row, where they outlive the loan."""
        self._device.copy(self._row, x)
        self._return()
        return model.logits(self._row)

    @abstractmethod
    def _return(self) -> None:
        """The last chunk of a read is queued: passes from now on lie in the memory of windows."""

    @abstractmethod
    def before_window(self) -> None:
        """What windows need is there."""

    @abstractmethod
    def over(self) -> None:
        """A read has ended, or was given up."""

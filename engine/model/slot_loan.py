"""Expert slots while a prompt is read: its buffers lie in the last ones (engine/experts/lending.py).

A chunk borrows as many slots as its rows take, so a short prompt borrows few. Between chunks the slots stay lent, and
windows of other sequences find their experts in RAM. Behind the last chunk they come back, beside the first token.
Where experts lie in the file every read borrows, since only the ring brings those to the card.

Memory   of its own what windows and reads of up to `stays` rows take
Cost     of a read the bytes of its slots over PCIe, for which the first window behind it waits
"""

from __future__ import annotations

from collections.abc import Callable

from strata.engine.device.arena import shown
from strata.engine.device.cuda import CudaDevice
from strata.engine.device.driver import Array
from strata.engine.experts.lending import Lending
from strata.engine.experts.store import ExpertStore
from strata.engine.log import log
from strata.engine.memory.borrow import BorrowPlan
from strata.engine.model.prompt_loan import PromptLoan


class SlotLoan(PromptLoan):
    """lending: of the slots of the store that it follows."""

    lending: Lending
    where = "slots"

    def __init__(self, device: CudaDevice, plan: BorrowPlan, row: tuple[int, int, int]) -> None:
        super().__init__(device, plan.own_bytes, plan.stays, plan.chunk, row, "use --no-prefill-borrow")
        self._plan = plan
        self._rings = False  # whether every read needs the ring, which is lent with slots
        self._rows = 0  # of the longest chunk of the read
        self._used = 0  # the rows that the parts in use are for, 0: those of windows

    @property
    def ring(self) -> int:
        return self._plan.buffers.ring

    @property
    def read_bytes(self) -> int:
        return self._plan.buffers(self.most)

    def follow(self, store: ExpertStore) -> None:
        self._cache = store.cache
        self._rings = store.reads_file
        self.lending = Lending(self._device.driver, store)

    def fit_lent(self, run: Callable[[int], None]) -> int:
        rows = super().fit_lent(run)
        short = "all reads borrow some" if self._rings else f"reads of up to {self.stays} borrow none"
        log(
            f"prompts: chunks of {rows} borrow {self.lending.slots} of {self.lending.of} expert slots, "
            f"{shown(self._plan.buffers(rows))}; {short}"
        )
        return rows

    def loaded(self) -> None:
        """The slots, in which passes were measured, get their bytes."""
        self.lending.give_back()
        self.lending.settle()
        self.lending.forget()

    def _lent_parts(self, rows: int) -> list[Array]:
        parts = self._plan.buffers.parts(rows)
        self.lending.lend(parts.n_bytes)
        at, found = int(self._cache.size) - parts.n_bytes, []
        for size in (parts.whole, parts.work):
            found.append(self._cache[at : at + size])
            at += size
        return found

    def lend(self, rows: int) -> bool:
        if rows > self.stays or self.lent or self._rings:
            self._rows, self.lent = max(rows, self._rows), True
            self._use(self._rows)
        else:
            self._use(0)
        return self.lent

    def before_window(self) -> None:
        self._use(0)
        self.lending.settle()

    def over(self) -> None:
        self._return()

    def _return(self) -> None:
        self._use(0)
        self._rows, self.lent = 0, False
        self.lending.give_back()

    def _use(self, rows: int) -> None:
        """Passes from now on lie where chunks of so many rows do, 0: where windows do."""
        if rows != self._used:
            self._device.use(self._lent_parts(rows) if rows else self._own_parts)
            self._used = rows

    def check(self) -> None:
        """Raises RuntimeError unless the books of slots balance."""
        self.lending.check()
        if self.lent and not self.lending.lent:
            raise RuntimeError("a prompt is read in slots that are not lent")

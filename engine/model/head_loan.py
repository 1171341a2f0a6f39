"""The output head's memory while a prompt is read: prompt buffers lie in it, and the head comes back from RAM.

The head's range is the head's all the time, so graphs keep its address. It is brought for the first time when all
weights are there, and before logits or a window where a prompt has had its memory.

Guard    after every load the address must be that of the graphs, and the bytes on the card those of the start by their
         fingerprint; the load is waited for, so that no token can come of another head
Memory   a page-locked copy of the head in RAM; on the card the prompts' own part of the plan, and the head's range
Errors   HeadLost, which the engine does not survive; DeviceError for memory that is not there
Cost     of a load the head's bytes over PCIe, and once through the card's memory: 8 ms of 440 MB (H200, 2026-11-29)
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import numpy as np

from strata.engine.device.arena import shown
from strata.engine.device.cuda import CudaDevice
from strata.engine.device.driver import Array
from strata.engine.device.loading import Copy, flat
from strata.engine.experts.store import ExpertStore
from strata.engine.log import log
from strata.engine.memory.loan import LoanPlan, Piece
from strata.engine.model.prompt_loan import PromptLoan
from strata.kernels.cuda.arguments import address
from strata.kernels.cuda.fingerprint import fingerprint
from strata.kernels.formats import Weight

MOVED: Final = 256
"""Bytes by which the test hook moves the head."""


class HeadLost(RuntimeError):
    """The head is not where the windows read it, or not what it was."""


class HeadLoan(PromptLoan):
    """loads: how often the head came back. n_bytes: of it · row: shape of a residual · moves: a test hook, the head
    comes back elsewhere."""

    where = "head"

    def __init__(
        self, device: CudaDevice, plan: LoanPlan, n_bytes: int, row: tuple[int, int, int], moves: bool = False
    ) -> None:
        remedy = "leave out --prefill-head-alias"
        super().__init__(device, plan.own_bytes, plan.stays, plan.chunk, row, remedy)
        self.plan = plan
        self.loads = 0
        self._driver = device.driver
        self._moves = moves
        self._head = device.account.take(n_bytes, "the output head", remedy)
        self._kept = self._driver.pinned(n_bytes)
        self._sum = device.fixed(8).view(np.uint64)
        self._store: ExpertStore | None = None
        self._bound: Weight | None = None
        self._wanted = 0

    def _at(self, piece: Piece) -> Array:
        return (self._head if piece.in_head else self._own)[piece.begin : piece.end]

    @property
    def ring(self) -> Array:
        """Memory of the ring, whose experts only lent reads stream."""
        return self._at(self.plan.ring)

    @property
    def read_bytes(self) -> int:
        return self.plan.own_bytes + self.plan.lent_bytes

    def follow(self, store: ExpertStore) -> None:
        """The store that has `ring`."""
        self._store = store

    def bind(self, w: Weight) -> Weight:
        """The output matrix where it lies from now on; its bytes are promised to the copy in RAM."""
        self._device.promise(Copy(flat(w.data), self._kept[: w.data.nbytes], host=True))
        data = self._head[: w.data.nbytes].view(w.data.dtype).reshape(w.data.shape)
        self._bound = Weight(w.type, w.shape, data)
        return self._bound

    # --------------------------------------------------------------------------------------------------------- start

    def fit_lent(self, run: Callable[[int], None]) -> int:
        rows = super().fit_lent(run)
        log(
            f"head alias: chunks of {rows} with {shown(self.plan.lent_bytes)} of the head's "
            f"{shown(int(self._head.size))}, {self.plan.plain} without, experts through a ring of "
            f"{shown(int(self.ring.size))}; the head stays for chunks of up to {self.stays}"
        )
        return rows

    def _lent_parts(self, rows: int) -> list[Array]:
        return [self._at(self.plan.whole), self._at(self.plan.work)]

    def loaded(self) -> None:
        """The copy in RAM is complete: the head comes to the card, and its fingerprint is what it always has to be."""
        self._driver.upload(self._head, self._kept)
        self._wanted = self._fingerprint()

    # --------------------------------------------------------------------------------------------------------- reads

    def lend(self, rows: int) -> bool:
        """From the first chunk of a read on that streams experts."""
        streams = self._store is not None and self._store.reads_file
        if not self.lent and (rows > self.stays or streams):
            if self._store is not None:
                self._store.forget_streamed()
            self._device.use(self._lent_parts(rows))
            self.lent = True
        return self.lent

    def before_window(self) -> None:
        self.take_back()

    def over(self) -> None:
        """A read that was given up leaves the head lent: whoever needs it next brings it back."""

    def _return(self) -> None:
        self.take_back()

    def take_back(self) -> None:
        """Bring the head back if it is lent. Raises HeadLost unless it is where it was and what it was."""
        if not self.lent:
            return
        if self._store is not None:
            self._store.forget_streamed()  # experts of a chunk that has not come may be on their way there
        self._driver.synchronize()  # what the prompt has queued reads its buffers
        begun = time.perf_counter()
        self._require_place()
        self._driver.upload(self._head, self._kept)
        self._device.use(self._own_parts)
        found = self._fingerprint()
        if found != self._wanted:
            raise HeadLost(
                f"the output head is not what it was: its bytes have the fingerprint {found:016x}, they had "
                f"{self._wanted:016x}; the engine ends, start it again"
            )
        self.lent = False
        self.loads += 1
        ms = (time.perf_counter() - begun) * 1e3
        log(f"head alias: {shown(int(self._head.size))} loaded again in {ms:.1f} ms, at its place and unchanged")

    def _require_place(self) -> None:
        if self._bound is None:
            raise RuntimeError("a loan of a head that was never bound")
        wanted, found = address(self._bound.data), address(self._head) + (MOVED if self._moves else 0)
        if found != wanted:
            raise HeadLost(
                f"the output head moved: windows read it at {wanted:#x}, it would come back at {found:#x}; the engine "
                "ends, start it again"
            )

    def _fingerprint(self) -> int:
        self._driver.zero(self._sum)
        fingerprint(self._head, self._sum)
        return int(self._driver.fetch(self._sum)[0])

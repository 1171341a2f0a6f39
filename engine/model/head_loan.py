"""The output head's memory while a prompt is read: prompt buffers lie in it, and the head comes back from RAM.

    loan = HeadLoan(device, plan, n_bytes, row)  # before the model is bound; `ring` is the ring's memory
    loan.follow(store)                        # whose ring that is
    loan.fit_own(run), loan.fit_lent(run)     # workspaces of short reads and of lent ones
    loan.loaded()                             # the weights are there: the head is brought for the first time
    loan.lend(rows)                           # before a chunk: whether it has the head's memory
    loan.logits(model, x[-1:])                # behind the last one: the head comes back first
    loan.take_back()                          # before a window

Nothing is freed: the head's range is the head's all the time, so graphs keep their addresses. All of it is queued on
the stream of the work, and the ring's copies wait for that.

Guard    after every load the address must be that of the graphs, and the bytes on the card those of the start by their
         fingerprint; the load is waited for, so that no token can come of another head
Memory   a page-locked copy of the head in RAM; on the card the prompts' own part of the plan, and the head's range
Errors   HeadLost, which the engine does not survive; DeviceError for memory that is not there
Cost     of a load the head's bytes over PCIe, and once through the card's memory: 8 ms of 440 MB (H200, 2026-11-29)
"""

from __future__ import annotations

import time
from collections.abc import Callable
from math import prod
from typing import Final

import numpy as np

from strata.engine.device.arena import shown
from strata.engine.device.cuda import CudaDevice
from strata.engine.device.driver import Array
from strata.engine.device.loading import Copy, flat
from strata.engine.experts.store import ExpertStore
from strata.engine.log import log
from strata.engine.memory.loan import LoanPlan, Piece, steps
from strata.engine.model.model import Model
from strata.kernels.cuda.arguments import address
from strata.kernels.cuda.compile import DeviceError
from strata.kernels.cuda.fingerprint import fingerprint
from strata.kernels.cuda.workspace import OutOfWorkspace
from strata.kernels.formats import Weight

DRAFT_ROWS: Final = 256
"""Rows of a pass of the draft layer at most: it takes memory of the part that lives for all of a chunk's pass."""
MOVED: Final = 256
"""Bytes by which the test hook moves the head."""


class HeadLost(RuntimeError):
    """The head is not where the windows read it, or not what it was."""


class HeadLoan:
    """stays: rows up to which a chunk leaves the head · lent: whether prompts have its memory now · loads: how often it
    came back. n_bytes: of the head · row: shape of a residual · moves: a test hook, the head comes back elsewhere."""

    def __init__(
        self, device: CudaDevice, plan: LoanPlan, n_bytes: int, row: tuple[int, int, int], moves: bool = False
    ) -> None:
        remedy = "leave out --prefill-head-alias"
        self.plan = plan
        self.stays = plan.stays
        self.lent = False
        self.loads = 0
        self._device = device
        self._driver = device.driver
        self._moves = moves
        self._head = device.account.take(n_bytes, "the output head", remedy)
        self._own = device.account.take(plan.own_bytes, "the memory of prompts", remedy)
        self._kept = self._driver.pinned(n_bytes)
        self._sum = device.fixed(8).view(np.uint64)
        self._row = device.fixed(4 * prod(row)).view(np.float32).reshape(row)
        self._lent_parts = [self._at(piece) for piece in (plan.whole, plan.mixers, plan.experts)]
        self._own_parts: list[Array] = []
        self._store: ExpertStore | None = None
        self._bound: Weight | None = None
        self._wanted = 0

    def _at(self, piece: Piece) -> Array:
        return (self._head if piece.in_head else self._own)[piece.begin : piece.end]

    @property
    def ring(self) -> Array:
        """Memory of the ring, whose experts only lent reads stream."""
        return self._at(self.plan.ring)

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

    def fit_own(self, run: Callable[[int], None], share: float) -> int:
        """The workspace of chunks that leave the head, which is in use from now on; their rows. run: passes of so many
        rows at most, and windows."""
        for rows in steps(self.plan.stays):
            parts = self._device.fit_in(self._own, lambda n=rows: run(n), share)  # type: ignore[misc]
            if parts is not None:
                self._own_parts, self.stays = parts, rows
                return rows
        raise DeviceError(
            f"the workspace of a prompt chunk of {rows} does not fit {shown(self.plan.own_bytes)}; use a smaller "
            "--max-context, or leave out --prefill-head-alias"
        )

    def fit_lent(self, run: Callable[[int], None]) -> int:
        """The rows of chunks that have the head's memory, behind a pass of so many."""
        for rows in steps(self.plan.chunk):
            if rows <= self.stays:
                break
            self._device.use(self._lent_parts)
            try:
                run(rows)
            except OutOfWorkspace:
                continue
            finally:
                self._driver.synchronize()
                self._device.use(self._own_parts)
            log(
                f"head alias: chunks of {rows} with {shown(self.plan.lent_bytes)} of the head's "
                f"{shown(int(self._head.size))}, {self.plan.plain} without, experts through a ring of "
                f"{shown(int(self.ring.size))}; the head stays for chunks of up to {self.stays}"
            )
            return rows
        raise DeviceError("no prompt chunk fits the head's memory; leave out --prefill-head-alias")

    def loaded(self) -> None:
        """The copy in RAM is complete: the head comes to the card, and its fingerprint is what it always has to be."""
        self._driver.upload(self._head, self._kept)
        self._wanted = self._fingerprint()

    # --------------------------------------------------------------------------------------------------------- reads

    def lend(self, rows: int) -> bool:
        """A chunk of so many rows comes. Whether it has the head's memory: from the first one of a read on that streams
        experts."""
        streams = self._store is not None and self._store.reads_file
        if not self.lent and (rows > self.stays or streams):
            if self._store is not None:
                self._store.forget_streamed()
            self._device.use(self._lent_parts)
            self.lent = True
        return self.lent

    def logits(self, model: Model, x: Array) -> Array:
        """Logits (1, vocab) of the residual (1, C, H) of a pass's last row, behind the return of the head."""
        self._device.copy(self._row, x)
        self.take_back()
        return model.logits(self._row)

    def take_back(self) -> None:
        """Bring the head back if it is lent. Raises HeadLost unless it is where it was and what it was."""
        if not self.lent:
            return
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

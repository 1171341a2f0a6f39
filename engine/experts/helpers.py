"""The processor as a third place for experts: of those that a window misses the card reads a share over PCIe, and the
processor computes the others meanwhile, and all that lie in the file only.

    helpers = HostExperts(card, layers, share, threads)
    helper = helpers.bind(layer, stacks, size, ram, cache)  # for every layer in order, while experts are placed
    helpers.start()                                         # before the first window
    helpers.measured(spare)                                 # with `--pcie-frac auto`, once all bytes are there

Exact    the processor's products are the card's, bit for bit, so the share never changes a text
Errors   DeviceError from `window_over` and `check`: the processor has not answered in time
Cost     two launches a layer of a window; threads that spin while windows run
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from strata.engine.device.driver import Array, Bytes, Driver
from strata.engine.experts.balance import PARTS, Balance
from strata.engine.experts.placement import ExpertSize
from strata.engine.log import log
from strata.kernels.cuda.arguments import address
from strata.kernels.cuda.compile import DeviceError
from strata.kernels.cuda.handover import AHEAD, OWN_WORDS, REQUESTS, SHARE, WAITS, Helper
from strata.kernels.cuda.plans import WINDOW_ROWS
from strata.kernels.desk import ANSWERED, ASKED, LAYER, PAIRS, USED, Desk
from strata.kernels.formats import Weight

if TYPE_CHECKING:
    from strata.kernels.cpu.handover import Server

LIMIT_S: Final = 5.0
"""A window waits so long for the processor."""
PROBED: Final = 8
"""Experts of a probe."""
PROBES: Final = 4
"""Measurements of each kind; the best one counts."""
PROBE_BYTES: Final = 64 << 20
LOOK_EVERY: Final = 16
"""Windows between two looks at who waited for whom."""
HEAD_START: Final = 192
"""256ths of an expert that are added to the card's share with `--pcie-frac auto`. To begin costs the processor more
than the card: an expert alone takes it 97 us, and the card 64 (H200 and its host, 2026-11-30)."""


class Card(Protocol):
    """What helpers need of a device."""

    driver: Driver

    def fixed(self, n_bytes: int) -> Array: ...


class HostExperts:
    """share: of the missing experts in RAM that the card reads, 0 to 1; None: half, then as `measured` says, then as
    windows show · threads: of the processor that compute · filed: layers of which some experts lie in the file only."""

    def __init__(self, card: Card, layers: int, share: float | None, threads: int, filed: Sequence[int] = ()) -> None:
        self._card = card
        self._layers = layers
        self._filed = frozenset(filed)
        self._threads = threads
        self.asks = share is None
        self.share = 0.5 if share is None else share
        self._own = card.fixed(4 * OWN_WORDS).view(np.uint32)
        self._words = card.driver.pinned(4 * OWN_WORDS).view(np.uint32)
        self._words[:] = 0
        self._landing = card.driver.pinned(4 * OWN_WORDS).view(np.uint32)
        self._landing[:] = 0
        self._download = card.driver.downloader(self._landing, self._own)
        self._landed = card.driver.event()
        self._balance: Balance | None = None
        self._seen = 0, 0  # requests and waits so far
        self._windows = 0
        self._desk: Desk | None = None
        self._server: Server | None = None
        self._probe: tuple[int, ExpertSize, Bytes] | None = None  # a layer, its experts in RAM

    def bind(self, layer: int, stacks: Sequence[Weight], size: ExpertSize, ram: Bytes, cache: Array) -> Helper | None:
        """A layer's way to the processor; None where the card computes all of it: float weights, or nothing missing."""
        nothing = not ram.size or self.share == 1
        if (nothing and layer not in self._filed) or any(w.type.is_float for w in stacks):
            return None
        gate = stacks[0]
        if self._desk is None or self._server is None:
            from strata.kernels.cpu.handover import Server  # only here: a card by itself needs no compiled host kernels
            from strata.kernels.cpu.team import set_threads

            memory = self._card.driver.pinned(Desk.n_bytes(WINDOW_ROWS, gate.cols))
            self._desk = Desk.within(memory, WINDOW_ROWS, gate.cols)
            set_threads(self._threads)
            self._server = Server(self._desk, self._layers, gate.rows)
        self._server.layer(layer, stacks, size.begins)
        if self._probe is None and ram.size >= PROBED * size.n_bytes:
            self._probe = layer, size, ram
        begin = address(cache)
        return Helper(self._desk, self._own, layer, begin, begin + cache.size, LIMIT_S)

    @property
    def busy_ms(self) -> int:
        """Time in which the processor has computed experts so far."""
        return 0 if self._server is None else int(self._server.busy_ms)

    def waits(self) -> tuple[int, int]:
        """Requests of windows so far, and answers that the card waited for; waits for all queued work."""
        words = self._card.driver.fetch(self._own)
        return int(words[REQUESTS]), int(words[WAITS])

    def use(self, threads: int) -> None:
        """Requests from now on have so many threads, at most as many as were given."""
        if self._server is not None:
            self._server.use(min(threads, self._threads))

    @property
    def filed(self) -> tuple[int, int]:
        """Experts that windows have had the processor read in the file so far, and their bytes."""
        return (0, 0) if self._server is None else self._server.filed

    def start(self) -> None:
        """Windows may come."""
        if self._server is None:
            log("--pcie-frac: experts of float weights are computed on the card, which reads all that it misses")
            self.share = 1.0
            return
        self.set_share(self.share)
        if self.asks:
            self._words[AHEAD] = HEAD_START
            self._card.driver.upload(self._own[AHEAD : AHEAD + 1], self._words[AHEAD : AHEAD + 1])
        self._server.start()

    def close(self) -> None:
        """No window comes any more."""
        if self._server is not None:
            self._server.stop()

    def window_over(self) -> None:
        """A window is over, and the next one may be queued already. Raises DeviceError when an answer did not come in
        time: windows since then mean nothing."""
        self.check()
        if self._balance is None:
            return
        self._windows += 1
        if self._windows % LOOK_EVERY == 0:
            self._download()
            self._landed.record()
        elif self._windows % LOOK_EVERY == 1 and self._windows > 1:
            self._landed.wait()
            now = int(self._landing[REQUESTS]), int(self._landing[WAITS])
            came = [(new - old) % (1 << 32) for new, old in zip(now, self._seen, strict=True)]
            self._seen = now
            self._queue_share(self._balance.look(*came))

    def check(self) -> None:
        """Raises DeviceError when an answer did not come in time, of the windows that have ended so far."""
        if self._desk is not None and self._desk.failed is not None:
            remedy = "give it more time of its own, or use --pcie-frac 1"
            if self._filed:
                remedy = (
                    "some of them come from the file: a faster disk helps, or more of them in RAM (--resident-experts) "
                    "or VRAM"
                )
            raise DeviceError(
                f"the processor has not computed experts of layer {self._desk.failed} within {LIMIT_S:.0f} s; {remedy}"
            )

    def measured(self, spare: Array) -> None:
        """Choose the share by how fast both ways are now, with nothing else under way. spare: memory of the card."""
        if self._desk is None:
            return
        if self._probe is None:
            log("missing experts: too few of them lie in RAM to measure with, so the card reads half of those")
            return
        link, processor = self._link_rate(spare), self._processor_rate()
        self.set_share(link / (link + processor))
        self._balance = Balance(round(self.share * PARTS))
        log(
            f"missing experts: {link / 1e9:.1f} GB/s over PCIe, {processor / 1e9:.1f} GB/s by {self._threads} threads; "
            f"the card reads {self.share:.2f} of a window's at first, the processor computes the others"
        )

    def set_share(self, share: float) -> None:
        """Windows from now on have this share."""
        self._queue_share(round(share * PARTS))
        self.share = share
        self._card.driver.synchronize()

    def _queue_share(self, parts: int) -> None:
        """The same behind what is queued. What was queued here the last time is on the card."""
        if parts != self._words[SHARE]:
            self.share = parts / PARTS
            self._words[SHARE] = parts
            self._card.driver.upload(self._own[SHARE : SHARE + 1], self._words[SHARE : SHARE + 1])

    def _link_rate(self, spare: Array) -> float:
        """Bytes per second from page-locked RAM to the card."""
        if self._probe is None:
            raise RuntimeError("there are no experts in RAM to measure with")
        ram = self._probe[2]
        n = min(PROBE_BYTES, ram.size, spare.size)
        uploader, best = self._card.driver.uploader(), 0.0
        for _ in range(PROBES):
            begun = time.perf_counter()
            for _ in range(max(1, PROBE_BYTES // n)):
                uploader.upload(spare[:n], ram[:n])
            uploader.finish()
            best = max(best, max(1, PROBE_BYTES // n) * n / (time.perf_counter() - begun))
        return best

    def _processor_rate(self) -> float:
        """Bytes per second of experts of one row that the processor computes. The desk is free meanwhile."""
        if self._desk is None or self._probe is None:
            raise RuntimeError("there are no experts in RAM to measure with")
        layer, size, ram = self._probe
        words, before, best = self._desk.words, int(self._desk.words[ASKED]), 0.0
        self._desk.x[0] = 1.0
        places = ram.size // size.n_bytes
        words[[LAYER, PAIRS, USED]] = layer, PROBED, PROBED
        for number in (*range(1, 2 + PROBES), 0):  # the first one wakes the threads, the last one leaves all as it was
            others = (number * PROBED + np.arange(PROBED)) % places  # which no cache of the processor holds
            self._desk.at[:PROBED] = ram.ctypes.data + size.n_bytes * others
            begun = time.perf_counter()
            words[ASKED] = before - number
            while words[ANSWERED] != before - number:
                if time.perf_counter() - begun > LIMIT_S:
                    raise DeviceError(f"the processor has not computed {PROBED} experts within {LIMIT_S:.0f} s")
            if number > 1:
                best = max(best, PROBED * size.n_bytes / (time.perf_counter() - begun))
        return best

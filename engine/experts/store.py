"""The experts of a model on a card that does not hold them all.

An expert lies either in a slot of the expert cache or in page-locked RAM. Each layer has a table on the card with the
addresses of its experts' gate, up and down, wherever they are: windows and short prompts read missing experts in place
over PCIe, long prompts through the ring. The same kernels compute all of them, so where an expert lies never changes a
bit.

    store = ExpertStore(device, placement, ring_bytes=..., remedy=...)
    stacks = store.bind(layer, stacks)        # for every layer in order
    device.load() ... device.loaded(); store.loaded()

Units    bytes
Errors   DeviceError: memory of the card or RAM that is not there, with the flag that helps
Cost     RAM is locked at some 2 GB/s, said in the log; the bytes come with the other weights
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from strata.engine.device.arena import ALIGNMENT, GIB, Account
from strata.engine.device.driver import Array, Driver
from strata.engine.device.loading import Copy, flat
from strata.engine.experts.placement import Placement
from strata.engine.experts.ring import Banks, Ring, Round, pieces
from strata.engine.log import log
from strata.kernels.cuda.arguments import address
from strata.kernels.cuda.mixture import Bank, Placed, Tally
from strata.kernels.cuda.plans import WINDOW_ROWS
from strata.kernels.formats import Weight

STREAM_MIN: Final = 1024
"""Rows of a chunk from which all missing experts of a layer come through the ring; shorter ones read in place what they
route to."""
REPORT_S: Final = 5.0


class Card(Protocol):
    """What the store needs of a device."""

    driver: Driver
    account: Account

    def fixed(self, n_bytes: int) -> Array: ...
    def upload(self, target: Array, source: npt.NDArray[np.uint8]) -> None: ...
    def promise(self, copy: Copy) -> None: ...


class ExpertStore:
    """stream_min: rows from which a chunk reads missing experts through the ring."""

    def __init__(
        self, card: Card, placement: Placement, ring_bytes: int, remedy: str, stream_min: int = STREAM_MIN
    ) -> None:
        self.placement = placement
        self._card = card
        self._stream_min = stream_min
        self._cache = card.account.take(placement.cache_bytes, "the expert cache", remedy)
        self._ring = Ring(card.driver, card.account.take(ring_bytes, "the ring of streamed experts", remedy))
        card.driver.zero(self._cache)
        self.hits = card.fixed(4 * WINDOW_ROWS).view(np.int32)
        """Of the rows of the last window: picks that lay in the cache."""
        self._ram: list[npt.NDArray[np.uint8]] = []
        self._locking = 0.0
        self._reported = time.perf_counter()

    @property
    def rounds(self) -> int:
        """Rounds of a whole pass."""
        return len(self._ring)

    def bind(self, layer: int, stacks: Sequence[Weight]) -> tuple[Weight, ...]:
        """Gate, up and down of a layer, as they lie from now on: their bytes are promised to `load`."""
        size, missing = self.placement.sizes[layer], self.placement.missing(layer)
        ram = self._locked(layer)
        table = np.zeros((3, stacks[0].experts), np.uint64)
        for expert, begin in enumerate(self.placement.begins[layer].tolist()):
            if begin >= 0:
                self._promise(stacks, expert, size.begins, self._cache[begin : begin + size.n_bytes], host=False)
                table[:, expert] = [address(self._cache) + begin + part for part in size.begins]
        at_cache = table.copy()
        seen = address(self._card.driver.mapped(ram)) if missing else 0
        for begin, expert in zip(range(0, ram.size, size.n_bytes), missing, strict=True):
            self._promise(stacks, expert, size.begins, ram[begin : begin + size.n_bytes], host=True)
            table[:, expert] = [seen + begin + part for part in size.begins]
        rounds = self._ring.add(list(self._rounds(layer, stacks, at_cache, ram)))
        banks = self._banks(stacks, table)
        tally = Tally(self.hits, address(self._cache), address(self._cache) + self._cache.size, layer == 0)
        gate = replace(banks[0], rounds=partial(self._take, banks, rounds), tally=tally)
        return tuple(Placed(w.type, w.shape, w.data, bank) for w, bank in zip(stacks, (gate, *banks[1:]), strict=True))

    def loaded(self) -> None:
        """All bytes are there: what prompts have brought over before means nothing."""
        self._ring.forget()

    def _take(self, banks: Banks, rounds: range, rows: int) -> Iterable[Banks]:
        """The rounds of a prompt of so many rows in a layer."""
        return self._ring.take(rounds) if rounds and rows >= self._stream_min else (banks,)

    def _locked(self, layer: int) -> npt.NDArray[np.uint8]:
        """Page-locked RAM for the missing experts of a layer."""
        n, begun = self.placement.ram_bytes(layer), time.perf_counter()
        if not n:
            return np.empty(0, np.uint8)
        ram = self._card.driver.pinned(n + ALIGNMENT)  # kernels read whole lines
        self._ram.append(ram)
        now = time.perf_counter()
        self._locking += now - begun
        done, whole = sum(each.size for each in self._ram), self.placement.missing_bytes
        if now - self._reported >= REPORT_S or layer == len(self.placement.sizes) - 1:
            self._reported = now
            log(f"experts: {done / GIB:.1f} of {whole / GIB:.1f} GiB of RAM locked in {self._locking:.1f} s")
        return ram[:n]

    def _promise(self, stacks: Sequence[Weight], expert: int, begins: Sequence[int], target: Array, host: bool) -> None:
        """Promise the matrices of an expert to the bytes of its place."""
        for w, begin in zip(stacks, begins, strict=True):
            source = flat(w.data[expert])
            self._card.promise(Copy(source, target[begin : begin + source.size], host))

    def _rounds(
        self, layer: int, stacks: Sequence[Weight], at_cache: npt.NDArray[np.uint64], ram: npt.NDArray[Any]
    ) -> Iterable[Round]:
        """The rounds of a layer's missing experts; the first one has those of the cache as well."""
        size, missing = self.placement.sizes[layer], self.placement.missing(layer)
        first, table = 0, at_cache
        for i, experts in enumerate(pieces(missing, size.n_bytes, self._ring.room)):
            table = at_cache.copy() if i == 0 else np.zeros_like(at_cache)
            begin = address(self._ring.buffer_of(self.rounds + i))
            for expert in experts:
                table[:, expert] = [begin + part for part in size.begins]
                begin += size.n_bytes
            source = ram[first * size.n_bytes : (first + len(experts)) * size.n_bytes]
            yield Round(source, self._banks(stacks, table))
            first += len(experts)

    def _banks(self, stacks: Sequence[Weight], table: npt.NDArray[np.uint64]) -> Banks:
        """A table on the card, for gate, up and down."""
        there = self._card.fixed(table.nbytes)
        self._card.upload(there, flat(table))
        rows = there.view(np.uint64).reshape(table.shape)
        gate, up, down = (Bank(w.type, w.rows, w.cols, row) for w, row in zip(stacks, rows, strict=True))
        return gate, up, down

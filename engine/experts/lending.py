"""Slots of the expert cache that prompts have while they are read: the last ones, as many as their buffers take.

    lending = Lending(driver, store)
    lending.lend(n_bytes)      # before a chunk: the last bytes of the cache are the caller's
    lending.give_back()        # behind the last one: experts come back from their twins, beside what follows
    lending.settle()           # before a window: the slots are the experts' again

A lent expert has no slot meanwhile: tables name its twin in RAM, which windows and prompts read as they read any other
that VRAM does not hold. So nothing has to be saved, and no bit depends on it. No slot's address changes: graphs stay.

Order    tables and buffers change behind what is queued on the stream of the work; experts come back on a stream of
         their own, behind the last chunk. The next window waits for them, the next chunk as well
Units    bytes
Errors   none of its own
Cost     lending: the tables of the layers that lose a slot; coming back: the bytes of the slots over PCIe, once
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from strata.engine.device.arena import MIB
from strata.engine.device.driver import Driver
from strata.engine.experts.homes import NOT_LENT
from strata.engine.experts.store import ExpertStore


def _nothing() -> None:
    """There is nothing to end."""


class Lending:
    """before: ends swaps under way, which must not find a slot lent.

    slots        that are lent now · most: the most that ever were · of: all that there are
    reads        of prompts that have borrowed so far · refilled: bytes that have come back behind them · waited_ms: how
                 long something has waited for these
    """

    def __init__(self, driver: Driver, store: ExpertStore) -> None:
        self.before: Callable[[], None] = _nothing
        self._driver = driver
        self._store = store
        self._layers = range(len(store.placement.sizes))
        begins = store.placement.begins
        self._slots = np.sort(begins[begins >= 0])
        self.of = len(self._slots)
        self._copies = driver.uploader()
        self._queued, self._landed = driver.event(), self._copies.event()
        self._from = NOT_LENT
        self._returning = False
        self.slots = 0
        self.forget()

    def __str__(self) -> str:
        """For --stats."""
        back = f"{self.refilled / MIB:.0f} MiB came back, for which {self.waited_ms:.0f} ms were waited"
        return f"{self.reads} prompts have borrowed up to {self.most} of {self.of} slots; {back}"

    @property
    def lent(self) -> bool:
        """Whether slots are lent, or on their way back."""
        return self._from < NOT_LENT

    def lend(self, n_bytes: int) -> None:
        """The last n bytes of the cache are the caller's, behind what is queued, until `give_back`."""
        self.before()
        self.settle()
        self.reads += not self.lent
        begin = self._begin_of(n_bytes)
        if begin < self._from:
            self._set(begin)
        self._store.forget_streamed()

    def give_back(self) -> None:
        """Experts come back to the slots behind all that is queued."""
        if not self.lent or self._returning:
            return
        self._store.forget_streamed()
        self._queued.record()
        self._copies.wait_for(self._queued)
        for layer in self._layers:
            homes = self._store.homes(layer)
            for begin in homes.begins[homes.lent].tolist():
                twin = homes.twin(begin)
                if twin is None:
                    raise RuntimeError(f"the slot of layer {layer} at {begin} is lent and has no twin")
                self._copies.upload(self._store.slot(layer, begin), self._store.place(layer, twin))
                self.refilled += homes.size.n_bytes
        self._landed.record()
        self._returning = True

    def settle(self) -> None:
        """What comes back is there, and tables name the slots."""
        if not self._returning:
            return
        begun = time.perf_counter()
        self._landed.wait()
        self.waited_ms += 1e3 * (time.perf_counter() - begun)
        self._driver.wait_for(self._landed)
        self._returning = False
        self._set(NOT_LENT)

    def forget(self) -> None:
        """What was counted so far was no text."""
        self.most = self.reads = self.refilled = 0
        self.waited_ms = 0.0

    def check(self) -> None:
        """Raises RuntimeError unless every expert has one home, every slot one expert at most, and the lent ones are
        those from one on."""
        lent = 0
        for layer in self._layers:
            homes = self._store.homes(layer)
            begins = homes.begins[homes.begins >= 0]
            twins, n = range(len(homes.twins)), homes.n_places
            places = [*twins, *homes.places[homes.places >= 0].tolist(), *homes.free]
            one_home = ((homes.begins >= 0) ^ (homes.places >= 0)).all() and len(np.unique(begins)) == len(begins)
            if not one_home or sorted(places) != list(range(n)) or homes.lent_from != self._from:
                raise RuntimeError(f"the books of the experts of layer {layer} do not balance")
            lent += int(homes.lent.sum())
        if lent != self.slots or (self.slots > 0) != self.lent:
            raise RuntimeError(f"{lent} experts have lost their slot, {self.slots} slots are lent")

    def _begin_of(self, n_bytes: int) -> int:
        """Of the first slot that the last n bytes touch."""
        if n_bytes > self._store.placement.lendable:
            raise ValueError(f"{n_bytes} bytes of the cache are wanted, {self._store.placement.lendable} may be lent")
        edge = int(self._store.cache.size) - n_bytes
        return int(self._slots[np.searchsorted(self._slots, edge, "right") - 1])

    def _set(self, begin: int) -> None:
        """Slots from this one on are lent, no others."""
        self._store.changing()
        self._from, self.slots, changed = begin, 0, set()
        for layer in self._layers:
            homes = self._store.homes(layer)
            before, homes.lent_from = homes.lent, begin
            self.slots += int(homes.lent.sum())
            if (before != homes.lent).any():
                changed.add(layer)
        self.most = max(self.most, self.slots)
        self._store.moved(changed)

"""Swaps that hold no window up: bytes move on a stream of their own, while windows go on with the tables of before.

    fetch(swaps)   the experts that leave are copied to free places in RAM
    vacate()       tables name these places, so windows from now on read them there; the others are copied to the slots
    occupy()       tables name the slots; the places that are left are free

Who comes from the file is brought by the host in `vacate`, and what is dropped for it is in the file from `occupy` on.

Between any two steps there are windows or prompts, or none: the tables are right behind each. Nothing is polled: what a
step needs of the one before it waits for in the order of the streams, by then mostly in vain.

Cost     of a swap its bytes over PCIe, both ways, beside windows; three tables of a layer
"""

from __future__ import annotations

from collections.abc import Sequence

from strata.engine.device.driver import Driver
from strata.engine.experts.adapt import Swap
from strata.engine.experts.store import ExpertStore


class Exchange:
    """moving: swaps that have begun and not ended."""

    def __init__(self, driver: Driver, store: ExpertStore) -> None:
        self._driver = driver
        self._store = store
        self._copies = driver.uploader()
        self._landed = self._copies.event()
        self._queued = driver.event()
        self._slots: list[int] = []  # of the swaps under way, once they are empty
        self.moving: Sequence[Swap] = ()

    def step(self) -> None:
        """The next step of what moves."""
        if self.moving:
            (self.occupy if self._slots else self.vacate)()

    def finish(self) -> None:
        """All steps of what moves."""
        while self.moving:
            self.step()

    def fetch(self, swaps: Sequence[Swap]) -> None:
        """Begin these, of which a layer has as many as it has free places at most."""
        self.moving, taken = swaps, dict[int, int]()
        self._after_work()
        for each in swaps:
            homes = self._store.homes(each.layer)
            n = taken.get(each.layer, 0)
            taken[each.layer] = n + 1
            place = self._store.place(each.layer, homes.free[n])
            self._copies.download(place, self._store.slot(each.layer, int(homes.begins[each.leaves])))
        self._landed.record()

    def vacate(self) -> None:
        self._store.changing()
        self._driver.wait_for(self._landed)
        for each in self.moving:
            homes = self._store.homes(each.layer)
            self._slots.append(int(homes.begins[each.leaves]))
            homes.leave(each.leaves)
        self._store.moved({each.layer for each in self.moving})
        self._after_work()  # nobody reads the slots any more
        for each, begin in zip(self.moving, self._slots, strict=True):
            self._store.bring(self._copies, each.layer, each.gets, begin)
        self._landed.record()

    def occupy(self) -> None:
        self._store.changing()
        self._driver.wait_for(self._landed)
        for each, begin in zip(self.moving, self._slots, strict=True):
            homes = self._store.homes(each.layer)
            from_file = homes.in_file(int(homes.places[each.gets]))
            homes.enter(each.gets, begin)
            if from_file:
                homes.retreat(each.leaves if each.drops < 0 else each.drops)
        self._store.moved({each.layer for each in self.moving})
        self.moving, self._slots = (), []

    def _after_work(self) -> None:
        """Copies from now on come behind all that is queued on the stream of the work."""
        self._queued.record()
        self._copies.wait_for(self._queued)

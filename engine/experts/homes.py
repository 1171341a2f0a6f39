"""Where the experts of one layer lie at the moment, and the tables of addresses that say so. Pure.

An expert has a slot of the cache or a place among the layer's experts in RAM. A swap exchanges one of each. With spare
places it may go in two steps: one expert leaves its slot for a free place, another one enters the slot and leaves a
free place behind.

Units    bytes; a table is uint64 (3, experts): addresses of gate, up and down, 0 = not there
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from strata.engine.experts.placement import ExpertSize

I64 = npt.NDArray[np.int64]
Table = npt.NDArray[np.uint64]


@dataclass(slots=True, eq=False)
class Homes:
    """begins (experts,): of an expert's slot in the cache, -1: none · places (experts,): in RAM, -1: none · free:
    places that hold none."""

    size: ExpertSize
    begins: I64
    places: I64
    free: list[int]

    @classmethod
    def of(cls, size: ExpertSize, begins: I64, spare: int = 0) -> Homes:
        """Those without a slot lie in RAM in the order of their numbers, spare places behind them."""
        missing = begins < 0
        n = int(missing.sum())
        return cls(size, begins.copy(), np.where(missing, np.cumsum(missing) - 1, -1), list(range(n, n + spare)))

    @property
    def n_places(self) -> int:
        return int((self.places >= 0).sum()) + len(self.free)

    def leave(self, expert: int) -> int:
        """An expert of the cache takes the next free place; its slot is empty. -> the place."""
        if self.begins[expert] < 0 or not self.free:
            raise ValueError(f"expert {expert} must lie in the cache, and a place be free")
        self.begins[expert], self.places[expert] = -1, self.free.pop(0)
        return int(self.places[expert])

    def enter(self, expert: int, begin: int) -> None:
        """An expert in RAM takes an empty slot; its place is free."""
        if self.places[expert] < 0 or (self.begins == begin).any():
            raise ValueError(f"expert {expert} must lie in RAM, and the slot at {begin} be empty")
        self.free.append(int(self.places[expert]))
        self.begins[expert], self.places[expert] = begin, -1

    def swap(self, gets: int, leaves: int) -> tuple[int, int]:
        """An expert in RAM gets the slot of one in the cache, which takes its place. -> the slot's begin, place."""
        begin, place = int(self.begins[leaves]), int(self.places[gets])
        if begin < 0 or place < 0:
            raise ValueError(f"expert {gets} must lie in RAM and {leaves} in the cache")
        self.begins[[gets, leaves]] = begin, -1
        self.places[[gets, leaves]] = -1, place
        return begin, place

    def table(self, cache: int, ram: int) -> Table:
        """The addresses of all experts, with cache and RAM at these."""
        at = np.where(self.begins >= 0, cache + self.begins, ram + self.places * self.size.n_bytes)
        return self._parts(at, np.ones_like(at, bool))

    def round_table(self, cache: int, buffer: int, first: int, n: int) -> Table:
        """The same for n places from the first one on, copied to a buffer; with the experts of the cache if these are
        the first of all."""
        here = (self.places >= first) & (self.places < first + n)
        at = np.where(here, buffer + (self.places - first) * self.size.n_bytes, cache + self.begins)
        return self._parts(at, here | ((self.begins >= 0) & (first == 0)))

    def _parts(self, at: I64, there: npt.NDArray[np.bool_]) -> Table:
        parts = at + np.array(self.size.begins)[:, None]
        return np.where(there, parts, 0).astype(np.uint64)

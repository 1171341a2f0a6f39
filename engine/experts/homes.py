"""Where the experts of one layer lie at the moment, and the tables of addresses that say so. Pure.

An expert has a slot of the cache or a place. The first `locked` places are in RAM that the card reads. Those behind
them are in the file: there every expert lies anyway, so such a place has no bytes, and only says that its expert is
nowhere else. A swap exchanges a slot and a place. With spare places it may go in two steps: one expert leaves its slot
for a free place, another one enters the slot and leaves a free place behind.

A slot that prompts may borrow has a *twin*: a place in RAM, before all others, with the same bytes. While it is lent
its expert is read there.

Units    bytes; a table is uint64 (3, experts): addresses of gate, up and down, 0 = not there
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from strata.engine.experts.placement import ExpertSize
from strata.kernels.desk import IN_FILE

I64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Table = npt.NDArray[np.uint64]
NOT_LENT: Final = 1 << 62
"""Where lent slots begin while none is."""


def _no_twins() -> I64:
    return np.empty(0, np.int64)


@dataclass(slots=True, eq=False)
class Homes:
    """begins (experts,): of an expert's slot in the cache, -1: none · places (experts,): its place, -1: none · locked:
    places in RAM · free: places that hold none · twins (m,): begins of the slots that have twins, ascending, which are
    the first places · lent_from: slots that begin there or behind it are lent."""

    size: ExpertSize
    begins: I64
    places: I64
    locked: int
    free: list[int]
    twins: I64 = field(default_factory=_no_twins)
    lent_from: int = NOT_LENT

    @classmethod
    def of(
        cls, size: ExpertSize, begins: I64, spare: int = 0, in_ram: Mask | None = None, twins: Sequence[int] = ()
    ) -> Homes:
        """Those without a slot lie in RAM in the order of their numbers, behind the twins; then spare places, and the
        others in places of the file. in_ram (experts,): None = all that have no slot."""
        missing = begins < 0
        held = missing if in_ram is None else missing & in_ram
        end, filed = len(twins) + int(held.sum()), missing & ~held
        places = np.full(len(begins), -1, np.int64)
        places[held] = np.arange(len(twins), end)
        places[filed] = end + spare + np.arange(int(filed.sum()))
        free = list(range(end, end + spare))
        return cls(size, begins.copy(), places, end + spare, free, np.array(twins, np.int64))

    @property
    def n_places(self) -> int:
        return len(self.twins) + int((self.places >= 0).sum()) + len(self.free)

    @property
    def lent(self) -> Mask:
        """Experts whose slots are lent, (experts,)."""
        return self.begins >= self.lent_from

    def twin(self, begin: int) -> int | None:
        """The place of a slot's twin; None: it has none."""
        at = int(np.searchsorted(self.twins, begin))
        return at if at < len(self.twins) and self.twins[at] == begin else None

    def _read_at(self) -> I64:
        """The places where experts are read, -1: in their slots."""
        places, lent = self.places.copy(), self.lent
        places[lent] = np.searchsorted(self.twins, self.begins[lent])
        return places

    @property
    def in_ram(self) -> Mask:
        """Experts that lie in RAM, (experts,)."""
        return (self.places >= 0) & (self.places < self.locked)

    def in_file(self, place: int) -> bool:
        """Whether a place has no bytes."""
        return place >= self.locked

    def within(self, first: int, n: int) -> list[tuple[int, int]]:
        """(place, expert) of those with one of n places from the first one on."""
        found = np.flatnonzero((self.places >= first) & (self.places < first + n)).tolist()
        return [(int(self.places[expert]), expert) for expert in found]

    def leave(self, expert: int) -> int:
        """An expert of the cache takes the next free place; its slot is empty. -> the place."""
        if self.begins[expert] < 0 or not self.free:
            raise ValueError(f"expert {expert} must lie in the cache, and a place be free")
        self.begins[expert], self.places[expert] = -1, self.free.pop(0)
        return int(self.places[expert])

    def enter(self, expert: int, begin: int) -> None:
        """An expert that has a place takes an empty slot; its place is free."""
        if self.places[expert] < 0 or (self.begins == begin).any():
            raise ValueError(f"expert {expert} must have a place, and the slot at {begin} be empty")
        self.free.append(int(self.places[expert]))
        self.begins[expert], self.places[expert] = begin, -1

    def retreat(self, expert: int) -> None:
        """An expert in RAM takes a free place of the file; its own one is free."""
        place = int(self.places[expert])
        found = next((i for i, free in enumerate(self.free) if self.in_file(free)), None)
        if place < 0 or self.in_file(place) or found is None:
            raise ValueError(f"expert {expert} must lie in RAM, and a place of the file be free")
        self.places[expert], self.free[found] = self.free[found], place

    def swap(self, gets: int, leaves: int) -> tuple[int, int]:
        """An expert that has a place gets the slot of one in the cache, which takes its place. -> the slot's begin, the
        place."""
        begin, place = int(self.begins[leaves]), int(self.places[gets])
        if begin < 0 or place < 0:
            raise ValueError(f"expert {gets} must have a place and {leaves} lie in the cache")
        self.begins[[gets, leaves]] = begin, -1
        self.places[[gets, leaves]] = -1, place
        return begin, place

    def trade(self, one: int, other: int) -> None:
        """Two experts exchange their places."""
        if min(self.places[one], self.places[other]) < 0:
            raise ValueError(f"experts {one} and {other} must have places")
        self.places[[one, other]] = self.places[[other, one]]

    def table(self, cache: int, ram: int, card: bool) -> Table:
        """The addresses of all experts, with cache and RAM at these. Those in the file are IN_FILE and their number;
        for what the `card` alone computes they are not there."""
        places = self._read_at()
        at = np.where(places < 0, cache + self.begins, ram + places * self.size.n_bytes)
        filed = places >= self.locked
        table = self._parts(at, ~filed)
        if not card:
            table[:, filed] = np.uint64(IN_FILE) + np.flatnonzero(filed).astype(np.uint64)
        return table

    def round_table(self, cache: int, buffer: int, first: int, n: int, with_cache: bool) -> Table:
        """Of those with one of n places from the first one on, copied to a buffer; `with_cache`: and of the cache's."""
        places = self._read_at()
        here = (places >= first) & (places < first + n)
        at = np.where(here, buffer + (places - first) * self.size.n_bytes, cache + self.begins)
        return self._parts(at, here | ((places < 0) & with_cache))

    def _parts(self, at: I64, there: Mask) -> Table:
        parts = at + np.array(self.size.begins)[:, None]
        return np.where(there, parts, 0).astype(np.uint64)

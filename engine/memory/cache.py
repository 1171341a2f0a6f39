"""The expert cache: how many bytes it gets, and how they become slots.

A slot holds one (layer, expert). Slots lie one behind the other, hottest first, so the last ones are one piece of
memory that a prompt may borrow. An expert goes into any slot that is at least as large.

Units    bytes
Errors   none: what does not fit is a smaller cache
Cost     a walk over the pairs, at most some ten thousand
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from strata.engine.device.arena import GIB, MIB, padded

DEFAULT_RESERVE: Final = 700 * MIB
LEAST_RESERVE: Final = 300 * MIB
"""How low a reserve that nobody asked for may go."""
BORROW_CHUNK: Final = 256
"""The shortest prompt chunk that is borrowed for."""
KEPT_SLOTS: Final = 128
"""Slots that are never lent."""
AFTER_FILL_SLACK: Final = 64 * MIB
AFTER_FILL_TRIES: Final = 6
REFUSAL_TRIES: Final = 8
"""Sizes that are asked for, each three quarters of the one before."""
NOTHING_FREE: Final = 16 * MIB


@dataclass(frozen=True, slots=True)
class Room:
    """What the cache may come from.

    free            bytes free before it is taken
    reserve         bytes that stay free; `given`: asked for, and so never lowered
    owned           buffers that the prompt path will allocate for itself, 0 when it borrows
    later           what is still taken when drafts and pipelines are bound
    """

    free: int
    reserve: int = DEFAULT_RESERVE
    given: bool = False
    owned: int = 0
    later: int = 0

    @property
    def left(self) -> int:
        """What the cache may take, never below 0."""
        return max(0, self.free - self.reserve - self.owned - self.later)


@dataclass(frozen=True, slots=True)
class CacheBudget:
    """Bytes of the cache, and the reserve that is kept beside it."""

    n_bytes: int
    reserve: int


def auto_budget(room: Room, largest: int, pairs: int, need: int) -> CacheBudget:
    """All that is left, in whole largest experts. With fewer than `need` of them a reserve that nobody asked for is
    lowered, to no less than LEAST_RESERVE, when that makes `need` fit."""
    slots = min(room.left // largest, pairs)
    if slots < need and not room.given:
        lowered = (room.free - room.owned - room.later - need * largest) // MIB * MIB
        if LEAST_RESERVE <= lowered < room.reserve:
            return CacheBudget(need * largest, lowered)
    return CacheBudget(slots * largest, room.reserve)


def given_budget(n: int, room: Room, largest: int) -> CacheBudget:
    """`--expert-cache N`: the bytes of N largest experts, as far as they are left."""
    return CacheBudget(min(n * largest, room.left), room.reserve)


def borrowing_need(smallest: int, largest: int) -> int:
    """Slots with which a prompt can borrow: `smallest` bytes of a chunk of BORROW_CHUNK, and those that stay."""
    return -(-smallest // largest) + KEPT_SLOTS


class Slots:
    """Slot sizes, hottest first, and what the last of them hold together."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        self._from_end = list(accumulate(reversed(self.sizes), initial=0))

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def n_bytes(self) -> int:
        return self._from_end[-1]

    def tail_bytes(self, n: int) -> int:
        """Bytes of the last n slots."""
        return self._from_end[n]

    def lent_for(self, n_bytes: int) -> int | None:
        """The fewest slots from the end that hold so many bytes; None when all together do not."""
        n = bisect_left(self._from_end, n_bytes)
        return n if n <= len(self.sizes) else None


def sized_slots(experts: Iterable[int], budget: int) -> Slots:
    """A slot for each expert, hottest first, as long as their bytes fit the budget."""
    sizes, left = [], budget
    for size in map(padded, experts):
        if size > left:
            break
        left -= size
        sizes.append(size)
    return Slots(sizes)


def equal_slots(largest: int, pairs: int, budget: int) -> Slots:
    """Slots that hold any expert: for a cache that is filled by use."""
    size = padded(largest)
    return Slots([size] * min(pairs, budget // size))


def shrink_after_fill(free: int, wanted: int, cache: int, tries: int) -> int:
    """Bytes to give back when filling the cache has shown what is really free; 0: enough is.

    wanted: the reserve and what is taken behind the cache · tries: how often it was shrunk already. Where next to
    nothing is free the driver has begun to page: then much goes at once.
    """
    if tries >= AFTER_FILL_TRIES or free >= wanted - AFTER_FILL_SLACK:
        return 0
    surplus = wanted - free + AFTER_FILL_SLACK
    if free < NOTHING_FREE:
        surplus = max(surplus, GIB if tries < 2 else cache // 4)
    return min(surplus, cache)


def after_refusal(n_bytes: int, largest: int) -> int:
    """What to ask for when the driver did not give a cache of so many bytes: three quarters, in whole largest slots; 0:
    nothing, not even one of them."""
    return n_bytes * 3 // 4 // largest * largest

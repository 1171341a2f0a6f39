"""The head alias as it was first published: the head is exchanged for prompt buffers, slots are lent as well. Pure.

Nothing runs by it. It is what explains the published figures of an 8 GB card (749 slots, 748 of them lent, chunks of
2,048), so that the planners below it can be held against them. What is built lends the head in place (loan.py).

exchange   the cache is sized with the head's bytes counted as free, so it has more slots; while a prompt is read the
           head is gone, and it comes back into the reserve before the first window
in place   the reserve is smaller than the head, which could then not come back: the head keeps its memory, prompt
           buffers lie in it during a read, and its weights are copied in again
hybrid     as many slots as may be lent, and an allocation for the rest

Units    bytes, tokens
Errors   none: chunk 0 = no candidate fits
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from strata.engine.memory.cache import Room, Slots
from strata.engine.memory.card import CardRoom
from strata.engine.memory.prompt import KEPT_FREE, Price, PromptLayout

CANDIDATES: Final = (2048, 1536, 1024, 512)
KEPT_SLOTS: Final = 1
"""Slots that are not lent: the first."""
TRIAL_TRIES: Final = 6


@dataclass(frozen=True, slots=True, eq=False)
class PublishedPlan:
    """free: bytes left while tokens are generated · free_reading: while a prompt is read."""

    slots: Slots
    layout: PromptLayout
    exchanged: bool
    free: int
    free_reading: int


def plan_published(room: CardRoom, head: int) -> PublishedPlan:
    """The cache and the prompt path with a head of so many bytes."""
    exchange = exchanges(head, room.reserve)
    free = room.free + (head if exchange else 0)
    slots = room.slots(room.budget(Room(free, room.reserve, room.given), 1).n_bytes)
    for _ in range(TRIAL_TRIES if exchange else 0):
        missing = trial_shrink(head, free - slots.n_bytes, room.largest)
        if not missing:
            break
        slots = Slots(slots.sizes[: max(0, len(slots) - missing)])
    comes_back = not exchange or free - slots.n_bytes >= head
    most = min(room.prefill or room.most, room.most) if comes_back else 0
    layout = alias_layout(slots, free - slots.n_bytes, head, room.streamed, most, exchange)
    reading = free - slots.n_bytes - layout.own_bytes
    return PublishedPlan(slots, layout, exchange, room.free - slots.n_bytes, reading)


def exchanges(head: int, reserve: int) -> bool:
    """Whether the head can come back into the reserve."""
    return reserve >= head


def alias_layout(slots: Slots, free: int, head: int, price: Price, most: int, exchange: bool) -> PromptLayout:
    """The prompt's buffers while a prompt is read. free: beside the cache, with the head gone when it is exchanged.
    chunk 0: no candidate fits, and the head stays."""
    return hybrid(slots, KEPT_SLOTS, free, price, CANDIDATES, most, 0 if exchange else head)


def trial_shrink(head: int, free: int, largest: int) -> int:
    """Slots to give up so that the head comes back into what is free, 0 when it does."""
    return max(0, -(-(head - free) // largest))


def hybrid(
    slots: Slots, kept: int, free: int, price: Price, candidates: Sequence[int], most: int, head: int = 0
) -> PromptLayout:
    """The longest candidate in all slots but the first `kept`, `head` bytes of the head's memory, and an allocation
    that leaves KEPT_FREE; the head's memory is taken first, then slots from the end, then the allocation."""
    lendable = max(0, len(slots) - kept)
    most_lent = slots.tail_bytes(lendable)
    room = most_lent + head + max(0, free - KEPT_FREE)
    chunk = next((c for c in candidates if c <= most and price(c) <= room), 0)
    if not chunk:
        return PromptLayout("hybrid", 0)
    rest = max(0, price(chunk) - head)
    if rest > most_lent:
        return PromptLayout("hybrid", chunk, lendable, most_lent, rest - most_lent, head)
    lent = slots.lent_for(rest) or 0
    return PromptLayout("hybrid", chunk, lent, slots.tail_bytes(lent), 0, head)

"""What is left of a card becomes expert slots and a way to read prompts.

The order of preference is that of MEMORY 6.5 (the head alias is loan.py's): own buffers from what is spare, borrowed
slots, own buffers that step down. Memory is never promised twice: slots, own buffers and reserve fit what is free.

Units    bytes, tokens
Errors   none: chunk 0 = no prompt can be read, which is the caller's to refuse
Cost     a walk over the experts for each way that is tried
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Literal

from strata.engine.device.arena import MIB, padded, shown
from strata.engine.memory.cache import (
    BORROW_CHUNK,
    CacheBudget,
    Room,
    Slots,
    auto_budget,
    borrowing_need,
    equal_slots,
    given_budget,
    sized_slots,
)
from strata.engine.memory.prompt import (
    KEPT_FREE,
    OWN_AUTO,
    OWN_CANDIDATES,
    OWN_NOTHING_FITS,
    PromptLayout,
    borrowed,
    own_chunk,
    own_layout,
    stepped_down,
)

RING: Final = 64
"""Experts of the double buffer through which a prompt streams those that VRAM does not hold, both halves together."""
STREAM_MIN: Final = 1024
"""Rows of a chunk from which all missing experts of a layer come through that buffer; shorter ones read in place what
they route to."""
OWN_SLACK: Final = 64 * MIB
STAGED: Final = 80
"""Experts that windows bring to the card before their products: eight rows of ten."""
STAGED_PART: Final = 32
"""Of the memory that is left, the part that these may take: its slots would hold few picks more."""

Way = Literal["head alias", "own from spare memory", "borrowed", "own, stepped down", "own"]
Alias = Literal["off", "in place"]


@dataclass(frozen=True, slots=True, eq=False)
class CardRoom:
    """What is left of a card, and what was asked for.

    free            bytes, with weights, head, drafts, state and decode windows already taken
    reserve, given  bytes that stay free, and whether somebody asked for them
    experts         bytes of every expert, hottest first as far as an order is `known`
    cache           `--expert-cache`, 0 = auto · prefill: `--prefill`, 0 = auto · most: the longest chunk there may be
    price           of a chunk's workspace
    borrow, own     whether slots may be lent, and whether own buffers may be taken from what is spare
    pct             of the slots that auto may lend
    lent            bytes of a chunk's buffers in lent slots; None: those that it has anywhere
    windows         that windows and short reads take beside slots which prompts borrow
    ring_experts    of the double buffer, 0 = RING
    """

    free: int
    reserve: int
    given: bool
    experts: tuple[int, ...]
    per_layer: int
    known: bool
    cache: int
    prefill: int
    most: int
    price: Callable[[int], int]
    borrow: bool = True
    own: bool = True
    pct: int = 85
    lent: Callable[[int], int] | None = None
    windows: int = 0
    ring_experts: int = 0

    @property
    def largest(self) -> int:
        return padded(max(self.experts))

    @property
    def every(self) -> int:
        """Bytes of slots for all experts, which have few different sizes."""
        return sum(n * padded(size) for size, n in Counter(self.experts).items())

    @property
    def ring(self) -> int:
        return min(self.ring_experts or RING, 2 * self.per_layer) * self.largest

    @property
    def least_chunk(self) -> int:
        return min(BORROW_CHUNK, self.most)

    def streamed(self, chunk: int) -> int:
        """Workspace and double buffer: where some expert is not in VRAM while a prompt is read."""
        return self.price(chunk) + self.ring

    def budget(self, room: Room, need: int) -> CacheBudget:
        if self.cache:
            return given_budget(self.cache, room, self.largest)
        return auto_budget(room, self.largest, len(self.experts), need)

    def slots(self, budget: int) -> Slots:
        """Slots in a budget: just as large as their experts where the order is known, else each as the largest."""
        if self.known:
            return sized_slots(self.experts, budget)
        return equal_slots(self.largest, len(self.experts), budget)


@dataclass(frozen=True, slots=True, eq=False)
class CardPlan:
    """slots and the budget that they came from · the reserve in force · the prompt's buffers and who chose them.

    free      bytes that stay free
    windows   bytes that windows and short reads take more, beside what prompts borrow
    ring      bytes of the prompt's buffers that hold streamed experts
    """

    slots: Slots
    budget: int
    reserve: int
    layout: PromptLayout
    way: Way
    alias: Alias
    free: int
    said: tuple[str, ...] = ()
    windows: int = 0
    ring: int = 0


def staged(free: int, largest: int, per_layer: int) -> int:
    """Bytes that windows bring experts to, beside the cache, where some do not lie there; free: left for both."""
    return max(0, min(STAGED, per_layer, free // (STAGED_PART * largest))) * largest


def plan_card(room: CardRoom) -> CardPlan:
    """The cache and the prompt path."""
    room = replace(room, known=room.known or room.every + room.reserve <= room.free)
    return _borrowing(room) or _owning(room)


def _borrowing(room: CardRoom) -> CardPlan | None:
    """Slots are lent, or own buffers are as good; None when neither gives a chunk."""
    if not (room.borrow and room.known and room.most):
        return None
    lent = room.lent or room.streamed
    need = borrowing_need(lent(room.least_chunk), room.largest)
    free = room.free - room.windows
    budget = room.budget(Room(free, room.reserve, room.given), need)
    slots = room.slots(budget.n_bytes)
    layout = borrowed(slots, lent, room.prefill, room.most, room.pct)
    left = free - slots.n_bytes
    whole = len(slots) == len(room.experts)
    price = room.price if whole else room.streamed
    most = min(room.prefill or room.most, room.most)
    chunks = (most,) if whole and most < OWN_CANDIDATES[-1] else OWN_CANDIDATES
    own = own_chunk(left + room.windows, budget.reserve, most, layout.chunk, price, chunks) if room.own else 0
    said = _lowered(room, budget)
    if own:
        chosen = own_layout(own, price)
        left += room.windows - chosen.own_bytes
        return CardPlan(slots, budget.n_bytes, budget.reserve, chosen, "own from spare memory", "off", left, said)
    if not layout.chunk:
        return None
    return CardPlan(slots, budget.n_bytes, budget.reserve, layout, "borrowed", "off", left, said, room.windows)


def _owning(room: CardRoom) -> CardPlan:
    """Buffers of their own, before the cache is sized."""
    tried = room.borrow and room.known and room.every + room.reserve > room.free
    chunk = min(room.prefill or (OWN_NOTHING_FITS if tried else OWN_AUTO), room.most)
    slack = max(OWN_SLACK, KEPT_FREE - room.reserve)
    whole = not room.cache and room.every + room.price(chunk) + slack + room.reserve <= room.free
    price = room.price if whole else room.streamed
    budget = room.budget(Room(room.free, room.reserve, room.given, price(chunk) + slack), 1)
    slots = room.slots(budget.n_bytes)
    layout = stepped_down(chunk, room.free - slots.n_bytes, price)
    if not layout.chunk and len(slots):  # a prompt comes before a cache
        slots = Slots(())
        layout = stepped_down(chunk, room.free, price)
    left = room.free - slots.n_bytes - layout.own_bytes
    said = _lowered(room, budget)
    return CardPlan(slots, budget.n_bytes, budget.reserve, layout, "own, stepped down", "off", left, said)


def _lowered(room: CardRoom, budget: CacheBudget) -> tuple[str, ...]:
    if budget.reserve == room.reserve:
        return ()
    return (f"reserve: lowered from {shown(room.reserve)} to {shown(budget.reserve)}, so that a prompt can be read",)

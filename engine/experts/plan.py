"""What of a card's memory becomes expert slots, ring and prompt chunk, for a model that does not fit whole. Pure.

The amounts are the memory planner's (engine/memory/card.py, without borrowing). What is spare behind a given cache
makes chunks longer and the ring larger, up to a layer a buffer.

Units    bytes, tokens
Errors   DoesNotFit in one line with the limit and the remedy
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from strata.engine.device.arena import shown
from strata.engine.experts.placement import (
    ExpertSize,
    Pair,
    Placement,
    by_number,
    missing_order,
    place,
    with_copies,
)
from strata.engine.experts.ring import BUFFERS, ring_bytes
from strata.engine.memory.cache import DEFAULT_RESERVE
from strata.engine.memory.card import CardPlan, CardRoom, plan_card, staged
from strata.engine.memory.figures import DoesNotFit
from strata.engine.memory.homes import homes_in, said_of
from strata.engine.memory.prompt import KEPT_FREE
from strata.engine.memory.ram import ExpertSource

CHUNKS: Final = (8192, 6144, 4096, 2048, 1024, 512, 256, 128, 64, 32)
"""Prompt chunks that are tried below the planned one."""


ARENA: Final = ExpertSource()


@dataclass(frozen=True, slots=True)
class Asked:
    """cache: `--expert-cache`, 0 = auto · order: of a profile, hottest first, None = by number · reserve, given: bytes
    that stay free, and whether somebody asked for them · prefill: `--prefill`, 0 = auto · ring: its experts at most,
    0 = as many as there is room for · pcie: of those that windows miss, the share that the card reads, None = measured
    · threads: of the processor, which computes the others · spare: free places of a layer in RAM, for swaps that hold
    no window up · source: where those come from that VRAM lacks."""

    cache: int = 0
    order: tuple[Pair, ...] | None = None
    reserve: int = DEFAULT_RESERVE
    given: bool = False
    prefill: int = 0
    ring: int = 0
    pcie: float | None = 1.0
    threads: int = 1
    spare: int = 0
    source: ExpertSource = ARENA


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """sizes: of each layer's experts · experts: of a layer · price: bytes of a chunk's workspace · most: tokens of a
    chunk at most · floats: whether experts have float weights, which only a card computes beside one."""

    sizes: tuple[ExpertSize, ...]
    experts: int
    price: Callable[[int], int]
    most: int
    floats: bool = False

    @property
    def largest(self) -> int:
        return max(size.n_bytes for size in self.sizes)


@dataclass(frozen=True, slots=True, eq=False)
class TierPlan:
    """staged_bytes: memory that windows bring experts to · chunks: to try, longest first · reserve: what stays free ·
    said: lines for the log."""

    placement: Placement
    ring_bytes: int
    staged_bytes: int
    chunks: tuple[int, ...]
    reserve: int
    said: tuple[str, ...]


def plan_tiers(free: int, asked: Asked, model: Model, ram: int) -> TierPlan:
    """In so many bytes, which all else has left. ram: bytes of RAM, which all else there has left."""
    order = asked.order if asked.order is not None else by_number(len(model.sizes), model.experts)
    staging = staged(free, model.largest, model.experts)
    room = CardRoom(
        free=free - staging,
        head=0,
        reserve=asked.reserve,
        given=asked.given,
        experts=tuple(model.sizes[layer].n_bytes for layer, _ in order),
        per_layer=model.experts,
        known=asked.order is not None,
        cache=asked.cache,
        prefill=asked.prefill,
        most=model.most,
        price=model.price,
        borrow=False,
    )
    plan = plan_card(room)
    least = min(CHUNKS[-1], model.most)
    if not plan.layout.chunk:
        raise DoesNotFit(
            f"no prompt can be read: {shown(max(0, free))} are left beside weights and state, a chunk of {least} and "
            f"its experts take {shown(room.streamed(least))} beside {shown(KEPT_FREE)} that stay free; use a "
            "smaller --max-context, another --kv or a smaller file"
        )
    chunk, spare = _chunk(asked, model, plan, room.ring)
    ring = min(room.ring + spare, ring_bytes(asked.ring or BUFFERS * model.experts, model.largest))
    slotted = place(model.sizes, model.experts, plan.slots.sizes, order, asked.spare)
    placement, said_of_ram = _copied(asked, model, slotted, order, ram)
    how = f"given {asked.cache}" if asked.cache else "auto"
    by = "numbers" if asked.order is None else f"a profile of {len(order)} pairs"
    said = (
        *plan.said,
        f"expert cache, {how}: {shown(free)} free, {shown(plan.reserve)} of them stay so; {placement.in_cache} of "
        f"{placement.pairs} experts, by {by}, in {shown(placement.cache_bytes)}",
        *said_of_ram,
        f"prompts: chunks of {chunk} in {shown(model.price(chunk))}, experts through a ring of {shown(ring)}",
    )
    return TierPlan(placement, ring, staging, (chunk, *(c for c in CHUNKS if c < chunk)), plan.reserve, said)


def _copied(
    asked: Asked, model: Model, placement: Placement, order: Iterable[Pair], ram: int
) -> tuple[Placement, tuple[str, ...]]:
    """Which of the others lie in so much RAM; lines for the log."""
    missing = missing_order(placement, order)
    left = ram - placement.spare_bytes
    homes = homes_in(asked.source, [model.sizes[layer].n_bytes for layer, _ in missing], (), left)
    found = with_copies(placement, missing[: homes.copies])
    if model.floats and homes.mapped_bytes:
        raise DoesNotFit(
            f"experts of float weights are computed on the card only, and {shown(homes.missing_bytes)} of them do not "
            f"fit {shown(max(0, left))} of RAM with {shown(asked.source.kept)} kept free; use a larger --expert-cache, "
            "a quantised file, or leave out --mmap-experts"
        )
    said = (
        f"experts that VRAM lacks: {homes.copies} in {shown(found.locked_bytes)} of page-locked RAM, of which "
        f"{shown(max(0, ram))} are there and {shown(asked.source.kept)} stay free"
    )
    if homes.mapped_bytes:
        said += f", {len(missing) - homes.copies} in {shown(homes.mapped_bytes)} of the mapped file"
    why = said_of(asked.source, homes, left)
    return found, (said,) if why is None else (why, said)


def _chunk(asked: Asked, model: Model, plan: CardPlan, ring: int) -> tuple[int, int]:
    """The longest chunk in what was planned for one and, of a given cache, what is spare; what is spare behind it."""
    planned = plan.layout.chunk
    spare = max(0, plan.free - plan.reserve) if asked.cache else 0
    bytes_for = model.price(planned) + spare
    longer = [c for c in CHUNKS if planned < c <= model.most and not asked.prefill and model.price(c) <= bytes_for]
    chunk = longer[0] if longer else planned
    return chunk, max(0, bytes_for - model.price(chunk))

"""What of a card's memory becomes expert slots, ring and prompt chunk, for a model that does not fit whole. Pure.

The amounts are the memory planner's (engine/memory/card.py). Where a prompt has buffers of its own, what is spare
behind a given cache makes chunks longer and the ring larger, up to a layer a buffer. Where it borrows slots, windows
and short reads have memory of their own, and the slots that may be lent have twins in RAM.

Units    bytes, tokens
Errors   DoesNotFit in one line with the limit and the remedy
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from strata.engine.device.arena import shown
from strata.engine.experts.placement import (
    ExpertSize,
    Pair,
    Placement,
    by_number,
    bytes_of,
    missing_order,
    place,
    with_copies,
)
from strata.engine.experts.ring import BUFFERS, ring_bytes
from strata.engine.memory.borrow import STAYS, BorrowPlan, Buffers, Windowed, own_bytes
from strata.engine.memory.cache import DEFAULT_RESERVE
from strata.engine.memory.card import RING, STREAM_MIN, CardPlan, CardRoom, plan_card, staged
from strata.engine.memory.figures import DoesNotFit, Switches
from strata.engine.memory.homes import homes_in, reserve_of, said_of, source_of
from strata.engine.memory.loan import steps
from strata.engine.memory.prompt import KEPT_FREE, LEND_PCT_PINNED, lend_pct
from strata.engine.memory.ram import ExpertSource
from strata.engine.options import Options

CHUNKS: Final = (8192, 6144, 4096, 2048, 1024, 512, 256, 128, 64, 32)
"""Prompt chunks that are tried below the planned one."""


FEW_PART: Final = 100
"""Fewer experts in VRAM than this part of all, by number and not by use, are none where prompts have the head's memory:
a window finds hardly one of them there, and what they take makes chunks longer."""
IN_PLACE: Final = 2
"""Tables of a layer before those of its rounds."""
MATRICES, ADDRESS = 3, 8
"""Of an expert; bytes of an address."""
ARENA: Final = ExpertSource()


@dataclass(frozen=True, slots=True)
class Asked:
    """cache: `--expert-cache`, 0 = auto · order: of a profile, hottest first, None = by number · reserve, given: bytes
    that stay free, and whether somebody asked for them · free: share of what is left that does so as well · prefill:
    `--prefill`, 0 = auto · ring: its experts, 0 = 64 and as many more as there is room for · stream_min: rows of a
    chunk from which it streams, 0 = as the model's · pcie: of those that windows miss, the share that the card reads,
    None = measured · threads: of the processor, which computes the others · spare: free places of a layer in RAM, for
    swaps that hold no window up · source: where those come from that VRAM lacks · borrow: whether prompts may borrow
    slots · own: whether they may have buffers of what is spare instead · pct: of the slots that auto may lend · alias:
    whether prompts may have the output head's memory."""

    cache: int = 0
    order: tuple[Pair, ...] | None = None
    reserve: int = DEFAULT_RESERVE
    given: bool = False
    free: float = 0.0
    prefill: int = 0
    ring: int = 0
    stream_min: int = 0
    pcie: float | None = 1.0
    threads: int = 1
    spare: int = 0
    source: ExpertSource = ARENA
    borrow: bool = False
    own: bool = True
    pct: int = LEND_PCT_PINNED
    alias: bool = False


def asked_of(options: Options, switches: Switches, order: tuple[Pair, ...] | None) -> Asked:
    """What a command line wants of experts that may not all fit VRAM. order: of its profile."""
    return Asked(
        options.expert_cache,
        order,
        *reserve_of(options),
        switches.free,
        min(options.prefill, options.max_context),
        switches.ring,
        switches.stream_min,
        pcie=options.pcie_share,
        threads=options.helping_threads,
        spare=options.spare_places,
        source=source_of(options, switches),
        borrow=not options.no_prefill_borrow,
        own=switches.own,
        pct=lend_pct(switches.lend_pct, 1.0),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """sizes: of each layer's experts · experts: of a layer · price: bytes of a chunk's workspace · most: tokens of a
    chunk at most · floats: whether experts have float weights, which only a card computes beside one · stream_min:
    rows from which a chunk streams · beside: what a draft layer takes beside one · mixer_rows: as of the price ·
    undivided: the price of chunks whose mixers take all rows at once."""

    sizes: tuple[ExpertSize, ...]
    experts: int
    price: Windowed
    most: int
    floats: bool = False
    stream_min: int = STREAM_MIN
    beside: Callable[[int], int] = lambda rows: 0
    mixer_rows: int = 0
    undivided: Callable[[int], int] | None = None

    @property
    def largest(self) -> int:
        return max(size.n_bytes for size in self.sizes)

    def tables(self, ring: int) -> int:
        """Bytes of the addresses of all experts, for reading in place and in rounds through a ring of so many, at
        most."""
        rounds = -(-self.experts // max(1, ring // BUFFERS)) + 1  # those of the file are rounds of their own
        return len(self.sizes) * (IN_PLACE + rounds) * MATRICES * self.experts * ADDRESS

    def own(self, chunk: int) -> int:
        """Bytes of a chunk's buffers of their own, with what a draft layer takes beside it."""
        return self.price(chunk) + self.beside(chunk)


@dataclass(frozen=True, slots=True, eq=False)
class TierPlan:
    """staged_bytes: memory that windows bring experts to · chunks: to try, longest first · reserve: what stays free ·
    said: lines for the log · mixer_rows: as of `Device` · borrow: what prompts borrow, None where they have buffers of
    their own · own_bytes: of these, ring and all · fixed: bytes that are taken behind the plan."""

    placement: Placement
    ring_bytes: int
    staged_bytes: int
    chunks: tuple[int, ...]
    reserve: int
    said: tuple[str, ...]
    mixer_rows: int = 0
    borrow: BorrowPlan | None = None
    own_bytes: int = 0
    fixed: int = 0


def plan_tiers(free: int, asked: Asked, model: Model, ram: int, fixed: int = 0) -> TierPlan:
    """In so many bytes, which all else has left. ram: bytes of RAM, which all else there has left · fixed: of the card,
    taken behind the plan, with the tables of a ring of RING experts."""
    kept = int(asked.free * max(0, free))
    fixed += max(0, model.tables(asked.ring or RING) - model.tables(RING))
    plan = replace(_plan(free - kept - fixed, asked, model, ram), fixed=fixed)
    if not kept:
        return plan
    said = f"expert cache: {shown(kept)} more stay free, {asked.free:g} of what weights and state leave"
    return replace(plan, reserve=plan.reserve + kept, said=(said, *plan.said))


def _plan(free: int, asked: Asked, model: Model, ram: int) -> TierPlan:
    """The same with nothing that stays free but the reserve."""
    staging = staged(free, model.largest, model.experts)
    room = _room(free - staging, asked, model)
    if not asked.borrow or asked.order is None:  # only with an order are the last slots the coldest
        return _owning(free, asked, model, ram, room, plan_card(room), staging)
    plan, wanted = _lendable(asked, model, room, False)
    if wanted is None:
        return _owning(free, asked, model, ram, room, plan, staging)
    borrowing, owning = _borrowing(free, asked, model, ram, plan, wanted, staging), plan_card(room)
    if borrowing is None:
        own = _owning(free, asked, model, ram, room, owning, staging)
        if not own.placement.filed.any():
            return own
        plan, wanted = _lendable(asked, model, room, True)
        borrowing = None if wanted is None else _borrowing(free, asked, model, ram, plan, wanted, staging, filed=True)
    if borrowing is not None and not _streams_only(owning, borrowing, model):
        return borrowing
    return _owning(free, asked, model, ram, room, owning, staging)


def _lendable(asked: Asked, model: Model, room: CardRoom, filed: bool) -> tuple[CardPlan, BorrowPlan | None]:
    """The plan where prompts may borrow slots, and what they borrow if they do. filed: some experts lie in the file,
    which come through the ring whatever a chunk's length."""
    ring = min(room.ring, ring_bytes(asked.ring or BUFFERS * model.experts, model.largest))
    stays = min(STAYS, model.most, max(1, model.stream_min - 1))  # who borrows nothing has no ring to stream through
    most = min(asked.prefill or model.most, model.most)
    own = own_bytes(model.price, stays, model.beside(stays))
    buffers = Buffers(model.price, most, ring, 0 if filed else model.stream_min, model.beside(most))
    plan = plan_card(replace(room, borrow=True, own=asked.own, lent=buffers, windows=own))
    return plan, BorrowPlan(buffers, plan.layout.chunk, 0, stays, own) if plan.way == "borrowed" else None


def _streams_only(owning: CardPlan, borrowing: TierPlan, model: Model) -> bool:
    """Whether own buffers beside the reserve have a chunk that streams experts, where borrowed slots have none: the
    experts that they cost are few then, and a chunk that reads in place takes several times as long."""
    fits = owning.free >= owning.reserve
    return fits and borrowing.chunks[0] < model.stream_min <= owning.layout.chunk


def _room(free: int, asked: Asked, model: Model) -> CardRoom:
    order = _order(asked, model)
    return CardRoom(
        free=free,
        reserve=asked.reserve,
        given=asked.given,
        experts=tuple(bytes_of(model.sizes, order)),
        per_layer=model.experts,
        known=asked.order is not None,
        cache=asked.cache,
        prefill=asked.prefill,
        most=model.most,
        price=model.own,
        borrow=False,
        pct=asked.pct,
        ring_experts=asked.ring // BUFFERS * BUFFERS,
    )


def _order(asked: Asked, model: Model) -> Sequence[Pair]:
    return asked.order if asked.order is not None else by_number(len(model.sizes), model.experts)


def _owning(free: int, asked: Asked, model: Model, ram: int, room: CardRoom, plan: CardPlan, staging: int) -> TierPlan:
    """Prompts have buffers of their own. Raises DoesNotFit."""
    least = min(CHUNKS[-1], model.most)
    if not plan.layout.chunk:
        raise DoesNotFit(
            f"no prompt can be read: {shown(max(0, free))} are left beside weights and state, a chunk of {least} and "
            f"its experts take {shown(room.streamed(least))} beside {shown(KEPT_FREE)} that stay free; use a "
            "smaller --max-context, another --kv or a smaller file"
        )
    chunk, spare = _chunk(asked, model, plan)
    mixer_rows, workspace = model.mixer_rows, model.own(chunk)
    more = 0 if model.undivided is None else model.undivided(chunk) - model.price(chunk)
    if more <= spare and not asked.alias:  # memory abounds
        mixer_rows, spare, workspace = 0, spare - more, workspace + more
    ring = min(room.ring + spare, ring_bytes(asked.ring or BUFFERS * model.experts, model.largest))
    order = _order(asked, model)
    sizes = plan.slots.sizes
    if asked.alias and not asked.cache and asked.order is None and FEW_PART * len(sizes) < len(order):
        sizes = ()
    slotted = place(model.sizes, model.experts, sizes, order, asked.spare)
    placement, said_of_ram = _copied(asked, model, slotted, order, ram)
    reserve, said_of_reserve = (plan.reserve, ()) if asked.alias else _kept(plan)
    said = (
        *said_of_reserve,
        *_said(free, asked, plan, placement),
        *said_of_ram,
        f"prompts: chunks of {chunk} in {shown(model.own(chunk))}, experts through a ring of {shown(ring)}",
    )
    chunks = (chunk, *(c for c in CHUNKS if c < chunk))
    return TierPlan(placement, ring, staging, chunks, reserve, said, mixer_rows, None, workspace + ring)


def _kept(plan: CardPlan) -> tuple[int, tuple[str, ...]]:
    """What stays free: of the reserve, own buffers that step down take all but KEPT_FREE."""
    if plan.free >= plan.reserve:
        return plan.reserve, ()
    kept = min(plan.reserve, KEPT_FREE)
    return kept, (f"reserve: prompts take some of it, {shown(plan.free)} of {shown(plan.reserve)} stay free",)


def _borrowing(
    free: int,
    asked: Asked,
    model: Model,
    ram: int,
    plan: CardPlan,
    wanted: BorrowPlan,
    staging: int,
    filed: bool = False,
) -> TierPlan | None:
    """Prompts borrow slots, in chunks for which RAM has room for twins: beside all experts that VRAM lacks, or, where
    these lie in the file in any case (filed), before them. None: it has none."""
    buffers, order = wanted.buffers, _order(asked, model)
    short = "" if filed else f" and reads of up to {wanted.stays}"
    for chunk in (c for c in steps(wanted.chunk) if c > wanted.stays):
        lent = plan.slots.tail_bytes(plan.slots.lent_for(buffers(chunk)) or 0)
        slotted = replace(place(model.sizes, model.experts, plan.slots.sizes, order, asked.spare), lendable=lent)
        if slotted.twin_bytes + slotted.spare_bytes + asked.source.kept > ram:
            continue
        try:
            placement, said_of_ram = _copied(asked, model, slotted, order, ram)
        except DoesNotFit:
            continue
        if placement.filed.any() and not filed:
            continue
        said = (
            *_said(free, asked, plan, placement),
            *said_of_ram,
            f"prompts: chunks of {chunk} in {shown(buffers(chunk))} of the cache, which their experts leave meanwhile "
            f"and of which RAM has a copy; windows{short} in {shown(wanted.own_bytes)}",
        )
        borrow = replace(wanted, chunk=chunk, lent_bytes=lent)
        return TierPlan(placement, buffers.ring, staging, (chunk,), plan.reserve, said, model.mixer_rows, borrow)
    return None


def _said(free: int, asked: Asked, plan: CardPlan, placement: Placement) -> tuple[str, ...]:
    how = f"given {asked.cache}" if asked.cache else "auto"
    by = "numbers" if asked.order is None else f"a profile of {len(asked.order)} pairs"
    return (
        *plan.said,
        f"expert cache, {how}: {shown(free)} free, {shown(plan.reserve)} of them stay so; {placement.in_cache} of "
        f"{placement.pairs} experts, by {by}, in {shown(placement.cache_bytes)}",
    )


def _copied(
    asked: Asked, model: Model, placement: Placement, order: Sequence[Pair], ram: int
) -> tuple[Placement, tuple[str, ...]]:
    """Which of the others lie in so much RAM; lines for the log."""
    missing = missing_order(placement, order)
    left = ram - placement.spare_bytes - placement.twin_bytes
    homes = homes_in(asked.source, bytes_of(model.sizes, missing), (), left)
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


def _chunk(asked: Asked, model: Model, plan: CardPlan) -> tuple[int, int]:
    """The longest chunk in what was planned for one and, of a given cache, what is spare; what is spare behind it."""
    planned = plan.layout.chunk
    spare = max(0, plan.free - plan.reserve) if asked.cache else 0
    bytes_for = model.own(planned) + spare
    longer = [c for c in CHUNKS if planned < c <= model.most and not asked.prefill and model.own(c) <= bytes_for]
    chunk = longer[0] if longer else planned
    return chunk, max(0, bytes_for - model.own(chunk))

"""What a card holds of a model whose experts do not all fit, as the engine will: its own plan, from a file's header.

    tiers = tiers_of(figures, options, switches)
    state = state_of(figures, options, tiers, left)
    found = card_of(figures, options, tiers, left, ram)

Units    bytes, tokens
Errors   DoesNotFit in one line: no conversation or no prompt fits
Cost     some tenths of a second: each plan walks over all experts
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from strata.engine.device.arena import shown
from strata.engine.device.meter import Meter
from strata.engine.experts.choice import CardMemory, Choice, choose
from strata.engine.experts.placement import ExpertSize, Placement
from strata.engine.experts.plan import asked_of
from strata.engine.experts.tiering import Tiering
from strata.engine.flags import WINDOW_ROWS
from strata.engine.memory.borrow import draft_beside
from strata.engine.memory.cache import Slots
from strata.engine.memory.card import Alias, CardPlan, Way
from strata.engine.memory.figures import DoesNotFit, Figures, Switches
from strata.engine.memory.loan import plan_loan
from strata.engine.memory.prompt import PromptLayout
from strata.engine.memory.ram import ExpertHomes, ExpertSource, Source
from strata.engine.memory.state import SlotCosts, SlotPlan, plan_slots, slot_costs
from strata.engine.options import Options
from strata.engine.state.slots import StatePool
from strata.kernels.cuda.compile import DeviceError

SIDES: Final = 2
"""Rows of recurrent state of a slot on a card: the one that is read and the one that is written."""


@dataclass(frozen=True, slots=True, eq=False)
class Tiered:
    """card: the plan · homes: where experts lie that VRAM lacks, or while prompts have their slots · fixed: bytes that
    are taken behind it · staged: of experts that windows bring over · spare: of RAM, places for swaps."""

    card: CardPlan
    homes: ExpertHomes
    fixed: int
    staged: int
    spare: int


def tiers_of(figures: Figures, options: Options, switches: Switches) -> Tiering:
    """The engine's planner for experts."""
    sizes = [ExpertSize(n_bytes, 0, 0) for n_bytes in figures.sizes.experts]  # only whole experts count in a plan
    draft = figures.spec if figures.draft else None
    return Tiering(
        figures.spec,
        figures.types,
        sizes,
        asked_of(options, switches, figures.profile),
        options.max_context,
        beside=lambda rows: draft_beside(draft, rows),
    )


def table_bytes(figures: Figures, options: Options, slots: int, checkpoints: int) -> int:
    """Bytes of the page tables of a state."""
    meter, costs = Meter(SIDES), _costs(figures, options)
    StatePool(
        figures.spec,
        slots,
        options.max_context,
        kv=options.kv,
        memory=meter,
        n_checkpoints=checkpoints,
        resident=options.resident,
    )
    return meter.state - slots * costs.slot - costs.staged - checkpoints * costs.checkpoint


def one_slot(figures: Figures, options: Options) -> int:
    """Bytes of the state of one conversation."""
    costs = _costs(figures, options)
    return costs.slot + costs.staged + table_bytes(figures, options, 1, 0) + figures.draft_memory(0)


def state_of(figures: Figures, options: Options, left: int, room: int) -> SlotPlan:
    """Slots and checkpoints: one conversation in any case, the others in `room`. left: behind the weights."""
    costs = _costs(figures, options)
    most = max(one_slot(figures, options), room) - figures.draft_memory(WINDOW_ROWS)
    plan = plan_slots(costs, most, most, options.batch_asked, options.prompt_cache)
    if plan is None or plan.slot_bytes + plan.checkpoint_bytes > left:
        raise DoesNotFit(
            f"--max-context {options.max_context}: one conversation takes {shown(costs.slot + costs.staged)}, "
            f"{shown(max(0, left))} are left beside the weights; use a smaller context, another --kv, or --kv-resident"
        )
    return plan


def _costs(figures: Figures, options: Options) -> SlotCosts:
    return slot_costs(figures.spec, options.kv, options.max_context, options.kv_resident, SIDES)


def card_of(figures: Figures, options: Options, tiers: Tiering, left: int, ram: int, source: ExpertSource) -> Tiered:
    """What becomes of so many bytes of the card, which weights and state have left. ram: behind what lies there in any
    case · source: of experts that VRAM lacks."""
    memory = CardMemory(left, ram, figures.sizes.head, figures.spec if figures.draft else None)
    try:
        chosen = choose(tiers, memory, plan_loan if options.prefill_head_alias else None)
    except DeviceError as error:
        raise DoesNotFit(str(error)) from None
    plan, slots = chosen.tiers, _slots(chosen.tiers.placement)
    layout, ring, windows = _layout(chosen, slots)
    taken = slots.n_bytes + plan.staged_bytes + plan.fixed + (windows or layout.own_bytes)
    way: Way = "head alias" if chosen.head else "borrowed" if plan.borrow else "own"
    alias: Alias = "in place" if chosen.head else "off"
    card = CardPlan(slots, slots.n_bytes, plan.reserve, layout, way, alias, left - taken, chosen.said, windows, ring)
    return Tiered(card, homes_of(source, plan.placement), plan.fixed, plan.staged_bytes, plan.placement.spare_bytes)


def homes_of(source: ExpertSource, placement: Placement) -> ExpertHomes:
    """Where the experts of a placement are that have no slot, and the copies of those whose slots may be lent."""
    held = placement.locked_bytes - placement.spare_bytes - placement.twin_bytes
    missing, copies = placement.missing, int(placement.in_ram.sum())
    twins = sum(len(placement.twins(layer)) for layer in range(len(placement.sizes)))
    kind: Source = source.kind
    if kind == "arena" and copies < missing:
        kind = "resident" if copies else "mapped"
    elif kind == "resident" and missing and not copies:
        kind = "mapped"
    return ExpertHomes(kind, missing, held + placement.filed_bytes, copies, held, twins, placement.twin_bytes)


def _slots(placement: Placement) -> Slots:
    """The slots of a placement, in their order."""
    begins = np.sort(placement.begins[placement.begins >= 0])
    return Slots(np.diff(begins, append=placement.cache_bytes).tolist() if begins.size else ())


def _layout(chosen: Choice, slots: Slots) -> tuple[PromptLayout, int, int]:
    """Where the buffers of the longest chunk lie, the ring's bytes, and those of windows and short reads beside what
    prompts borrow."""
    plan, head, borrow = chosen.tiers, chosen.head, chosen.tiers.borrow
    if head is not None:
        layout = PromptLayout("own", head.chunk, own_bytes=head.own_bytes, head_bytes=head.lent_bytes)
        return layout, head.ring.n_bytes, 0
    if borrow is None:
        return PromptLayout("own", plan.chunks[0], own_bytes=plan.own_bytes), plan.ring_bytes, 0
    parts = borrow.buffers.parts(borrow.chunk)
    lent = slots.lent_for(parts.n_bytes) or 0
    return PromptLayout("borrow", borrow.chunk, lent, slots.tail_bytes(lent)), parts.ring, borrow.own_bytes

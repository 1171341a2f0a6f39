"""The whole plan: what lies in VRAM and in RAM with these options. Figures in, plan out; nothing is touched.

    plan = plan_memory(figures, options, switches)
    plan.lines          what, where, bytes; those of a place add up to what is free there
    plan.shortfalls     what is less than was asked for or could be of use (advice.py says which option changes it)

Order    of a card: fixed buffers, dense weights, head, draft layer, state, decode windows; then the expert cache with
         the prompt path (card.py), beside a reserve. Of RAM: the n-gram table, streamed keys and values, parked
         conversations, experts, beside what must stay free
Units    bytes, tokens
Errors   DoesNotFit in one line with the limit and the remedy: no conversation or no prompt fits, a refused option
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from strata.engine import flags
from strata.engine.device.arena import GIB, MIB, shown
from strata.engine.device.base import Memory
from strata.engine.memory import alias, ram
from strata.engine.memory.borrow import STAYS, Buffers, draft_beside, own_bytes
from strata.engine.memory.cache import LEAST_RESERVE
from strata.engine.memory.card import STREAM_MIN, CardPlan, CardRoom, plan_card, staged
from strata.engine.memory.figures import DoesNotFit, Figures, Line, MemoryPlan, Shortfall, Switches
from strata.engine.memory.forms import takes_forms
from strata.engine.memory.homes import (
    CACHE_FIRST,
    STAGING,
    conversation_cache,
    expert_homes,
    reserve_of,
    said_of,
    source_of,
)
from strata.engine.memory.price import MIXER_ROWS, Price, prompt_shape
from strata.engine.memory.prompt import lend_pct
from strata.engine.memory.sizes import rope_bytes
from strata.engine.memory.state import SlotPlan, plan_slots, slot_costs
from strata.engine.options import Options
from strata.engine.state.plan import MIN_BATCH

FIXED: Final = 4 * MIB
"""Row tables, counters, page tables, samplers' settings."""
SIDES: Final = 2
"""Rows of recurrent state of a slot on a card: the one that is read and the one that is written."""
TABLE_ROOM: Final = 3 * GIB
"""VRAM that stays for prompts when `auto` puts the n-gram table there."""
_FORMS: Final = "the card's own, faster and larger than the file's"
LOW: Final = 256 * MIB
"""Free VRAM below which a card is said to be low."""


def plan_memory(figures: Figures, options: Options, switches: Switches) -> MemoryPlan:
    """The plan for a model, a machine and options that `fitted` has seen."""
    if figures.vram is None:
        return _on_host(figures, options)
    return _on_card(figures, figures.vram, options, switches)


# ------------------------------------------------------------------------------------------------------------- a card


def _on_card(figures: Figures, vram: Memory, options: Options, switches: Switches) -> MemoryPlan:
    refusal = alias.refusal(_conditions(figures, options)) if options.prefill_head_alias else None
    if refusal is not None:
        raise DoesNotFit(refusal)
    price = Price(prompt_shape(figures.spec, figures.types, options.max_context))
    always = _always(figures, options, price)
    slots = _slots(figures, options, vram.free - _sum(always), price(min(256, options.max_context)))
    state = [
        Line("slots", "VRAM", slots.slot_bytes, f"{1 + slots.n_slots} of {options.max_context} tokens, {options.kv}"),
        Line("checkpoints", "VRAM", slots.checkpoint_bytes, f"{slots.n_checkpoints}"),
        Line("draft layer's memory", "VRAM", figures.draft_memory(slots.n_slots)),
    ]
    left = vram.free - _sum(always) - _sum(state)
    table = _table_in_vram(figures, options, left - reserve_of(options)[0] - TABLE_ROOM)
    room, staging = _room(figures, options, switches, left - table, price), 0
    card = plan_card(room)
    if len(card.slots) < figures.sizes.pairs:
        staging = staged(room.free, room.largest, room.per_layer)
        card = plan_card(replace(room, free=room.free - staging))
    if not card.layout.chunk:
        raise DoesNotFit(
            f"no prompt can be read: weights and state take {shown(vram.free - left)} of {shown(vram.free)}, "
            f"{shown(max(0, left))} are left; use a smaller --max-context, another --kv, or a smaller file"
        )
    forms = _forms(figures, card, left - table - figures.sizes.expert_bytes, switches.forms)
    card = replace(card, free=card.free - forms, free_reading=card.free_reading - forms)
    lines = [*always, *state, Line("n-gram table", "VRAM", table), Line("forms of weights", "VRAM", forms, _FORMS)]
    lines.append(Line("experts brought over", "VRAM", staging, "from RAM for a window, before its products"))
    head = Line("output head", "VRAM", figures.sizes.head, _head_note(card))
    lines = [head if line.what == head.what else line for line in lines if line.n_bytes]
    return _with_ram(figures, options, switches, [*lines, *_card_lines(figures, card)], slots, card, table)


def _always(figures: Figures, options: Options, price: Price) -> list[Line]:
    """What a card holds whatever runs."""
    dense = figures.sizes.dense + rope_bytes(figures.spec, options.max_context)
    return [
        Line("fixed buffers", "VRAM", FIXED),
        Line("dense weights", "VRAM", dense, "embedding, attention, delta nets, routers, shared experts, rope"),
        Line("output head", "VRAM", figures.sizes.head),
        Line("draft layer", "VRAM", figures.draft, "with its experts"),
        Line("decode windows", "VRAM", price.windows + figures.tape, f"up to {flags.WINDOW_ROWS} rows"),
    ]


def _sum(lines: Iterable[Line]) -> int:
    return sum(line.n_bytes for line in lines)


def _room(figures: Figures, options: Options, switches: Switches, left: int, price: Price) -> CardRoom:
    reserve, given = reserve_of(options)
    most = min(flags.MAX_CHUNK, options.max_context)
    room = CardRoom(
        free=left,
        head=figures.sizes.head,
        reserve=reserve,
        given=given,
        experts=figures.hot(),
        per_layer=figures.sizes.per_layer,
        known=figures.profile is not None,
        cache=options.expert_cache,
        prefill=options.prefill,
        most=most,
        price=price,
        borrow=not options.no_prefill_borrow,
        own=switches.own,
        alias=options.prefill_head_alias,
        pct=lend_pct(switches.lend_pct, float(source_of(options, switches).kind == "arena")),
    )
    draft, divided = figures.spec if figures.draft else None, Price(price.shape, MIXER_ROWS)
    short = min(STAYS, most)
    lent = Buffers(divided, most, room.ring, STREAM_MIN, draft_beside(draft, most))
    own = own_bytes(divided, short, draft_beside(draft, short))
    windows = max(0, own - divided.windows)
    return replace(room, lent=lent, windows=windows, divided=lambda n: divided(n) + draft_beside(draft, n))


def _conditions(figures: Figures, options: Options) -> alias.AliasConditions:
    return alias.AliasConditions(
        serve=options.serve,
        batch=options.batch,
        short_read=options.short_read,
        expert_cache=options.expert_cache,
        mtp=figures.mtp,
        borrow=not options.no_prefill_borrow,
        profile=figures.profile is not None,
    )


def _slots(figures: Figures, options: Options, room: int, chunk: int) -> SlotPlan:
    """Slots and checkpoints. The solo slot comes before all else but the shortest prompt; the others leave the reserve
    and room to borrow in."""
    costs = slot_costs(figures.spec, options.kv, options.max_context, options.kv_resident, SIDES)
    reserve, given = reserve_of(options)
    room -= figures.draft_memory(0)
    least = room - (reserve if given else LEAST_RESERVE)
    cache = chunk + min(CACHE_FIRST * figures.sizes.largest, figures.sizes.expert_bytes)
    each = figures.draft_memory(1) - figures.draft_memory(0)
    plan = plan_slots(costs, least, room - reserve - cache, options.batch_asked, options.prompt_cache, each)
    if plan is None:
        raise DoesNotFit(
            f"--max-context {options.max_context}: one conversation takes {shown(costs.slot + costs.staged)}, "
            f"{shown(max(0, least))} are left beside the weights and the reserve; use a smaller context, another --kv, "
            "or --kv-resident"
        )
    return plan


def _table_in_vram(figures: Figures, options: Options, room: int) -> int:
    """Bytes of the n-gram table in VRAM: as asked, or where all experts are there as well."""
    table = figures.sizes.table
    if options.ple_io == "vram":
        return table
    return table if options.ple_io == "auto" and figures.sizes.expert_bytes + table <= room else 0


def _forms(figures: Figures, card: CardPlan, left: int, wanted: bool) -> int:
    """What the card forms of experts that are all there take more."""
    whole = len(card.slots) == figures.sizes.pairs and card.layout.kind == "own"
    return figures.sizes.forms if whole and takes_forms(figures.sizes.forms, left, wanted) else 0


def _head_note(card: CardPlan) -> str:
    if card.alias == "exchange":
        return "not there while a prompt is read"
    return "holds prompt buffers while a prompt is read" if card.alias == "in place" else ""


def _card_lines(figures: Figures, card: CardPlan) -> list[Line]:
    """Cache, prompt path, and what stays free."""
    layout, read = card.layout, card.free_reading
    parts = [f"chunks of {layout.chunk}, {card.way}"]
    parts += [f"{layout.lent} slots lent ({shown(layout.lent_bytes)})"] if layout.lent else []
    parts += [f"{shown(layout.head_bytes)} of the head"] if layout.head_bytes else []
    own = layout.own_bytes if layout.kind == "own" else card.windows
    parts += [f"{shown(layout.own_bytes)} allocated for a read"] if layout.own_bytes and layout.kind != "own" else []
    parts += ["short reads borrow nothing"] if card.windows else []
    free = f"reserve {card.reserve // MIB} MiB" + (
        f", {read // MIB} while a prompt is read" if read != card.free else ""
    )
    return [
        Line("expert cache", "VRAM", card.slots.n_bytes, f"{len(card.slots)} of {figures.sizes.pairs} experts"),
        Line("prompt buffers", "VRAM", own, ", ".join(parts)),
        Line("free", "VRAM", card.free, free + (", LOW" if card.free < LOW else "")),
    ]


# ------------------------------------------------------------------------------------------------------- RAM, and both


def _with_ram(
    figures: Figures,
    options: Options,
    switches: Switches,
    lines: list[Line],
    slots: SlotPlan,
    card: CardPlan,
    table: int,
) -> MemoryPlan:
    """The plan of a card completed by that of RAM."""
    parked = conversation_cache(options)
    fixed = [
        Line("page-locked buffers", "RAM", STAGING),
        Line("copy of the head", "RAM", figures.sizes.head if card.alias != "off" else 0, "page-locked, it comes back"),
        Line("n-gram table", "RAM", figures.sizes.table - table, "page-locked, read over PCIe"),
        Line("keys and values", "RAM", slots.streamed_bytes, "page-locked, streamed"),
        Line("parked conversations", "RAM", parked.budget if parked.on else 0, f"at most {parked.slots}"),
    ]
    free = figures.ram.free - _sum(fixed)
    source = source_of(options, switches)
    homes = expert_homes(figures, source, card.slots, card.layout.lent, max(0, free))
    kept, not_locked = source.kept, said_of(source, homes, free)
    copies = homes.copy_bytes + homes.lent_copy_bytes
    note = f"{homes.source}: {homes.copies} of {homes.missing} that VRAM does not hold"
    note += f", {homes.lent_copies} that it holds" if homes.lent_copies else ""
    ours = [
        *(line for line in fixed if line.n_bytes),
        Line("experts", "RAM", copies, note),
        Line("free", "RAM", free - copies, f"at least {shown(kept)}"),
    ]
    said = [*card.said, *([] if not_locked is None else [not_locked])]
    if card.layout.lent and homes.mapped_bytes:
        said.append(
            f"prompts: {card.layout.lent} slots could be lent, but the engine lends none where experts lie in the "
            "mapped file: prompts have buffers of their own, as with --no-prefill-borrow"
        )
    if free - copies < kept:
        said.append(f"RAM: {shown(kept - free + copies)} less than should stay free; plan for more, or ask for less")
    shortfalls = (*_of_state(options, slots), *_of_card(figures, options, card, table), *_of_ram(homes))
    return MemoryPlan((*lines, *ours), slots, card, homes, shortfalls, tuple(said))


def _of_state(options: Options, slots: SlotPlan) -> list[Shortfall]:
    found = [Shortfall("checkpoints", slots.n_checkpoints, slots.wanted_checkpoints, "checkpoints")]
    if options.batch_asked >= MIN_BATCH:
        found.append(Shortfall("batch slots", slots.n_slots, options.batch_asked, "slots"))
    return [each for each in found if each.got < each.wanted]


def _of_card(figures: Figures, options: Options, card: CardPlan, table: int) -> list[Shortfall]:
    most = min(options.prefill or flags.MAX_CHUNK, options.max_context)
    found = [
        Shortfall("experts in VRAM", len(card.slots), figures.sizes.pairs, "experts"),
        Shortfall("prompt chunk", card.layout.chunk, most, "tokens"),
        Shortfall("n-gram table in VRAM", table // MIB, figures.sizes.table // MIB, "MiB"),
    ]
    return [each for each in found if each.got < each.wanted]


def _of_ram(homes: ram.ExpertHomes) -> list[Shortfall]:
    found = Shortfall("experts in RAM", homes.copies, homes.missing, "experts")
    return [found] if found.got < found.wanted else []


# ------------------------------------------------------------------------------------------------------------ the host


def _on_host(figures: Figures, options: Options) -> MemoryPlan:
    """Weights are the mapped file; the rest is RAM that is taken."""
    costs = slot_costs(figures.spec, options.kv, options.max_context, 0, 1)
    parked = conversation_cache(options)
    free, budget = figures.ram.free, parked.budget if parked.on else 0
    slots = plan_slots(costs, free, free, options.batch_asked, options.prompt_cache)
    if slots is None:
        raise DoesNotFit(
            f"--max-context {options.max_context}: one conversation takes {shown(costs.slot)}, {shown(free)} of RAM "
            "are free; use a smaller context"
        )
    sizes = figures.sizes
    weights = sizes.dense + sizes.head + sizes.table + sizes.expert_bytes
    state = slots.slot_bytes + slots.checkpoint_bytes
    cached = min(weights, max(0, free - state - budget))
    lines = (
        Line("slots", "RAM", slots.slot_bytes, f"{1 + slots.n_slots} of {options.max_context} tokens, {options.kv}"),
        Line("checkpoints", "RAM", slots.checkpoint_bytes, f"{slots.n_checkpoints}"),
        Line("parked conversations", "RAM", budget, f"at most {parked.slots}"),
        Line("weights", "RAM", cached, f"mapped file of {shown(weights)}, kept by the system as far as there is room"),
        Line("free", "RAM", free - state - budget - cached),
    )
    homes = ram.ExpertHomes("mapped", sizes.pairs, sizes.expert_bytes, 0, 0)
    found = [*_of_state(options, slots)]
    if cached < weights:
        found.append(Shortfall("weights in RAM", cached // MIB, weights // MIB, "MiB"))
    return MemoryPlan(
        tuple(line for line in lines if line.n_bytes or line.what == "free"), slots, None, homes, tuple(found)
    )

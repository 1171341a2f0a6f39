"""The whole plan: what lies in VRAM and in RAM with these options. Figures in, plan out; nothing is touched.

    plan = plan_memory(figures, options, switches)
    plan.lines          what, where, bytes; those of a place add up to what is free there
    plan.shortfalls     what is less than was asked for or could be of use (advice.py says which option changes it)

Order    of a card: fixed buffers, dense weights, head, draft layer, state; then the expert cache with the prompt path,
         beside a reserve, by the engine's own planner (tiered.py). Of RAM: the n-gram table, streamed keys and values,
         parked conversations, experts, beside what must stay free
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
from strata.engine.device.cuda import TABLES
from strata.engine.experts.choice import RESERVE, auto_chunks
from strata.engine.experts.tiering import Tiering
from strata.engine.memory import alias, ram
from strata.engine.memory.cache import Slots
from strata.engine.memory.card import CardPlan
from strata.engine.memory.figures import DoesNotFit, Figures, Line, MemoryPlan, Shortfall, Switches
from strata.engine.memory.forms import takes_forms
from strata.engine.memory.homes import STAGING, conversation_cache, said_of, source_of
from strata.engine.memory.price import Price, prompt_shape
from strata.engine.memory.prompt import own_layout
from strata.engine.memory.sizes import rope_bytes
from strata.engine.memory.state import SlotPlan, plan_slots, slot_costs
from strata.engine.memory.tiered import card_of, one_slot, state_of, table_bytes, tiers_of
from strata.engine.options import Options
from strata.engine.state.plan import MIN_BATCH

TABLE_ROOM: Final = 3 * GIB
"""VRAM that stays for prompts when `auto` puts the n-gram table there."""
BESIDE: Final = 4 * MIB
"""Buffers of windows and of a draft layer, beside a model that is there whole."""
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
    refusal = alias.refused(options, figures.sizes.head > 0, figures.mtp)
    if refusal is not None:
        raise DoesNotFit(refusal)
    tiers = tiers_of(figures, options, switches)
    always = _always(figures, options)
    left, one = vram.free - _sum(always), one_slot(figures, options)
    table = _table_in_vram(figures, options, left, one)
    if tiers.fit_whole(left - figures.sizes.expert_bytes - table - one):
        return _whole(figures, options, switches, always, left, table)
    return _tiered(figures, options, switches, tiers, always, left - table, table)


def _tiered(
    figures: Figures,
    options: Options,
    switches: Switches,
    tiers: Tiering,
    always: list[Line],
    left: int,
    table: int,
) -> MemoryPlan:
    """Some experts lie in RAM. left: of the card, behind the weights."""
    slots = state_of(figures, options, left, tiers.room_for_state(left - RESERVE))
    tables = table_bytes(figures, options, 1 + slots.n_slots, slots.n_checkpoints)
    state = _state(figures, options, slots)
    ram_left = figures.ram.free - slots.streamed_bytes - _locked_table(figures, options, table)
    source = source_of(options, switches)
    found = card_of(figures, options, tiers, left - _sum(state) - tables, ram_left, source)
    lines = [
        *_noted(always, found.card, tables + found.fixed),
        *state,
        Line("n-gram table", "VRAM", table),
        Line("experts brought over", "VRAM", found.staged, "from RAM for a window, before its products"),
        *_card_lines(figures, found.card, found.homes.mapped_bytes > 0),
    ]
    return _with_ram(figures, options, source, lines, slots, found.card, table, found.homes, found.spare)


def _noted(always: list[Line], card: CardPlan, tables: int) -> list[Line]:
    """The same with what the head does meanwhile, and with more tables of so many bytes."""
    note = "holds prompt buffers while a prompt is read" if card.alias == "in place" else ""
    first, *others = always
    return [
        replace(first, n_bytes=first.n_bytes + tables),
        *(replace(line, note=note) if line.what == "output head" else line for line in others),
    ]


def _whole(
    figures: Figures, options: Options, switches: Switches, always: list[Line], left: int, table: int
) -> MemoryPlan:
    """All experts lie in VRAM. left: of the card, behind all other weights."""
    left -= figures.sizes.expert_bytes + table
    behind = left - RESERVE
    slots = state_of(figures, options, left, behind - min(TABLE_ROOM, behind // 4))
    tables = table_bytes(figures, options, 1 + slots.n_slots, slots.n_checkpoints)
    state = _state(figures, options, slots)
    tables += BESIDE
    left -= _sum(state) + tables
    forms = figures.sizes.forms if takes_forms(figures.sizes.forms, left, switches.forms) else 0
    card = _whole_card(figures, options, left - forms)
    lines = [
        *_noted(always, card, tables),
        *state,
        Line("n-gram table", "VRAM", table),
        Line("forms of weights", "VRAM", forms, _FORMS),
        *_card_lines(figures, card),
    ]
    source = source_of(options, switches)
    return _with_ram(figures, options, source, lines, slots, card, table, source.homes((), (), 0), 0)


def _whole_card(figures: Figures, options: Options, left: int) -> CardPlan:
    """All experts, and the longest chunk in what is left behind them."""
    price = Price(prompt_shape(figures.spec, figures.types, options.max_context))
    asked = min(options.prefill, options.max_context)
    chunks = [asked] if asked else auto_chunks(options.max_context)
    layout = own_layout(next((n for n in chunks if price(n) <= left - RESERVE), 0), price)
    if not layout.chunk:
        raise DoesNotFit(
            f"no prompt can be read: {shown(max(0, left))} are left beside weights and state, {shown(RESERVE)} of them "
            f"stay free, a chunk of {chunks[-1]} takes {shown(price(chunks[-1]))}; use a smaller --max-context, "
            "another --kv, or a smaller file"
        )
    slots = Slots([size for size in figures.sizes.experts for _ in range(figures.sizes.per_layer)])
    said = ("head alias: all experts lie in VRAM, so the head stays",) if options.prefill_head_alias else ()
    return CardPlan(slots, slots.n_bytes, RESERVE, layout, "own", "off", left - layout.own_bytes, said)


def _state(figures: Figures, options: Options, slots: SlotPlan) -> list[Line]:
    return [
        Line("slots", "VRAM", slots.slot_bytes, f"{1 + slots.n_slots} of {options.max_context} tokens, {options.kv}"),
        Line("checkpoints", "VRAM", slots.checkpoint_bytes, f"{slots.n_checkpoints}"),
        Line("draft layer's memory", "VRAM", figures.draft_memory(slots.n_slots)),
    ]


def _always(figures: Figures, options: Options) -> list[Line]:
    """What a card holds whatever runs."""
    dense = figures.sizes.dense + rope_bytes(figures.spec, options.max_context)
    return [
        Line("fixed buffers", "VRAM", TABLES),
        Line("dense weights", "VRAM", dense, "embedding, attention, delta nets, routers, shared experts, rope"),
        Line("output head", "VRAM", figures.sizes.head),
        Line("draft layer", "VRAM", figures.draft, "with its experts"),
        Line("verify windows", "VRAM", figures.tape, "what they record, to go back"),
    ]


def _sum(lines: Iterable[Line]) -> int:
    return sum(line.n_bytes for line in lines)


def _table_in_vram(figures: Figures, options: Options, left: int, one: int) -> int:
    """Bytes of the n-gram table in VRAM: as asked, or where all experts are there as well. left: behind the weights."""
    table = figures.sizes.table
    if options.ple_io == "vram":
        return table
    everything = figures.sizes.expert_bytes + table + one + TABLE_ROOM + RESERVE
    return table if options.ple_io == "auto" and everything <= left else 0


def _locked_table(figures: Figures, options: Options, table: int) -> int:
    """Bytes of it in page-locked RAM. table: those in VRAM."""
    return 0 if options.ple_io == "mmap" else figures.sizes.table - table


def _card_lines(figures: Figures, card: CardPlan, filed: bool = False) -> list[Line]:
    """Cache, prompt path, and what stays free. filed: some experts lie in the file."""
    layout = card.layout
    parts = [f"chunks of {layout.chunk}, {card.way}"]
    parts += [f"{layout.lent} slots lent ({shown(layout.lent_bytes)})"] if layout.lent else []
    parts += [f"{shown(layout.head_bytes)} of the head"] if layout.head_bytes else []
    parts += [f"a ring of {shown(card.ring)}"] if card.ring else []
    parts += ["short reads borrow nothing"] if card.windows and not filed else []
    free = f"reserve {card.reserve // MIB} MiB" + (", LOW" if card.free < LOW else "")
    return [
        Line("expert cache", "VRAM", card.slots.n_bytes, f"{len(card.slots)} of {figures.sizes.pairs} experts"),
        Line("prompt buffers", "VRAM", card.windows or layout.own_bytes, ", ".join(parts)),
        Line("free", "VRAM", card.free, free),
    ]


# ------------------------------------------------------------------------------------------------------- RAM, and both


def _with_ram(
    figures: Figures,
    options: Options,
    source: ram.ExpertSource,
    of_card: list[Line],
    slots: SlotPlan,
    card: CardPlan,
    table: int,
    homes: ram.ExpertHomes,
    spare: int,
) -> MemoryPlan:
    """The plan of a card completed by that of RAM, where swaps have places of so many `spare` bytes."""
    lines = [line for line in of_card if line.n_bytes or line.what in ("expert cache", "free")]
    parked = conversation_cache(options)
    fixed = [
        Line("page-locked buffers", "RAM", STAGING),
        Line("copy of the head", "RAM", figures.sizes.head if card.alias != "off" else 0, "page-locked, it comes back"),
        Line("n-gram table", "RAM", _locked_table(figures, options, table), "page-locked, read over PCIe"),
        Line("keys and values", "RAM", slots.streamed_bytes, "page-locked, streamed"),
        Line("parked conversations", "RAM", parked.budget if parked.on else 0, f"at most {parked.slots}"),
        Line("places for swaps", "RAM", spare, "page-locked"),
    ]
    free = figures.ram.free - _sum(fixed)
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

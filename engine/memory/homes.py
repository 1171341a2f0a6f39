"""Which experts RAM holds, and what else lies there, for the options of a command line.

Units    bytes
Errors   DoesNotFit: `--resident-cpu-experts` that do not fit
"""

from __future__ import annotations

from strata.engine.device.arena import GIB, MIB, shown
from strata.engine.memory import ram
from strata.engine.memory.cache import Slots
from strata.engine.memory.figures import DoesNotFit, Figures, Switches
from strata.engine.options import Options


def source_of(options: Options) -> ram.Source:
    if options.resident_experts or options.resident_cpu_experts:
        return "resident"
    return "mapped" if options.mmap_experts else "arena"


def conversation_cache(options: Options) -> ram.ConversationCache:
    return ram.ConversationCache(
        options.conversation_cache_mib * MIB,
        options.conversation_cache_min_free_mib * MIB,
        options.conversation_cache_slots,
        options.prompt_cache,
        options.serve,
    )


def expert_homes(
    figures: Figures,
    options: Options,
    switches: Switches,
    slots: Slots,
    lent: int,
    available: int,
    parked: ram.ConversationCache,
) -> tuple[ram.ExpertHomes, int]:
    """Where the experts are that VRAM does not hold, or not while a prompt is read; and what stays free beside them.

    `available` is what is left behind the budget of parked conversations, which head-room would count once more.
    """
    hot = figures.hot()
    missing, lent_sizes = [*hot[len(slots) :], *figures.cold()], hot[len(slots) - lent : len(slots)][::-1]
    source = source_of(options)
    if source == "resident":
        cpu = options.resident_cpu_experts
        planned = switches.headroom if switches.headroom is not None else ram.CPU_HEADROOM if cpu else ram.HEADROOM
        room = ram.headroom(planned, True, parked) - (parked.budget if parked.on else 0)
        kept = max(0, room)
        given = options.resident_budget_gib * GIB or None
        homes = ram.resident_homes(missing, lent_sizes, ram.resident_budget(available, kept, given))
        if cpu and homes.copies < homes.missing:
            raise DoesNotFit(
                f"--resident-cpu-experts: {shown(homes.missing_bytes)} of experts do not fit {shown(available)} of RAM "
                f"with {shown(kept)} kept free; use --resident-experts, which takes what fits"
            )
        return homes, kept
    kept = parked.min_free if parked.on else ram.BUDGET_SLACK
    total = sum(missing)
    if source == "arena" and (missing or lent_sizes):
        whole = figures.sizes.expert_bytes
        if whole <= available - kept:
            return ram.ExpertHomes("arena", len(missing), total, len(missing), total, len(slots), whole - total), kept
    return ram.ExpertHomes("mapped", len(missing), total, 0, 0), kept

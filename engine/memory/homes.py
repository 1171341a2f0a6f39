"""Which experts RAM holds, what else lies there, and what stays free, for the options of a command line.

Units    bytes
Errors   DoesNotFit: `--resident-cpu-experts` that do not fit
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from strata.engine.device.arena import GIB, MIB, shown
from strata.engine.memory import ram
from strata.engine.memory.cache import DEFAULT_RESERVE
from strata.engine.memory.figures import DoesNotFit, Switches
from strata.engine.options import Options

STAGING: Final = 256 * MIB
"""Page-locked buffers that weights come through."""
CACHE_FIRST: Final = 192
"""Expert slots that batch slots and checkpoints leave room for: 128 that are never lent, and some that are."""


def reserve_of(options: Options) -> tuple[int, bool]:
    """The reserve, and whether it was asked for."""
    given = options.vram_reserve_mib >= 0
    return (options.vram_reserve_mib * MIB if given else DEFAULT_RESERVE), given


def source_of(options: Options, switches: Switches) -> ram.ExpertSource:
    """Where experts come from that VRAM lacks."""
    resident = options.resident_experts or options.resident_cpu_experts
    return ram.ExpertSource(
        "resident" if resident else "mapped" if options.mmap_experts else "arena",
        options.resident_cpu_experts,
        switches.headroom,
        options.resident_budget_gib * GIB or None,
        switches.arena_pin,
        conversation_cache(options),
    )


def conversation_cache(options: Options) -> ram.ConversationCache:
    return ram.ConversationCache(
        options.conversation_cache_mib * MIB,
        options.conversation_cache_min_free_mib * MIB,
        options.conversation_cache_slots,
        options.prompt_cache,
        options.serve,
    )


def homes_in(source: ram.ExpertSource, missing: Iterable[int], lent: Iterable[int], available: int) -> ram.ExpertHomes:
    """The same for experts of these bytes. Raises DoesNotFit where all must have copies and do not."""
    homes = source.homes(missing, lent, available)
    if source.all_fit and homes.copies < homes.missing:
        raise DoesNotFit(
            f"--resident-cpu-experts: {shown(homes.missing_bytes)} of experts do not fit {shown(max(0, available))} of "
            f"RAM with {shown(source.kept)} kept free; use --resident-experts, which takes what fits"
        )
    return homes


def said_of(source: ram.ExpertSource, homes: ram.ExpertHomes, available: int) -> str | None:
    """A line for who asked for an arena and gets none."""
    if source.kind != "arena" or homes.source != "mapped" or not homes.missing:
        return None
    wanted = homes.missing_bytes + source.kept
    return (
        f"experts: {shown(homes.missing_bytes)} of them do not fit {shown(max(0, available))} of RAM beside "
        f"{shown(source.kept)} that stay free ({shown(wanted)} in all), so they are read from the mapped file; "
        "--resident-experts keeps copies of as many as fit"
    )

"""Which option would change what did not fit: each is tried, and only those that help are named, with what they give.

Cost     a plan for every option that is tried, about a dozen
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec

from strata.engine import flags
from strata.engine.memory import alias
from strata.engine.memory.cache import LEAST_RESERVE
from strata.engine.memory.figures import DoesNotFit, Figures, MemoryPlan, Shortfall, Switches
from strata.engine.memory.homes import reserve_of
from strata.engine.memory.plan import plan_memory
from strata.engine.options import Options

MOST: Final = 4
"""Options that are named for one thing."""
SHORTER_CONTEXT: Final = 8192
"""Contexts that long are worth halving."""
_SMALLER: Final = ("fp32", "fp16", "int8", "k8v4", "q4_0")


@dataclass(frozen=True, slots=True)
class Advice:
    """option: as it is written · got: what there would be with it, in the shortfall's unit."""

    option: str
    got: int


@dataclass(frozen=True, slots=True)
class _Change:
    """An option, and all that is planned with it."""

    option: str
    options: Options
    figures: Figures


def advise(
    figures: Figures, options: Options, switches: Switches, plan: MemoryPlan
) -> dict[Shortfall, tuple[Advice, ...]]:
    """For each shortfall of a plan, the options that make it smaller, the most helpful first."""
    found: dict[Shortfall, list[Advice]] = {short: [] for short in plan.shortfalls}
    if not found:
        return {}
    for change in _changes(figures, options):
        try:
            other = plan_memory(change.figures, change.options, switches)
        except DoesNotFit:
            continue
        got = {short.what: short.got for short in other.shortfalls}
        for short, advice in found.items():
            now = got.get(short.what, short.wanted)
            if now > short.got and _asks_for_as_much(short, options, change.options):
                advice.append(Advice(change.option, now))
    return {short: tuple(sorted(all_, key=lambda one: -one.got)[:MOST]) for short, all_ in found.items()}


def _asks_for_as_much(short: Shortfall, options: Options, changed: Options) -> bool:
    """Whether the thing itself is still wanted: doing without it is no help."""
    own = {
        "batch slots": ("batch",),
        "checkpoints": ("prompt_cache", "batch"),
        "prompt chunk": ("prefill",) if changed.max_context >= flags.MAX_CHUNK else ("prefill", "max_context"),
    }
    return all(getattr(options, name) == getattr(changed, name) for name in own.get(short.what, ()))


def _changes(figures: Figures, options: Options) -> Iterator[_Change]:
    def changed(option: str, **values: Any) -> _Change:
        return _Change(option, msgspec.structs.replace(options, **values), figures)

    yield from _smaller_state(options, changed)
    if figures.vram is None:
        return
    reserve, _ = reserve_of(options)
    if reserve > LEAST_RESERVE:
        least = LEAST_RESERVE >> 20
        yield changed(f"--vram-reserve-mib {least}", vram_reserve_mib=least)
    if options.expert_cache:
        yield changed("--expert-cache auto", expert_cache=0)
    if options.no_prefill_borrow:
        yield changed("without --no-prefill-borrow", no_prefill_borrow=False)
    if options.ple_io != "vram" and figures.sizes.table:
        yield changed("--ple-io vram", ple_io="vram")
    if figures.draft and not options.prefill_head_alias:
        yield _Change("without --mtp", options, replace(figures, draft=0, draft_slot=0, mtp=False))
    yield from _known_order(figures, options)
    if not options.resident_experts:
        yield changed("--resident-experts", resident_experts=True, resident_cpu_experts=False)
    if options.resident_budget_gib:
        yield changed("without --resident-budget-gib", resident_budget_gib=0)


def _smaller_state(options: Options, changed: Any) -> Iterator[_Change]:
    """What sequences could do without."""
    if options.device == "cuda":
        for kv in _SMALLER[_SMALLER.index(options.kv) + 1 :]:
            yield changed(f"--kv {kv}", kv=kv)
        if not options.kv_resident and options.max_context > flags.MIN_RESIDENT:
            yield changed(f"--kv-resident {flags.MIN_RESIDENT}", kv_resident=flags.MIN_RESIDENT)
    if options.max_context >= SHORTER_CONTEXT:
        half = options.max_context // 2
        yield changed(f"--max-context {half}", max_context=half)
    if options.batch_asked:
        yield changed("without --batch", batch=0)
    if options.prompt_cache > 1:
        yield changed("--prompt-cache 1", prompt_cache=1)
    if options.conversation_cache_mib:
        yield changed("without --conversation-cache-mib", conversation_cache_mib=0)


def _known_order(figures: Figures, options: Options) -> Iterator[_Change]:
    """A profile, and the head's memory: any order shows what is possible."""
    if figures.profile is None:
        pairs = tuple((i, e) for e in range(figures.sizes.per_layer) for i in range(len(figures.sizes.experts)))
        yield _Change("--expert-profile FILE", options, replace(figures, profile=pairs))
    lent = msgspec.structs.replace(options, prefill_head_alias=True, serve=True, short_read=0)
    if options.prefill_head_alias or alias.refused(lent, figures.sizes.head > 0, figures.mtp):
        return
    with_it = f"{'' if options.serve else ' --serve'}{' --short-read 0' if options.short_read else ''}"
    yield _Change(f"{alias.FLAG}{with_it}", lent, figures)

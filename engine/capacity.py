"""What the options ask of the state's memory, and what they get: slots, checkpoints, pages, parked conversations.

Errors   Refused when not even one conversation fits, or the folder for parked ones cannot be used
"""

from __future__ import annotations

from pathlib import Path

from strata.engine.device.host import ram
from strata.engine.log import log
from strata.engine.options import Options, Refused
from strata.engine.pack import ModelSpec, Pack
from strata.engine.state.checkpoints import CacheRules
from strata.engine.state.disk import DiskError, ParkingDisk
from strata.engine.state.fingerprint import fingerprint
from strata.engine.state.parked_file import Figures
from strata.engine.state.parking import MIB, Parking, ParkingRules
from strata.engine.state.plan import StatePlan, plan_state
from strata.engine.state.slots import StatePool, StateTooLarge


def cache_rules(options: Options) -> CacheRules:
    return CacheRules(options.prompt_cache, options.prompt_cache_every, options.prompt_cache_root)


def state_plan(options: Options, spec: ModelSpec, free_bytes: int, sides: int = 1) -> StatePlan:
    """The state for these options in so much memory. What is less than was asked is said in the log."""
    try:
        plan = plan_state(
            spec, options.max_context, free_bytes, options.batch_asked, cache_rules(options), options.kv, sides,
            options.resident,
        )  # fmt: skip
    except StateTooLarge as error:
        raise Refused(f"--max-context {options.max_context}: {error}") from None
    if options.batch > options.batch_asked:
        log(f"batch: {options.batch} slots asked, a window has rows for {options.batch_asked}")
    for line in plan.said:
        log(line)
    return plan


def parking_for(options: Options, pack: Pack, state: StatePool) -> Parking | None:
    """Where conversations are parked, None when nowhere."""
    budget = options.conversation_cache_mib * MIB if options.conversation_cache_slots else 0
    disk = options.conversation_cache_disk_mib * MIB
    if not options.prompt_cache or not (budget or disk):
        return None
    rules = ParkingRules(
        budget,
        options.conversation_cache_slots,
        options.conversation_cache_min_free_mib * MIB,
        options.conversation_cache_n_min,
        options.conversation_cache_similarity,
    )
    return Parking(rules, lambda: ram().free, _disk(options, pack, state, disk) if disk else None)


def _disk(options: Options, pack: Pack, state: StatePool, budget: int) -> ParkingDisk:
    own = fingerprint(pack, options.kv, "reference" if options.kernels == "reference" else "exact")
    figures = Figures(state.pages.page_bytes, state.recurrent.n_bytes)
    try:
        return ParkingDisk(Path(options.conversation_cache_dir), budget, own, figures)
    except DiskError as error:
        raise Refused(f"--conversation-cache-dir: {error}; name another folder") from None

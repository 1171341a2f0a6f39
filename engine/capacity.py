"""What the options ask of the state's memory, and what they get: slots, checkpoints, pages.

Errors   Refused when not even one conversation fits
"""

from __future__ import annotations

from strata.engine.log import log
from strata.engine.options import Options, Refused
from strata.engine.pack import ModelSpec
from strata.engine.state.checkpoints import CacheRules
from strata.engine.state.plan import StatePlan, plan_state
from strata.engine.state.slots import StateTooLarge


def cache_rules(options: Options) -> CacheRules:
    return CacheRules(options.prompt_cache, options.prompt_cache_every, options.prompt_cache_root)


def state_plan(options: Options, spec: ModelSpec, free_bytes: int, sides: int = 1) -> StatePlan:
    """The state for these options in so much memory. What is less than was asked is said in the log."""
    try:
        plan = plan_state(
            spec, options.max_context, free_bytes, options.batch_asked, cache_rules(options), options.kv, sides
        )
    except StateTooLarge as error:
        raise Refused(f"--max-context {options.max_context}: {error}") from None
    if options.batch > options.batch_asked:
        log(f"batch: {options.batch} slots asked, a window has rows for {options.batch_asked}")
    for line in plan.said:
        log(line)
    return plan

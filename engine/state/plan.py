"""How many batch slots and checkpoints a memory holds, and the pages they need. Figures in, plan out.

Order    the solo slot must fit; then batch slots, as many as asked or as fit; then checkpoints. Every slot can grow to
         the whole context whatever the others hold: the pool has the pages of them all
Wanted   `--prompt-cache` checkpoints, and one more for each slot: the last turn of its conversation
Units    bytes; slots beside the solo one
Errors   StateTooLarge when not even the solo slot fits
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from strata.engine.pack import ModelSpec
from strata.engine.state.checkpoints import CacheRules
from strata.engine.state.slots import estimate_bytes, pages_of, require_memory

MIN_BATCH: Final = 2
"""A batch of fewer slots is none."""
GIB: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class StatePlan:
    """n_slots batch slots (0 = no batch) beside the solo one, for a `StatePool` of 1 + n_slots; said: for the log."""

    n_slots: int
    n_checkpoints: int
    n_pages: int
    n_bytes: int
    said: tuple[str, ...]


def plan_state(
    spec: ModelSpec,
    max_context: int,
    free_bytes: int,
    batch: int,
    rules: CacheRules,
    kv: str = "fp32",
    sides: int = 1,
    resident: int = 0,
) -> StatePlan:
    """The state of a solo slot and of at most `batch` others in `free_bytes`; below two others there are none."""

    def takes(slots: int, checkpoints: int) -> int:
        return estimate_bytes(spec, 1 + slots, max_context, None, kv, sides, checkpoints, resident)

    require_memory(spec, 1, max_context, free_bytes, kv=kv, sides=sides, resident=resident)
    least = int(rules.reuse)
    fitting = (n for n in range(batch, MIN_BATCH - 1, -1) if takes(n, least) <= free_bytes)
    slots = next(fitting, 0)
    wanted = rules.checkpoints + slots if rules.reuse else 0
    checkpoints = next(n for n in range(wanted, -1, -1) if takes(slots, n) <= free_bytes)
    said = []
    if slots < batch:
        one = (takes(batch, least) - takes(0, least)) / batch
        said.append(
            f"batch: {batch} slots asked, {slots or 'none'} run: one of {max_context} tokens takes "
            f"{one / GIB:.2f} GiB, {free_bytes / GIB:.2f} GiB are free; a smaller context makes room for more"
            if batch >= MIN_BATCH
            else f"batch: {batch} slot asked, none runs: a batch has at least {MIN_BATCH}"
        )
    if checkpoints < wanted:
        said.append(
            f"prompt cache: {checkpoints} checkpoints of {wanted} wanted: one takes "
            f"{(takes(0, 1) - takes(0, 0)) / GIB:.2f} GiB, no more fit"
        )
    return StatePlan(
        slots, checkpoints, pages_of(1 + slots, max_context, checkpoints), takes(slots, checkpoints), tuple(said)
    )

"""What sequences take of a card: the solo one, batch slots, checkpoints, the draft layer's memory.

Order    as in engine/state/plan.py: the solo slot must fit; then batch slots, as many as asked or as fit; then
         checkpoints. With streamed keys and values a slot has `resident` tokens of them in VRAM and a home in RAM for
         all; the pooled index keys of the whole context stay in VRAM
Units    bytes, tokens
Errors   none: `plan_slots` gives None when not even the solo slot fits
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from strata.engine.pack import DraftSpec, ModelSpec
from strata.engine.state.pages import page_shapes, pages_for, staged_bytes
from strata.engine.state.plan import MIN_BATCH
from strata.engine.state.recurrent import recurrent_bytes
from strata.kernels.kv import KV
from strata.kernels.ops import PAGE

_FLOAT = 4


@dataclass(frozen=True, slots=True)
class SlotCosts:
    """Bytes of one slot and of one checkpoint in VRAM; streamed, kept: of these in page-locked RAM · staged: in VRAM,
    of all slots together, where a prompt brings what is in RAM."""

    slot: int
    checkpoint: int
    streamed: int
    kept: int = 0
    staged: int = 0


def slot_costs(spec: ModelSpec, kv: str, max_context: int, resident: int, sides: int) -> SlotCosts:
    """resident: tokens whose keys and values are in VRAM, 0 = all of the context."""
    streams = 0 < resident < max_context
    whole, cells = pages_for(max_context), pages_for(resident if streams else max_context)
    page, pooled = 0, 0
    for layer in page_shapes(spec, kv):
        sizes = {name: int(np.prod(shape)) * kind.itemsize for name, (shape, kind) in layer.items()}
        page += sum(sizes.values())
        pooled += sizes["block"]
    block = recurrent_bytes(spec)
    slot = cells * page + (whole - cells) * pooled + sides * block
    if not streams:
        return SlotCosts(slot, page + block, 0)
    frame = page - pooled
    return SlotCosts(slot, page + block, whole * frame, frame, staged_bytes(spec, whole, kv))


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """n_slots: batch slots beside the solo one · the checkpoints that were wanted, and those that there are."""

    n_slots: int
    wanted_checkpoints: int
    n_checkpoints: int
    costs: SlotCosts

    @property
    def slot_bytes(self) -> int:
        return (1 + self.n_slots) * self.costs.slot + self.costs.staged

    @property
    def checkpoint_bytes(self) -> int:
        return self.n_checkpoints * self.costs.checkpoint

    @property
    def streamed_bytes(self) -> int:
        return (1 + self.n_slots) * self.costs.streamed + self.n_checkpoints * self.costs.kept


def plan_slots(costs: SlotCosts, least: int, room: int, batch: int, checkpoints: int, each: int = 0) -> SlotPlan | None:
    """The solo slot in `least` bytes; slots and checkpoints beside it in `room`, which is less.

    batch, checkpoints   what was asked for; every slot wants a checkpoint more. 0 checkpoints: none at all
    each                 what a batch slot takes beside its state
    """
    if costs.slot + costs.staged > least:
        return None

    def takes(slots: int, n: int) -> int:
        return (1 + slots) * costs.slot + costs.staged + slots * each + n * costs.checkpoint

    fewest = int(checkpoints > 0)
    slots = next((n for n in range(batch, MIN_BATCH - 1, -1) if takes(n, fewest) <= room), 0)
    wanted = checkpoints + slots if checkpoints else 0
    kept = next((n for n in range(wanted, 0, -1) if takes(slots, n) <= room), 0)
    return SlotPlan(slots, wanted, kept, costs)


def draft_slot_bytes(spec: ModelSpec, draft: DraftSpec, kv: str, window: int) -> int:
    """What the draft layer remembers of one sequence: pages of one attention layer, for `window` tokens."""
    keys, values = KV[kv]
    row = sum(spec.kv_heads * form.row(spec.head_dim) * form.dtype.itemsize for form in (keys, values))
    pooled = spec.index_dim * _FLOAT * (PAGE // draft.ratio if draft.ratio else 0)
    return pages_for(window) * (PAGE * (row + spec.index_dim * _FLOAT) + pooled)

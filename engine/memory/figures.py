"""What a plan starts from, and what it is. Sizes of the model, memory of the machine; lines, shortfalls.

Units    bytes
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from strata.engine.device.base import Memory
from strata.engine.memory import ram
from strata.engine.memory.card import CardPlan
from strata.engine.memory.sizes import ModelSizes
from strata.engine.memory.state import SlotPlan
from strata.engine.pack import ModelSpec
from strata.kernels.formats import TensorType

Place = Literal["VRAM", "RAM"]


class DoesNotFit(Exception):
    """There is no plan. One line."""


@dataclass(frozen=True, slots=True, eq=False)
class Figures:
    """What is there.

    types    of the pack's tensors by name
    draft    bytes of the draft layer, 0 = none is loaded · draft_slot: of its memory of a sequence · draft_in_slots:
             whether it follows batch slots too · mtp: whether one was asked for
    tape     bytes that verify windows record, 0 = there are none
    vram     of the card, None on the host · ram: of the machine
    profile  (layer, expert), hottest first; None when no order is known
    """

    spec: ModelSpec
    sizes: ModelSizes
    types: Mapping[str, TensorType]
    vram: Memory | None
    ram: Memory
    draft: int = 0
    draft_slot: int = 0
    draft_in_slots: bool = False
    mtp: bool = False
    tape: int = 0
    profile: tuple[tuple[int, int], ...] | None = None

    def draft_memory(self, n_slots: int) -> int:
        """Bytes of what the draft layer remembers, with so many batch slots."""
        return self.draft_slot * (1 + (n_slots if self.draft_in_slots else 0))


@dataclass(frozen=True, slots=True)
class Switches:
    """What the environment may change. lend_pct: None = by how the experts lie in RAM · headroom: None = 4 GiB · forms:
    whether experts may have forms of the card's own · arena_pin: bytes of an arena that are page-locked at most, None =
    all of it · free: share of what weights and state leave that stays free beside the reserve · ring: its experts, 0 =
    64 and what is spare · stream_min: rows of a chunk from which it streams, 0 = 1024"""

    own: bool = True
    lend_pct: int | None = None
    headroom: int | None = None
    forms: bool = True
    arena_pin: int | Literal["auto"] | None = None
    free: float = 0.0
    ring: int = 0
    stream_min: int = 0


@dataclass(frozen=True, slots=True)
class Line:
    what: str
    place: Place
    n_bytes: int
    note: str = ""


@dataclass(frozen=True, slots=True)
class Shortfall:
    """Something that is less than it could be. got, wanted: as `unit` says."""

    what: str
    got: int
    wanted: int
    unit: str


@dataclass(frozen=True, slots=True, eq=False)
class MemoryPlan:
    """card is None on the host; the rest is as its parts say."""

    lines: tuple[Line, ...]
    slots: SlotPlan
    card: CardPlan | None
    homes: ram.ExpertHomes
    shortfalls: tuple[Shortfall, ...]
    said: tuple[str, ...] = field(default=())

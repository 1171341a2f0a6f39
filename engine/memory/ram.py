"""RAM: how much stays free beside the experts, and which experts lie where.

arena      all experts that VRAM lacks, page-locked
resident   those of them that fit, hottest first; the others are read from the mapped file
mapped     the file; the system keeps what it can

Units    bytes; sums stop at 2^64 - 1 instead of passing it
Errors   none: what does not fit stays in the file
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, Literal

from strata.engine.device.arena import GIB, MIB

Source = Literal["arena", "resident", "mapped"]

MOST: Final = (1 << 64) - 1
HEADROOM: Final = 4 * GIB
CPU_HEADROOM: Final = 8 * GIB
"""Of `--resident-cpu-experts`."""
CONVERSATION_SLACK: Final = 256 * MIB
BUDGET_SLACK: Final = 256 * MIB


def saturating(*terms: int) -> int:
    """The sum, at most MOST."""
    return min(sum(terms), MOST)


@dataclass(frozen=True, slots=True)
class ConversationCache:
    """What parked conversations may take, and what must stay free beside them; as asked on the command line."""

    budget: int
    min_free: int
    slots: int
    prompt_cache: int
    serve: bool

    @property
    def on(self) -> bool:
        return self.serve and min(self.budget, self.slots, self.prompt_cache) > 0


NO_CONVERSATIONS: Final = ConversationCache(0, 0, 0, 0, False)


@dataclass(frozen=True, slots=True)
class ExpertSource:
    """Where experts come from that VRAM lacks, as asked.

    all_fit    they must all have copies · headroom: RAM that copies leave, None = 4 GiB, or 8 where all must fit
    given      RAM for copies, None = what is there
    pinned     of an arena, the most that is page-locked: bytes, "auto" = what copies may take, None = all of it
    """

    kind: Source = "arena"
    all_fit: bool = False
    headroom: int | None = None
    given: int | None = None
    pinned: int | Literal["auto"] | None = None
    parked: ConversationCache = NO_CONVERSATIONS

    @property
    def kept(self) -> int:
        """RAM that stays free beside experts and the budget of parked conversations, whom head-room would count once
        more."""
        if not self._copies:
            return self.parked.min_free if self.parked.on else BUDGET_SLACK
        planned = self.headroom if self.headroom is not None else CPU_HEADROOM if self.all_fit else HEADROOM
        return max(0, headroom(planned, True, self.parked) - (self.parked.budget if self.parked.on else 0))

    @property
    def _copies(self) -> bool:
        """Whether the rule of resident copies says how much RAM there is."""
        return self.kind == "resident" or (self.kind == "arena" and self.pinned == "auto")

    def budget(self, available: int) -> int:
        """RAM for copies, of what is left behind the budget of parked conversations."""
        given = self.given if self.kind == "resident" else self.pinned if isinstance(self.pinned, int) else None
        return 0 if self.kind == "mapped" else resident_budget(available, self.kept, given)

    def homes(self, missing: Iterable[int], lent: Iterable[int], available: int) -> ExpertHomes:
        """Of experts of these bytes, hottest first, and of those in lent slots, from the last one downward."""
        missing, lent = list(missing), list(lent)
        total, of_lent = sum(missing), sum(lent)
        budget = self.budget(available)
        if self.kind == "arena" and self.pinned is None:
            if total + of_lent > budget:
                return ExpertHomes("mapped", len(missing), total, 0, 0)
            return ExpertHomes("arena", len(missing), total, len(missing), total, len(lent), of_lent)
        homes = resident_homes(missing, lent, budget)
        return homes if self.kind != "mapped" else replace(homes, source="mapped")


def headroom(existing: int, resident: bool, conversations: ConversationCache) -> int:
    """RAM that the resident experts leave: what was planned anyway, or enough for parked conversations if that is
    more."""
    if not (resident and conversations.on):
        return existing
    return max(existing, saturating(conversations.budget, conversations.min_free, CONVERSATION_SLACK))


def resident_budget(available: int, kept: int, given: int | None) -> int:
    """RAM for resident experts; given: `--resident-budget-gib` in bytes, as far as it is there."""
    if given is None:
        return max(0, available - kept)
    return max(0, min(given, available - kept - BUDGET_SLACK))


@dataclass(frozen=True, slots=True)
class ExpertHomes:
    """Where the experts are that VRAM does not hold, and those that lent slots hold.

    copies, copy_bytes   in RAM, of `missing` and the lent ones · lent_copies: of lent slots, from the last downward
    mapped_bytes         of the missing, read from the file
    """

    source: Source
    missing: int
    missing_bytes: int
    copies: int
    copy_bytes: int
    lent_copies: int = 0
    lent_copy_bytes: int = 0

    @property
    def mapped_bytes(self) -> int:
        return self.missing_bytes - self.copy_bytes


def resident_homes(missing: Iterable[int], lent: Iterable[int], budget: int) -> ExpertHomes:
    """Copies for the missing experts, hottest first, then for those in lent slots, from the last slot downward."""
    sizes = list(missing)
    copies, copy_bytes = _take(sizes, budget)
    lent_copies, lent_bytes = _take(lent, budget - copy_bytes) if copies == len(sizes) else (0, 0)
    source: Source = "resident" if copies or not sizes else "mapped"
    return ExpertHomes(source, len(sizes), sum(sizes), copies, copy_bytes, lent_copies, lent_bytes)


def _take(sizes: Iterable[int], budget: int) -> tuple[int, int]:
    """How many of the first fit, and their bytes."""
    n = total = 0
    for size in sizes:
        if total + size > budget:
            break
        n, total = n + 1, total + size
    return n, total

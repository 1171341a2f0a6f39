"""What prompts of a model that does not fit whole do with memory that is not theirs: slots, the head, nothing. Pure.

The start of a card and `--plan` both choose here, from the same figures, so that a plan is what an engine does.

    chosen = choose(tiers, CardMemory(left, ram, head, drafts), plan_loan)
    chosen.tiers, chosen.head, chosen.said

Units    bytes, tokens
Errors   DeviceError of the plan without the head
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from strata.engine.device.arena import MIB, shown
from strata.engine.experts.plan import TierPlan
from strata.engine.experts.tiering import Tiering
from strata.engine.memory.borrow import DRAFT_ROWS, draft_beside
from strata.engine.memory.loan import STAYS, LoanPlan, Planner
from strata.engine.pack import ModelSpec
from strata.kernels.cuda.compile import DeviceError

AUTO_CHUNKS: Final = (8192, 4096, 2048, 1024, 512, 256, 128, 64, 32)
"""Prompt chunks that are tried where all experts lie in VRAM; the largest that fits wins."""
RESERVE: Final = 512 * MIB
"""VRAM that batch slots and checkpoints leave free: the driver's share of graphs and kernels, and the desktop."""
FIXED: Final = 16 * MIB
"""VRAM of what is taken behind a plan: tables of addresses, buffers of windows."""


def auto_chunks(most: int) -> list[int]:
    """Those of at most so many tokens, longest first; where all of a context is less than the longest, also that."""
    top = min(most, AUTO_CHUNKS[0])
    return [top, *(n for n in AUTO_CHUNKS if n < top)]


@dataclass(frozen=True, slots=True)
class CardMemory:
    """left: bytes of the card that weights and state have left · ram: of RAM, behind what lies there in any case ·
    head: of the output head · drafts: the model that a draft layer alone would be, None without one."""

    left: int
    ram: int
    head: int
    drafts: ModelSpec | None


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """tiers: what becomes of the memory · head: what prompts do with the head's, None: it stays · said: why."""

    tiers: TierPlan
    head: LoanPlan | None = None
    said: tuple[str, ...] = ()


def choose(tiers: Tiering, memory: CardMemory, loan: Planner | None) -> Choice:
    """The plan, and of the head where it is to be lent (loan) and that gains something."""
    plain = tiers.plan(memory.left, memory.ram, FIXED)
    if loan is None:
        return Choice(plain)
    try:
        lent = tiers.plan(memory.left, memory.ram - memory.head, FIXED, alias=True)
    except DeviceError as error:
        return Choice(plain, said=(f"head alias: {error}; so the head stays",))
    found = _plan_loan(loan, tiers, lent, memory)
    why = _stays(plain, lent, found, memory.head)
    return Choice(lent, found) if why is None else Choice(plain, said=(f"head alias: {why}, so it stays",))


def _stays(plain: TierPlan, lent: TierPlan, found: LoanPlan | None, head: int) -> str | None:
    """Why the head is not lent."""
    if found is None:
        return f"with {shown(head)} of the head reads would be hardly faster"
    borrowed = 0 if plain.borrow is None else plain.borrow.chunk
    if borrowed >= found.chunk:
        return f"chunks of {borrowed} fit slots that prompts borrow, {found.chunk} the head"
    if lent.placement.filed.sum() > plain.placement.filed.sum():
        return f"RAM has no room for {shown(head)} of the head beside experts"
    return None


def _plan_loan(loan: Planner, tiers: Tiering, planned: TierPlan, memory: CardMemory) -> LoanPlan | None:
    """What prompts do with the head's memory."""
    own = memory.left - planned.placement.cache_bytes - planned.staged_bytes - planned.reserve - planned.fixed
    room = tiers.loan_room(own, memory.head, min(STAYS, tiers.stream_min - 1), planned.placement)
    return loan(replace(room, beside=draft_beside(memory.drafts, DRAFT_ROWS)), tiers.price)

"""Where the buffers of a prompt chunk lie, and how long a chunk is.

own       an allocation beside the cache: nothing is lent
borrow    the last slots of the expert cache, for the time of a read; their experts are brought back afterwards
Which one, in this order: own buffers from spare memory, borrowing, own buffers that step down until they fit. Before
all of them comes the output head's memory, where it is lent (loan.py).

Units    tokens, bytes, slots. `price(chunk)`: bytes of the buffers of a chunk; it never falls when the chunk grows
Errors   none: what does not fit is a shorter chunk, 0 = none fits
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Literal

from strata.engine.device.arena import MIB
from strata.engine.memory.cache import KEPT_SLOTS, Slots

Price = Callable[[int], int]
Kind = Literal["own", "borrow", "hybrid"]

GRID: Final = 256
"""Prompt chunks are planned in steps of so many tokens."""
OWN_CANDIDATES: Final = (32768, 16384, 8192, 6144, 4096, 3072, 2048, 1024, 512, 256)
"""Own buffers from spare memory."""
STEPS: Final = (6144, 4096, 3072, 2048, 1536, 1024, 512, 256, 128, 64, 32)
"""Own buffers where nothing else is left; the last four so that a small card starts at all."""
KEPT_FREE: Final = 512 * MIB
OWN_AUTO: Final = 2048
"""Own buffers of `auto` without a profile, or when nothing is lent."""
OWN_NOTHING_FITS: Final = 1024
"""Own buffers of `auto` when no chunk can be borrowed for."""
LEND_PCT, LEND_PCT_PINNED = 85, 90
PINNED_SHARE: Final = 0.9


@dataclass(frozen=True, slots=True)
class PromptLayout:
    """chunk: tokens, 0 = there is no room for any · lent, lent_bytes: slots from the end of the cache · own_bytes: an
    allocation · head_bytes: of the output head's memory."""

    kind: Kind
    chunk: int
    lent: int = 0
    lent_bytes: int = 0
    own_bytes: int = 0
    head_bytes: int = 0


def lend_pct(given: int | None, pinned_share: float) -> int:
    """Most of the cache that `auto` lends, in percent; `pinned_share`: of the experts, from which a refill is fast."""
    if given is not None:
        return given
    return LEND_PCT_PINNED if pinned_share >= PINNED_SHARE else LEND_PCT


def borrowed(slots: Slots, price: Price, asked: int, most: int, pct: int) -> PromptLayout:
    """Borrow for the longest chunk of at most `most` tokens. asked 0: whole steps, and at most `pct` percent of the
    slots are lent; else `asked`, halved until it fits."""
    chunk = _auto_chunk(slots, price, most, pct) if not asked else _halved(slots, price, min(asked, most))
    lent = _lent(slots, price(chunk), None) if chunk else None
    if lent is None:
        return PromptLayout("borrow", 0)
    return PromptLayout("borrow", chunk, lent, slots.tail_bytes(lent))


def _auto_chunk(slots: Slots, price: Price, most: int, pct: int) -> int:
    """The longest whole step, by bisection; a context shorter than a step is one chunk."""
    if most < GRID:
        return most if _lent(slots, price(most), pct) is not None else 0
    fits = range(1, most // GRID + 1)
    return GRID * bisect_left(fits, True, key=lambda step: _lent(slots, price(step * GRID), pct) is None)


def _halved(slots: Slots, price: Price, chunk: int) -> int:
    least = min(GRID, chunk)
    while chunk >= least and _lent(slots, price(chunk), None) is None:
        chunk //= 2
    return chunk if chunk >= least else 0


def _lent(slots: Slots, n_bytes: int, pct: int | None) -> int | None:
    """Slots to lend for so many bytes, None when too few would stay."""
    lent = slots.lent_for(n_bytes)
    if lent is None or len(slots) - lent < KEPT_SLOTS:
        return None
    return lent if pct is None or 100 * lent <= pct * len(slots) else None


def own_chunk(
    free: int,
    reserve: int,
    most: int,
    borrowed_chunk: int,
    price: Price,
    candidates: Iterable[int] = OWN_CANDIDATES,
) -> int:
    """The longest candidate whose buffers fit beside the reserve, no shorter than what borrowing would give;
    0: borrow."""
    if free <= reserve or most <= 0:
        return 0
    available = free - reserve
    fits = (c for c in candidates if borrowed_chunk <= c <= most and 0 < price(c) <= available)
    return next(fits, 0)


def own_layout(chunk: int, price: Price) -> PromptLayout:
    return PromptLayout("own", chunk, own_bytes=price(chunk) if chunk else 0)


def stepped_down(asked: int, free: int, price: Price, steps: Iterable[int] = STEPS) -> PromptLayout:
    """Own buffers of `asked` tokens, or the next step below that leaves KEPT_FREE."""
    wanted = [asked, *(step for step in steps if step < asked)]
    return own_layout(next((c for c in wanted if price(c) <= free - KEPT_FREE), 0), price)

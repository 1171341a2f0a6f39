"""What a prompt may lay into the output head's own memory while it is read, and how long its chunks then are. Pure.

A pass has three parts (engine/device/cuda.py): what lives for all of it, what mixers take, what experts take. Chunks
that stream experts have a ring beside them. The first part outlives the loan, since logits are made of its last row, so
it lies in memory of the prompts' own; each of the other pieces lies there or in the head, whole. Reads that are short
keep the head and lie in the same memory of their own, without a ring.

    plan_loan(LoanRoom(own=.., head=.., most=.., ring=.., ..), price)

Units    bytes, tokens
Errors   none: None = the head has nothing to add
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Final, Protocol

from strata.engine.device.arena import padded
from strata.engine.memory.prompt import GRID

STAYS: Final = 512
"""Rows of a chunk up to which the head stays: experts are read in place."""
LEAST: Final = 8
_FLOAT: Final = 4


class Priced(Protocol):
    """Bytes of a chunk's workspace, and of its parts: the whole pass's, mixers', experts'."""

    def __call__(self, chunk: int) -> int: ...
    def parts(self, n: int) -> tuple[int, int, int]: ...


@dataclass(frozen=True, slots=True)
class LoanRoom:
    """own: bytes of prompts beside the cache, ring and all · head: of the output head · most: tokens of a chunk at most

    ring     what it takes at least; ring_step: how it grows; ring_most: what it can use; ring_alone: without a loan
    stays    rows up to which the head stays, at most · beside: what a draft layer takes of the first part
    """

    own: int
    head: int
    most: int
    ring: int
    ring_step: int
    ring_most: int
    ring_alone: int
    stays: int = STAYS
    beside: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes [begin, end) of the head's memory, or of the prompts' own."""

    in_head: bool
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class LoanPlan:
    """chunk: of a read that has the head's memory · plain: what there would be room for without it · stays: rows up to
    which a chunk leaves the head alone · the pieces of a lent read · own_bytes: of memory of the prompts' own ·
    beside: as of the room."""

    chunk: int
    plain: int
    stays: int
    whole: Piece
    mixers: Piece
    experts: Piece
    ring: Piece
    own_bytes: int
    beside: int = 0

    @property
    def lent_bytes(self) -> int:
        """Of the head's memory."""
        return sum(piece.end - piece.begin for piece in (self.mixers, self.experts, self.ring) if piece.in_head)


Planner = Callable[[LoanRoom, Priced], LoanPlan | None]


def plan_loan(room: LoanRoom, price: Priced) -> LoanPlan | None:
    """The longest chunk, with as much as possible in the head; None where it is no longer than without."""

    def alone(chunk: int, ring: int) -> bool:
        return price(chunk) + room.beside + ring <= room.own

    plain = next((c for c in steps(room.most) if alone(c, room.ring_alone)), 0)
    stays = next((c for c in steps(min(room.stays, room.most)) if alone(c, 0)), 0)
    for chunk in steps(room.most):
        if chunk <= max(plain, stays) or not stays:
            return None
        whole, mixers, experts = price.parts(chunk)
        placed = _placed(room, padded(whole + room.beside), (padded(mixers), padded(experts), room.ring))
        if placed is not None:
            own = max(padded(price(stays) + room.beside), *(piece.end for piece in placed if not piece.in_head))
            return LoanPlan(chunk, plain, stays, *placed, own, room.beside)
    return None


def beside(rows: int, wide: int, hidden: int) -> int:
    """What a draft layer that reads so many rows at once takes behind a chunk; wide: values of a residual."""
    return padded(rows * _FLOAT * (2 * wide + 4 * hidden))


def steps(most: int) -> Iterator[int]:
    """Chunks of at most `most` tokens, longest first: all of it, whole steps, and halves of one."""
    yield most
    yield from range((most - 1) // GRID * GRID, GRID - 1, -GRID)
    half = min(most, GRID) // 2
    while half >= LEAST:
        yield half
        half //= 2


def _placed(room: LoanRoom, whole: int, sizes: tuple[int, int, int]) -> tuple[Piece, Piece, Piece, Piece] | None:
    """Where the first part, mixers, experts and ring lie; None when they do not fit. The ring takes what is left."""
    sets = [chosen for n in range(len(sizes) + 1) for chosen in combinations(range(len(sizes)), n)]
    fits = [chosen for chosen in sets if sum(sizes[i] for i in chosen) <= room.head]
    lent = max(fits, key=lambda chosen: sum(sizes[i] for i in chosen))
    ends = {True: 0, False: whole}
    pieces = []
    for i, size in enumerate(sizes):
        begin = ends[i in lent]
        ends[i in lent] = begin + size
        pieces.append(Piece(i in lent, begin, begin + size))
    if ends[False] > room.own:
        return None
    mixers, experts, ring = pieces
    left = (room.head if ring.in_head else room.own) - ring.end
    more = min(left, room.ring_most - room.ring) // room.ring_step * room.ring_step
    return Piece(False, 0, whole), mixers, experts, Piece(ring.in_head, ring.begin, ring.end + max(0, more))

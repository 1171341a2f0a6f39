"""What a prompt may lay into the output head's own memory while it is read, and how long its chunks then are. Pure.

A pass has two parts (engine/device/cuda.py): what lives for all of it, and what blocks of layers work in. Chunks that
stream experts have a ring beside them. The first part outlives the loan, since logits are made of its last row, so it
lies in memory of the prompts' own; each of the others lies there or in the head, whole. Reads that are short keep the
head and lie in the same memory of their own, without a ring.

A longer chunk has its experts streamed for more tokens, a larger ring lets the link go on while mixers compute. Of all
ways to lay them the one with the least estimated time a token is taken (`seconds`).

    plan_loan(LoanRoom(own=.., head=.., most=.., ring=.., ..), price)

Units    bytes, tokens, seconds
Errors   none: None = the head has nothing to add
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol

from strata.engine.device.arena import padded
from strata.engine.memory.prompt import GRID

STAYS: Final = 512
"""Rows of a chunk up to which the head stays: experts are read in place."""
LEAST: Final = 8
GAIN: Final = 0.9
"""Of the time without a loan, what one may take that is worth its copy of the head in RAM."""
LINK: Final = 1 / 54e9
MIXERS: Final = 80e-6
EXPERTS: Final = 50e-6
ROUND: Final = 0.9e-3
"""Seconds: of a byte over PCIe, of a token in all mixers and in all experts, and what a round through the ring has its
products take more. H200, 2026-11-30: chunks of 8,192 with whole layers in the ring took 1.06 s, of 3,840 with a ring of
186 experts 1.26 s, of 2,816 with one of 32 experts 1.8 s, of 2,048 and of 1,024 with one of 64 experts 1.2 s; these
constants say them within a tenth. Cards differ, but what decides between two ways is mostly the link."""
UNEVEN: Final = ((0.25, 0.5), (0.75, 0.5))
"""Of the layers, and of the time of all mixers: those with attention, deep in a prompt, and the others."""
IN_PLACE: Final = 2
"""How much longer the link takes for experts that kernels read in place."""
_BUFFERS: Final = 2
"""Of the ring."""
_FLOAT: Final = 4


class Priced(Protocol):
    """Bytes of a chunk's workspace, and of its parts: the whole pass's, and what blocks of layers work in."""

    def __call__(self, chunk: int) -> int: ...
    def parts(self, n: int) -> tuple[int, int]: ...


@dataclass(frozen=True, slots=True)
class LoanRoom:
    """own: bytes of prompts beside the cache, ring and all · head: of the output head · most: tokens of a chunk at most

    ring      what it takes at least; ring_step: how it grows; ring_most: what it can use; ring_alone: without a loan
    missing   bytes of the experts that a chunk streams, in so many `layers`, from `stream_min` rows on
    stays     rows up to which the head stays, at most · beside: what a draft layer takes of the first part
    """

    own: int
    head: int
    most: int
    ring: int
    ring_step: int
    ring_most: int
    ring_alone: int
    missing: int
    layers: int
    stream_min: int
    stays: int = STAYS
    beside: int = 0

    def seconds(self, chunk: int, ring: int) -> float:
        """A token's, in chunks with such a ring: computing or the link, whatever takes longer. The link rests while
        mixers compute, but for what the ring holds beyond the rounds that products are about to read; what it holds
        more than one layer's mixers need is of no use to another's."""
        link, computing = self.missing * LINK, chunk * (MIXERS + EXPERTS)
        if not self.missing:
            return computing / chunk
        if chunk < self.stream_min:
            return (IN_PLACE * link + computing) / chunk
        share = min(_BUFFERS, ring * self.layers / self.missing)  # of a layer's experts
        rounds = self.layers * max(1.0, _BUFFERS / share)
        ahead = share * max(0.0, link - chunk * EXPERTS)
        spare = ahead - _BUFFERS * self.layers * ROUND
        rests = sum(max(0.0, time * chunk * MIXERS - layers * spare) for layers, time in UNEVEN)
        return max(computing + rounds * ROUND, link + rests) / chunk


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes [begin, end) of the head's memory, or of the prompts' own."""

    in_head: bool
    begin: int
    end: int

    @property
    def n_bytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class LoanPlan:
    """chunk: of a read that has the head's memory · plain: what there would be room for without it · stays: rows up to
    which a chunk leaves the head alone · the pieces of a lent read · own_bytes: of memory of the prompts' own ·
    beside: as of the room."""

    chunk: int
    plain: int
    stays: int
    whole: Piece
    work: Piece
    ring: Piece
    own_bytes: int
    beside: int = 0

    @property
    def lent_bytes(self) -> int:
        """Of the head's memory."""
        return sum(piece.n_bytes for piece in (self.work, self.ring) if piece.in_head)


Planner = Callable[[LoanRoom, Priced], LoanPlan | None]


def plan_loan(room: LoanRoom, price: Priced) -> LoanPlan | None:
    """The chunk, no shorter than without a loan, and the pieces that take the least time a token; of equal ones the
    longest chunk. None where they gain little."""

    def alone(chunk: int, ring: int) -> bool:
        return price(chunk) + room.beside + ring <= room.own

    plain = next((c for c in steps(room.most) if alone(c, room.ring_alone)), 0)
    stays = next((c for c in steps(min(room.stays, room.most)) if alone(c, 0)), 0)
    if not stays:
        return None
    best, wanted = None, GAIN * room.seconds(plain, room.ring_alone) if plain else float("inf")
    for chunk in steps(room.most):
        if chunk < plain or chunk <= stays:
            break
        whole, work = price.parts(chunk)
        for pieces in _placed(room, padded(whole + room.beside), padded(work)):
            seconds = room.seconds(chunk, pieces[-1].n_bytes)
            if seconds < wanted:
                best, wanted = (chunk, pieces), seconds
    if best is None:
        return None
    chunk, (whole_piece, *lendable) = best
    ends = [piece.end for piece in (whole_piece, *lendable) if not piece.in_head]
    own = max(padded(price(stays) + room.beside), *ends)
    return LoanPlan(chunk, plain, stays, whole_piece, lendable[0], lendable[1], own, room.beside)


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


def _placed(room: LoanRoom, whole: int, work: int) -> Iterator[tuple[Piece, Piece, Piece]]:
    """Where the first part, that of blocks and the ring may lie with something of them in the head; the ring has all
    that is left in its place, as far as it can use it."""
    for work_lent, ring_lent in ((False, True), (True, False), (True, True)):
        ends = {True: 0, False: whole}
        begin = ends[work_lent]
        ends[work_lent] = begin + work
        left = (room.head if ring_lent else room.own) - ends[ring_lent]
        if left < room.ring or ends[True] > room.head or ends[False] > room.own:
            continue
        ring = room.ring + max(0, min(left, room.ring_most) - room.ring) // room.ring_step * room.ring_step
        at = ends[ring_lent]
        yield Piece(False, 0, whole), Piece(work_lent, begin, begin + work), Piece(ring_lent, at, at + ring)

"""A parked conversation: a slot's state on the host, with checkpoints of the way there and a checksum over every byte.

What     tokens; pages and recurrent block of all of them (`StateImage`); marks: recurrent blocks of earlier positions,
         whose pages are the first ones of the image
Seal     CRC-32 of the head (tokens, figures, the other sums), of the pages and of every block. Taken when the state is
         captured and compared before any of it is used; so is what went to a file and came back
Cost     the copy from the device; the sums take 0.15 s a GB (one x86 core, 2026-11-29; BLAKE2b takes 0.7 s)
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import Final

import numpy as np

from strata.engine.device.base import Bytes
from strata.engine.state.checkpoints import KINDS, Checkpoint, Kind, is_prefix
from strata.engine.state.slots import StateImage, StatePool
from strata.kernels.ops import I32

FIGURES: Final = struct.Struct("<QQQ")
"""Tokens, bytes of the pages, bytes of a block."""
SUMS: Final = struct.Struct("<III")
"""Sums of the pages and of the block, marks."""
MARK: Final = struct.Struct("<QII")
"""Position, kind, sum of the block."""


@dataclass(frozen=True, slots=True, eq=False)
class Mark:
    """A checkpoint of a parked conversation: the recurrent block at a position below its length."""

    position: int
    kind: Kind
    block: Bytes


@dataclass(frozen=True, slots=True)
class Seal:
    """CRC-32 sums of a parked conversation; `marks` in their order."""

    head: int
    pages: int
    block: int
    marks: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Parked:
    """tokens int32 (image.length,); marks in ascending order."""

    tokens: I32
    image: StateImage
    marks: tuple[Mark, ...]
    seal: Seal

    @property
    def n_bytes(self) -> int:
        """What it takes, for the budgets."""
        blocks = len(self.image.block) * (1 + len(self.marks))
        return self.tokens.nbytes + len(self.image.pages) + blocks

    @property
    def positions(self) -> tuple[int, ...]:
        """Lengths that it can be continued from."""
        return *(mark.position for mark in self.marks), len(self.tokens)

    @property
    def is_intact(self) -> bool:
        """Whether every byte is as it was sealed."""
        return self.seal == seal_of(self.tokens, self.image, self.marks)

    def restore(self, state: StatePool, slot: int, length: int) -> None:
        """Put the first `length` tokens, one of `positions`, into a slot. OutOfPages and ValueError as there."""
        block = next((mark.block for mark in self.marks if mark.position == length), self.image.block)
        state.restore(slot, self.image, length, block)


def head(tokens: I32, image: StateImage, pages: int, block: int, marks: tuple[tuple[Mark, int], ...]) -> bytes:
    """What says how the bodies are to be read, with their sums: the part of a file that a model has no part in."""
    parts = [FIGURES.pack(len(tokens), len(image.pages), len(image.block)), SUMS.pack(pages, block, len(marks))]
    parts += [MARK.pack(mark.position, KINDS.index(mark.kind), own) for mark, own in marks]
    return b"".join([*parts, tokens.astype("<i4").tobytes()])


def seal_of(tokens: I32, image: StateImage, marks: tuple[Mark, ...]) -> Seal:
    """The sums of these bytes now."""
    pages, block = zlib.crc32(image.pages.data), zlib.crc32(image.block.data)
    own = tuple(zlib.crc32(mark.block.data) for mark in marks)
    return Seal(zlib.crc32(head(tokens, image, pages, block, tuple(zip(marks, own, strict=True)))), pages, block, own)


def marks_of(checkpoints: dict[int, Checkpoint], tokens: I32) -> dict[int, Checkpoint]:
    """The checkpoints worth keeping with a conversation: the last turn on its way, and the last root or pin."""
    found: dict[int, Checkpoint] = {}
    for kinds in (("turn",), ("root", "pin")):
        own = {
            place: c
            for place, c in checkpoints.items()
            if c.kind in kinds and len(c.tokens) < len(tokens) and is_prefix(c.tokens, tokens)
        }
        if own:
            place = max(own, key=lambda place: len(own[place].tokens))
            found[place] = own[place]
    return dict(sorted(found.items(), key=lambda item: len(item[1].tokens)))


def capture(state: StatePool, slot: int, tokens: I32, checkpoints: dict[int, Checkpoint]) -> Parked:
    """The slot, which holds the tokens, and checkpoints on its way (by pool slot). MemoryError when RAM is short."""
    image = state.image(slot)
    marks = tuple(Mark(len(c.tokens), c.kind, state.recurrent.read(place)) for place, c in checkpoints.items())
    own = np.array(tokens, np.int32)
    return Parked(own, image, marks, seal_of(own, image, marks))

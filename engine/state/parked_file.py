"""The file of a parked conversation: head, pages, recurrent blocks. docs/parking.md describes it byte by byte.

    magic 8 · version u32 · bytes of the head u32 · fingerprint 32                     PREFIX
    tokens u64 · bytes of the pages u64 · bytes of a block u64                         FIGURES
    sum of the pages u32 · sum of the block u32 · marks u32                            SUMS
    each mark: position u64 · kind u32 · sum of its block u32                          MARK
    token ids i32 each · CRC-32 of everything before it u32
    pages · block · block of each mark

Units    bytes, little-endian; sums are CRC-32
Errors   NotOurs: another magic, version or fingerprint. Torn: of the wrong size, or a head that was changed. The bodies
         are compared with their sums by `Parked.is_intact`
Limits   every figure is compared with the file's size and the model's figures before anything is allocated by it
"""

from __future__ import annotations

import os
import struct
import zlib
from dataclasses import dataclass
from io import BufferedReader
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np

from strata.engine.device.base import Bytes
from strata.engine.state.checkpoints import KINDS
from strata.engine.state.pages import pages_for
from strata.engine.state.parked import FIGURES, MARK, SUMS, Mark, Parked, Seal, head
from strata.engine.state.slots import StateImage
from strata.kernels.ops import I32

MAGIC: Final = b"STRATAPK"
VERSION: Final = 1
PREFIX: Final = struct.Struct("<8sII32s")
_SUM: Final = struct.Struct("<I")
MAX_HEAD: Final = 64 << 20


class NotOurs(Exception):
    """A file of another format, model or engine."""


class Torn(Exception):
    """A file that is not whole, or whose head has changed."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Bytes of a page over all layers, and of a recurrent block."""

    page_bytes: int
    block_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class _Head:
    tokens: I32
    n_pages: int
    n_block: int
    pages: int
    block: int
    marks: tuple[tuple[int, int, int], ...]
    size: int
    """Of the head itself."""


def head_bytes(parked: Parked, fingerprint: bytes) -> bytes:
    """The head of its file. Raises Torn when it is not what was sealed."""
    marks = tuple(zip(parked.marks, parked.seal.marks, strict=True))
    body = head(parked.tokens, parked.image, parked.seal.pages, parked.seal.block, marks)
    if zlib.crc32(body) != parked.seal.head:
        raise Torn("its tokens have changed in memory")
    size = PREFIX.size + len(body) + _SUM.size
    whole = PREFIX.pack(MAGIC, VERSION, size, fingerprint) + body
    return whole + _SUM.pack(zlib.crc32(whole))


def write_file(path: Path, head: bytes, parked: Parked) -> None:
    """Write a whole file, for its owner only, and wait until it is on the medium."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(head)
        for body in (parked.image.pages, parked.image.block, *(mark.block for mark in parked.marks)):
            file.write(body.data)
        file.flush()
        os.fsync(fd)


def read_head(path: Path, fingerprint: bytes, figures: Figures) -> tuple[I32, tuple[int, ...]]:
    """Tokens of a file, and the positions that it can be continued from. Raises NotOurs, Torn, OSError."""
    with _opened(path) as file:
        found = _read_head(file, fingerprint, figures)
    return found.tokens, (*(position for position, _, _ in found.marks), len(found.tokens))


def read_file(path: Path, fingerprint: bytes, figures: Figures) -> Parked:
    """A whole file; whether its bytes are those that were written says `is_intact`. Raises NotOurs, Torn, OSError."""
    with _opened(path) as file:
        found = _read_head(file, fingerprint, figures)
        image = StateImage(len(found.tokens), _body(file, found.n_pages), _body(file, found.n_block))
        marks = tuple(Mark(at, KINDS[kind], _body(file, found.n_block)) for at, kind, _ in found.marks)
    sums = tuple(own for _, _, own in found.marks)
    own = zlib.crc32(head(found.tokens, image, found.pages, found.block, tuple(zip(marks, sums, strict=True))))
    return Parked(found.tokens, image, marks, Seal(own, found.pages, found.block, sums))


def _opened(path: Path) -> BufferedReader:
    if not path.is_file():
        raise NotOurs("it is not a plain file")
    return open(path, "rb")


def _body(file: BufferedReader, n_bytes: int) -> Bytes:
    body = np.empty(n_bytes, np.uint8)
    if file.readinto(body.data) != n_bytes:
        raise Torn("it ends early")
    return body


def _read_head(file: BufferedReader, fingerprint: bytes, figures: Figures) -> _Head:
    n_file = os.fstat(file.fileno()).st_size
    prefix = file.read(PREFIX.size)
    if len(prefix) < PREFIX.size:
        raise Torn(f"it has {n_file} bytes")
    magic, version, size, written_by = PREFIX.unpack(prefix)
    if (magic, version, written_by) != (MAGIC, VERSION, fingerprint):
        raise NotOurs("it is of another model or engine")
    if not PREFIX.size + FIGURES.size + SUMS.size + _SUM.size <= size <= min(n_file, MAX_HEAD):
        raise Torn(f"its head is said to take {size} of {n_file} bytes")
    rest = file.read(size - PREFIX.size)
    body, own = rest[: -_SUM.size], rest[-_SUM.size :]
    if len(rest) != size - PREFIX.size or _SUM.pack(zlib.crc32(prefix + body)) != own:
        raise Torn("the sum of its head is wrong")
    found = _parse(body, size)
    n, marks = len(found.tokens), found.marks
    if (found.n_pages, found.n_block) != (pages_for(n) * figures.page_bytes, figures.block_bytes) or not n:
        raise NotOurs("its states have another size")
    positions = (0, *(position for position, _, _ in marks), n)
    if any(a >= b for a, b in pairwise(positions)) or any(kind >= len(KINDS) for _, kind, _ in marks):
        raise Torn("its checkpoints are out of order")
    if n_file != size + found.n_pages + found.n_block * (1 + len(marks)):
        raise Torn(f"it has {n_file} bytes, its head says otherwise")
    return found


def _parse(body: bytes, size: int) -> _Head:
    """The head between prefix and sum. Raises Torn when the figures do not fill it."""
    n, n_pages, n_block = FIGURES.unpack_from(body)
    pages, block, n_marks = SUMS.unpack_from(body, FIGURES.size)
    begin = FIGURES.size + SUMS.size
    if begin + n_marks * MARK.size + 4 * n != len(body):
        raise Torn("its head has another size than its figures say")
    marks = tuple(MARK.unpack_from(body, begin + i * MARK.size) for i in range(n_marks))
    tokens = np.frombuffer(body, "<i4", offset=begin + n_marks * MARK.size).astype(np.int32)
    return _Head(tokens, n_pages, n_block, pages, block, marks, size)

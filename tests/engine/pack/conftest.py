"""A GGUF header as editable parts, written and read without the code under test, over files full of holes."""

from __future__ import annotations

import math
import re
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from strata.engine.pack import PackError, open_pack
from strata.kernels.formats import BY_ID, BY_NAME

KINDS = ("u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "string", "array", "u64", "i64", "f64")
FORMS = dict(zip(KINDS, ("B", "b", "H", "h", "I", "i", "f", "?", None, None, "Q", "q", "d"), strict=True))


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def value(kind: str, content: Any) -> bytes:
    """A typed value; `content` of an array is (kind of element, elements)."""
    head = struct.pack("<I", KINDS.index(kind))
    if kind == "string":
        return head + string(content)
    if kind != "array":
        return head + struct.pack("<" + FORMS[kind], content)
    inner, elements = content
    head += struct.pack("<IQ", KINDS.index(inner), len(elements))
    if inner == "string":
        return head + b"".join(map(string, elements))
    return head + struct.pack(f"<{len(elements)}{FORMS[inner]}", *elements)


@dataclass
class Entry:
    """A line of the tensor directory. dims: fastest axis first, as the file has them; offset from the data's start."""

    name: str | bytes
    dims: list[int]
    type_id: int
    offset: int

    @property
    def n_bytes(self) -> int:
        return BY_ID[self.type_id].row_bytes(self.dims[0]) * math.prod(self.dims[1:])


@dataclass
class Header:
    """Metadata in order (key -> bytes of the typed value), tensors in order, and numbers that may be made to lie."""

    metadata: dict[str | bytes, bytes] = field(default_factory=dict)
    tensors: list[Entry] = field(default_factory=list)
    magic: bytes = b"GGUF"
    version: int = 3
    n_tensors: int | None = None
    n_keys: int | None = None
    alignment: int = 32
    more_keys: bytes = b""
    """Written after the metadata; counted by n_keys alone."""
    hole: int | None = None
    """Bytes of the data part; the tensors' own unless given."""

    def set(self, key: str, kind: str, content: Any) -> None:
        self.metadata[key] = value(kind, content)

    def add(self, name: str, shape: tuple[int, ...], kind: str) -> None:
        """A tensor of a numpy-order shape behind the last one."""
        begin = self._aligned(self.tensors[-1:])
        self.tensors.append(Entry(name, list(shape[::-1]), BY_NAME[kind].ggml_id, begin))

    def entry(self, name: str) -> Entry:
        return next(t for t in self.tensors if t.name == name)

    @property
    def data_bytes(self) -> int:
        return self._aligned(self.tensors)

    def _aligned(self, tensors: list[Entry]) -> int:
        """The first place behind all of these."""
        end = max((t.offset + t.n_bytes for t in tensors), default=0)
        return -(-end // self.alignment) * self.alignment

    def encode(self) -> bytes:
        n_tensors = len(self.tensors) if self.n_tensors is None else self.n_tensors
        n_keys = len(self.metadata) if self.n_keys is None else self.n_keys
        parts = [self.magic, struct.pack("<IQQ", self.version, n_tensors, n_keys)]
        for key, raw in self.metadata.items():
            parts += [string(key), raw]
        parts.append(self.more_keys)
        for t in self.tensors:
            parts += [string(t.name), struct.pack(f"<I{len(t.dims)}Q", len(t.dims), *t.dims)]
            parts.append(struct.pack("<IQ", t.type_id, t.offset))
        return b"".join(parts)

    def write(self, path: Path) -> Path:
        """The header and a hole in place of the tensors: it takes no room on the disk and reads as zeros."""
        raw = self.encode()
        path.write_bytes(raw)
        start = -(-len(raw) // self.alignment) * self.alignment
        with path.open("r+b") as f:
            f.truncate(start + (self.data_bytes if self.hole is None else self.hole))
        return path


def parse(raw: bytes) -> Header:
    """A header from the bytes of a sound file."""
    at = 4

    def take(form: str) -> int:
        nonlocal at
        (number,) = struct.unpack_from("<" + form, raw, at)
        at += struct.calcsize("<" + form)
        return number

    def text() -> str:
        nonlocal at
        n = take("Q")
        at += n
        return raw[at - n : at].decode()

    def skip(kind: str) -> None:
        if kind == "string":
            text()
        elif kind == "array":
            inner, count = KINDS[take("I")], take("Q")
            for _ in range(count):
                skip(inner)
        else:
            take(FORMS[kind])

    header = Header(version=take("I"))
    n_tensors, n_keys = take("Q"), take("Q")
    for _ in range(n_keys):
        key, start = text(), at
        skip(KINDS[take("I")])
        header.metadata[key] = raw[start:at]
    for _ in range(n_tensors):
        name = text()
        header.tensors.append(Entry(name, [take("Q") for _ in range(take("I"))], take("I"), take("Q")))
    return header


@pytest.fixture(scope="session")
def _sound_header(packs) -> bytes:
    return packs["odd-q2_0"].read_bytes()


@pytest.fixture
def header(_sound_header) -> Header:
    """The header of a small real pack, to be broken; `header.write(path)` makes a file of it."""
    return parse(_sound_header)


@pytest.fixture
def new_header() -> type[Header]:
    """The class, for tests that write a file from nothing."""
    return Header


@pytest.fixture(scope="session")
def refused() -> Callable[[Path, str, str], None]:
    """refused(path, what, reason): opening fails within a second and one line says file, tensor or key, reason (a
    pattern)."""

    def check(path: Path, what: str, reason: str) -> None:
        began = time.perf_counter()
        with pytest.raises(PackError) as caught:
            open_pack(path)
        assert time.perf_counter() - began < 1
        line = str(caught.value)
        assert line.isprintable() and len(line) < 1200
        assert line.startswith(f"{path}: {what}")
        assert re.search(reason, line), line

    return check

"""The header of one GGUF file: metadata and a checked directory of tensors over a mapped file.

Formats  version 3, and 2, which has the same layout; little-endian only
Limits   every count, length, product and offset is compared with what is left of the file, and with the limits below,
         before it is used; nothing is allocated by a number from the file. Arrays stay in the file until asked for.
Errors   PackError naming the file, the key or tensor, and the reason
Source   the GGUF description of ggml (docs/gguf.md), version 3
Cost     no tensor is read. A header with a vocabulary of 250,000 tokens and as many merges takes about 0.1 s: strings
         carry their own lengths, so their ends have to be walked
"""

from __future__ import annotations

import math
import mmap
import os
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from strata.engine.pack.errors import PackError, shown
from strata.kernels.formats import BY_ID, TensorType

MAX_KEYS: Final = 1 << 14
MAX_TENSORS: Final = 1 << 15
MAX_KEY_BYTES: Final = (1 << 16) - 1
"""By the format's own rule."""
MAX_NAME_BYTES: Final = 256
MAX_TEXT_BYTES: Final = 1 << 24
"""Keys, names and string values of one header together; the longest real string is a chat template of some 10 KB."""
MAX_ARRAY_STRINGS: Final = 1 << 20
"""Strings in all arrays of one header: twice a real vocabulary with its merges, walked in a quarter of a second."""
MAX_DIMS: Final = 4
MAX_DIM: Final = 1 << 40
MAX_ALIGNMENT: Final = 1 << 20

_KINDS: Final = ("u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "string", "array", "u64", "i64", "f64")
_SCALARS: Final = {
    "u8": struct.Struct("<B"),
    "i8": struct.Struct("<b"),
    "u16": struct.Struct("<H"),
    "i16": struct.Struct("<h"),
    "u32": struct.Struct("<I"),
    "i32": struct.Struct("<i"),
    "f32": struct.Struct("<f"),
    "bool": struct.Struct("<B"),
    "u64": struct.Struct("<Q"),
    "i64": struct.Struct("<q"),
    "f64": struct.Struct("<d"),
}
_DTYPES: Final = {"bool": "u1"} | {k: f"<{k[0]}{int(k[1:]) // 8}" for k in _SCALARS if k != "bool"}
_U32: Final = _SCALARS["u32"]
_U64: Final = _SCALARS["u64"]

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class Array:
    """An array value, still in the file. kind: u8 … f64, bool or string; raw: its bytes there."""

    kind: str
    count: int
    raw: Bytes

    def numbers(self) -> list[int] | list[float]:
        """The elements as Python numbers (exact integers, bools as 0 and 1). Not for strings."""
        return self.raw.view(_DTYPES[self.kind]).tolist()  # type: ignore[no-any-return]


Value = bool | int | float | str | Array


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies. shape: slowest axis first (numpy); offset: bytes from the start of the file."""

    name: str
    type: TensorType
    shape: tuple[int, ...]
    offset: int
    n_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class GgufFile:
    """One file, mapped read-only; the mapping lives as long as any view of `data`."""

    path: Path
    version: int
    metadata: dict[str, Value]
    tensors: dict[str, TensorInfo]
    data: Bytes


class _Cursor:
    """Reads forward through the header; refuses to step past the end of the file."""

    def __init__(self, path: Path, buffer: mmap.mmap, data: Bytes) -> None:
        self.path = path
        self.buffer = buffer
        self.data = data
        self.end = len(data)
        self.at = 0
        self.text_left = MAX_TEXT_BYTES
        self.strings_left = MAX_ARRAY_STRINGS

    def fail(self, what: str, reason: str) -> PackError:
        return PackError(self.path, what, reason)

    def step(self, n_bytes: int, what: str) -> int:
        """Takes `n_bytes`; returns where they start."""
        start = self.at
        if n_bytes > self.end - start:
            raise self.fail(what, f"the file ends inside it ({n_bytes} bytes wanted at {start} of {self.end})")
        self.at = start + n_bytes
        return start

    def number(self, form: struct.Struct, what: str) -> int:
        value: int = form.unpack_from(self.buffer, self.step(form.size, what))[0]
        return value

    def text(self, what: str, least: int, limit: int) -> str:
        n = self.number(_U64, what)
        if not least <= n <= limit:
            raise self.fail(what, f"a string of {n} bytes; {least} to {limit} are read")
        if n > self.text_left:
            raise self.fail(what, f"the strings of this header pass {MAX_TEXT_BYTES} bytes")
        self.text_left -= n
        start = self.step(n, what)
        try:
            return self.buffer[start : start + n].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(what, f"a string that is not UTF-8 ({error.reason} at byte {error.start})") from None


def read_gguf(path: Path) -> GgufFile:
    """Maps a file and reads its header. Raises PackError; never opens anything but a regular file."""
    buffer = _map(path)
    data = np.frombuffer(buffer, np.uint8)
    cursor = _Cursor(path, buffer, data)
    version, n_tensors, n_keys = _preamble(cursor)
    metadata: dict[str, Value] = {}
    for i in range(n_keys):
        key = cursor.text(f"metadata key {i}", 1, MAX_KEY_BYTES)
        if key in metadata:
            raise cursor.fail(key, "the key is there twice")
        metadata[key] = _value(cursor, key)
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 8 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise cursor.fail("general.alignment", f"{_brief(alignment)} is no power of two from 8 to {MAX_ALIGNMENT}")
    found = [_tensor(cursor, i) for i in range(n_tensors)]
    tensors = _directory(cursor, found, -(-cursor.at // alignment) * alignment, alignment)
    return GgufFile(path, version, metadata, tensors, data)


def _map(path: Path) -> mmap.mmap:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe must not hold us up
    except OSError as error:
        raise PackError(path, "", f"cannot be opened ({error.strerror})") from None
    except ValueError as error:
        raise PackError(path, "", f"cannot be opened ({error})") from None
    try:
        status = os.fstat(fd)
        if stat.S_ISDIR(status.st_mode):
            raise PackError(path, "", "is a folder; give the GGUF file, or the first shard of a split one")
        if not stat.S_ISREG(status.st_mode):
            raise PackError(path, "", "is not a regular file")
        if status.st_size == 0:
            raise PackError(path, "", "is empty")
        return mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise PackError(path, "", f"cannot be mapped ({error.strerror})") from None
    finally:
        os.close(fd)


def _preamble(cursor: _Cursor) -> tuple[int, int, int]:
    """Version, number of tensors, number of keys."""
    if cursor.buffer[:4] != b"GGUF":
        raise cursor.fail("", "is not a GGUF file (it does not start with GGUF)")
    cursor.at = 4
    version = cursor.number(_U32, "version")
    if version & 0xFFFF == 0 and version:
        raise cursor.fail("version", "a big-endian GGUF file; only little-endian ones are read")
    if version not in (2, 3):
        raise cursor.fail("version", f"GGUF version {version} is not read, only 2 and 3")
    n_tensors = cursor.number(_U64, "tensor count")
    n_keys = cursor.number(_U64, "key count")
    left = cursor.end - cursor.at
    for what, n, limit, least in (
        ("tensor count", n_tensors, MAX_TENSORS, 33),
        ("key count", n_keys, MAX_KEYS, 14),
    ):
        if n > limit:
            raise cursor.fail(what, f"{n} is more than the {limit} that are read")
        if n * least > left:
            raise cursor.fail(what, f"{n} do not fit into the {left} bytes that follow")
    return version, n_tensors, n_keys


def _kind(cursor: _Cursor, key: str) -> str:
    number = cursor.number(_U32, key)
    if number >= len(_KINDS):
        raise cursor.fail(key, f"value type {number} is unknown")
    return _KINDS[number]


def _value(cursor: _Cursor, key: str) -> Value:
    kind = _kind(cursor, key)
    if kind == "string":
        return cursor.text(key, 0, MAX_TEXT_BYTES)
    if kind == "array":
        return _array(cursor, key)
    value: int | float = _SCALARS[kind].unpack_from(cursor.buffer, cursor.step(_SCALARS[kind].size, key))[0]
    if kind != "bool":
        return value
    if value > 1:
        raise cursor.fail(key, f"{value} is no truth value")
    return bool(value)


def _array(cursor: _Cursor, key: str) -> Array:
    kind = _kind(cursor, key)
    if kind == "array":
        raise cursor.fail(key, "an array of arrays is not read")
    count = cursor.number(_U64, key)
    size = 8 if kind == "string" else _SCALARS[kind].size
    left = cursor.end - cursor.at
    if count * size > left:
        raise cursor.fail(key, f"an array of {count} elements does not fit into the {left} bytes that follow")
    start = cursor.at
    if kind == "string":
        _walk_strings(cursor, key, count)
    else:
        cursor.at += count * size
    return Array(kind, count, cursor.data[start : cursor.at])


def _walk_strings(cursor: _Cursor, key: str, count: int) -> None:
    if count > cursor.strings_left:
        raise cursor.fail(key, f"the string arrays of this header pass {MAX_ARRAY_STRINGS} elements")
    cursor.strings_left -= count
    buffer, at, end, length = cursor.buffer, cursor.at, cursor.end, _U64.unpack_from
    last = end - 8
    for i in range(count):
        if at > last:
            raise cursor.fail(key, f"the file ends inside string {i} of {count}")
        at += 8 + length(buffer, at)[0]
    if at > end:
        raise cursor.fail(key, f"the file ends inside the last of {count} strings")
    cursor.at = at


def _tensor(cursor: _Cursor, number: int) -> TensorInfo:
    """One entry of the directory; its offset still counts from the start of the data."""
    name = cursor.text(f"name of tensor {number}", 1, MAX_NAME_BYTES)
    n_dims = cursor.number(_U32, name)
    if not 1 <= n_dims <= MAX_DIMS:
        raise cursor.fail(name, f"{n_dims} dimensions; 1 to {MAX_DIMS} are read")
    shape = tuple(cursor.number(_U64, name) for _ in range(n_dims))[::-1]
    if not all(1 <= n <= MAX_DIM for n in shape):
        raise cursor.fail(name, f"shape {list(shape)}: every dimension must be from 1 to {MAX_DIM}")
    type_id = cursor.number(_U32, name)
    offset = cursor.number(_U64, name)
    kind = BY_ID.get(type_id)
    if kind is None:
        raise cursor.fail(name, f"tensor type {type_id} is unknown")
    try:
        n_bytes = kind.row_bytes(shape[-1]) * math.prod(shape[:-1])
    except ValueError as error:
        raise cursor.fail(name, str(error)) from None
    return TensorInfo(name, kind, shape, offset, n_bytes)


def _directory(cursor: _Cursor, found: list[TensorInfo], base: int, alignment: int) -> dict[str, TensorInfo]:
    """The tensors by name with offsets from the start of the file: inside it, aligned, apart from each other."""
    tensors: dict[str, TensorInfo] = {}
    for t in found:
        if t.name in tensors:
            raise cursor.fail(t.name, "the tensor is there twice")
        if t.offset % alignment:
            raise cursor.fail(t.name, f"offset {t.offset} is not aligned to {alignment} bytes")
        start = base + t.offset
        if start > cursor.end or t.n_bytes > cursor.end - start:
            reason = f"{t.type.name} {list(t.shape)}, {t.n_bytes} bytes at {start}, passes the end at {cursor.end}"
            raise cursor.fail(t.name, reason)
        tensors[t.name] = TensorInfo(t.name, t.type, t.shape, start, t.n_bytes)
    before: TensorInfo | None = None
    for t in sorted(tensors.values(), key=lambda t: t.offset):
        if before is not None and before.offset + before.n_bytes > t.offset:
            raise cursor.fail(t.name, f"its bytes overlap those of {shown(before.name)}")
        before = t
    return tensors


def _brief(value: Value) -> str:
    return f"an array of {value.count}" if isinstance(value, Array) else shown(repr(value))

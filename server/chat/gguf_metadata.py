"""The metadata section of a GGUF file (version 2 or 3, little-endian), for the few keys that the server needs.

Input    path of a pack, or of the first shard of a split pack; a predicate that names the wanted keys
Output   key -> str | int | float | bool | list; values of other keys are stepped over without being built
Errors   VocabularyError with file, key and reason, also for a file that cannot be opened
Source   the GGUF specification; tensors are never looked at
Cost     the file is mapped, not read. One step per string of a string array: 0.5 s for 250,000 tokens and as many
         merges on a slow core
Bounds   every count and length is compared with the bytes that are left before it is believed, and the number of
         items in one file with MAX_ITEMS, so that no header can make the reader run long or allocate much
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from pathlib import Path

from strata.server.chat.errors import VocabularyError

Scalar = str | int | float | bool
Value = Scalar | list[Scalar]

MAX_PAIRS = 65_536
MAX_KEY_BYTES = 65_535
MAX_TEXT_BYTES = 16 << 20  # one wanted string: the longest is a chat template of some 20 KiB
MAX_ITEMS = 1 << 23  # items of wanted arrays and strings stepped over, in the whole file
MAX_NESTING = 4

_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_U32, _U64 = _SCALARS[4], _SCALARS[10]


def read_metadata(path: Path, wanted: Callable[[str], bool]) -> dict[str, Value]:
    """The wanted key-value pairs of the file's header."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            return _Reader(path, mapped).pairs(wanted)
    except OSError as error:
        raise VocabularyError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        if isinstance(error, VocabularyError):
            raise
        raise VocabularyError(f"{path}: cannot be mapped: {error}") from error


class _Reader:
    """A position in the mapped file. Every step checks that its bytes are there."""

    def __init__(self, path: Path, mapped: mmap.mmap) -> None:
        self._path = path
        self._mapped = mapped
        self._size = len(mapped)
        self._at = 0
        self._items_left = MAX_ITEMS
        self._key = "header"

    def pairs(self, wanted: Callable[[str], bool]) -> dict[str, Value]:
        if self._take(4) != b"GGUF":
            raise self._fault("not a GGUF file")
        version = self._number(_U32)
        if version not in (2, 3):
            raise self._fault(f"version {version} is not supported; versions 2 and 3 are")
        self._number(_U64)  # tensors
        count = self._number(_U64)
        if count > MAX_PAIRS:
            raise self._fault(f"{count} metadata pairs; the limit is {MAX_PAIRS}")
        found: dict[str, Value] = {}
        for _ in range(count):
            self._key = "key"
            key = self._text(MAX_KEY_BYTES)
            self._key = key
            kind = self._number(_U32)
            if not wanted(key):
                self._skip(kind, MAX_NESTING)
            elif key in found:
                raise self._fault("appears twice")
            else:
                found[key] = self._array() if kind == _ARRAY else self._scalar(kind)
        return found

    def _fault(self, reason: str) -> VocabularyError:
        return VocabularyError(f"{self._path}: {self._key[:200]!r}: {reason}")

    def _step(self, n_bytes: int) -> int:
        """Moves past `n_bytes` and returns where they begin."""
        start = self._at
        if n_bytes > self._size - start:
            raise self._fault(f"{n_bytes} bytes at {start} reach past the end of the file ({self._size} bytes)")
        self._at = start + n_bytes
        return start

    def _take(self, n_bytes: int) -> bytes:
        start = self._step(n_bytes)
        return self._mapped[start : start + n_bytes]

    def _number(self, form: struct.Struct) -> int:
        value: int = form.unpack_from(self._mapped, self._step(form.size))[0]
        return value

    def _text(self, limit: int) -> str:
        n_bytes = self._number(_U64)
        if n_bytes > limit:
            raise self._fault(f"a string of {n_bytes} bytes; the limit is {limit}")
        try:
            return self._take(n_bytes).decode()
        except UnicodeDecodeError as error:
            raise self._fault("a string that is not UTF-8") from error

    def _scalar(self, kind: int) -> Scalar:
        if kind == _STRING:
            return self._text(MAX_TEXT_BYTES)
        form = self._form(kind)
        value: Scalar = form.unpack_from(self._mapped, self._step(form.size))[0]
        return value

    def _form(self, kind: int) -> struct.Struct:
        form = _SCALARS.get(kind)
        if form is None:
            raise self._fault(f"unknown value type {kind}")
        return form

    def _count(self, item_bytes: int) -> int:
        """An array's length, believed only when that many items of at least `item_bytes` can follow."""
        count = self._number(_U64)
        if count > (self._size - self._at) // item_bytes:
            raise self._fault(f"an array of {count} items reaches past the end of the file")
        return count

    def _spend(self, items: int) -> None:
        self._items_left -= items
        if self._items_left < 0:
            raise self._fault(f"more than {MAX_ITEMS} array items in the metadata")

    def _array(self) -> list[Scalar]:
        kind = self._number(_U32)
        if kind == _ARRAY:
            raise self._fault("an array of arrays where a plain array is needed")
        if kind == _STRING:
            count = self._count(_U64.size)
            self._spend(count)
            return [self._text(MAX_KEY_BYTES) for _ in range(count)]
        form = self._form(kind)
        count = self._count(form.size)
        self._spend(count)
        many = struct.Struct(f"<{count}{form.format[-1]}")
        return list(many.unpack_from(self._mapped, self._step(many.size)))

    def _skip(self, kind: int, nesting: int) -> None:
        if kind == _STRING:
            self._step(self._number(_U64))
        elif kind != _ARRAY:
            self._step(self._form(kind).size)
        elif nesting == 0:
            raise self._fault(f"arrays nested deeper than {MAX_NESTING}")
        else:
            item = self._number(_U32)
            if item in (_STRING, _ARRAY):
                count = self._count(_U64.size)
                self._spend(count)
                for _ in range(count):
                    self._skip(item, nesting - 1)
            else:
                self._step(self._count(1) * self._form(item).size)

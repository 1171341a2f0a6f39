"""Metadata read with a type and a range: what a file says becomes a Python value here or a PackError.

Writers differ in the width and sign of integers (i32, u32, i64, u64); any integer type is taken, its value is what
counts. Floats are never taken for integers, nor the other way round.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from strata.engine.pack.errors import PackError, shown
from strata.engine.pack.gguf import Array, Value

_INTEGERS: Final = frozenset({"u8", "i8", "u16", "i16", "u32", "i32", "u64", "i64"})


class Metadata:
    """The keys of one file. Every reader raises PackError with the key when it is missing, of another type, or out
    of the closed range."""

    def __init__(self, path: Path, values: Mapping[str, Value]) -> None:
        self.path = path
        self._values = values

    @property
    def values(self) -> Mapping[str, Value]:
        """The keys as the file has them, for reading."""
        return MappingProxyType(dict(self._values))

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def fail(self, key: str, reason: str) -> PackError:
        return PackError(self.path, key, reason)

    def _get(self, key: str) -> Value:
        if key not in self._values:
            raise self.fail(key, "the key is missing")
        return self._values[key]

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        if default is not None and key not in self._values:
            return default
        value = self._get(key)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.fail(key, f"is {describe(value)}, not an integer")
        if not low <= value <= high:
            raise self.fail(key, f"is {value}, outside {low} to {high}")
        return value

    def real(self, key: str, low: float, high: float) -> float:
        value = self._get(key)
        if not isinstance(value, float):
            raise self.fail(key, f"is {describe(value)}, not a float")
        if not math.isfinite(value) or not low <= value <= high:
            raise self.fail(key, f"is {value:g}, outside {low:g} to {high:g}")
        return value

    def truth(self, key: str, default: bool) -> bool:
        value = self._values.get(key, default)
        if not isinstance(value, bool):
            raise self.fail(key, f"is {describe(value)}, not a truth value")
        return value

    def text(self, key: str) -> str:
        value = self._get(key)
        if not isinstance(value, str):
            raise self.fail(key, f"is {describe(value)}, not a string")
        return value

    def array(self, key: str, at_least: int, at_most: int) -> Array:
        """An array of a length that was asked for, its elements still unread."""
        value = self._get(key)
        if not isinstance(value, Array):
            raise self.fail(key, f"is {describe(value)}, not an array")
        if not at_least <= value.count <= at_most:
            wanted = str(at_least) if at_least == at_most else f"{at_least} to {at_most}"
            raise self.fail(key, f"has {value.count} elements, not {wanted}")
        return value

    def integers(self, key: str, at_least: int, at_most: int, low: int, high: int) -> tuple[int, ...]:
        array = self.array(key, at_least, at_most)
        if array.kind not in _INTEGERS:
            raise self.fail(key, f"is {describe(array)}, not of integers")
        values = tuple(int(v) for v in array.numbers())
        for i, value in enumerate(values):
            if not low <= value <= high:
                raise self.fail(key, f"element {i} is {value}, outside {low} to {high}")
        return values

    def truths(self, key: str, count: int) -> tuple[bool, ...]:
        array = self.array(key, count, count)
        if array.kind != "bool" and array.kind not in _INTEGERS:
            raise self.fail(key, f"is {describe(array)}, not of truth values")
        values = array.numbers()
        if any(value not in (0, 1) for value in values):
            raise self.fail(key, "holds an element that is no truth value")
        return tuple(value == 1 for value in values)


def describe(value: Value) -> str:
    """A value for an error line."""
    if isinstance(value, Array):
        return f"an array of {value.count} {value.kind}"
    return f"the string {shown(repr(value))}" if isinstance(value, str) else repr(value)

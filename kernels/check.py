"""Argument checks shared by every backend: one line that names the argument, the wanted and the given.

The wrapper checks, the kernel trusts. A wanted shape is written as words: a name is bound to the size at its first
use and compared from then on, a number is that size, and a product such as `C*H` is multiplied out of bound names and
numbers; a product with one name not yet bound is taken as it is given.
Errors   ValueError
Cost     under a microsecond an array; what was asked before is known
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@lru_cache(maxsize=512)
def _words(want: str) -> tuple[tuple[str, int | None, tuple[str, ...]], ...]:
    """The words of a wanted shape: (word, its number or None, the factors of a product or none)."""
    return tuple(
        (word, int(word) if word.isdecimal() else None, tuple(word.split("*")) if "*" in word else ())
        for word in want.split()
    )


def check(**arrays: tuple[Array, str, type[np.generic]]) -> dict[str, int]:
    """Bind the sizes of several arrays: name=(array, "n C H", np.float32) -> {"n": .., "C": .., "H": ..}.

    Raises ValueError for another dtype, number of dimensions or size, and for an array that is not C-contiguous.
    """
    asked = [
        (name, want, dtype, array.dtype, array.shape, None if _is_contiguous(array) else array.strides)
        for name, (array, want, dtype) in arrays.items()
    ]
    return _sizes(tuple(asked)).copy()


_Asked = tuple[str, str, type[np.generic], np.dtype[Any], tuple[int, ...], tuple[int, ...] | None]
"""An array's name, wanted shape and dtype, and its dtype, shape and strides; None: C-contiguous."""


@lru_cache(maxsize=4096)
def _sizes(arrays: tuple[_Asked, ...]) -> dict[str, int]:
    """`check`; the layers of a model ask the same again and again."""
    sizes: dict[str, int] = {}
    for name, want, dtype, kind, shape, strides in arrays:
        words = _words(want)
        if kind.type is not dtype or len(shape) != len(words):
            raise ValueError(f"{name} must be {dtype.__name__} ({want}), got {kind} {shape}")
        for (word, number, factors), given in zip(words, shape, strict=True):
            wanted = number if number is not None else sizes.get(word)
            if wanted is None and factors and all(f in sizes or f.isdecimal() for f in factors):
                wanted = prod(sizes[f] if f in sizes else int(f) for f in factors)
            if wanted is None or wanted == given:
                sizes[word] = given
                continue
            bound = ", ".join(f"{w} = {sizes[w]}" for w, literal, _ in words if literal is None and w in sizes)
            raise ValueError(f"{name} must be ({want}){' with ' + bound if bound else ''}, got {shape}")
        if strides is not None:
            raise ValueError(f"{name} must be C-contiguous, got strides {strides} for {shape}")
    return sizes


def _is_contiguous(array: Any) -> bool:
    """CuPy makes an object for `flags` each time, and has the answer beside it."""
    if isinstance(array, np.ndarray):
        return bool(array.flags.c_contiguous)
    return bool(getattr(array, "_c_contiguous", None) or array.flags.c_contiguous)


def require(condition: bool, message: str) -> None:
    """Raise ValueError with the message unless the condition holds."""
    if not condition:
        raise ValueError(message)


def check_segments(segments: Array, n: int, slots: int) -> None:
    """Segments (slot, begin, end) must cover rows 0..n in order, each slot at most once and within the state."""
    check(segments=(segments, "s 3", np.int32))
    at, seen = 0, set()
    for slot, begin, end in segments.tolist():
        if begin != at or end <= begin:
            raise ValueError(f"segments must cover rows 0 to {n} in order, got rows {begin} to {end} after row {at}")
        if not 0 <= slot < slots or slot in seen:
            raise ValueError(f"segments must name each of the {slots} slots once at most, got slot {slot}")
        seen.add(slot)
        at = end
    require(at == n, f"segments must cover rows 0 to {n}, got rows 0 to {at}")


def check_slots(slots: Array, n: int) -> None:
    """Every slot number must be one of the n slots of the state."""
    if slots.size and (slots.min() < 0 or slots.max() >= n):
        raise ValueError(f"slots must be in 0 to {n - 1}, got {slots.min()} to {slots.max()}")

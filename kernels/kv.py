"""Formats of keys and values in pages. Arithmetic: ops.py, `cache`.

KvFormat         how the vector of one token and key head lies in an array
KV               what `--kv` names: the formats of keys and of values
format_of(...)   the format of an array of pages

Shapes   a row is `row(d)` elements of `dtype`; packed: the codes of all blocks of 32, then their float16 scales, then
         unused bytes up to a multiple of 16
Errors   ValueError for an array that is no row of any format
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import numpy as np

BLOCK: Final = 32
"""Elements that share a scale."""
_ALIGNMENT: Final = 16


@dataclass(frozen=True, slots=True)
class KvFormat:
    """name · type of an array · bits of an element of a vector · whether elements are codes with scales."""

    name: str
    dtype: np.dtype[Any]
    bits: int
    packed: bool

    def row(self, d: int) -> int:
        """Elements of an array that hold a vector of d."""
        if not self.packed:
            return d
        return -(-(d * self.bits // 8 + d // BLOCK * 2) // _ALIGNMENT) * _ALIGNMENT


FP32: Final = KvFormat("fp32", np.dtype(np.float32), 32, False)
FP16: Final = KvFormat("fp16", np.dtype(np.float16), 16, False)
INT8: Final = KvFormat("int8", np.dtype(np.uint8), 8, True)
Q4_0: Final = KvFormat("q4_0", np.dtype(np.uint8), 4, True)

FORMATS: Final = (FP32, FP16, INT8, Q4_0)

KV: Final[Mapping[str, tuple[KvFormat, KvFormat]]] = MappingProxyType(
    {"fp32": (FP32, FP32), "fp16": (FP16, FP16), "int8": (INT8, INT8), "q4_0": (Q4_0, Q4_0), "k8v4": (INT8, Q4_0)}
)
"""Formats of keys and of values by the names of `--kv`."""


def format_of(name: str, array: Any, d: int) -> KvFormat:
    """The format of pages of vectors of d. Raises ValueError naming the array."""
    for form in FORMATS:
        if array.dtype == form.dtype and array.shape[-1] == form.row(d):
            return form
    wanted = ", ".join(f"{form.name}: {form.row(d)} {form.dtype.name}" for form in FORMATS)
    raise ValueError(f"{name} must hold vectors of {d} as one of {wanted}; got {array.shape[-1]} {array.dtype}")

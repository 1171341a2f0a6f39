"""Matrices of a file in their card form: `formats.CARD_FORMS`, the same codes and scales, laid out for the kernels.

card_form(kind, cols)            the form, None where a type or a width has none
repack(source, target, kind)     whole blocks of the file's type, on the current stream

Shapes   source uint8 (n * block_bytes,) at a multiple of 4, target uint8 (..,) of the form's bytes at a multiple of 8
Errors   ValueError naming the sizes: no whole blocks, a target of another size
Cost     reads and writes its bytes once, bound by memory; not for several threads at a time
"""

from __future__ import annotations

from typing import Final

import numpy as np

from strata.kernels.check import require
from strata.kernels.cuda.arguments import address
from strata.kernels.cuda.compile import load_kernel
from strata.kernels.cuda.workspace import DeviceArray
from strata.kernels.formats import CARD_FORMS, TensorType

_WARPS: Final = 8
"""Of a block, each of which makes one block of the form."""


def card_form(kind: TensorType, cols: int) -> TensorType | None:
    """The card form of a matrix of so many columns."""
    form = CARD_FORMS.get(kind.name)
    return form if form is not None and cols % form.block == 0 else None


def file_bytes(kind: TensorType) -> int:
    """Bytes of the file that become one block of the card form."""
    return CARD_FORMS[kind.name].block // kind.block * kind.block_bytes


def repack(source: DeviceArray, target: DeviceArray, kind: TensorType) -> None:
    """Queue the making of the form."""
    form, n = CARD_FORMS[kind.name], source.nbytes // file_bytes(kind)
    fits = source.nbytes == n * file_bytes(kind) and target.nbytes == n * form.block_bytes
    require(fits, f"{source.nbytes} bytes of {kind.name} are no {target.nbytes} bytes of {form.name}")
    if n:
        kernel = load_kernel("repack.cu", "repack", TYPE=kind.name)
        pointers = (np.uint64(address(source)), np.uint64(address(target)))
        kernel((-(-n // _WARPS),), (32 * _WARPS,), (*pointers, np.int64(n)), shared_mem=0)

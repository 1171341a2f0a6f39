"""Blocks of a file's type in their card form (`formats.CARD_FORMS`), in NumPy.

repack(kind, data)   data uint8 (..., row_bytes) of the file -> uint8 (..., row_bytes of the form)

Errors   KeyError for a type without a card form, ValueError for rows that are no whole blocks of it
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from strata.kernels.formats import BY_NAME, CARD_FORMS, TensorType
from strata.kernels.reference.quant import unpack

U8 = npt.NDArray[np.uint8]


def repack(kind: TensorType, data: U8) -> U8:
    """Rows of the file's blocks as rows of the form's."""
    form = CARD_FORMS[kind.name]
    cols = data.shape[-1] // kind.block_bytes * kind.block
    flat = np.ascontiguousarray(data).reshape(-1, form.block // kind.block * kind.block_bytes)
    return _REPACK[kind.name](flat).reshape(*data.shape[:-1], form.row_bytes(cols))


def _iq3_s(b: U8) -> U8:
    codes, _, _ = unpack(BY_NAME["IQ3_S"], b)
    halved = ((codes.astype(np.int64) + 15) // 2).astype(np.uint8).reshape(len(b), 8, 2, 16)
    fields = halved[:, :, 0] | halved[:, :, 1] << np.uint8(4)
    scales = np.stack([b[:, 106:] & 15, b[:, 106:] >> 4], axis=2).reshape(len(b), 8)
    head = np.concatenate([b[:, :2], np.zeros_like(b[:, :2]), scales[:, :4] | scales[:, 4:] << np.uint8(4)], axis=1)
    return np.concatenate([head, fields.reshape(len(b), 128)], axis=1)


def _iq4_nl(b: U8) -> U8:
    blocks = b.reshape(len(b), 4, 18)
    halves = np.stack([blocks[:, :, 2:] & 15, blocks[:, :, 2:] >> 4], axis=2)  # weights 0 to 15, then 16 to 31
    words = halves.reshape(len(b), 4, 2, 4, 4).transpose(0, 1, 3, 2, 4).reshape(len(b), 64, 2)  # by threads
    fields = words[:, :, 0] | words[:, :, 1] << np.uint8(4)
    return np.concatenate([blocks[:, :, :2].reshape(len(b), 8), fields], axis=1)


def _q6_k(b: U8) -> U8:
    return np.pad(b, ((0, 0), (0, 6)))


_REPACK: dict[str, Callable[[U8], U8]] = {"IQ3_S": _iq3_s, "IQ4_NL": _iq4_nl, "Q6_K": _q6_k}

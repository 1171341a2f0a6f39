"""Keys and values as pages hold them. The formats: kv.py; the arithmetic: ops.py, `cache`.

encode(form, x)         vectors (..., d) -> rows (..., form.row(d))
decode(form, rows, d)   and back to float32, exactly
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from strata.kernels.kv import BLOCK, INT8, Q4_0, KvFormat
from strata.kernels.ops import F32

Rows = npt.NDArray[Any]

_MOST_SCALE = np.float32(65504)
_ZEROS = {INT8: 128, Q4_0: 8}
_LIMITS = {INT8: (-127, 127), Q4_0: (-8, 7)}


def encode(form: KvFormat, x: F32) -> Rows:
    """Vectors of float32 as rows of a format."""
    d = x.shape[-1]
    if not form.packed:
        return x.astype(form.dtype)
    blocks = np.ascontiguousarray(x, np.float32).reshape(*x.shape[:-1], d // BLOCK, BLOCK)
    scale = _scales(form, blocks)
    shown = scale.astype(np.float32)[..., None]
    with np.errstate(divide="ignore", invalid="ignore"):
        codes = np.where(shown == 0, np.float32(0), np.clip(np.rint(blocks / shown), *_LIMITS[form]))
    codes = (codes.astype(np.int16) + _ZEROS[form]).astype(np.uint8).reshape(*x.shape[:-1], d)
    if form is Q4_0:
        codes = codes[..., 0::2] | codes[..., 1::2] << 4
    rows = np.zeros((*x.shape[:-1], form.row(d)), np.uint8)
    rows[..., : codes.shape[-1]] = codes
    rows[..., codes.shape[-1] : codes.shape[-1] + d // BLOCK * 2] = scale.view(np.uint8)
    return rows


def _scales(form: KvFormat, blocks: F32) -> npt.NDArray[np.float16]:
    """A float16 for each block."""
    if form is INT8:
        scale = np.abs(blocks).max(-1) / np.float32(127)
    else:
        first = np.abs(blocks).argmax(-1)[..., None]
        scale = np.take_along_axis(blocks, first, -1)[..., 0] / np.float32(-8)
    return np.clip(scale, -_MOST_SCALE, _MOST_SCALE).astype(np.float16)


def decode(form: KvFormat, rows: Rows, d: int) -> F32:
    """What the rows say, as float32."""
    if not form.packed:
        return rows.astype(np.float32)
    n_codes = d * form.bits // 8
    codes = rows[..., :n_codes]
    if form is Q4_0:
        codes = np.stack([codes & 15, codes >> 4], -1).reshape(*rows.shape[:-1], d)
    scales = np.ascontiguousarray(rows[..., n_codes : n_codes + d // BLOCK * 2]).view(np.float16).astype(np.float32)
    return (codes.astype(np.float32) - np.float32(_ZEROS[form])) * np.repeat(scales, BLOCK, -1)

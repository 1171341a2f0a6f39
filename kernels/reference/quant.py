"""Every quantised GGUF block as int8 codes, float32 scales and offsets: `formats.py` in NumPy.

unpack(type, data)   data uint8 (..., row_bytes) -> codes int8 (..., cols), scales float32 (..., cols / group) and
                     offsets float32 of the same shape, or None for a type without offsets. Lossless: a weight is
                     code * scale + offset, and scale and offset are exact.
quantize(x)          activations: x float32 (n, cols) -> q int8 (n, cols), d float32 (n, cols / 32); `ops.py`, quantize

Errors   ValueError for a float type, or rows that are no whole number of blocks
Source   the block layouts of ggml; the grids of the IQ types come from the `gguf` package
Cost     some 20 NumPy passes over the codes

A function below unpacks an array of blocks, uint8 (n, block_bytes), to the arrays of one block each.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import numpy.typing as npt
from gguf import quants

from strata.kernels.formats import TensorType
from strata.kernels.ops import ACT_BLOCK, F32

U8 = npt.NDArray[np.uint8]
I8 = npt.NDArray[np.int8]
Parts = tuple[npt.NDArray, npt.NDArray, npt.NDArray | None]

IQ4_VALUES = np.array((-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), np.int8)
MXFP4_VALUES = np.array((0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12), np.int8)
"""Twice the values of e2m1, by code."""


@cache
def grid(name: str) -> I8:
    """The codes of a grid type, int8 (entries, 4 or 8): 8, 25, 43 · 4..62 · 1..15 · -1, 0, 1."""
    traits = getattr(quants, name)
    traits.init_grid()
    return traits.grid.reshape(traits.grid_shape).astype(np.int8)


@cache
def parity_signs() -> U8:
    """Seven sign bits and an eighth that makes their number even, uint8 (128,)."""
    low = np.arange(128, dtype=np.uint8)
    odd = np.unpackbits(low[:, None], axis=1).sum(1, dtype=np.uint8) & np.uint8(1)
    return low | odd << np.uint8(7)


def quantize(x: F32) -> tuple[I8, F32]:
    """Blocks of ACT_BLOCK inputs to int8: q = round_half_even(x * (127 / amax)), d = amax / 127."""
    blocks = x.reshape(len(x), -1, ACT_BLOCK)
    amax = np.abs(blocks).max(-1)
    small = amax < np.float32(1e-30)
    d = np.where(small, np.float32(0), amax / np.float32(127))
    inv = np.where(small, np.float32(0), np.float32(127) / np.where(small, np.float32(1), amax))
    return np.rint(blocks * inv[:, :, None]).astype(np.int8).reshape(x.shape), d


def unpack(kind: TensorType, data: U8) -> tuple[I8, F32, F32 | None]:
    """Rows of blocks to codes, scales and offsets. Raises ValueError for a float type or a torn row."""
    if kind.is_float or data.shape[-1] % kind.block_bytes:
        raise ValueError(f"rows of {data.shape[-1]} bytes are no quantised blocks of {kind.name}")
    rows = data.shape[:-1]
    with np.errstate(invalid="ignore"):  # a scale that is no number stays one
        codes, scales, offsets = _UNPACK[kind.name](np.ascontiguousarray(data).reshape(-1, kind.block_bytes))
    cols = data.shape[-1] // kind.block_bytes * kind.block
    shape = (*rows, cols // kind.group)
    return (
        codes.astype(np.int8).reshape(*rows, cols),
        scales.astype(np.float32).reshape(shape),
        None if offsets is None else offsets.astype(np.float32).reshape(shape),
    )


def _half(b: U8) -> F32:
    """Pairs of bytes as half-precision numbers."""
    return np.ascontiguousarray(b).view("<f2").astype(np.float32)


def _word(b: U8, kind: str) -> npt.NDArray:
    """Bytes as little-endian unsigned words, `<u2` or `<u4`."""
    return np.ascontiguousarray(b).view(kind)


def _fields(b: npt.NDArray, width: int, shifts: list[int]) -> npt.NDArray:
    """Bit fields of every word: (n, k) -> (n, k, len(shifts))."""
    return b[:, :, None] >> np.array(shifts, b.dtype) & b.dtype.type((1 << width) - 1)


def _planes(b: U8, width: int, run: int) -> U8:
    """Bit planes of runs of bytes: each run of `run` bytes holds 8 / width runs of values, lowest bits first."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)
    planes = b.reshape(len(b), -1, 1, run) >> shifts[:, None] & np.uint8((1 << width) - 1)
    return planes.reshape(len(b), -1)


def _bits(b: U8) -> U8:
    """Single bits of bytes, lowest first."""
    return np.unpackbits(b, axis=-1, bitorder="little")


def _signed(codes: I8, negative: U8) -> I8:
    return np.where(negative, -codes, codes)


# ------------------------------------------------------------------------------------------------ blocks of 32 and 64


def _q8_0(b: U8) -> Parts:
    return b[:, 2:].view(np.int8), _half(b[:, :2]), None


def _q2_0(b: U8) -> Parts:
    codes = _fields(b[:, 2:], 2, [0, 2, 4, 6]).reshape(len(b), -1).astype(np.int8) - 1
    return codes, np.repeat(_half(b[:, :2]), 2, axis=1), None


def _q4_0(b: U8) -> Parts:
    return _planes(b[:, 2:], 4, 16).astype(np.int8) - 8, _half(b[:, :2]), None


def _q4_1(b: U8) -> Parts:
    return _planes(b[:, 4:], 4, 16), _half(b[:, :2]), _half(b[:, 2:4])


def _q5_0(b: U8) -> Parts:
    codes = _planes(b[:, 6:], 4, 16) | _bits(b[:, 2:6]) << np.uint8(4)
    return codes.astype(np.int8) - 16, _half(b[:, :2]), None


def _q5_1(b: U8) -> Parts:
    return _planes(b[:, 8:], 4, 16) | _bits(b[:, 4:8]) << np.uint8(4), _half(b[:, :2]), _half(b[:, 2:4])


def _iq4_nl(b: U8) -> Parts:
    return IQ4_VALUES[_planes(b[:, 2:], 4, 16)], _half(b[:, :2]), None


def _mxfp4(b: U8) -> Parts:
    return MXFP4_VALUES[_planes(b[:, 1:], 4, 16)], np.ldexp(np.float32(1), b[:, :1].astype(np.int32) - 128), None


# ------------------------------------------------------------------------------------------------------ K super-blocks


def _q2_k(b: U8) -> Parts:
    d, dmin = _half(b[:, 80:82]), _half(b[:, 82:84])
    return _planes(b[:, 16:80], 2, 32), d * (b[:, :16] & 15), -dmin * (b[:, :16] >> 4)


def _q3_k(b: U8) -> Parts:
    low = _planes(b[:, 96:104], 4, 8)
    high = _planes(b[:, 104:108], 2, 4)
    scale = (low | high << np.uint8(4)).astype(np.int8) - 32
    codes = (_planes(b[:, 32:96], 2, 32) | _planes(b[:, :32], 1, 32) << np.uint8(2)).astype(np.int8) - 4
    return codes, _half(b[:, 108:110]) * scale, None


def _k_scales(b: U8) -> tuple[U8, U8]:
    """The eight 6-bit scales and the eight 6-bit minima of Q4_K and Q5_K, from their twelve bytes."""
    s, m, rest = b[:, 0:4], b[:, 4:8], b[:, 8:12]
    six, two = np.uint8(63), np.uint8(48)
    scale = np.concatenate([s & six, rest & np.uint8(15) | s >> np.uint8(2) & two], axis=1)
    minimum = np.concatenate([m & six, rest >> np.uint8(4) | m >> np.uint8(2) & two], axis=1)
    return scale, minimum


def _q4_k(b: U8) -> Parts:
    scale, minimum = _k_scales(b[:, 4:16])
    return _planes(b[:, 16:], 4, 32), _half(b[:, :2]) * scale, -_half(b[:, 2:4]) * minimum


def _q5_k(b: U8) -> Parts:
    scale, minimum = _k_scales(b[:, 4:16])
    codes = _planes(b[:, 48:], 4, 32) | _planes(b[:, 16:48], 1, 32) << np.uint8(4)
    return codes, _half(b[:, :2]) * scale, -_half(b[:, 2:4]) * minimum


def _q6_k(b: U8) -> Parts:
    codes = _planes(b[:, :128], 4, 64) | _planes(b[:, 128:192], 2, 32) << np.uint8(4)
    return codes.astype(np.int8) - 32, _half(b[:, 208:210]) * b[:, 192:208].view(np.int8), None


# ----------------------------------------------------------------------------------------------------- IQ super-blocks


def _iq4_xs(b: U8) -> Parts:
    low = _planes(b[:, 4:8], 4, 1)
    high = _fields(_word(b[:, 2:4], "<u2"), 2, list(range(0, 16, 2)))[:, 0]
    scale = (low | high << 4).astype(np.int8) - 32
    return IQ4_VALUES[_planes(b[:, 8:], 4, 16)], _half(b[:, :2]) * scale, None


def _odd_scales(d: F32, s: npt.NDArray, divisor: int) -> F32:
    """d * (2s + 1) / divisor; the divisor is a power of two, so nothing is rounded."""
    return d * ((2 * s.astype(np.float32) + 1) / np.float32(divisor))


def _sevens(words: npt.NDArray) -> U8:
    """The four sign bytes in the low 28 bits of every word: (n, k) -> sign bits (n, 32 k)."""
    return _bits(parity_signs()[_fields(words, 7, [0, 7, 14, 21])].reshape(len(words), -1))


def _iq2_xxs(b: U8) -> Parts:
    words = _word(b[:, 2:], "<u4").reshape(len(b), 8, 2)
    index = np.ascontiguousarray(words[:, :, 0]).view(np.uint8)
    codes = grid("IQ2_XXS")[index].reshape(len(b), -1)
    return _signed(codes, _sevens(words[:, :, 1])), _odd_scales(_half(b[:, :2]), words[:, :, 1] >> 28, 8), None


def _iq2_xs(b: U8) -> Parts:
    words = _word(b[:, 2:66], "<u2")
    codes = grid("IQ2_XS")[words & 511].reshape(len(b), -1)
    codes = _signed(codes, _bits(parity_signs()[words >> 9]))
    return codes, _odd_scales(_half(b[:, :2]), _planes(b[:, 66:], 4, 1), 8), None


def _iq2_s(b: U8) -> Parts:
    index = b[:, 2:34] | _planes(b[:, 66:74], 2, 1).astype(np.uint16) << 8
    codes = _signed(grid("IQ2_S")[index].reshape(len(b), -1), _bits(b[:, 34:66]))
    return codes, _odd_scales(_half(b[:, :2]), _planes(b[:, 74:], 4, 1), 8), None


def _iq3_xxs(b: U8) -> Parts:
    words = _word(b[:, 66:], "<u4")
    codes = grid("IQ3_XXS")[b[:, 2:66]].reshape(len(b), -1)
    return _signed(codes, _sevens(words)), _odd_scales(_half(b[:, :2]), words >> 28, 4), None


def _iq3_s(b: U8) -> Parts:
    index = b[:, 2:66] | _bits(b[:, 66:74]).astype(np.uint16) << 8
    codes = _signed(grid("IQ3_S")[index].reshape(len(b), -1), _bits(b[:, 74:106]))
    return codes, _odd_scales(_half(b[:, :2]), _planes(b[:, 106:], 4, 1), 1), None


def _iq3_s_card(b: U8) -> Parts:
    codes = _planes(b[:, 8:], 4, 16).astype(np.int8) * np.int8(2) - np.int8(15)
    return codes, _odd_scales(_half(b[:, :2]), _planes(b[:, 4:8], 4, 4), 1), None


def _iq4_nl_card(b: U8) -> Parts:
    fields = _fields(_word(b[:, 8:], "<u4"), 4, list(range(0, 32, 4))).reshape(len(b), 4, 4, 2, 4)
    return IQ4_VALUES[fields.transpose(0, 1, 3, 2, 4).reshape(len(b), 128)], _half(b[:, :8]), None


def _with_delta(index: npt.NDArray, negative: npt.NDArray) -> I8:
    """Eight times the grid values, plus or minus one: index and sign (n, 32) of eight values each."""
    codes = grid("IQ1_S")[index] * np.int8(8)
    return (codes + np.where(negative, np.int8(-1), np.int8(1))[:, :, None]).reshape(len(index), -1)


def _iq1_s(b: U8) -> Parts:
    high = _word(b[:, 34:], "<u2")
    index = b[:, 2:34] | _fields(high, 3, [0, 3, 6, 9]).reshape(len(b), -1) << 8
    codes = _with_delta(index, np.repeat(high >> 15, 4, axis=1))
    return codes, _odd_scales(_half(b[:, :2]), high >> 12 & 7, 8), None


def _iq1_m(b: U8) -> Parts:
    scales = _word(b[:, 48:], "<u2")
    d = (scales >> 12 << np.array([0, 4, 8, 12], np.uint16)).sum(1, dtype=np.uint16)[:, None]
    high = _planes(b[:, 32:48], 4, 1)
    index = b[:, :32] | (high & np.uint8(7)).astype(np.uint16) << 8
    scale = _fields(scales, 3, [0, 3, 6, 9]).reshape(len(b), -1)
    return _with_delta(index, high >> 3), _odd_scales(_half(d.view(np.uint8)), scale, 8), None


_UNPACK: dict[str, Callable[[U8], Parts]] = {
    "Q8_0": _q8_0,
    "Q2_0": _q2_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "Q6_K_CARD": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
    "IQ3_S_CARD": _iq3_s_card,
    "IQ4_NL_CARD": _iq4_nl_card,
    "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
    "MXFP4": _mxfp4,
}

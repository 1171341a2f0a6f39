"""Fixtures of the kernel tests: weights of every type as a file would hold them, the written arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from strata.kernels.cpu import team
from strata.kernels.formats import BY_NAME, Weight
from strata.kernels.ops import EXP_POLY, LANES, LOG1P_POLY
from strata.kernels.reference.fma import fma

F = np.float32

HALVES = {  # byte offsets of the half-precision numbers of a block; 0 where not named
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL_CARD": (0, 2, 4, 6),
    "Q6_K_CARD": (208,),
}


def unaligned(data: np.ndarray) -> np.ndarray:
    """The same bytes at an odd address, ending where the memory that holds them ends."""
    flat = np.empty(data.size + 64, np.uint8)
    start = next(i for i in range(1, 64) if (flat.ctypes.data + i) % 64 == 33)
    view = flat[start : start + data.size].reshape(data.shape)
    view[:] = data
    return view


def blocks(name: str, n: int, scale: float, rng: np.random.Generator) -> np.ndarray:
    """n random blocks with finite scales of about `scale`, either sign."""
    kind = BY_NAME[name]
    if kind.is_float:
        values = (rng.standard_normal(n) * scale).astype(np.float32)
        if name == "F16":
            return values.astype(np.float16).view(np.uint8).reshape(n, 2)
        words = values.view(np.uint8).reshape(n, 4)
        return words[:, 2:] if name == "BF16" else words
    data = rng.integers(0, 256, (n, kind.block_bytes), dtype=np.uint8)
    half = (scale * rng.uniform(0.5, 1.5, (n, 2)) * rng.choice([-1, 1], (n, 2))).astype(np.float16)
    raw = half.view(np.uint8).reshape(n, 2, 2)
    if name == "MXFP4":
        data[:, 0] = 127 + np.int64(np.round(np.log2(scale))) + rng.integers(-2, 3, n)
    elif name == "IQ1_M":  # the scale lies in the top nibbles of four words
        words = data[:, 48:56].copy().view(np.uint16) & 0x0FFF
        nibbles = half[:, :1].view(np.uint16) >> np.arange(0, 16, 4, dtype=np.uint16) & np.uint16(15)
        data[:, 48:56] = (words | nibbles << np.uint16(12)).view(np.uint8)
    else:
        for i, at in enumerate(HALVES.get(name, (0,))):
            data[:, at : at + 2] = raw[:, i % 2]
    return data


@pytest.fixture
def random_weight() -> Callable[..., Weight]:
    """random_weight(name, rows, cols, scale=.., experts=.., seed=..): a weight whose bytes start at an odd address."""

    def make(name: str, rows: int, cols: int, scale: float = 0.02, experts: int = 0, seed: int = 0) -> Weight:
        kind = BY_NAME[name]
        shape = (experts, rows, cols) if experts else (rows, cols)
        stack = (*shape[:-1], kind.row_bytes(cols))
        rng = np.random.default_rng([seed, kind.ggml_id, rows, cols])
        data = blocks(name, int(np.prod(stack)) // kind.block_bytes, scale, rng).reshape(stack)
        return Weight(kind, shape, unaligned(data))

    return make


class Written:
    """The steps of `ops.py`, "One arithmetic", in NumPy with an exact fma: the bits that kernels must have."""

    fma = staticmethod(fma)

    @staticmethod
    def exp(x: np.ndarray) -> np.ndarray:
        y = np.minimum(x, F(88.3))
        n = np.round(y * F(1.44269504))  # NumPy rounds halves to the even number
        r = fma(-n, F(1.42860677e-6), fma(-n, F(0.693145751953125), y))
        p = np.full_like(x, EXP_POLY[0])
        for c in EXP_POLY[1:]:
            p = fma(p, r, F(c))
        y = fma(p, r * r, r) + F(1)
        power = (np.nan_to_num(n).astype(np.int32) + 127 << 23).view(np.float32)
        return np.where(x < F(-87.3), F(0), y * power)

    @staticmethod
    def sigmoid(x: np.ndarray) -> np.ndarray:
        return F(1) / (F(1) + Written.exp(-x))

    @staticmethod
    def silu(x: np.ndarray) -> np.ndarray:
        return x / (F(1) + Written.exp(-x))

    @staticmethod
    def softplus(x: np.ndarray) -> np.ndarray:
        y = Written.exp(-np.abs(x))
        z = y / (F(2) + y)
        s = z * z
        p = np.full_like(x, LOG1P_POLY[0])
        for c in LOG1P_POLY[1:]:
            p = fma(p, s, F(c))
        return np.maximum(x, F(0)) + (F(2) * z) * p

    @staticmethod
    def lanes(a: np.ndarray, b: np.ndarray | None = None) -> np.ndarray:
        """lanes(a), or lanes(a * b), over the last axis."""
        p = np.zeros((*np.broadcast_shapes(a.shape, a.shape if b is None else b.shape)[:-1], LANES), np.float32)
        for i in range(0, a.shape[-1], LANES):
            part = a[..., i : i + LANES]
            m = part.shape[-1]
            p[..., :m] = p[..., :m] + part if b is None else fma(part, b[..., i : i + LANES], p[..., :m])
        for s in (64, 32, 16, 8, 4, 2, 1):
            p = p[..., :s] + p[..., s : 2 * s]
        return p[..., 0]

    @staticmethod
    def dot4(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """dot4(a, b) over the last axis, a multiple of 4."""
        c = np.zeros((*np.broadcast_shapes(a.shape, b.shape)[:-1], 4), np.float32)
        for i in range(0, a.shape[-1], 4):
            c = fma(a[..., i : i + 4], b[..., i : i + 4], c)
        return (c[..., 0] + c[..., 1]) + (c[..., 2] + c[..., 3])

    @staticmethod
    def rms(x: np.ndarray, w: np.ndarray, eps: float) -> np.ndarray:
        r = F(1) / np.sqrt(Written.lanes(x, x) / F(x.shape[-1]) + F(eps))
        return (x * r[..., None]) * w

    @staticmethod
    def same(a: np.ndarray, b: np.ndarray) -> bool:
        """The same bits, signs of zeros included; any NaN equals any other."""
        return bool(((a.view(np.uint32) == b.view(np.uint32)) | (np.isnan(a) & np.isnan(b))).all())


@pytest.fixture
def written() -> type[Written]:
    return Written


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """threads(n) sets the number of threads until the end of the test."""
    before = team.threads()
    yield team.set_threads
    team.set_threads(before)

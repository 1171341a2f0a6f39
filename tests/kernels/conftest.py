"""Fixtures of the kernel tests: random weights of every type, stored as a file would hold them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from strata.kernels.formats import BY_NAME, Weight

HALVES = {  # byte offsets of the half-precision numbers of a block; 0 where not named
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
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
            data[:, at : at + 2] = raw[:, i]
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

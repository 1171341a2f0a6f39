"""Hints of weights to come: inside the matrices, and without any effect on results."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.kernels.cuda import ahead
from strata.kernels.cuda.backend import CudaKernels
from strata.kernels.formats import BY_NAME, Weight
from strata.kernels.ops import Hyper


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 63)), max_size=ahead.MOST), st.integers(1, 300))
def test_nothing_outside_of_the_matrices_is_asked_for(matrices: list[tuple[int, int]], threads: int):
    memory = np.zeros(64 + 4 * sum(1000 * rows for rows, _ in matrices), np.uint8)
    weights, at = [], 0
    for rows, shift in matrices:
        data = memory[at + shift : at + shift + 1000 * rows]
        weights.append(Weight(BY_NAME["F32"], (rows, 250), data.reshape(rows, 1000)))
        at += 1000 * rows
    hint = ahead.struct(weights)
    for i, w in enumerate(weights):
        begin, end = int(hint["first"][i]), int(hint["first"][i]) + int(hint["pieces"][i]) * ahead.PIECE
        address = w.data.ctypes.data
        assert begin % 16 == 0 and (not hint["pieces"][i] or address <= begin <= end <= address + w.data.nbytes)
    assert ahead.blocks(hint, threads) * threads >= hint["pieces"].sum()


def test_a_hint_for_too_many_matrices_is_refused():
    w = Weight(BY_NAME["F32"], (1, 4), np.zeros((1, 16), np.uint8))
    with pytest.raises(ValueError, match="a hint holds 4 matrices, got 5"):
        ahead.struct([w] * 5)


def test_hints_change_no_bit(target, same_bits, random_weight):
    norm = np.ones((4, 64), np.float32)
    down, up = random_weight("Q8_0", 32, 256), random_weight("Q8_0", 256, 32)
    hc = target.put(Hyper(norm, down, up, None))
    x = np.random.default_rng(3).standard_normal((2, 4, 64)).astype(np.float32)
    kernels = CudaKernels(target.workspace())
    plain, _ = kernels.hyper_mix(target.put(x), hc, 1e-6)
    kernels.ahead(hc, [target.put(random_weight("F32", 40, 256))])
    hinting, _ = kernels.hyper_mix(target.put(x), hc, 1e-6)
    same_bits(target.host(hinting), target.host(plain))

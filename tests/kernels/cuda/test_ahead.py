"""A hint of a matrix to come: inside of it, and without any effect on results."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.kernels.cuda import ahead
from strata.kernels.cuda.backend import CudaKernels
from strata.kernels.formats import BY_NAME, Weight
from strata.kernels.ops import Gdn


@given(st.integers(0, 40), st.integers(0, 63))
def test_nothing_outside_of_the_matrix_is_asked_for(rows: int, shift: int):
    data = np.zeros(64 + 1000 * rows, np.uint8)[shift : shift + 1000 * rows]
    hint = ahead.struct(Weight(BY_NAME["F32"], (rows, 250), data.reshape(rows, 1000)))
    begin, pieces, first = int(hint["first"]), int(hint["pieces"]), data.ctypes.data
    assert begin % 16 == 0 and first <= begin and begin + pieces * ahead.PIECE <= max(begin, first + data.nbytes)
    assert begin + (pieces + 1) * ahead.PIECE > first + data.nbytes


@pytest.mark.parametrize("n", [1, 3])
def test_a_hint_changes_no_bit(target, same_bits, random_weight, n):
    rng = np.random.default_rng(n)
    values = [rng.standard_normal(shape).astype(np.float32) for shape in ((n, 128), (n, 64), (n, 2), (n, 2))]
    conv, state = np.zeros((1, 3, 128), np.float32), rng.standard_normal((1, 2, 32, 32)).astype(np.float32)
    w = target.put(
        Gdn(rng.standard_normal((128, 4)).astype(np.float32), *(np.full(k, -0.5, np.float32) for k in (2, 2, 32)))
    )
    kernels, segments = CudaKernels(target.workspace()), target.put(np.array([[0, 0, n]], np.int32))

    def run() -> list[np.ndarray]:
        own = target.put(conv), target.put(state)
        y = kernels.gdn(w, *map(target.put, values), segments, *own, 1e-6)
        return [target.host(a) for a in (y, *own)]

    plain = run()
    kernels.ahead(w, target.put(random_weight("F32", 40, 256)))
    for got, want in zip(run(), plain, strict=True):
        same_bits(got, want)

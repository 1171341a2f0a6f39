"""A hint of a matrix to come: inside of it, and without any effect on results."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from strata.kernels.cuda import ahead
from strata.kernels.formats import BY_NAME, Weight


@given(st.integers(0, 40), st.integers(0, 63))
def test_nothing_outside_of_the_matrix_is_asked_for(rows: int, shift: int):
    data = np.zeros(64 + 1000 * rows, np.uint8)[shift : shift + 1000 * rows]
    hint = ahead.struct(Weight(BY_NAME["F32"], (rows, 250), data.reshape(rows, 1000)))
    begin, pieces, first = int(hint["first"]), int(hint["pieces"]), data.ctypes.data
    assert begin % 16 == 0 and first <= begin and begin + pieces * ahead.PIECE <= max(begin, first + data.nbytes)
    assert begin + (pieces + 1) * ahead.PIECE > first + data.nbytes

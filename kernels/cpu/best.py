"""The k best of many scores in linear time, by their bits.

A float32 of zero or more is ordered as its bits are, so the k-th best score is found by counting: 11, 11 and 10 bits
at a time. Contract: `ops.Kernels.qsa_attend` (equal scores: the lower index). Cost: four passes over the scores.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from strata.kernels.cpu.math import JIT


@njit("Tuple((int64, int64))(int32[::1], int64)", **JIT)
def threshold(bits, k):
    """The bits of the k-th best score (1 <= k <= n), and how many scores with exactly these bits are among the k."""
    counts = np.empty(2048, np.int64)
    wanted, left = np.int64(0), k
    for shift, width in ((21, 11), (10, 11), (0, 10)):
        counts[:] = 0
        for i in range(bits.size):
            value = np.int64(bits[i])
            if value >> (shift + width) == wanted:
                counts[(value >> shift) & ((1 << width) - 1)] += 1
        digit = (1 << width) - 1
        while counts[digit] < left:
            left -= counts[digit]
            digit -= 1
        wanted = (wanted << width) | digit
    return wanted, left

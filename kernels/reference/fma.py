"""The fused multiply-add of float32, exact, in NumPy: a * b + c rounded once.

float64 holds the product of two float32 exactly; the sum with c is taken in float64, its error is recovered exactly
(two-sum), and a sum that was not exact is moved to its neighbour with an odd last bit ("round to odd"). Such a number
lies on the same side of every float32 rounding boundary as the true sum, so the last conversion rounds as the true
sum would: the double rounding of a plain float64 detour cannot happen.

Shapes   any, broadcast as NumPy does; float32 in and out
Errors   none; infinities and NaN propagate as in IEEE 754
Cost     about ten float64 operations an element
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from strata.kernels.ops import F32


def fma(a: npt.ArrayLike, b: npt.ArrayLike, c: npt.ArrayLike) -> F32:
    """a * b + c with a single rounding to float32."""
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        p = np.asarray(a, np.float32).astype(np.float64) * np.asarray(b, np.float32).astype(np.float64)
        z = np.asarray(c, np.float32).astype(np.float64)
        s = p + z
        t = s - p
        error = (p - (s - t)) + (z - t)
        even = (s.view(np.int64) & 1) == 0
        inexact = np.isfinite(s) & (error != 0)
        odd = np.where(inexact & even, np.nextafter(s, np.copysign(np.inf, error)), s)
        return odd.astype(np.float32)

"""The scalar functions of the model in float64: logistic, silu, softplus and the root mean square.

Arrays of any shape; float64 inside and out, so that the callers round once, at the end of an operation.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]


def sigmoid(x: F64) -> F64:
    """1 / (1 + exp(-x)), without overflow at either end."""
    return np.exp(-np.logaddexp(0.0, -x))


def silu(x: F64) -> F64:
    return x * sigmoid(x)


def softplus(x: F64) -> F64:
    """log(1 + exp(x))."""
    return np.logaddexp(0.0, x)


def rms(x: F64, eps: float) -> F64:
    """x / sqrt(mean(x^2) + eps) over the last axis."""
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)

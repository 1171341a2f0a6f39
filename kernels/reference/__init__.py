"""The reference backend: every operation of `kernels.ops` in readable NumPy. The truth that fast backends are held to.

Float64 between the products, float32 at the borders of an operation. The module satisfies `ops.Kernels`.
"""

from __future__ import annotations

from strata.kernels.reference.gdn import gdn
from strata.kernels.reference.hyper import hyper_add, hyper_mix
from strata.kernels.reference.linear import dequantize, linear
from strata.kernels.reference.moe import moe, route
from strata.kernels.reference.norm import rms_norm
from strata.kernels.reference.ple import ple, ple_rows
from strata.kernels.reference.qsa import qsa_attend, qsa_store
from strata.kernels.reference.sample import sample

__all__ = [
    "dequantize",
    "gdn",
    "hyper_add",
    "hyper_mix",
    "linear",
    "moe",
    "ple",
    "ple_rows",
    "qsa_attend",
    "qsa_store",
    "rms_norm",
    "route",
    "sample",
    "set_threads",
]


def set_threads(n: int) -> None:
    """Accepted for the contract: the reference runs as NumPy does."""
    if n < 1:
        raise ValueError(f"threads must be at least 1, got {n}")

"""Fast host kernels (numba): every operation of `kernels.ops`, in its written arithmetic. Satisfies `ops.Kernels`.

The bits of a row do not depend on the rows beside it, on how a prompt is cut or on the number of threads. Operations
are called from one thread at a time.
Cost   the first import on a machine compiles for some seconds; afterwards the machine code is read from the cache
"""

from __future__ import annotations

from strata.kernels.cpu import cache as cache  # before any kernel is defined: it says where compiled code is kept
from strata.kernels.cpu.gdn import gdn
from strata.kernels.cpu.hyper import hyper_add, hyper_mix
from strata.kernels.cpu.linear import dequantize, linear
from strata.kernels.cpu.moe import moe
from strata.kernels.cpu.norm import rms_norm
from strata.kernels.cpu.ple import ple, ple_rows
from strata.kernels.cpu.qsa_attend import qsa_attend
from strata.kernels.cpu.qsa_store import qsa_store
from strata.kernels.cpu.route import route
from strata.kernels.cpu.sample import sample
from strata.kernels.cpu.team import set_threads

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

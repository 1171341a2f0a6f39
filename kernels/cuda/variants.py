"""Sources beside the products with the constants they are compiled with: what a check without a card compiles.

operations()   (source, constants) for the geometries that the engine runs: the model's, and those of the test packs
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from strata.kernels.cuda.compile import Constants
from strata.kernels.cuda.gdn import HEAD_SIZES
from strata.kernels.cuda.qsa import HEADS_OF_A_THREAD

_PLAIN: Final = ("norm", "embed", "ple", "sample", "window", "qsa_score", "qsa_select")
_CACHES: Final = ("Float32", "Float16")


def operations() -> Iterator[tuple[str, Constants]]:
    """Every source once for each set of constants."""
    for name in _PLAIN:
        yield f"{name}.cu", {}
    for per in (2, 20):
        yield "hyper.cu", {"PER_THREAD": per, "STREAMS": 4}
    for kind, spans in (("Q8_0", 3), ("Q8_0", 1), ("Q5_1", 3), ("IQ4_NL", 3)):
        yield "hyper_window.cu", {"TYPE": kind, "SPANS": spans, "STREAMS": 4}
    for per in (1, 16):
        yield "route.cu", {"PER_LANE": per}
        for n, warps in ((1, 4), (8, 8)):
            yield "route_window.cu", {"TYPE": "F32", "WARPS": warps, "INPUTS": n, "PER_LANE": per}
    for d in HEAD_SIZES:
        yield "gdn.cu", {"HEAD_SIZE": d, "TAPS": 4}
        yield "gdn_scan.cu", {"HEAD_SIZE": d, "TAPS": 4}
        yield "gdn_scan.cu", {"HEAD_SIZE": d, "TAPS": 4, "TOKENS": 2}
    for cache in _CACHES:
        yield "qsa_prepare.cu", {"CACHE": cache}
        yield "qsa_window.cu", {"CACHE": cache}
        for heads in HEADS_OF_A_THREAD:
            yield "qsa_prompt.cu", {"CACHE": cache, "HEADS": heads}

"""What the kernels' plans need to know of a card.

card()   the card in use, read once. Errors: DeviceError when there is none
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from strata.kernels.cuda.compile import DeviceError


@dataclass(frozen=True, slots=True)
class Card:
    """arch: 90 for sm_90 · multiprocessors · shared_block: shared bytes a block may ask for · shared_multiprocessor:
    those of a multiprocessor, one KiB of which a block takes for itself."""

    arch: int
    multiprocessors: int
    shared_block: int
    shared_multiprocessor: int


@cache
def card() -> Card:
    """The current device. Raises DeviceError."""
    try:
        import cupy as cp
    except ImportError as error:
        raise DeviceError(f"a card needs CuPy: pip install 'strata[cuda13]' or 'strata[cuda12]' ({error})") from error
    try:
        device = cp.cuda.Device()
        attributes = device.attributes
    except cp.cuda.runtime.CUDARuntimeError as error:
        raise DeviceError(f"no card can be used: {error}") from error
    return Card(
        int(device.compute_capability),
        int(attributes["MultiProcessorCount"]),
        int(attributes["MaxSharedMemoryPerBlockOptin"]),
        int(attributes["MaxSharedMemoryPerMultiprocessor"]),
    )

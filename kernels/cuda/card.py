"""What the kernels' plans need to know of a card.

card()   the card in use, read once. Errors: DeviceError when there is none
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final

from strata.kernels.cuda.compile import DeviceError

ROOMY: Final = 200 << 10
OWN_SHARED: Final = 1 << 10
"""Bytes that a block takes of a multiprocessor beside those it asks for."""


@dataclass(frozen=True, slots=True)
class Card:
    """arch: 90 for sm_90 · multiprocessors · shared_block: shared bytes a block may ask for · shared_multiprocessor:
    those of a multiprocessor, one KiB of which a block takes for itself."""

    arch: int
    multiprocessors: int
    shared_block: int
    shared_multiprocessor: int

    @property
    def roomy(self) -> bool:
        """Whether a multiprocessor has shared memory for large blocks of two kernels at once."""
        return self.shared_multiprocessor >= ROOMY

    def apart(self, shared: int, blocks: int) -> int:
        """Shared bytes of a block that needs so many, with which a multiprocessor takes no second one of its launch.

        Blocks of a kernel that comes while others still run go where there is room: two of them to a multiprocessor
        that is free already, none to one that is not yet, and the kernel takes twice as long.
        """
        if blocks > self.multiprocessors or not self.roomy:
            return shared
        return max(shared, self.shared_multiprocessor // 2 - OWN_SHARED + 128)


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

"""Memory of a card: an account of what the engine took, and arenas that hand it out in aligned pieces.

`Account`   asks the driver for a piece, or says what was wanted, what is free and what would help. With a limit the
            card counts as one of that size, whatever it has
`Arena`     one piece, handed out from the bottom up and never taken back

Units    bytes; every array begins at a multiple of ALIGNMENT
Errors   DeviceError in one line
"""

from __future__ import annotations

from math import prod
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from strata.engine.device.base import Array, Memory
from strata.kernels.cuda.compile import DeviceError

ALIGNMENT: Final = 256
GIB: Final = 1 << 30
MIB: Final = 1 << 20


class Source(Protocol):
    """What memory comes from."""

    def memory(self) -> tuple[int, int]: ...
    def allocate(self, n_bytes: int) -> Array: ...


def padded(n_bytes: int) -> int:
    """Bytes that an array takes in an arena."""
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


def shown(n_bytes: int) -> str:
    """A size as a message says it."""
    return f"{n_bytes / GIB:.2f} GiB" if n_bytes >= 10 * MIB else f"{n_bytes / MIB:.2f} MiB"


class Account:
    """What the engine holds of a card. `limit`: bytes that the card counts as, 0 = all that it has."""

    def __init__(self, source: Source, limit: int = 0) -> None:
        self._source = source
        self.limit = limit
        self.held = 0

    def memory(self) -> Memory:
        """Total and free bytes, within the limit."""
        free, total = self._source.memory()
        if self.limit:
            return Memory(min(total, self.limit), max(0, min(free, self.limit - self.held)))
        return Memory(total, free)

    def take(self, n_bytes: int, what: str, remedy: str) -> Array:
        """uint8 (n_bytes,) for `what`. Raises DeviceError with the remedy when it is not there."""
        self.require(n_bytes, what, remedy)
        try:
            memory = self._source.allocate(max(n_bytes, ALIGNMENT))
        except DeviceError as error:
            raise DeviceError(f"{what}: {error}; {remedy}") from None
        self.held += n_bytes
        return memory

    def require(self, n_bytes: int, what: str, remedy: str, beside: int = 0) -> None:
        """Raises DeviceError with the remedy when there is no room for `what` and for `beside` other bytes."""
        free = max(0, self.memory().free - beside)
        if n_bytes > free:
            limited = f" within --vram-limit-mib {self.limit // MIB}" if self.limit else ""
            raise DeviceError(
                f"{what} take {shown(n_bytes)} of the card's memory, {shown(free)} are free{limited}; {remedy}"
            )

    def give(self, n_bytes: int) -> None:
        """Count a piece that was taken as given back; its memory goes with the last view of it."""
        self.held -= n_bytes


class Arena:
    """`memory` uint8 (n,) whose address is a multiple of ALIGNMENT."""

    def __init__(self, memory: Array, what: str) -> None:
        self._memory = memory
        self._what = what
        self.used = 0

    @property
    def free(self) -> int:
        return int(self._memory.size) - self.used

    def array(self, shape: tuple[int, ...], dtype: npt.DTypeLike = np.float32) -> Array:
        """A C-contiguous array with undefined contents."""
        kind = np.dtype(dtype)
        wanted = prod(shape) * kind.itemsize
        if padded(wanted) > self.free:
            raise DeviceError(f"{self._what}: {shape} {kind.name} takes {wanted} bytes, {self.free} are left")
        begin = self.used
        self.used += padded(wanted)
        return self._memory[begin : begin + wanted].view(kind).reshape(shape)

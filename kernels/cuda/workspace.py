"""Where the arrays of a forward pass live: one device buffer, handed out from the bottom up.

    y = workspace.array((n, width))           # valid until a mark taken before it is released
    with workspace.scratch():                 # what is taken inside is given back at the end
        t = workspace.array((n, 4 * width))
    if workspace.free >= n_bytes:             # what another way does without: no part of `peak`
        with workspace.spare():
            t = workspace.array((n_bytes,), np.uint8)

Nothing is allocated after the buffer: the same calls give the same addresses, so a captured graph can be replayed.
Giving back is only bookkeeping. Work that is under way on the stream still owns the bytes, and work that comes later
on the same stream cannot overtake it; arrays that cross streams need an event, as any memory does.

Units    bytes; every array begins at a multiple of `ALIGNMENT`
Errors   OutOfWorkspace with what was wanted and what is free; ValueError for a mark that is not in use
Cost     an array is a view: no kernel, no call of the driver; the same array again costs a look into a table
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from math import prod
from typing import Any, Final

import numpy as np
import numpy.typing as npt

ALIGNMENT: Final = 256
_MOST_VIEWS: Final = 4096
"""Arrays that are kept to be handed out again: the layers of a pass ask for the same ones."""
_NO_VIEW: Final = (0, None)

DeviceArray = Any
"""A CuPy array. CuPy brings no types and is not there on a machine without a card."""


class OutOfWorkspace(MemoryError):
    """An operation wants more scratch memory than the workspace has left. One line."""


class Workspace:
    """`memory`: a uint8 array on the device whose address is a multiple of ALIGNMENT."""

    def __init__(self, memory: DeviceArray) -> None:
        if memory.dtype != np.uint8 or memory.ndim != 1 or not memory.flags.c_contiguous:
            raise ValueError(f"a workspace is a flat uint8 array, got {memory.dtype} {memory.shape}")
        self._memory = memory
        self._begin = _address(memory)
        self._used = 0
        self._peak = 0
        self._left: dict[int, tuple[int, object]] = {}
        self._views: dict[tuple[int, tuple[int, ...], npt.DTypeLike], tuple[int, DeviceArray]] = {}

    @property
    def capacity(self) -> int:
        """Bytes of the buffer."""
        return int(self._memory.size)

    @property
    def used(self) -> int:
        """Bytes handed out, alignment included."""
        return self._used

    @property
    def free(self) -> int:
        """Bytes left above what is handed out."""
        return self.capacity - self._used

    @property
    def peak(self) -> int:
        """The most that was handed out at any time but in `spare`: what a workspace for the same calls must hold."""
        return self._peak

    def array(self, shape: tuple[int, ...], dtype: npt.DTypeLike = np.float32) -> DeviceArray:
        """A C-contiguous array with undefined contents. Raises OutOfWorkspace."""
        key = self._used, shape, dtype
        end, view = self._views.get(key, _NO_VIEW)
        if view is not None:
            self._used = end
            if end > self._peak:
                self._peak = end
            return view
        view = self._view(shape, dtype)
        if len(self._views) == _MOST_VIEWS:
            self._views.clear()
        self._views[key] = self._used, view
        return view

    def _view(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> DeviceArray:
        kind = np.dtype(dtype)
        wanted = prod(shape) * kind.itemsize
        padded = -(-wanted // ALIGNMENT) * ALIGNMENT
        if padded > self.free:
            raise OutOfWorkspace(
                f"{kind.name} {shape} takes {padded} bytes of workspace, {self.free} of {self.capacity} are free; "
                "read the prompt in smaller chunks or give the engine more workspace"
            )
        begin = self._used
        self._used += padded
        self._peak = max(self._peak, self._used)
        return self._memory[begin : begin + wanted].view(kind).reshape(shape)

    def upload(self, host: npt.NDArray[Any]) -> DeviceArray:
        """An array with the contents of a host array, copied on the current stream. Raises OutOfWorkspace."""
        array = self.array(host.shape, host.dtype)
        if isinstance(array, np.ndarray):
            array[...] = host
        else:
            array.set(np.ascontiguousarray(host))
        return array

    def leave(self, array: DeviceArray, beside: object) -> None:
        """Note what the maker of an array of this workspace left beside it for its readers; until it is given back."""
        self._left[self._place(array)] = array.nbytes, beside

    def left(self, array: DeviceArray) -> object | None:
        """What was left beside just this array."""
        nbytes, beside = self._left.get(self._place(array), (0, None))
        return beside if nbytes == array.nbytes else None

    def _place(self, array: DeviceArray) -> int:
        return _address(array) - self._begin

    def mark(self) -> int:
        """The place to come back to."""
        return self._used

    def release(self, mark: int) -> None:
        """Give back everything taken since the mark."""
        if not 0 <= mark <= self._used:
            raise ValueError(f"mark {mark} is not in use: {self._used} bytes are handed out")
        self._used = mark
        if self._left:
            for place in [place for place in self._left if place >= mark]:
                del self._left[place]

    def resume(self, mark: int) -> None:
        """What was taken up to the mark, by work that has been captured and now runs again, is in use."""
        if not 0 <= mark <= self.capacity:
            raise ValueError(f"mark {mark} is outside of {self.capacity} bytes")
        self._used = mark

    def scratch(self) -> AbstractContextManager[None]:
        """Give back at the end what was taken inside."""
        return _Scratch(self)

    @contextmanager
    def spare(self) -> Iterator[None]:
        """`scratch` of what the caller does without where there is no room for it."""
        peak = self._peak
        with self.scratch():
            yield
        self._peak = peak


class _Scratch:
    """`Workspace.scratch`; a class, since a pass enters some thousand of them."""

    __slots__ = ("_mark", "_workspace")

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._mark = 0

    def __enter__(self) -> None:
        self._mark = self._workspace.mark()

    def __exit__(self, *_: object) -> None:
        self._workspace.release(self._mark)


def _address(array: DeviceArray) -> int:
    return int(array.ctypes.data) if isinstance(array, np.ndarray) else int(array.data.ptr)

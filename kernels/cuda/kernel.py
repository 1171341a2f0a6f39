"""A loaded kernel and how it is launched: on the current stream, overlapping the kernel before it where the card can.

On compute capability 9.0 and newer a launch may begin while its predecessor still runs: its blocks come to the card and
run up to `inputs_ready()` (intrinsics.cuh), which every kernel calls before it touches what another one does. Captured
graphs keep this as programmatic edges. Copies and fills between kernels are waited for as a whole. The bits are the
same either way; STRATA_LAUNCH_OVERLAP=0 switches it off.

Errors   DeviceError: a launch that the driver refuses, by name
Cost     three microseconds or so of host time a launch: one packing of the arguments, one call of the driver
"""

from __future__ import annotations

import ctypes
import os
import re
import struct
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Final

import numpy as np

OVERLAP: Final = "STRATA_LAUNCH_OVERLAP"
_OVERLAP_ARCH: Final = 90
_OVERLAP_DRIVER: Final = 12030
"""The first driver that captures overlapping launches."""

_CONFIG: Final = struct.Struct("@7IPPI4x")
"""CUlaunchConfig: grid, block, bytes of shared memory, stream, attributes and their number."""
_ATTRIBUTE: Final = struct.Struct("@I4xi60x")
"""CUlaunchAttribute: its number, its value."""
_SERIALIZATION: Final = 6
"""CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION."""
WINDOW_SHARED: Final = 100
"""Percent of the first cache that kernels of windows ask for as shared memory, so that blocks of the next kernel find
room beside those of the one before (Card.apart). H200, 2026-11-29, a window of one row: 3,776 us, 3,881 with 50; of
eight rows no difference."""
_PROMPTS: Final = re.compile(r"prompt|scan|thin|_tile")
"""Kernels whose blocks want to be many on a multiprocessor."""
CACHES: Final = {"qsa_prompt_values": 25, "hyper_rows": 50, "hyper_mean": 50, "gdn_inputs": 50}
"""Kernels of prompts that want the first cache as a cache, and how many percent they need as shared memory."""
_CODES: Final = {"i": "i", "u": "I", "f": "f"}
_WIDE: Final = {"i": "q", "u": "Q", "f": "d"}


class DeviceError(RuntimeError):
    """The card cannot be used; the message says why and what to do."""


@cache
def _driver() -> ctypes.CDLL:
    library = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    library.cuLaunchKernelEx.argtypes = [ctypes.c_void_p] * 4
    return library


def overlaps(arch: int, driver: int, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether kernels of this card overlap: `arch` 90 for compute capability 9.0, `driver` 12030 for CUDA 12.3."""
    return arch >= _OVERLAP_ARCH and driver >= _OVERLAP_DRIVER and environ.get(OVERLAP, "").strip() != "0"


def of_window(name: str) -> bool:
    """Whether a kernel of this name asks for WINDOW_SHARED: of a prompt's, fewer blocks would fit a multiprocessor."""
    return not _PROMPTS.search(name)


def _packing(argument: Any) -> str:
    """How an argument is packed: its code for `struct`."""
    if isinstance(argument, int):
        return "i"
    if isinstance(argument, float) and not isinstance(argument, np.generic):
        return "f"
    if isinstance(argument, np.generic):
        codes = _CODES if argument.dtype.itemsize == np.dtype(np.int32).itemsize else _WIDE
        return codes[argument.dtype.kind]
    if isinstance(argument, np.ndarray):
        return f"{argument.nbytes}s"
    return "P"


class Kernel:
    """One kernel. `function`: CuPy's; `overlapping`: whether its launches may begin before their predecessors end. Not
    for several threads at a time: a launch is packed into one buffer.

    A call takes arrays (their addresses are passed), None (a null pointer), numbers (Python's as int32 or float32,
    NumPy's as they are), and NumPy structs (arrays without dimensions) by value, each time of the same kinds.
    """

    def __init__(self, function: Any, name: str, stream: Callable[[], int], overlapping: bool) -> None:
        self.name = name
        self.overlapping = overlapping
        self._function = function
        self._handle = int(function.kernel.ptr)
        self._stream = stream
        self._shared = 0
        self._attribute = ctypes.create_string_buffer(_ATTRIBUTE.pack(_SERIALIZATION, 1))
        self._config = ctypes.create_string_buffer(_CONFIG.size)
        self._config_at = ctypes.addressof(self._config)
        self._configured: tuple[Any, ...] = ()
        self._arguments: _Arguments | None = None
        self._launch = _driver().cuLaunchKernelEx
        if name in CACHES or of_window(name):
            self.prefer_shared(CACHES.get(name, WINDOW_SHARED))

    def prefer_shared(self, percent: int) -> None:
        """How much of the first cache becomes shared memory; -1: as the driver thinks. A multiprocessor changes it only
        when it is empty, so that kernels which differ in it cannot overlap."""
        self._function.preferred_shared_memory_carveout = percent

    def __call__(
        self, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...], shared_mem: int = 0
    ) -> None:
        if self._arguments is None:
            self._arguments = _Arguments(args)
        asked = grid, block, shared_mem, self._stream(), self.overlapping
        if asked != self._configured:  # the layers of a pass mostly ask for the same
            self._configure(*asked)
            self._configured = asked
        status = self._launch(self._config_at, self._handle, self._arguments.packed(args), None)
        if status:
            raise DeviceError(f"{self.name} {grid} x {block}, {shared_mem} bytes shared: {_error_name(status)}")

    def _configure(
        self, grid: tuple[int, ...], block: tuple[int, ...], shared_mem: int, stream: int, overlapping: bool
    ) -> None:
        if shared_mem > self._shared:  # more than a block has without asking, or asked for before
            self._function.max_dynamic_shared_size_bytes = shared_mem
            self._shared = shared_mem
        sizes = (*grid, 1, 1)[:3], (*block, 1, 1)[:3]
        attributes = ctypes.addressof(self._attribute), overlapping
        _CONFIG.pack_into(self._config, 0, *sizes[0], *sizes[1], shared_mem, stream, *attributes)


class _Arguments:
    """A buffer for a kernel's arguments, and where each lies in it."""

    def __init__(self, args: tuple[Any, ...]) -> None:
        codes = [_packing(a) for a in args]
        self._layout = struct.Struct("@" + "".join(codes))
        self._arrays = tuple(i for i, code in enumerate(codes) if code == "P")
        self._structs = tuple(i for i, code in enumerate(codes) if code.endswith("s"))
        self._buffer = ctypes.create_string_buffer(max(self._layout.size, 1))
        first, places = ctypes.addressof(self._buffer), []
        for i, code in enumerate(codes):
            end = struct.calcsize("@" + "".join(codes[: i + 1]))
            places.append(first + end - struct.calcsize(f"@{code}"))
        self._pointers = (ctypes.c_void_p * max(len(places), 1))(*places)
        self._address = ctypes.addressof(self._pointers)

    def packed(self, args: tuple[Any, ...]) -> int:
        """Enter the arguments of a launch; the address of the list of pointers to them."""
        values = list(args)
        for i in self._arrays:
            array = values[i]
            values[i] = 0 if array is None else array.data.ptr
        for i in self._structs:
            values[i] = values[i].tobytes()
        self._layout.pack_into(self._buffer, 0, *values)
        return self._address


def _error_name(status: int) -> str:
    name = ctypes.c_char_p()
    _driver().cuGetErrorName(status, ctypes.byref(name))
    return (name.value or b"CUDA error").decode() + f" ({status})"

"""The few things that a card does for the engine, and CuPy doing them: memory, copies, one stream, events, graphs.

Everything runs on one stream in the order of the calls; nothing is allocated that was not asked for here. `Driver` is
the seam: tests put a card without hardware behind it.

Units    bytes
Errors   DeviceError in one line: no CuPy, no driver, a driver too old for CuPy's toolkit, no visible card, a card too
         old for the kernels, no memory
Cost     a copy or an event costs the host a few microseconds, a replay of a graph five or so
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from strata.engine.device.locked import registered
from strata.kernels.cuda.compile import DeviceError, collecting
from strata.kernels.cuda.precompile import compile_missing
from strata.kernels.cuda.repack import repack
from strata.kernels.formats import TensorType

Bytes = npt.NDArray[np.uint8]
Array = Any
"""An array on the device. CuPy brings no types."""

_LAUNCH: Final = threading.Lock()
"""Launches of uploaders: a kernel is for one thread at a time."""
OLDEST: Final = (7, 5)
"""Compute capability that the kernels need: matrix steps of int8."""
INSTALL: Final = "install strata[cuda13] or strata[cuda12]"
GIB: Final = 1 << 30


class Event(Protocol):
    """A place in the stream."""

    def record(self) -> None: ...
    def wait(self) -> None:
        """Until the stream has come to where the event was last recorded."""


class Graph(Protocol):
    """Captured work. Replays use the addresses of the capture."""

    def launch(self) -> None: ...


class Driver(Protocol):
    """One card."""

    name: str

    def memory(self) -> tuple[int, int]:
        """Free and total bytes of the card, all processes counted."""

    def allocate(self, n_bytes: int) -> Array:
        """uint8 (n_bytes,) on the card with undefined contents; the memory goes back with the last view of it."""

    def pinned(self, n_bytes: int) -> Bytes:
        """uint8 (n_bytes,) of page-locked host memory that the card can address."""

    def mapped(self, host: npt.NDArray[Any]) -> Array:
        """The device's view of an array that lies in `pinned` memory."""

    def upload(self, target: Array, source: npt.NDArray[Any]) -> None:
        """Queue a copy from host memory, which must keep its contents until the stream has come past it. From memory
        that is not `pinned` the driver copies piece by piece, and the host waits."""

    def download(self, target: npt.NDArray[Any], source: Array) -> None:
        """Queue a copy into host memory; the host waits when it is not `pinned`."""

    def downloader(self, target: npt.NDArray[Any], source: Array) -> Callable[[], None]:
        """`download` of just these, to be queued again and again: all that it needs is looked up now."""

    def copy(self, target: Array, source: Array) -> None:
        """Queue a copy between C-contiguous arrays of the card."""

    def fetch(self, array: Array) -> npt.NDArray[Any]:
        """A copy of a C-contiguous array on the host; waits for all queued work."""

    def zero(self, array: Array) -> None:
        """Queue filling a C-contiguous array with zero bytes."""

    def event(self) -> Event: ...

    def capture(self, work: Callable[[], None]) -> Graph:
        """The kernels, copies and fills that `work` queues, as a graph; none of them runs now. Raises DeviceError where
        the card has no memory for it."""

    def precompile(self, work: Callable[[], None]) -> int:
        """Compile the kernels that `work` would launch, of which none runs, several at once. Returns how many were not
        known yet."""

    def uploader(self) -> Uploader:
        """A stream of its own for bulk copies, for the calling thread."""

    def wait_for(self, event: Event) -> None:
        """What is queued from now on comes behind an uploader's event, as it was last recorded. The host goes on."""

    def synchronize(self) -> None:
        """Until all queued work is done. Raises DeviceError when some of it failed."""

    def seal(self) -> None:
        """From now on an array operation that allocates beside `allocate` raises DeviceError."""


class Uploader(Protocol):
    """Copies to the card beside the stream of the work, and from it into `pinned` memory."""

    def upload(self, target: Array, source: npt.NDArray[Any]) -> None: ...
    def download(self, target: npt.NDArray[Any], source: Array) -> None: ...
    def repack(self, target: Array, source: Array, kind: TensorType) -> None:
        """Queue the making of a card form from blocks of the file's type that lie on the card."""

    def event(self) -> Event: ...
    def wait_for(self, event: Event) -> None:
        """What is queued here from now on comes behind an event of the driver's, as it was last recorded."""

    def finish(self) -> None: ...


class CupyDriver:
    """The first card that CUDA_VISIBLE_DEVICES leaves visible."""

    def __init__(self) -> None:
        self._cp = _import_cupy()
        self._runtime = self._cp.cuda.runtime
        _require_card(self._runtime)
        try:
            self._device = self._cp.cuda.Device(0)
            self._device.use()
            properties = self._runtime.getDeviceProperties(0)
            self._stream = self._cp.cuda.Stream(non_blocking=True)
        except self._runtime.CUDARuntimeError as error:
            raise DeviceError(f"the card cannot be used: {error}; is another program using all of it?") from error
        self.name = str(properties["name"].decode(errors="replace"))
        _require_kernels(self.name, (int(properties["major"]), int(properties["minor"])))
        self._stream.use()
        self._cp.cuda.set_allocator(self._cp.get_default_memory_pool().malloc)

    def memory(self) -> tuple[int, int]:
        free, total = self._runtime.memGetInfo()
        return int(free), int(total)

    def allocate(self, n_bytes: int) -> Array:
        try:
            memory = self._cp.cuda.Memory(n_bytes)
        except (self._runtime.CUDARuntimeError, self._cp.cuda.memory.OutOfMemoryError) as error:
            free, _ = self.memory()
            raise DeviceError(
                f"the card gives no {n_bytes / GIB:.2f} GiB in one piece, {free / GIB:.2f} GiB are free ({error})"
            ) from None
        return self._array(memory, n_bytes)

    def pinned(self, n_bytes: int) -> Bytes:
        found = registered(self._runtime, n_bytes)
        if found is not None:
            return found
        try:
            flags = self._runtime.hostAllocMapped | self._runtime.hostAllocPortable
            memory = self._cp.cuda.PinnedMemory(n_bytes, flags)
        except self._runtime.CUDARuntimeError as error:
            raise DeviceError(
                f"{n_bytes / GIB:.2f} GiB of RAM cannot be locked for the card ({error}); free some of it, or allow "
                "more locked memory"
            ) from None
        return np.frombuffer(self._cp.cuda.PinnedMemoryPointer(memory, 0), np.uint8, n_bytes)

    def mapped(self, host: npt.NDArray[Any]) -> Array:
        # One address space: pinned memory has the same address on the card. `host` owns the memory.
        memory = self._cp.cuda.UnownedMemory(host.ctypes.data, host.nbytes, host, 0)
        return self._cp.ndarray(host.shape, host.dtype, self._cp.cuda.MemoryPointer(memory, 0))

    def upload(self, target: Array, source: npt.NDArray[Any]) -> None:
        _copy(self._runtime, target.data.ptr, source.ctypes.data, target, source, self._stream.ptr)

    def download(self, target: npt.NDArray[Any], source: Array) -> None:
        _copy(self._runtime, target.ctypes.data, source.data.ptr, target, source, self._stream.ptr)

    def downloader(self, target: npt.NDArray[Any], source: Array) -> Callable[[], None]:
        to, given, kind = target.ctypes.data, source.data.ptr, self._runtime.memcpyDefault
        queue, n_bytes, stream = self._runtime.memcpyAsync, target.nbytes, self._stream.ptr
        if n_bytes != source.nbytes:
            raise ValueError(f"a copy of {source.nbytes} bytes into {n_bytes}")
        return lambda: queue(to, given, n_bytes, kind, stream)

    def copy(self, target: Array, source: Array) -> None:
        _copy(self._runtime, target.data.ptr, source.data.ptr, target, source, self._stream.ptr)

    def fetch(self, array: Array) -> npt.NDArray[Any]:
        host = np.empty(array.shape, array.dtype)
        _copy(self._runtime, host.ctypes.data, array.data.ptr, host, array, self._stream.ptr)
        self.synchronize()
        return host

    def zero(self, array: Array) -> None:
        self._runtime.memsetAsync(array.data.ptr, 0, array.nbytes, self._stream.ptr)

    def event(self) -> Event:
        return _CupyEvent(self._cp, self._stream)

    def capture(self, work: Callable[[], None]) -> Graph:
        self._stream.begin_capture()
        try:
            work()
        except BaseException:
            with suppress(self._runtime.CUDARuntimeError):  # the stream must leave capture; the first error counts
                self._stream.end_capture()
            raise
        try:
            graph = self._stream.end_capture()
            graph.upload(self._stream)
        except self._runtime.CUDARuntimeError as error:
            free, _ = self.memory()
            raise DeviceError(f"the card keeps no graph, {free / GIB:.2f} GiB are free ({error})") from None
        return _CupyGraph(graph, self._stream)

    def precompile(self, work: Callable[[], None]) -> int:
        with collecting() as jobs:
            work()
        return compile_missing(jobs, int(self._device.compute_capability))

    def uploader(self) -> Uploader:
        self._device.use()  # the current device belongs to a thread
        return _CupyUploader(self._cp)

    def wait_for(self, event: Event) -> None:
        _order(self._stream, event)

    def synchronize(self) -> None:
        try:
            self._stream.synchronize()
        except self._runtime.CUDARuntimeError as error:
            raise DeviceError(f"work on the card failed: {error}") from error

    def seal(self) -> None:
        self._cp.get_default_memory_pool().free_all_blocks()
        self._cp.cuda.set_allocator(_refuse)

    def _array(self, memory: Any, n_bytes: int) -> Array:
        return self._cp.ndarray((n_bytes,), np.uint8, self._cp.cuda.MemoryPointer(memory, 0))


class _CupyEvent:
    """Waiting spins: it returns some microseconds after the card is done."""

    def __init__(self, cp: Any, stream: Any) -> None:
        self.event = cp.cuda.Event(disable_timing=True)
        self._stream = stream
        self._error = cp.cuda.runtime.CUDARuntimeError

    def record(self) -> None:
        self.event.record(self._stream)

    def wait(self) -> None:
        try:
            self.event.synchronize()
        except self._error as error:
            raise DeviceError(f"work on the card failed: {error}") from error


class _CupyGraph:
    def __init__(self, graph: Any, stream: Any) -> None:
        self._graph = graph
        self._stream = stream

    def launch(self) -> None:
        self._graph.launch(self._stream)


class _CupyUploader:
    def __init__(self, cp: Any) -> None:
        self._cp = cp
        self._stream = cp.cuda.Stream(non_blocking=True)

    def upload(self, target: Array, source: npt.NDArray[Any]) -> None:
        _copy(self._cp.cuda.runtime, target.data.ptr, source.ctypes.data, target, source, self._stream.ptr)

    def download(self, target: npt.NDArray[Any], source: Array) -> None:
        _copy(self._cp.cuda.runtime, target.ctypes.data, source.data.ptr, target, source, self._stream.ptr)

    def repack(self, target: Array, source: Array, kind: TensorType) -> None:
        with _LAUNCH, self._stream:
            repack(source, target, kind)

    def event(self) -> Event:
        return _CupyEvent(self._cp, self._stream)

    def wait_for(self, event: Event) -> None:
        _order(self._stream, event)

    def finish(self) -> None:
        self._stream.synchronize()


def _order(stream: Any, event: Event) -> None:
    if not isinstance(event, _CupyEvent):
        raise TypeError(f"an event of another driver: {event}")
    stream.wait_event(event.event)


def _copy(runtime: Any, to: int, source: int, target: Any, given: Any, stream: int) -> None:
    if target.nbytes != given.nbytes:
        raise ValueError(f"a copy of {given.nbytes} bytes into {target.nbytes}")
    runtime.memcpyAsync(to, source, given.nbytes, runtime.memcpyDefault, stream)


def _refuse(n_bytes: int) -> Any:
    """CuPy's allocator: nothing of the engine may grow a pool behind the accounts."""
    raise DeviceError(f"an array operation asked for {n_bytes} bytes beside the engine's arenas")


def _import_cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise DeviceError(f"CuPy is not installed ({error}); {INSTALL}") from None
    return cupy


def _require_card(runtime: Any) -> None:
    """DeviceError unless there is a driver that is new enough and a card that it shows."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    shown = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
    wanted = _version(runtime.runtimeGetVersion())
    try:
        driver = runtime.driverGetVersion()
        if not driver:
            raise DeviceError("no NVIDIA driver is loaded; install the driver, or use --device host")
        n = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        if "NoDevice" in str(error):
            raise DeviceError(f"no card is visible{shown}; nvidia-smi lists the cards of this machine") from None
        if "InsufficientDriver" in str(error):
            raise DeviceError(
                f"the NVIDIA driver knows CUDA {_version(driver)}, the installed CuPy needs {wanted}; "
                "update the driver, or install strata[cuda12]"
            ) from None
        raise DeviceError(f"CUDA does not start: {error}") from None
    if not n:
        raise DeviceError(f"no card is visible{shown}; nvidia-smi lists the cards of this machine")


def _require_kernels(name: str, capability: tuple[int, int]) -> None:
    """DeviceError unless the card is new enough for the kernels."""
    if capability < OLDEST:
        own, wanted = (".".join(map(str, each)) for each in (capability, OLDEST))
        raise DeviceError(
            f"{name} has compute capability {own}, the kernels need {wanted} or newer; choose another card with "
            "CUDA_VISIBLE_DEVICES, or use --device host"
        )


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"

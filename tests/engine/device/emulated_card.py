"""A card without hardware behind `engine.device.driver.Driver`: kernels run on the emulator, memory is NumPy's.

Work is queued and runs as late as CUDA allows, when somebody waits: a buffer that is changed while a copy of it is
under way, or an id that is read before its event, gives wrong numbers here. With `eager`, copies on streams of their
own run as early as it allows: one that does not wait for the kernels that read its target gives wrong numbers.
Fresh memory holds 0xFF: floats in it are NaN. Only a piece that is larger than any arena here, in which a workspace is
measured, stays as the system gives it.
"""

from __future__ import annotations

import importlib.util
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np

from strata.kernels.cuda import arguments, card, compile, fetch, handover, mixture, product
from strata.kernels.cuda.card import Card
from strata.kernels.formats import TensorType
from strata.kernels.reference.repack import repack

LOADING = (compile, arguments, product, mixture, handover, fetch)
"""Modules that load kernels."""
REAL_LOADER = compile.load_kernel
ALIGNMENT = 256
MULTIPROCESSORS = 3
FILLED = 256 << 20
EMULATOR = Path(__file__).resolve().parents[2] / "kernels" / "cuda" / "emulator" / "emulator.py"


def load_emulator() -> ModuleType:
    name = "strata_test_emulator"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, EMULATOR)
        assert spec and spec.loader
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def aligned(n_bytes: int) -> np.ndarray:
    """uint8 (n_bytes,) at a multiple of ALIGNMENT, with some readable bytes behind it."""
    room = np.empty(n_bytes + 2 * ALIGNMENT, np.uint8)
    begin = -room.ctypes.data % ALIGNMENT
    return room[begin : begin + n_bytes]


class EmulatedEvent:
    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.at = 0

    def record(self) -> None:
        self.at = self.stream.queued

    def wait(self) -> None:
        self.stream.run_to(self.at)


class Stream:
    """A queue of work. `queued` and `done` count pieces since the beginning."""

    def __init__(self) -> None:
        self.queued = 0
        self.done = 0
        self._queue: deque[tuple[Callable[[], None], tuple[Stream, int] | None]] = deque()
        self._running = False

    def add(self, work: Callable[[], None], behind: tuple[Stream, int] | None = None) -> None:
        """`behind`: a place in another stream that has to be passed first."""
        self._queue.append((work, behind))
        self.queued += 1

    def wait_for(self, event: EmulatedEvent) -> None:
        stream, at = event.stream, event.at
        self.add(lambda: stream.run_to(at), (stream, at))

    def run_to(self, at: int) -> None:
        assert not self._running or at <= self.done, "streams wait for each other"
        while self.done < at:
            work, _ = self._queue.popleft()
            running, self._running = self._running, True
            work()
            self._running = running
            self.done += 1

    def run_freely(self) -> None:
        """All that does not have to wait."""
        while self._queue:
            _, behind = self._queue[0]
            if behind is not None and behind[0].done < behind[1]:
                return
            self.run_to(self.done + 1)


class EmulatedGraph:
    def __init__(self, driver: EmulatedDriver, work: list[Callable[[], None]]) -> None:
        self._driver = driver
        self.work = work

    def launch(self) -> None:
        self._driver.graph_launches += 1
        for each in self.work:
            self._driver.stream.add(each)


class EmulatedCard:
    """The machine that a driver is for: while it is plugged in, launches go to the driver that was made last."""

    def __init__(self, folder: Path) -> None:
        # Engines run every kernel some hundred times: -O2 takes half as long again to compile, they run in two thirds.
        self._emulator = load_emulator().Emulator(folder, "-O2")
        self._driver: EmulatedDriver | None = None
        self.loaded: set[tuple[str, tuple[tuple[str, int | str], ...]]] = set()

    def driver(self, total: int = 4 << 30, rehearses: bool = True) -> EmulatedDriver:
        self._driver = EmulatedDriver(total)
        self._driver.rehearses = rehearses
        return self._driver

    def load_kernel(self, source: str, name: str, **constants: int | str) -> Any:
        kernel = self._emulator.load_kernel(source, name, **constants)
        self.loaded.add((source, tuple(sorted(constants.items()))))

        def queue(grid: Any, block: Any, args: tuple[Any, ...], shared_mem: int = 0) -> None:
            kept = tuple(a.copy() if isinstance(a, np.ndarray) and not a.ndim else a for a in args)
            driver = self._driver
            assert driver is not None
            driver.add(lambda: driver.run(kernel, grid, block, kept, shared_mem))

        queue.max_dynamic_shared_size_bytes = 227 << 10  # type: ignore[attr-defined]
        return queue

    @contextmanager
    def plugged_in(self) -> Iterator[EmulatedCard]:
        """Kernels are loaded from here."""
        figures = Card(80, MULTIPROCESSORS, 227 << 10, 228 << 10)
        with mock.patch.object(card, "card", lambda: figures):
            patches = [mock.patch.object(m, "load_kernel", self.load_kernel) for m in LOADING]
            for patch in patches:
                patch.start()
            try:
                yield self
            finally:
                for patch in patches:
                    patch.stop()


class EmulatedDriver:
    """`total`: bytes of the card; `held`: how much of it other programs have; `eager`: what uploaders do at once;
    `rehearses`: False leaves out the kernels of a start, whose passes are over contents that mean nothing."""

    name = "emulated card"

    def __init__(self, total: int) -> None:
        self.total = total
        self.held = 0
        self.eager = False
        self.rehearses = True
        self.stream = Stream()
        self.sealed = False
        self.collected: set[tuple[str, tuple[tuple[str, int | str], ...]]] = set()
        self.graph_launches = 0
        self._captured: list[Callable[[], None]] | None = None

    def add(self, work: Callable[[], None]) -> None:
        if self._captured is not None:
            self._captured.append(work)
        else:
            self.stream.add(work)

    def run(self, kernel: Any, grid: Any, block: Any, args: tuple[Any, ...], shared_mem: int) -> None:
        """A launch, when its turn has come."""
        if self.sealed or self.rehearses:
            kernel(grid, block, args, shared_mem=shared_mem)

    def memory(self) -> tuple[int, int]:
        return self.total - self.held, self.total

    def allocate(self, n_bytes: int) -> np.ndarray:
        assert not self.sealed and self._captured is None, "memory is taken after the start"
        memory = aligned(n_bytes)
        if n_bytes <= FILLED:
            memory[:] = 0xFF
        return memory

    def pinned(self, n_bytes: int) -> np.ndarray:
        memory = aligned(n_bytes)
        memory[:] = 0xEE
        return memory

    def mapped(self, host: np.ndarray) -> np.ndarray:
        return host

    def upload(self, target: np.ndarray, source: np.ndarray) -> None:
        self.copy(target, source)

    def download(self, target: np.ndarray, source: np.ndarray) -> None:
        self.copy(target, source)

    def downloader(self, target: np.ndarray, source: np.ndarray) -> Callable[[], None]:
        return lambda: self.copy(target, source)

    def copy(self, target: np.ndarray, source: np.ndarray) -> None:
        assert target.nbytes == source.nbytes and target.flags.c_contiguous and source.flags.c_contiguous
        self.add(lambda: _bytes(target).__setitem__(slice(None), _bytes(source)))

    def fetch(self, array: np.ndarray) -> np.ndarray:
        assert array.flags.c_contiguous
        self.synchronize()
        return array.copy()

    def zero(self, array: np.ndarray) -> None:
        assert array.flags.c_contiguous
        self.add(lambda: array.fill(0))

    def event(self) -> EmulatedEvent:
        return EmulatedEvent(self.stream)

    def capture(self, work: Callable[[], None]) -> EmulatedGraph:
        self._captured = captured = []
        try:
            work()
        finally:
            self._captured = None
        return EmulatedGraph(self, captured)

    def precompile(self, work: Callable[[], None]) -> int:
        """Nothing is compiled ahead, but what would be is in `collected`, and none of it may run."""
        with ExitStack() as stack:
            for module in LOADING:
                stack.enter_context(mock.patch.object(module, "load_kernel", REAL_LOADER))
            with compile.collecting() as self.collected:
                work()
        return 0

    def uploader(self) -> EmulatedUploader:
        return EmulatedUploader(self.eager)

    def wait_for(self, event: EmulatedEvent) -> None:
        assert self._captured is None, "a wait inside of a capture"
        self.stream.wait_for(event)

    def synchronize(self) -> None:
        assert self._captured is None, "a wait inside of a capture"
        self.stream.run_to(self.stream.queued)

    def seal(self) -> None:
        self.sealed = True


class EmulatedUploader:
    def __init__(self, eager: bool) -> None:
        self._stream = Stream()
        self._eager = eager

    def upload(self, target: np.ndarray, source: np.ndarray) -> None:
        assert target.nbytes == source.nbytes
        self._stream.add(lambda: _bytes(target).__setitem__(slice(None), _bytes(source)))
        if self._eager:
            self._stream.run_freely()

    def repack(self, target: np.ndarray, source: np.ndarray, kind: TensorType) -> None:
        self._stream.add(lambda: _bytes(target).__setitem__(slice(None), repack(kind, source)))
        if self._eager:
            self._stream.run_freely()

    def download(self, target: np.ndarray, source: np.ndarray) -> None:
        self.upload(target, source)

    def wait_for(self, event: EmulatedEvent) -> None:
        self._stream.wait_for(event)

    def event(self) -> EmulatedEvent:
        return EmulatedEvent(self._stream)

    def finish(self) -> None:
        self._stream.run_to(self._stream.queued)


def _bytes(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)

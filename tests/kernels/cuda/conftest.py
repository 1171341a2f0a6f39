"""Where the operations of the CUDA backend are tested: the emulator on the host, and a card.

    def test_...(target):
        workspace = target.workspace()
        y = target.host(rms_norm(workspace, target.put(x), target.put(w), eps))

On the emulator the threads and blocks run in a shuffled order, arrays end where their memory ends, and fresh memory
holds NaN: a missing barrier, a read past the end and an unwritten result show.
"""

from __future__ import annotations

import ctypes
import importlib.util
import mmap
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strata.kernels.cuda import arguments, card, compile, mixture, product
from strata.kernels.cuda.card import Card
from strata.kernels.cuda.workspace import Workspace
from strata.kernels.formats import Weight

EMULATOR = Path(__file__).resolve().parent / "emulator" / "emulator.py"
ALIGNMENT = 256
PAGE_BYTES = mmap.PAGESIZE
SCRATCH_PART = 2
"""Of what a test asks for on a card, the emulator gets half."""

_libc = ctypes.CDLL(None, use_errno=True)
_kept: list[mmap.mmap] = []


def fenced(n_bytes: int) -> np.ndarray:
    """n bytes (and up to 15 more, to a multiple of 16) that end before a page that nobody may touch, filled with 0xFF.

    They begin at a multiple of ALIGNMENT where their number is one, at a multiple of 16 otherwise.
    """
    room = -(-n_bytes // 16) * 16
    pages = -(-room // PAGE_BYTES) * PAGE_BYTES
    memory = mmap.mmap(-1, pages + PAGE_BYTES)
    _kept.append(memory)
    whole = np.frombuffer(memory, np.uint8)
    if _libc.mprotect(ctypes.c_void_p(whole.ctypes.data + pages), ctypes.c_size_t(PAGE_BYTES), 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    array = whole[pages - room : pages - room + n_bytes]
    array[:] = 0xFF
    return array


class Target:
    """Arrays there and back. `emulator` is None on a card."""

    def __init__(self, emulator: Any, put: Callable[[np.ndarray], Any], host: Callable[[Any], np.ndarray]) -> None:
        self._emulator = emulator
        self._put = put
        self._host = host

    @property
    def emulated(self) -> bool:
        return self._emulator is not None

    def put(self, value: Any) -> Any:
        """A host array, a weight, or a dataclass of them, on the device; None and numbers pass."""
        if isinstance(value, np.ndarray):
            return self._put(value)
        if isinstance(value, Weight):
            return Weight(value.type, value.shape, self._put(np.ascontiguousarray(value.data)))
        if is_dataclass(value) and not isinstance(value, type):
            return replace(value, **{f.name: self.put(getattr(value, f.name)) for f in fields(value)})
        return value

    def host(self, array: Any) -> np.ndarray:
        """A copy of a device array."""
        return self._host(array)

    def update(self, array: Any, value: np.ndarray) -> None:
        """Other contents for an array that stays where it is."""
        array[...] = value if self._emulator else self._put(value)

    def graph(self, run: Callable[[], None]) -> Callable[[], None]:
        """Launches captured while `run` runs (after a run that is not captured): calling it launches them again."""
        run()
        if self._emulator:
            self._emulator.recorded = recorded = []
            run()
            self._emulator.recorded = None

            def replay() -> None:
                for kernel, *arguments in recorded:
                    kernel(*arguments)

            return replay
        import cupy

        stream = cupy.cuda.get_current_stream()
        stream.begin_capture()
        run()
        graph = stream.end_capture()
        return lambda: graph.launch(stream)

    def workspace(self, megabytes: int = 4) -> Workspace:
        """Scratch that holds NaN. The emulator has few multiprocessors that want some, and to fill it takes time."""
        if self._emulator:
            return Workspace(fenced((megabytes << 20) // SCRATCH_PART))
        return Workspace(self._put(np.full(megabytes << 20, 0xFF, np.uint8)))


def _to_fence(array: np.ndarray) -> np.ndarray:
    copy = fenced(array.nbytes)[: array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


@pytest.fixture(scope="session")
def emulators(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """emulators("-Og"): the emulator at a level of the compiler; compiled kernels are kept between runs."""
    spec = importlib.util.spec_from_file_location("strata_test_emulator", EMULATOR)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    cache_dir = getattr(request.config, "cache", None)
    folder = Path(cache_dir.mkdir("emulated")) if cache_dir else tmp_path_factory.mktemp("emulated")
    return cache(lambda level: module.Emulator(folder, level))


@pytest.fixture
def emulator(request: pytest.FixtureRequest, emulators: Callable[[str], Any]) -> Any:
    """At the module's LEVEL, -Og where it names none: most kernels run a few times."""
    return emulators(getattr(request.module, "LEVEL", "-Og"))


@pytest.fixture(params=["emulated", pytest.param("card", marks=pytest.mark.gpu)])
def target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Target]:
    """Every test that asks for it runs on the emulator, and on a card when cards are asked for."""
    if request.param == "card":
        import cupy

        with cupy.cuda.Stream(non_blocking=True):
            yield Target(None, cupy.asarray, cupy.asnumpy)
        return
    emulator = request.getfixturevalue("emulator")
    for module in (compile, arguments, product, mixture):
        monkeypatch.setattr(module, "load_kernel", emulator.load_kernel)
    monkeypatch.setattr(card, "card", lambda: Card(80, 3, 227 << 10, 228 << 10))
    emulator.order = 1 + zlib.crc32(request.node.name.encode())  # odd and even ones: copies land early and late
    first = len(_kept)
    yield Target(emulator, _to_fence, np.array)
    del _kept[first:]


def same_bits(got: np.ndarray, want: np.ndarray) -> None:
    """Equal shapes and equal bytes; a message that counts the elements that differ."""
    assert got.shape == want.shape and got.dtype == want.dtype, f"{got.dtype} {got.shape}, {want.dtype} {want.shape}"
    if not got.size:
        return
    a, b = (np.ascontiguousarray(x).reshape(-1).view(np.uint8).reshape(x.size, -1) for x in (got, want))
    differ = (a != b).any(1)
    where = np.argwhere(differ.reshape(want.shape))[:4].tolist()
    assert not differ.any(), f"{differ.sum()} of {differ.size} elements differ, first at {where}"


@pytest.fixture(name="same_bits")
def _same_bits() -> Callable[[np.ndarray, np.ndarray], None]:
    return same_bits

"""RAM that is locked for a card is all there, at one address, and given back with its last view."""

from __future__ import annotations

import gc
import mmap
from types import SimpleNamespace

import numpy as np
import pytest

from strata.engine.device import locked


class Refused(RuntimeError):
    pass


class Runtime(SimpleNamespace):
    """CuPy's runtime, as far as locking goes. held: bytes by address."""

    CUDARuntimeError = Refused

    def __init__(self, same: int = 1, most: int = 1 << 40) -> None:
        super().__init__(held={}, same=same, most=most)

    def getDevice(self) -> int:
        return 0

    def deviceGetAttribute(self, name: int, device: int) -> int:
        assert (name, device) == (91, 0)
        return self.same

    def hostRegister(self, at: int, n_bytes: int, flags: int) -> None:
        assert flags == 3
        if n_bytes > self.most:
            raise Refused("out of memory")
        self.held[at] = n_bytes

    def hostUnregister(self, at: int) -> None:
        del self.held[at]


@pytest.mark.parametrize("n_bytes", [1, mmap.PAGESIZE - 1, 3 * mmap.PAGESIZE + 5, (4 << 20) + 123])
@pytest.mark.parametrize("threads", [1, 3, 8])
def test_touched_memory_is_zero_begins_at_a_page_and_can_be_written(n_bytes, threads):
    memory = locked.touched(n_bytes, threads)
    assert memory is not None and memory.size == n_bytes and memory.dtype == np.uint8
    assert memory.ctypes.data % mmap.PAGESIZE == 0 and memory.flags.writeable and not memory.any()
    memory[:] = 7
    assert int(memory[-1]) == 7


def test_memory_stays_locked_until_its_last_view_goes(monkeypatch):
    monkeypatch.setattr(locked, "LEAST", 1)
    runtime = Runtime()
    memory = locked.registered(runtime, 1 << 20)
    assert runtime.held == {memory.ctypes.data: 1 << 20}
    view = memory[5:9].view(np.int32)
    del memory
    gc.collect()
    view[0] = 1
    assert len(runtime.held) == 1
    del view
    gc.collect()
    assert runtime.held == {}


def test_the_driver_allocates_where_it_does_not_lock_or_would_have_another_address(monkeypatch):
    assert locked.registered(Runtime(), locked.LEAST - 1) is None
    monkeypatch.setattr(locked, "LEAST", 1)
    assert locked.registered(Runtime(same=0), 1 << 20) is None
    refusing = Runtime(most=100)
    assert locked.registered(refusing, 1 << 20) is None and refusing.held == {}
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    assert locked.registered(Runtime(), 1 << 20) is None

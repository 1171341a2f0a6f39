"""RAM for a card to lock, whose pages are there before it does.

The driver's own allocation takes its pages one by one on one thread. Here several threads touch huge pages
of a mapping that the driver only has to lock then; they also save the card most of the walks that it needs to find
4 KiB pages. Where that is not to be had, the caller asks the driver.

    memory = registered(runtime, n_bytes)     # None: not here

Errors   none
Cost     zeroing by THREADS threads, and a call that locks
"""

from __future__ import annotations

import mmap
import threading
import weakref
from contextlib import suppress
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from strata.engine.device.host import ram

LEAST: Final = 32 << 20
"""Bytes below which the driver's own allocation is as good."""
THREADS: Final = 8
PAGE: Final = mmap.PAGESIZE
_PORTABLE, _MAPPED = 1, 2
_SAME_ADDRESS: Final = 91
"""cudaDevAttrCanUseHostPointerForRegisteredMem."""
Bytes = npt.NDArray[np.uint8]


def touched(n_bytes: int, threads: int = THREADS) -> Bytes | None:
    """uint8 (n_bytes,) of zeros that begins at a page, with all its pages; None where the system has no huge ones or
    does not give so much."""
    if not hasattr(mmap, "MADV_HUGEPAGE") or n_bytes > ram().free:
        return None
    try:
        mapping = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError):
        return None
    for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK):  # a child's copy would take the pages from the card
        with suppress(OSError):  # a system without huge pages has small ones
            mapping.madvise(advice)
    memory = np.frombuffer(mapping, np.uint8)
    part = -(-n_bytes // (threads * PAGE)) * PAGE
    workers = [
        threading.Thread(target=_touch, args=(memory[begin : begin + part],), name="pages", daemon=True)
        for begin in range(0, n_bytes, part)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return memory


def _touch(part: Bytes) -> None:
    part[::PAGE] = 0


def registered(runtime: Any, n_bytes: int) -> Bytes | None:
    """The same, locked for all cards and at the same address there, until its last view goes. None where `touched` is
    none, or the driver does not lock it or would give it another address. runtime: CuPy's."""
    if n_bytes < LEAST or not runtime.deviceGetAttribute(_SAME_ADDRESS, runtime.getDevice()):
        return None
    memory = touched(n_bytes)
    if memory is None:
        return None
    at = memory.ctypes.data
    try:
        runtime.hostRegister(at, n_bytes, _PORTABLE | _MAPPED)
    except runtime.CUDARuntimeError:
        return None
    weakref.finalize(memory, runtime.hostUnregister, at).atexit = False
    return memory

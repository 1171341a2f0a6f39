"""Weights from the mapped file to the card: a few threads, each with two page-locked buffers.

A thread copies a piece of the file into one buffer while the card fetches the other; pieces of all tensors are handed
out in the order of the file, so that a cold file is read forwards. What the card keeps in another form comes to a
buffer of the thread there, PIECE bytes, and is made from that; these buffers are given back at the end.

Units    bytes
Errors   those of the card, DeviceError; the first one ends the load. DeviceError too where bytes that are read back are
         not what was sent
Cost     bound by the copy out of the page cache: some 5 GB/s a thread
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from strata.engine.device.arena import GIB
from strata.engine.device.driver import Array, Driver, Event
from strata.engine.log import log
from strata.kernels.cuda.compile import DeviceError
from strata.kernels.cuda.repack import file_bytes
from strata.kernels.formats import CARD_FORMS, TensorType

PIECE: Final = 16 << 20
THREADS: Final = 8
REPORT_S: Final = 5.0
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """Bytes of the file (flat uint8) and where they go (flat uint8): to the card, or to `host` memory that it reads.
    kind: of the file, where the target is its card form (kernels/cuda/repack.py) · checked: read back from the card and
    compared when everything is there; not with a kind."""

    source: Bytes
    target: Array
    host: bool = False
    kind: TensorType | None = None
    checked: bool = False

    @property
    def steps(self) -> tuple[int, int]:
        """Bytes of source and of target that belong together."""
        return (1, 1) if self.kind is None else (file_bytes(self.kind), CARD_FORMS[self.kind.name].block_bytes)


def pieces(copies: Sequence[Copy], most: int = PIECE) -> Iterator[Copy]:
    """The copies cut into pieces of at most `most` bytes of the file, whole blocks where the form changes."""
    for copy in copies:
        given, made = copy.steps
        for begin in range(0, copy.source.size // given, most // given):
            end = min(begin + most // given, copy.source.size // given)
            target = copy.target[begin * made : end * made]
            yield Copy(copy.source[begin * given : end * given], target, copy.host, copy.kind)


class Loading:
    """A load under way. `wait` returns when everything is there, or raises what went wrong."""

    def __init__(self, driver: Driver, copies: Sequence[Copy], threads: int = THREADS) -> None:
        self.total = sum(copy.source.size for copy in copies)
        self._driver = driver
        self._checked = [copy for copy in copies if copy.checked]
        self._pieces = pieces(sorted(copies, key=lambda copy: copy.source.ctypes.data))
        self._lock = threading.Lock()
        self._done = 0
        self._error: BaseException | None = None
        self._begun = time.perf_counter()
        self._reported = self._begun
        n = max(1, min(threads, -(-self.total // PIECE)))
        forms = any(copy.kind is not None for copy in copies)
        staged = [driver.allocate(PIECE) if forms else None for _ in range(n)]
        self._threads = [
            threading.Thread(target=self._run, args=(stage,), name=f"load-{i}", daemon=True)
            for i, stage in enumerate(staged)
        ]
        for thread in self._threads:
            thread.start()

    def wait(self) -> None:
        for thread in self._threads:
            thread.join()
        if self._error is not None:
            raise self._error
        for copy in self._checked:
            self._compare(copy)
        seconds = time.perf_counter() - self._begun
        log(f"weights: {self.total / GIB:.2f} GiB on the card after {seconds:.1f} s")

    def _compare(self, copy: Copy) -> None:
        """DeviceError unless the card holds what was sent."""
        wrong = np.flatnonzero(self._driver.fetch(copy.target) != copy.source)
        if wrong.size:
            raise DeviceError(
                f"the card's memory does not keep what was written: {wrong.size} of {copy.source.size} bytes of an "
                f"expert read back changed, the first is number {wrong[0]}; test the card, undo any overclocking, or "
                "use another one"
            )

    def cancel(self) -> None:
        """Stop after the pieces under way."""
        with self._lock:
            self._error = self._error or RuntimeError("the load was cancelled")
        for thread in self._threads:
            thread.join()

    def _next(self) -> Copy | None:
        with self._lock:
            return None if self._error is not None else next(self._pieces, None)

    def _run(self, stage: Array | None) -> None:
        try:
            self._copy_all(stage)
        except BaseException as error:  # noqa: BLE001 - `wait` raises it in the thread that asked for the load
            with self._lock:
                self._error = self._error or error

    def _copy_all(self, stage: Array | None) -> None:
        uploader = self._driver.uploader()
        buffers = [_Buffer(self._driver.pinned(PIECE), uploader.event()) for _ in range(2)]
        turn = 0
        while (piece := self._next()) is not None:
            n = piece.source.size
            if piece.host:
                np.copyto(piece.target, piece.source)
            else:
                buffer = buffers[turn]
                turn ^= 1
                buffer.free()
                np.copyto(buffer.memory[:n], piece.source)
                if piece.kind is None or stage is None:
                    uploader.upload(piece.target, buffer.memory[:n])
                else:
                    uploader.upload(stage[:n], buffer.memory[:n])
                    uploader.repack(piece.target, stage[:n], piece.kind)
                buffer.sent()
            self._report(n)
        uploader.finish()

    def _report(self, n: int) -> None:
        with self._lock:
            self._done += n
            now = time.perf_counter()
            if now - self._reported < REPORT_S:
                return
            self._reported = now
            done, rate = self._done, self._done / (now - self._begun)
        log(f"weights: {done / GIB:.1f} of {self.total / GIB:.1f} GiB, {rate / 1e9:.1f} GB/s")


@dataclass(slots=True, eq=False)
class _Buffer:
    memory: Bytes
    event: Event
    busy: bool = False

    def free(self) -> None:
        """Until the card has fetched what was in it."""
        if self.busy:
            self.event.wait()
        self.busy = False

    def sent(self) -> None:
        self.event.record()
        self.busy = True


def flat(array: npt.NDArray[Any]) -> Bytes:
    """The bytes of a C-contiguous array."""
    return array.reshape(-1).view(np.uint8)

"""Experts that lie in the mapped file only, on their way to the card: through two page-locked buffers, used in turn.

    reader = FileReader(driver, largest)
    reader.bring(queue, expert)              # one, for a swap
    FileRound(reader, size, stacks, homes, first, n).bring(queue, buffer, picked)

A card cannot read pages that the system may take away, so threads copy them to RAM that is locked, while the card
fetches what they have copied before. What is copied next is asked for ahead, so that the disk does not wait.

Units    bytes
Errors   none of its own; a file that has become shorter ends the process with a line (kernels/lost.py)
Memory   BUFFERS of at least STAGE bytes, page-locked
Cost     of what the system has kept, a copy of RAM; else the disk. The host waits for all but the last two buffers
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Protocol

import numpy as np

from strata.engine.device.driver import Array, Bytes, Driver, Event
from strata.engine.device.loading import flat
from strata.engine.experts.homes import Homes, Mask
from strata.engine.experts.placement import ExpertSize
from strata.kernels.formats import Weight

BUFFERS: Final = 2
STAGE: Final = 32 << 20
THREADS: Final = 8
PIECE: Final = 256 << 10
"""Bytes that a thread copies at once."""
Placed = tuple[int, Sequence[Bytes]]
"""Where an expert goes, and its matrices in the file."""


class Queue(Protocol):
    """What copies to the card in the order of the calls: a driver or an uploader."""

    def upload(self, target: Array, source: Bytes) -> None: ...
    def download(self, target: Bytes, source: Array) -> None: ...
    def event(self) -> Event: ...


class FileReader:
    """largest: bytes of the largest expert as it lies on the card · stage: of a buffer, if it holds one. sent: bytes of
    experts so far."""

    def __init__(self, driver: Driver, largest: int, stage: int = STAGE) -> None:
        from strata.kernels.cpu.memory import ask_ahead  # only where experts lie in the file

        room = max(stage, largest)
        self._buffers = [driver.pinned(room) for _ in range(BUFFERS)]
        self._busy: list[Event | None] = [None] * BUFFERS
        self._turn = 0
        self._threads = min(THREADS, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(self._threads, "file")
        self._ahead = ThreadPoolExecutor(1, "file-ahead")
        self._ask_ahead = ask_ahead
        self.sent = 0

    @property
    def room(self) -> int:
        return int(self._buffers[0].size)

    def bring(self, queue: Queue, target: Array, size: ExpertSize, experts: Sequence[Placed]) -> None:
        """Queue copies of experts to where they begin in `target`."""
        each = self.room // size.n_bytes
        parts = [experts[i : i + each] for i in range(0, len(experts), each)]
        for part, following in zip(parts, [*parts[1:], []], strict=True):
            if following:
                self._ask(following)
            self._send(queue, target, size, part)
        self.sent += len(experts) * size.n_bytes

    def ask(self, experts: Sequence[Placed], size: ExpertSize) -> None:
        """Have the system read the first of these in the background, as many as a buffer holds."""
        most = self.room // size.n_bytes
        self._ask(experts[:most])

    def _ask(self, experts: Sequence[Placed]) -> None:
        for _, matrices in experts:
            for w in matrices:
                self._ahead.submit(self._ask_ahead, w.ctypes.data, w.size)

    def _send(self, queue: Queue, target: Array, size: ExpertSize, experts: Sequence[Placed]) -> None:
        """As many as a buffer holds."""
        turn, self._turn = self._turn, (self._turn + 1) % BUFFERS
        buffer, busy = self._buffers[turn], self._busy[turn]
        if busy is not None:
            busy.wait()
        copies = []
        for i, (_, matrices) in enumerate(experts):
            for w, begin in zip(matrices, size.begins, strict=True):
                at = i * size.n_bytes + begin
                copies += [(buffer[at + k : at + k + PIECE], w[k : k + PIECE]) for k in range(0, w.size, PIECE)]
        shares = [copies[i :: self._threads] for i in range(min(self._threads, len(copies)))]
        list(self._pool.map(_copy, shares))
        for i, (begin, _) in enumerate(experts):
            queue.upload(target[begin : begin + size.n_bytes], buffer[i * size.n_bytes : (i + 1) * size.n_bytes])
        sent = self._busy[turn] = queue.event()
        sent.record()


class FileRound:
    """The experts of a layer that have one of n places from the first one on, as they lie in a buffer of a ring."""

    def __init__(self, reader: FileReader, stacks: Sequence[Weight], homes: Homes, first: int, n: int) -> None:
        self._reader = reader
        self._stacks = stacks
        self._homes = homes
        self._first = first
        self._n = n

    def experts(self, picked: Mask | None = None) -> list[Placed]:
        """Those that are there now, or that of them which were picked, (experts,)."""
        n_bytes = self._homes.size.n_bytes
        return [
            ((place - self._first) * n_bytes, matrices(self._stacks, expert))
            for place, expert in self._homes.within(self._first, self._n)
            if picked is None or picked[expert]
        ]

    def bring(self, queue: Queue, buffer: Array, experts: Sequence[Placed]) -> None:
        self._reader.bring(queue, buffer, self._homes.size, experts)

    def ask(self) -> None:
        self._reader.ask(self.experts(), self._homes.size)


def matrices(stacks: Sequence[Weight], expert: int) -> list[Bytes]:
    """Gate, up and down of an expert in the file."""
    return [flat(w.data[expert]) for w in stacks]


def _copy(copies: Sequence[tuple[Bytes, Bytes]]) -> None:
    for target, source in copies:
        np.copyto(target[: source.size], source)

"""Batches for training, made by processes of their own, in the order of their index.

Aligned   conversations are moved apart so that each begins at a multiple of the indexer's block; a row grows by SLACK
          tokens, and a conversation that has no room even then is left out
Order     batch i comes from worker i mod n: the same batches in the same order for any number of workers
Errors    FeedFailed with the worker's own words, or when one died
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkContext
from types import TracebackType
from typing import Any

import numpy as np

from strata.bench.demo_pack.data.stream import Batch

SLACK = 64
AHEAD = 3
"""Batches that a worker makes before they are asked for."""
PATIENCE_S = 120.0

Source = Callable[[int], Batch]


class FeedFailed(Exception):
    """No more batches can come."""


def aligned(batch: Batch, block: int, end: int) -> Batch:
    """The batch with rows SLACK tokens longer and every conversation at a multiple of `block`; padding holds `end`."""
    rows, context = batch.ids.shape
    shape = (rows, context + SLACK)
    out = Batch(
        np.full(shape, end, np.int32),
        np.zeros(shape, bool),
        np.full(shape, -1, np.int32),
        np.full(shape, 255, np.uint8),
    )
    for row in range(rows):
        segment = batch.segment[row]
        edges = np.flatnonzero(np.diff(segment)) + 1
        starts, stops = np.concatenate([[0], edges]), np.concatenate([edges, [context]])
        at = 0
        for start, stop in zip(starts, stops, strict=True):
            if segment[start] < 0 or at + stop - start > shape[1]:
                continue
            for new, old in zip(out, batch, strict=True):
                new[row, at : at + stop - start] = old[row, start:stop]
            # what fills up to the next block reads as the conversation's own rest: nobody looks back at it
            after = -(-(at + stop - start) // block) * block
            out.segment[row, at + stop - start : after] = segment[start]
            at = int(after)
    return out


class Feed:
    """Iterator over aligned batches source(start), source(start + 1), ...; use as a context manager.

    n_workers 0: in this process. Workers are forked, so make a feed before anything touches a card.
    """

    def __init__(self, source: Source, block: int, end: int, start: int = 0, n_workers: int = 0) -> None:
        self.index = start
        self._make = lambda index: aligned(source(index), block, end)
        context: ForkContext = multiprocessing.get_context("fork")
        self._queues: list[Any] = [context.Queue(AHEAD) for _ in range(n_workers)]
        self._workers = [
            context.Process(target=_work, args=(self._make, self._queues[i], self._first(i), n_workers), daemon=True)
            for i in range(n_workers)
        ]
        for worker in self._workers:
            worker.start()

    def _first(self, worker: int) -> int:
        n = len(self._queues)
        return self.index + (worker - self.index) % n

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        index, self.index = self.index, self.index + 1
        if not self._workers:
            return self._make(index)
        which = index % len(self._workers)
        try:
            got = self._queues[which].get(timeout=PATIENCE_S)
        except queue.Empty:
            alive = self._workers[which].is_alive()
            reason = f"gave nothing for {PATIENCE_S:.0f} s" if alive else f"ended with {self._workers[which].exitcode}"
            raise FeedFailed(f"worker {which}, asked for batch {index}, {reason}") from None
        if isinstance(got, str):
            raise FeedFailed(f"worker {which}: {got}")
        return Batch(*got)

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for worker in self._workers:
            worker.terminate()
        for worker in self._workers:
            worker.join()


def _work(make: Source, out: Any, start: int, step: int) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    index = start
    while True:
        try:
            batch = make(index)
        except Exception:  # noqa: BLE001  whatever it is, the trainer must hear of it
            out.put(traceback.format_exc())
            return
        out.put(tuple(batch))
        index += step

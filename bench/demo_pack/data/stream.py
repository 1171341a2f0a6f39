"""Batches of packed conversations for training: infinite, seeded, any batch on its own.

    stream = MixedStream(tokens=65_536, seed=1)             # or Stream(context=1024, rows=64, seed=1)
    for index in range(worker, n_batches, n_workers):       # each process makes its own batches
        batch = stream.batch(index)                          # a pure function of the stream's arguments and the index

Rows      conversations one after the other, each whole, each followed by <|endoftext|>; the rest of a row is padding
          (<|endoftext|>). A conversation begins at position 0 of nothing: `segment` says where, for whoever resets
          states and masks attention there
Lengths   conversations of 30 to 1,000 tokens at a context of 1,024; at 4,608 most have 500 to 4,500
Resuming  needs the index of the next batch and nothing else
Cost      one process makes 450,000 tokens/s at a context of 512 or 1,024, 290,000 at 2,048 or 4,608 (one core of an AMD
          EPYC, 2026-11-29)
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from random import Random
from typing import NamedTuple

import numpy as np

from strata.bench.demo_pack.data.mixture import TASKS, draw
from strata.bench.demo_pack.data.sample import Split
from strata.bench.demo_pack.rendering import Renderer

NO_TASK = 255
FAILURES = 12
"""A batch is full when so many conversations in a row have found no room."""
SHORT_CONTEXT = 1024
LENGTHS = ((512, 0.15), (1024, 0.5), (2048, 0.15), (4608, 0.2))
"""Contexts of a mixed stream, and the share of the batches that each has."""


class Batch(NamedTuple):
    """Arrays [rows, context].

    ids      int32: tokens
    mask     bool: this token is to be predicted (from those before it in its segment)
    segment  int32: the number of the conversation in its row, from 0; -1 is padding
    task     uint8: index into TASKS; NO_TASK is padding
    """

    ids: np.ndarray
    mask: np.ndarray
    segment: np.ndarray
    task: np.ndarray


@cache
def _renderer() -> Renderer:
    return Renderer()


class Stream:
    """Batches of `rows` rows of `context` tokens."""

    def __init__(self, context: int, rows: int, seed: int, *, split: Split = "train") -> None:
        if context < 256 or rows < 1:
            raise ValueError(f"wants a context of 256 tokens or more and a row or more, got {context} and {rows}")
        self.context, self.rows, self.seed, self.split = context, rows, seed, split

    def batch(self, index: int) -> Batch:
        rng = Random(f"{self.seed}/{self.split}/{self.context}/{self.rows}/{index}")
        renderer = _renderer()
        end = renderer.vocabulary.special["<|endoftext|>"]
        shape = (self.rows, self.context)
        batch = Batch(
            np.full(shape, end, np.int32), np.zeros(shape, bool), np.full(shape, -1, np.int32),
            np.full(shape, NO_TASK, np.uint8),
        )  # fmt: skip
        used, counts = [0] * self.rows, [0] * self.rows
        failures = 0
        while failures < FAILURES:
            sample = draw(rng, self.split, self._size(rng))
            ids, mask = renderer.render(sample)
            n = len(ids) + 1
            row = next((r for r in range(self.rows) if used[r] + n <= self.context), None)
            if row is None:
                failures += 1
                continue
            failures = 0
            at = used[row]
            batch.ids[row, at : at + n - 1] = ids
            batch.mask[row, at : at + n - 1] = mask
            batch.segment[row, at : at + n] = counts[row]
            batch.task[row, at : at + n] = TASKS.index(sample.task)
            used[row] += n
            counts[row] += 1
        order = list(range(self.rows))
        rng.shuffle(order)  # the first rows are filled first: no row of a batch is special
        return Batch(*(array[order] for array in batch))

    def batches(self, start: int = 0, step: int = 1) -> Iterator[Batch]:
        """Batch start, start + step, ..., without end."""
        index = start
        while True:
            yield self.batch(index)
            index += step

    def _size(self, rng: Random) -> int:
        """How long a conversation is wished, as far as its task has a length: log-uniform."""
        low = 100 if self.context <= SHORT_CONTEXT else 500
        high = self.context * 0.92
        return int(low * (high / low) ** rng.random())


class MixedStream:
    """Batches of `tokens` tokens whose context changes from batch to batch, by LENGTHS."""

    def __init__(
        self,
        tokens: int,
        seed: int,
        *,
        lengths: tuple[tuple[int, float], ...] = LENGTHS,
        split: Split = "train",
    ) -> None:
        self.seed = seed
        self._weights = [share for _, share in lengths]
        self._streams = [Stream(n, max(1, tokens // n), seed, split=split) for n, _ in lengths]

    def batch(self, index: int) -> Batch:
        stream = Random(f"{self.seed}/length/{index}").choices(self._streams, self._weights)[0]
        return stream.batch(index)

    def batches(self, start: int = 0, step: int = 1) -> Iterator[Batch]:
        """Batch start, start + step, ..., without end."""
        index = start
        while True:
            yield self.batch(index)
            index += step

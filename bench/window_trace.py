"""Records of a traced window (trace.cuh) put in order: which launch each block belongs to, and when it was where.

    times = Clocks.of(samples).nanoseconds(records)     # one time for all multiprocessors, to some microseconds
    launches = launch_times(records, times, kernels, blocks)
    launches = aligned(launches, starts)                # to a tenth of one
    rows = summary(launches, labels, starts, names)

A *step* goes from the first block of a launch that need not wait any more to the first of the next launch: steps add up
to the window, and what a launch does before its step costs nothing.

Units    ns in arrays, us in rows
Errors   ValueError where a kernel left more or fewer records than its launches have blocks
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]
F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

WORDS: Final = 12
"""Of a record; trace.cuh."""
BEGUN: Final = 0
READY: Final = 1
SM: Final = WORDS - 1
"""Marks that every record has: the block began to wait for the kernel before; it need not wait any more."""


@dataclass(frozen=True, slots=True)
class Clocks:
    """Of each multiprocessor: ns = clock / rate + offset."""

    rate: float
    offset: F64

    @classmethod
    def of(cls, samples: U64) -> Clocks:
        """samples (multiprocessors, n, 2): clock, ns when it changed. Multiprocessors without any are zeros."""
        clock, ns = samples[..., 0].astype(np.float64), samples[..., 1].astype(np.float64)
        seen = ns[:, 0] > 0
        rates = (clock[seen, -1] - clock[seen, 0]) / (ns[seen, -1] - ns[seen, 0])
        rate = float(np.median(rates))
        return cls(rate, np.median(ns - clock / rate, axis=1))

    def nanoseconds(self, records: U64) -> F64:
        """(n, WORDS): times of the marks, 0 where a block has none; last its multiprocessor."""
        sm = (records[:, 0] >> np.uint64(32) & np.uint64(0xFFFF)).astype(np.int64)
        clock = records[:, 1:].astype(np.float64)
        times = np.where(clock > 0, clock / self.rate + self.offset[sm][:, None], 0.0)
        return np.concatenate([times, sm[:, None].astype(np.float64)], axis=1)


@dataclass(frozen=True, slots=True)
class Row:
    """Launches of one label. us: of a step; begun: before the step, the first and the last block to begin to wait;
    marks: name, then when the median and the last block were there, after the step's begin."""

    label: str
    launches: int
    us: float
    begun: tuple[float, float]
    marks: list[tuple[str, float, float]]


def set_clocks(records: U64, times: F64, kernels: Sequence[int], blocks: Sequence[int]) -> F64:
    """The times with those of each multiprocessor moved, by kernels of which each has a block of every launch: all blocks
    learn of the end of the kernel before at once, but those that come later."""
    of = (records[:, 0] >> np.uint64(48)).astype(np.int64)
    sms = times[:, SM].astype(np.int64)
    n = int(sms.max()) + 1
    late: list[F64] = []
    for kernel in sorted(set(kernels)):
        count = sum(1 for k in kernels if k == kernel)
        own = of == kernel
        if any(b != n for b, k in zip(blocks, kernels, strict=True) if k == kernel):
            continue
        if (np.bincount(sms[own], minlength=n) != count).any():
            continue
        ready = np.array([np.sort(times[own & (sms == sm), READY]) for sm in range(n)])
        late.append(ready - np.median(ready, axis=0))
    moves = np.median(np.concatenate(late, axis=1), axis=1)[sms]
    return np.concatenate([np.where(times[:, :SM] > 0, times[:, :SM] - moves[:, None], 0.0), times[:, SM:]], axis=1)


def launch_times(records: U64, times: F64, kernels: Sequence[int], blocks: Sequence[int]) -> list[F64]:
    """Of each launch the times of its blocks. kernels: the number of each launch's kernel; blocks: how many it has."""
    of = (records[:, 0] >> np.uint64(48)).astype(np.int64)
    found: list[F64] = [times[:0]] * len(kernels)
    for kernel in sorted(set(kernels)):
        own = times[of == kernel]
        own = own[np.argsort(own[:, READY], kind="stable")]
        at = [i for i, k in enumerate(kernels) if k == kernel]
        wanted = sum(blocks[i] for i in at)
        if len(own) != wanted:
            raise ValueError(f"kernel {kernel}: {len(own)} records of {wanted} blocks")
        ends = np.cumsum([blocks[i] for i in at])
        for i, end in zip(at, ends, strict=True):
            found[i] = own[end - blocks[i] : end]
    return found


def aligned(launches: Sequence[F64], starts: Sequence[int]) -> list[F64]:
    """The same with times of each multiprocessor moved, so that the middle of its waits end when those of others do: all
    blocks that wait for a kernel learn of its end at once. Launches that wait at their end have no part in it."""
    n = 1 + int(max(times[:, SM].max() for times in launches if len(times)))
    late: list[F64] = []
    for times, start in zip(launches, starts, strict=True):
        if start != READY or len(times) < n // 2:
            continue
        first = np.full(n, np.inf)
        np.minimum.at(first, times[:, SM].astype(np.int64), times[:, READY])
        late.append(np.where(np.isfinite(first), first - np.median(first[np.isfinite(first)]), np.nan))
    moves = np.nanmedian(np.array(late), axis=0)
    found = []
    for times in launches:
        marks, sm = times[:, :SM], times[:, SM].astype(np.int64)
        found.append(np.concatenate([np.where(marks > 0, marks - moves[sm][:, None], 0.0), times[:, SM:]], axis=1))
    return found


def begins(launches: Sequence[F64], starts: Sequence[int]) -> F64:
    """When the step of each launch begins: its middle block need not wait any more, or where blocks take turns on the
    multiprocessors the middle one of the first half. starts: the mark from which its kernel goes on."""
    return np.array([np.quantile(times[:, start], 0.25) for times, start in zip(launches, starts, strict=True)])


def summary(
    launches: Sequence[F64], labels: Sequence[str], starts: Sequence[int], names: dict[str, Sequence[str]]
) -> list[Row]:
    """A row for each label, in the order of the first; the last launch has no step. names: of the marks behind READY,
    by the kernel's name, with which its labels begin."""
    begin = begins(launches, starts)
    step = np.diff(begin)
    rows = []
    for label in dict.fromkeys(labels[:-1]):
        at = [i for i, name in enumerate(labels[:-1]) if name == label]
        marks: list[tuple[str, float, float]] = []
        for m, name in enumerate(("need not wait", *names.get(label.split(" ")[0], ())), READY):
            found = [(launches[i][:, m][launches[i][:, m] > 0] - begin[i]) / 1e3 for i in at]
            found = [f for f in found if len(f)]
            if found:
                marks.append((name, _mean(np.median(f) for f in found), _mean(f.max() for f in found)))
        waits = [(launches[i][:, BEGUN] - begin[i]) / 1e3 for i in at]
        rows.append(
            Row(
                label, len(at), float(step[at].mean()) / 1e3,
                (_mean(w.min() for w in waits), _mean(w.max() for w in waits)), marks,
            )
        )  # fmt: skip
    return rows


def _mean(values: Any) -> float:
    return float(np.mean(list(values)))

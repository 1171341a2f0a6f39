"""Records of a traced window (trace.cuh) put in order: which launch each block belongs to, and when it was where.

    times = Clocks.of(samples).nanoseconds(records)      # one time for all multiprocessors, to some microseconds
    times = set_clocks(records, times, kernels, blocks)  # to a tenth of one
    launches = launch_times(records, times, kernels, blocks)
    rows = summary(launches, labels, names)

A *step* goes from the last mark of any block of a launch to the last one of the next launch, so steps add up to the
window. Times of marks count from the begin of the launch's step: what is below zero was done beside the launch before.

Units    ns in arrays, us in rows
Errors   ValueError where a kernel left more or fewer records than its launches have blocks, or no kernel tells how the
         clocks stand to each other
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]
F64 = npt.NDArray[np.float64]

WORDS: Final = 12
"""Of a record; trace.cuh."""
READY: Final = 1
"""The mark at which a block need not wait any more for the kernel before. Mark 0: it began to."""
ENTRY: Final = WORDS - 2
"""The mark of a block's first line, which some kernels have."""
SM: Final = WORDS - 1
"""Behind the marks: the multiprocessor."""
FIRST_NAMES: Final = ("waits", "need not wait")


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
    """Launches of one label. us: of a step; marks: name, then when the middle and the last block were there, in the
    order of the middle ones."""

    label: str
    launches: int
    us: float
    marks: list[tuple[str, float, float]]


def _kernels(records: U64) -> npt.NDArray[np.int64]:
    return (records[:, 0] >> np.uint64(48)).astype(np.int64)


def set_clocks(records: U64, times: F64, kernels: Sequence[int], blocks: Sequence[int]) -> F64:
    """The times with those of each multiprocessor moved, by kernels of which each has a block of every launch: of those
    that wait already all learn of the end of the kernel before at once. Arguments: `launch_times`."""
    of, sms = _kernels(records), times[:, SM].astype(np.int64)
    n = int(sms.max()) + 1
    late: list[F64] = []
    for kernel in sorted(set(kernels)):
        own, sizes = of == kernel, [b for b, k in zip(blocks, kernels, strict=True) if k == kernel]
        if set(sizes) != {n} or (np.bincount(sms[own], minlength=n) != len(sizes)).any():
            continue
        ready = np.array([np.sort(times[own & (sms == sm), READY]) for sm in range(n)])
        late.append(ready - np.median(ready, axis=0))
    if not late:
        raise ValueError(f"no kernel of the window has a block on each of the {n} multiprocessors")
    moves = np.median(np.concatenate(late, axis=1), axis=1)[sms][:, None]
    return np.concatenate([np.where(times[:, :SM] > 0, times[:, :SM] - moves, 0.0), times[:, SM:]], axis=1)


def launch_times(records: U64, times: F64, kernels: Sequence[int], blocks: Sequence[int]) -> list[F64]:
    """Of each launch the times of its blocks. kernels: the number of each launch's kernel; blocks: how many it has."""
    of = _kernels(records)
    found: list[F64] = [times[:0]] * len(kernels)
    for kernel in sorted(set(kernels)):
        own = times[of == kernel]
        own = own[np.argsort(own[:, READY], kind="stable")]
        at = [i for i, k in enumerate(kernels) if k == kernel]
        ends = np.cumsum([blocks[i] for i in at])
        if len(own) != ends[-1]:
            raise ValueError(f"kernel {kernel}: {len(own)} records of {ends[-1]} blocks")
        for i, end in zip(at, ends, strict=True):
            found[i] = own[end - blocks[i] : end]
    return found


def summary(launches: Sequence[F64], labels: Sequence[str], names: Mapping[str, Sequence[str]]) -> list[Row]:
    """A row for each label, in the order of the first; the first launch has no step. names: of the marks behind READY,
    by the kernel's name, with which its labels begin."""
    ends = np.array([times[:, :ENTRY].max() for times in launches])
    rows = []
    for label in dict.fromkeys(labels[1:]):
        at = [i for i, name in enumerate(labels) if name == label and i]
        named = [*enumerate((*FIRST_NAMES, *names.get(label.split(" ")[0], ()))), (ENTRY, "comes")]
        marks = []
        for mark, name in named:
            own = [launches[i][launches[i][:, mark] > 0, mark] - ends[i - 1] for i in at]
            own = [times / 1e3 for times in own if len(times)]
            if own:
                marks.append((name, _mean(np.median(t) for t in own), _mean(t.max() for t in own)))
        marks.sort(key=lambda mark: mark[1])
        rows.append(Row(label, len(at), _mean(ends[i] - ends[i - 1] for i in at) / 1e3, marks))
    return rows


def _mean(values: Iterable[Any]) -> float:
    return float(np.mean(list(values)))

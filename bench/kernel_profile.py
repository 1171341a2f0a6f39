"""Spans of a card's work -> a table whose rows add up: each kernel's own time, the gaps between them, the whole.

    run = taken(labelled, spans)             # one pass with launches in turn
    records = table("window of 1", runs, limits, overlapping)

A pass is recorded several times. The rows are those of one run, the one whose whole is the median, so that they add up
to it; least and largest are those of all runs.

Errors   Incomplete: a launch was not recorded, or more than were launched
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec

from strata.bench.report import Limit, Record

GAPS: Final = "gaps between kernels"
IN_TURN: Final = "all, launches in turn"
OVERLAPPING: Final = "all, launches that overlap, without the recorder"
ROUNDING_US: Final = 0.05
"""By how much spans may overlap that follow each other: what is recorded are whole nanoseconds, kept as floats."""


class Incomplete(RuntimeError):
    """What was recorded is not what was launched."""


class Span(NamedTuple):
    """What the card did from `begin` to `end`, in microseconds."""

    name: str
    begin: float
    end: float


def merged(spans: Sequence[Span]) -> list[tuple[float, float]]:
    """When at least one of them ran, in order."""
    out: list[tuple[float, float]] = []
    for span in sorted(spans, key=lambda span: span.begin):
        if out and span.begin <= out[-1][1]:
            out[-1] = out[-1][0], max(out[-1][1], span.end)
        else:
            out.append((span.begin, span.end))
    return out


@dataclass(frozen=True, slots=True)
class Taken:
    """Of one pass: microseconds and launches by label, the time from the first begin to the last end, and how long more
    than one of them ran at a time."""

    us: Mapping[str, float]
    launches: Mapping[str, int]
    whole: float
    overlap: float

    @property
    def gaps(self) -> float:
        return self.whole - sum(self.us.values())


def taken(labelled: Sequence[tuple[str, str]], spans: Sequence[Span]) -> Taken:
    """labelled: kernel and label of every launch, in order; what else ran (copies, fills) keeps its own name."""
    waiting: dict[str, deque[str]] = defaultdict(deque)
    for kernel, label in labelled:
        waiting[kernel].append(label)
    us: dict[str, float] = defaultdict(float)
    launches: dict[str, int] = defaultdict(int)
    for span in sorted(spans, key=lambda span: span.begin):
        labels = waiting.get(span.name)
        if labels is not None and not labels:
            raise Incomplete(f"{span.name} ran more often than it was launched")
        label = span.name if labels is None else labels.popleft()
        us[label] += span.end - span.begin
        launches[label] += 1
    missing = {kernel: len(labels) for kernel, labels in waiting.items() if labels}
    if missing or not spans:
        raise Incomplete(f"launches that were not recorded: {missing or 'all'}")
    whole = max(s.end for s in spans) - min(s.begin for s in spans)
    busy = sum(end - begin for begin, end in merged(spans))
    return Taken(us, launches, whole, sum(us.values()) - busy)


def middle(runs: Sequence[Taken]) -> Taken:
    """The run whose whole is the median; of an even number the lower."""
    return sorted(runs, key=lambda run: run.whole)[(len(runs) - 1) // 2]


def table(work: str, runs: Sequence[Taken], limits: Mapping[str, Limit], overlapping: Sequence[float]) -> list[Record]:
    """The longest kernel first; behind them gaps, the whole, and the whole with overlapping launches (us)."""
    chosen = middle(runs)
    out = []
    for label, us in sorted(chosen.us.items(), key=lambda item: -item[1]):
        limit = limits.get(label, Limit(launches=0))
        own = msgspec.structs.replace(limit, launches=chosen.launches[label])
        out.append(_record(f"{work}: {label}", us, [run.us.get(label, 0.0) for run in runs], own))
    out.append(_record(f"{work}: {GAPS}", chosen.gaps, [run.gaps for run in runs], Limit(launches=0)))
    whole = summed([r.limit for r in out if r.limit])
    out.append(_record(f"{work}: {IN_TURN}", chosen.whole, [run.whole for run in runs], whole))
    together = Record.of(f"{work}: {OVERLAPPING}", "us", overlapping)
    return [*out, msgspec.structs.replace(together, limit=whole)]


def summed(limits: Sequence[Limit]) -> Limit:
    """Of all kernels; where a limit is not known it counts as none."""
    return Limit(
        launches=sum(limit.launches for limit in limits),
        bytes=sum(limit.bytes for limit in limits),
        macs=sum(limit.macs for limit in limits),
        us=sum(limit.us or 0.0 for limit in limits),
    )


def _record(work: str, us: float, of_all: Sequence[float], limit: Limit) -> Record:
    return Record(work=work, unit="us", median=us, min=min(of_all), max=max(of_all), runs=len(of_all), limit=limit)


def in_turn(runs: Sequence[Taken]) -> str:
    """What is wrong where launches in turn overlap; "" where they do not."""
    most = max(run.overlap for run in runs)
    allowed = max(ROUNDING_US * sum(run.launches.values()) for run in runs)
    return "" if most <= allowed else f"{most:.1f} us ran beside another kernel"


def grouped(labels: Sequence[str]) -> dict[str, list[int]]:
    """Which launches have each label."""
    order = sorted(range(len(labels)), key=lambda i: (labels[i], i))
    return {label: list(group) for label, group in itertools.groupby(order, key=lambda i: labels[i])}

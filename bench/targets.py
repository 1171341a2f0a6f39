"""What must be reached, beside what was measured for it: the table of targets of docs/performance.md.

    lines(reports)       # a row a target, from the newest report that has a figure with its tag

Errors   none: a target without a figure says so
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Final, NamedTuple

from strata.bench.report import Record, Report


class Target(NamedTuple):
    """name: the tag of its figures · work: in words · figure: the work of its record, a pattern · must: at least, or
    where `most` at most. ratio: of our figure to the one beside it ("peer")."""

    name: str
    work: str
    figure: str
    must: float
    most: bool = False
    ratio: bool = False


TARGETS: Final = (
    Target("P1", "decode, one stream", "tg 128", 350),
    Target("P2", "decode, one stream at 32,000", "tg 128 @ 32000", 320),
    Target("P3", "decode, eight slots together", "8 slots, greedy, all decoding", 1000),
    Target("P4", "prompt of 8,192", "pp 8192", 10_000),
    Target("P5", "prompt of 2,048", "pp 2048", 7000),
    Target("P6", "prompt of 32,768", "pp 32768", 8000),
    Target("P6", "prompt of 2,048 behind 131,072", "pp 2048 @ 131072", 5000),
    Target("P7", "no expert in VRAM: decode", "*, corrected from *", 45),
    Target("P7", "no expert in VRAM: prompt of 8,192", "pp 8192", 3000),
    Target("P8", "a quarter of the experts in VRAM, uniform routing: decode", "tg *", 60),
    Target("P9", "the same, skewed routing: decode", "tg *", 120),
    Target("P10", "host work for a window", "tg *: host work", 150, most=True),
    Target("P11", "8,151 MiB, prompt of 29,854: with the head alias against without", "pp 29854", 1.8, ratio=True),
    Target("P12", "one stream through HTTP against the engine alone", "http: 1 *", 0.95),
    Target("P12", "eight streams through HTTP against the engine alone", "http: 8 *", 0.95),
    Target("P13", "start to READY", "start to READY", 60, most=True),
    Target("P14", "longest stop of a stream while 64K are read", "longest stop *", 500, most=True),
    Target("P15", "question behind a read of 45K: first token, of its time", "* share of *", 1 / 3, most=True),
    Target("P16", "next turn, 30K held: first token", "next turn alone*", 80, most=True),
    Target("P17", "the machine without a card: decode against llama.cpp", "tg 64", 0.5, ratio=True),
    Target("P17", "the machine without a card: prompt against llama.cpp", "pp 512", 0.3, ratio=True),
)


def lines(reports: Sequence[tuple[str, Report]]) -> list[str]:
    """A table; reports: by name of their file, newest first."""
    top = [
        "| target | work | wanted | median | min | max | unit | runs | of what is wanted | report |",
        "|" + " --- |" * 10,
    ]
    return [*top, *(_row(target, *_found(target, reports)) for target in TARGETS)]


def _found(target: Target, reports: Sequence[tuple[str, Report]]) -> tuple[str, Record | None]:
    for name, report in reports:
        for record in report.records:
            if record.target == target.name and fnmatchcase(record.work, target.figure):
                return name, record
    return "", None


def _row(target: Target, name: str, record: Record | None) -> str:
    wanted = f"{'at most' if target.most else 'at least'} {_short(target.must)}"
    first = f"| {target.name} | {target.work} | {wanted} |"
    if record is None:
        return f"{first} not measured |" + " |" * 6
    by = record.peer["median"] if target.ratio and record.peer else 1.0
    figures = [value / by for value in (record.median, record.min, record.max)]
    share = target.must / figures[0] if target.most else figures[0] / target.must
    reached = "reached" if share >= 1 else f"{math.floor(1000 * share) / 10:g} %"  # never 100
    unit = f"x {record.peer['name']}" if target.ratio and record.peer else record.unit
    return f"{first} {' | '.join(map(_short, figures))} | {unit} | {record.runs} | {reached} | `{name}` |"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"

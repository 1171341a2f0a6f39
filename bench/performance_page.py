"""`strata-bench page`: write docs/performance.md and docs/quality.md from the figures in bench/results.

The text around the figures is in docs/performance.in.md and docs/quality.in.md; the line `<!-- figures -->` there is
replaced by one table per results file, newest first: those of `strata-bench quality` on their page, all others on the
other; `<!-- targets -->` by what must be reached beside what was. No figure is typed by hand.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.console import Console

from strata.bench import quality, targets
from strata.bench.report import Limit, Record, Report

MARK = "<!-- figures -->"
AIMS: Final = "<!-- targets -->"
QUALITY: Final = f"strata-bench {quality.TOOL}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--results", type=Path, default=Path("bench/results"), help="folder of JSON files (bench/results)"
    )
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="folder of the pages and their texts (docs)")


def run(args: argparse.Namespace, console: Console) -> int:
    for name in PAGES:
        source, target = args.docs / f"{name}.in.md", args.docs / f"{name}.md"
        text = source.read_text()
        if MARK not in text:
            console.print(f"{source}: has no line {MARK}")
            return 2
        target.write_text(page(text, args.results, name))
        console.print(f"written: {target}")
    return 0


def page(text: str, results: Path, name: str = "performance") -> str:
    """The whole page. Raises msgspec.DecodeError for a results file that is not one."""
    reports = [
        (path.name, msgspec.json.decode(path.read_bytes(), type=Report)) for path in sorted(results.glob("*.json"))
    ]
    reports = [item for item in reports if (item[1].tool == QUALITY) is (name == "quality")]
    reports.sort(key=lambda item: item[1].date, reverse=True)
    text = text.replace(AIMS, "\n".join(targets.lines(reports)))
    return text.replace(MARK, "\n\n".join("\n".join([*head(*item), *PAGES[name](item[1])]) for item in reports))


def head(name: str, report: Report) -> list[str]:
    """What was measured where."""
    m = report.machine
    where = f"{m['cpu']}, {m['cores']} cores, {', '.join(m['vector'])}" + (f", {m['gpu']}" if "gpu" in m else "")
    pack = f"; pack `{report.pack['name']}`, {report.pack['bytes'] / 1e6:,.1f} MB" if report.pack else ""
    flags = ", ".join(f"{key} {value}" for key, value in report.flags.items() if value not in (None, [], ""))
    lines = [f"### {report.tool}, {report.date[:10]}", "", f"{where}{pack}. {flags}. `bench/results/{name}`", ""]
    if report.checks:
        lines += [f"{sum(check.ok for check in report.checks)} of {len(report.checks)} checks hold.", ""]
    return lines


def table(report: Report) -> list[str]:
    """A row a figure; behind them what is taken apart by kernel, a table each."""
    plain = [r for r in report.records if r.limit is None]
    top = ["| target | work | median | min | max | unit | runs | peer | ratio |", "|" + " --- |" * 9]
    lines = [*top, *(row(r) for r in plain)] if plain else []
    whole = [r for r in report.records if r.limit is not None]
    for work, records in itertools.groupby(whole, lambda r: r.work.partition(": ")[0]):
        lines += ["", *profile(work, list(records))]
    return lines


def row(r: Record) -> str:
    peer = _peer(r.peer) if r.peer else ""
    ratio = f"{r.median / r.peer['median']:.2f}" if r.peer else ""
    figures = " | ".join(f"{value:.2f}" for value in (r.median, r.min, r.max))
    return f"| {r.target} | {r.work} | {figures} | {r.unit} | {r.runs} | {peer} | {ratio} |"


def _peer(peer: dict[str, Any]) -> str:
    """Its figure of the same run, or where it is from."""
    how = f"{peer['min']:.1f}..{peer['max']:.1f}" if "min" in peer else peer.get("source", "")
    return f"{peer['name']} {peer['median']:.1f}" + (f" ({how})" if how else "")


def profile(work: str, records: list[Record]) -> list[str]:
    """Kernels with the least time that they could take."""
    lines = [f"| {work} | launches | us | MB | GMAC | limit, us | % of its limit |", "| --- |" + " ---: |" * 6]
    for r in records:
        limit = r.limit or Limit(launches=0)
        needs = [_short(value) if value else "" for value in (limit.bytes / 1e6, limit.macs / 1e9, limit.us)]
        share = f"{100 * limit.us / r.median:.0f}" if limit.us and r.median else ""
        name, launches = r.work.partition(": ")[2], limit.launches or ""
        lines.append(f"| {name} | {launches} | {_short(r.median)} | {' | '.join(needs)} | {share} |")
    return lines


def _short(value: float) -> str:
    return f"{value:,.1f}" if abs(value) >= 1 else f"{value:.3f}"


PAGES: Final[dict[str, Callable[[Report], list[str]]]] = {
    "performance": table,
    "quality": lambda report: quality.matrix(report.records),
}

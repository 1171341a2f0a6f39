"""`strata-bench page`: write docs/performance.md from the figures in bench/results.

The text around the figures is in docs/performance.in.md; the line `<!-- figures -->` there is replaced by one table
per results file, newest first. No figure is typed by hand.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec
from rich.console import Console

from strata.bench.report import Record, Report

MARK = "<!-- figures -->"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--results", type=Path, default=Path("bench/results"), help="folder of JSON files (bench/results)"
    )
    parser.add_argument("--text", type=Path, default=Path("docs/performance.in.md"), help="the text around the figures")
    parser.add_argument("--out", type=Path, default=Path("docs/performance.md"), help="the page (docs/performance.md)")


def run(args: argparse.Namespace, console: Console) -> int:
    text = args.text.read_text()
    if MARK not in text:
        console.print(f"{args.text}: has no line {MARK}")
        return 2
    args.out.write_text(page(text, args.results))
    console.print(f"written: {args.out}")
    return 0


def page(text: str, results: Path) -> str:
    """The whole page. Raises msgspec.DecodeError for a results file that is not one."""
    reports = [
        (path.name, msgspec.json.decode(path.read_bytes(), type=Report)) for path in sorted(results.glob("*.json"))
    ]
    reports.sort(key=lambda item: item[1].date, reverse=True)
    return text.replace(MARK, "\n\n".join(section(name, report) for name, report in reports))


def section(name: str, report: Report) -> str:
    m = report.machine
    where = f"{m['cpu']}, {m['cores']} cores, {', '.join(m['vector'])}" + (f", {m['gpu']}" if "gpu" in m else "")
    pack = f"; pack `{report.pack['name']}`, {report.pack['bytes'] / 1e6:,.1f} MB" if report.pack else ""
    flags = ", ".join(f"{key} {value}" for key, value in report.flags.items() if value not in (None, [], ""))
    lines = [f"### {report.tool}, {report.date[:10]}", "", f"{where}{pack}. {flags}. `bench/results/{name}`", ""]
    if report.checks:
        lines += [f"{sum(check.ok for check in report.checks)} of {len(report.checks)} checks hold.", ""]
    lines += ["| target | work | median | min | max | unit | runs | peer | ratio |", "|" + " --- |" * 9]
    return "\n".join([*lines, *(row(r) for r in report.records)])


def row(r: Record) -> str:
    peer = f"{r.peer['name']} {r.peer['median']:.1f} ({r.peer['min']:.1f}..{r.peer['max']:.1f})" if r.peer else ""
    ratio = f"{r.median / r.peer['median']:.2f}" if r.peer else ""
    figures = " | ".join(f"{value:.2f}" for value in (r.median, r.min, r.max))
    return f"| {r.target} | {r.work} | {figures} | {r.unit} | {r.runs} | {peer} | {ratio} |"

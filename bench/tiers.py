"""`strata-bench tiers`: decode rate of a model by the share of its experts that lies in VRAM.

An engine is started for each share, and for each way of computing what VRAM lacks: engine options in one word,
`--way="--pcie-frac 1" --way="--pcie-frac auto"`. Each reads a few ids and generates greedily, once to warm up and then
`--runs` times; the same prompts for all. Where experts lie never changes a text, so the tokens of all starts are
compared with those of the first. What was measured so far is in the file of `--json` behind every start.

`--chart` draws the rates, with the figures of `--peer` as level lines. `--from FILE` draws what was measured before,
on a machine without a card; targets and peers may still be given:

    strata-bench tiers --from tiers.json --chart docs/tiers.png --peer "tg 128, 100%*=101.6" --peer-source spec \\
        --level "llama.cpp, spec, all experts on the host=15.2"      # of what no run was like
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console

from strata.bench import chart, marks
from strata.bench.engine import FIRST_PLAIN_ID, Case, command, random_ids
from strata.bench.engine_process import EngineProcess
from strata.bench.report import Check, Record, Report, finish, pack_facts
from strata.engine.pack import open_pack

SHARES = (1.0, 0.75, 0.5, 0.25, 0.1, 0.0)
WAYS = ("--pcie-frac 1", "--pcie-frac auto")
FIXED = ("--adapt-every", "0")
"""Experts stay where they are, unless a way says otherwise."""
RATE: Final = re.compile(r"tg (?P<n>\d+), (?P<share>[\d.]+)% in VRAM(?:, (?P<way>.+))?")
"""The name of a rate."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--pack", type=Path, help="the GGUF file (the first shard of a split pack)")
    what.add_argument("--from", type=Path, nargs="+", dest="before", metavar="FILE", help="measured before, one card")
    parser.add_argument("--exe", help="the engine program; default: the strata-engine of this installation")
    parser.add_argument("--device", default="cuda", help="passed to the engine (default: cuda)")
    parser.add_argument("--threads", type=int, help="passed to the engine; default: its own choice")
    parser.add_argument("--shares", type=float, nargs="+", default=list(SHARES), metavar="S", help="of the experts")
    both = " and ".join(WAYS)
    parser.add_argument("--way", action="append", metavar="OPTIONS", help=f"for what VRAM lacks; default: {both}")
    parser.add_argument("-p", "--prompt", type=int, default=32, metavar="N", help="ids of a prompt (32)")
    parser.add_argument("-n", "--generate", type=int, default=128, metavar="N", help="tokens to generate (128)")
    parser.add_argument("-r", "--runs", type=int, default=3, help="measured runs of each start (3)")
    marks.add_arguments(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    parser.add_argument("--chart", type=Path, metavar="FILE", help="draw them there: .png or .svg (extra `chart`)")
    parser.add_argument(
        "--level", type=marks.peer, nargs="*", default=[], metavar="NAME=FIGURE", help="a level line more of the chart"
    )
    parser.add_argument("--extra", nargs=argparse.REMAINDER, default=[], help="everything after it goes to the engine")


@dataclass(frozen=True, slots=True)
class Start:
    """An engine with so many experts in VRAM, and what was measured. cache: 0 = all of them."""

    share: float
    way: str
    cache: int

    @property
    def name(self) -> str:
        return f"{100 * self.share:g}% in VRAM" + (f", {self.way}" if self.cache else "")

    @property
    def options(self) -> list[str]:
        return [*FIXED, "--expert-cache", str(self.cache), *self.way.split()] if self.cache else []


@dataclass(frozen=True, slots=True)
class Measured:
    """Tokens per second and share of hits of the runs, and what they said; the share that the card read."""

    rates: list[float]
    hits: list[float]
    tokens: list[list[int]]
    pcie: float


def starts(shares: Sequence[float], ways: Sequence[str], pairs: int) -> list[Start]:
    """Every start, from the most experts in VRAM to the fewest. A cache holds at least one."""
    found = [Start(1.0, "", 0)] if any(share >= 1 for share in shares) else []
    for share in sorted((share for share in shares if share < 1), reverse=True):
        found += [Start(share, way, max(1, round(share * pairs))) for way in ways]
    return found


def run(args: argparse.Namespace, console: Console) -> int:
    if args.runs < 1 or not all(0 <= share <= 1 for share in args.shares):
        console.print("--runs: at least 1; --shares: numbers from 0 to 1")
        return 2
    try:
        if args.chart:
            chart.check(args.chart)
        reports = [marks.marked(report, args) for report in _reports(args, console)]
        code = max(finish(report, args.json, console) for report in reports)
        if args.chart:
            chart.draw(drawn(reports, args.level), args.chart)
            console.print(f"written: {args.chart}")
    except chart.ChartError as error:
        console.print(str(error), markup=False, soft_wrap=True)
        return 2
    return code


def _reports(args: argparse.Namespace, console: Console) -> list[Report]:
    """What was measured before, or now. Raises ChartError for files that are no such reports."""
    if args.before is None:
        return [_measure_all(args, console)]
    if args.json and len(args.before) > 1:
        raise chart.ChartError("--json writes the figures of one file; give --from one")
    try:
        return [msgspec.json.decode(path.read_bytes(), type=Report) for path in args.before]
    except msgspec.DecodeError as error:
        raise chart.ChartError(f"--from: {error}") from None


def _measure_all(args: argparse.Namespace, console: Console) -> Report:
    """Every start in turn."""
    spec = open_pack(args.pack).spec
    found: dict[Start, Measured] = {}
    for start in starts(args.shares, args.way or WAYS, spec.layers * spec.experts):
        console.print(f"{start.name} ..")
        found[start] = measure(args, start)
        if args.json:
            report_of(args, found).write(args.json)
    return report_of(args, found)


def measure(args: argparse.Namespace, start: Start) -> Measured:
    case = Case("tg", 0, args.prompt, args.generate)
    with EngineProcess(command(args, [case], runs=args.runs + 1, extra=[*start.options, *args.extra])) as engine:
        vocab = int(engine.info.get("vocab", FIRST_PLAIN_ID))
        made = [engine.generate(random_ids(case.prompt, vocab, seed=i), case.generate) for i in range(args.runs + 1)]
        pcie = float(engine.info.get("pcie_frac", 0.0))
    return Measured(
        [g.decode_tok_s for g in made[1:]],
        [100 * (g.done.hit_rate or 0.0) for g in made[1:]],
        [g.tokens for g in made],
        pcie,
    )


def report_of(args: argparse.Namespace, found: dict[Start, Measured]) -> Report:
    """Records of all starts, and whether they said the same."""
    first, wanted = next(iter(found.items()))
    records, checks = [], []
    for start, one in found.items():
        records.append(Record.of(f"tg {args.generate}, {start.name}", "tok/s", one.rates))
        records.append(Record.of(f"{start.name}: experts in VRAM", "%", one.hits))
        if start.cache:
            records.append(Record.of(f"{start.name}: missing ones read by the card", "%", [100 * one.pcie]))
        if start is not first:
            same = one.tokens == wanted.tokens
            checks.append(Check(f"{start.name} says what {first.name} says", same))
    flags = {"device": args.device, "threads": args.threads, "prompt": args.prompt, "generate": args.generate}
    flags["extra"] = args.extra
    return Report(tool="strata-bench tiers", records=records, checks=checks, flags=flags, pack=pack_facts(args.pack))


# ---------------------------------------------------------------------------------------------------------- the chart


@dataclass(frozen=True, slots=True)
class Rate:
    """A rate of so many tokens, with so many percent of the experts in VRAM. way: "" with all of them."""

    n: int
    share: float
    way: str
    record: Record


def rates(records: Iterable[Record]) -> Iterator[Rate]:
    for record in records:
        found = RATE.fullmatch(record.work)
        if found and record.unit == "tok/s":
            yield Rate(int(found["n"]), float(found["share"]), found["way"] or "", record)


def drawn(reports: Sequence[Report], levels: Iterable[marks.Peer] = ()) -> chart.Chart:
    """Rates by the share of experts in VRAM, a line a way; peers, and other `levels`, as level lines. Raises ChartError
    where there are none, or of several cards, packs or lengths."""
    found = [rate for report in reports for rate in rates(report.records)]
    where = {(_card(report), _pack(report)) for report in reports}
    lengths = {rate.n for rate in found}
    if not found or len(where) > 1 or len(lengths) > 1:
        kinds = [f"tg {n}" for n in sorted(lengths)] + [" of ".join(reversed(one)) for one in sorted(where)]
        raise chart.ChartError(f"a chart has rates of one length, card and pack, not of: {', '.join(kinds)}")
    (card, pack), (length,) = where.pop(), lengths
    days = sorted({report.date[:10] for report in reports})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    title = f"{pack}: decoding {length} tokens by where experts lie\n{card}, {when}"
    ways = [way for way in dict.fromkeys(rate.way for rate in found) if way]
    up = "tokens per second, median and spread of the runs"
    level_lines = [*_levels(found), *(chart.Level(level.of, level.figure) for level in levels)]
    return chart.Chart(title, "experts in VRAM, %", up, _lines(found, ways), level_lines)


def _lines(found: Sequence[Rate], ways: Sequence[str]) -> list[chart.Line]:
    """All experts in VRAM is the end of every line."""
    lines = []
    for way in ways or [""]:
        own = sorted((rate for rate in found if rate.way in (way, "")), key=lambda rate: rate.share)
        points = [chart.Point(rate.share, rate.record.median, rate.record.min, rate.record.max) for rate in own]
        lines.append(chart.Line(way or "all in VRAM", points))
    return lines


def _levels(found: Sequence[Rate]) -> list[chart.Level]:
    """Each figure of a peer once, with the share that it belongs to."""
    levels: dict[chart.Level, None] = {}
    for rate in found:
        if peer := rate.record.peer:
            name = f"{peer['name']}, {peer['source']}" if peer.get("source") else str(peer["name"])
            level = chart.Level(f"{name}, {rate.share:g} % of experts in VRAM", peer["median"])
            levels[level] = None
    return list(levels)


def _card(report: Report) -> str:
    """The first card of the machine, without its driver; else the processor."""
    return str(report.machine.get("gpu") or report.machine["cpu"]).split(";")[0].split(",")[0]


def _pack(report: Report) -> str:
    return str(report.pack["name"]) if report.pack else "no pack"

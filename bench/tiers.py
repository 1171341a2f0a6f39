"""`strata-bench tiers`: decode rate of a model by the share of its experts that lies in VRAM.

An engine is started for each share, and for each way of computing what VRAM lacks: engine options in one word,
`--way="--pcie-frac 1" --way="--pcie-frac auto"`. Each reads a few ids and generates greedily, once to warm up and then
`--runs` times; the same prompts for all. Where experts lie never changes a text, so the tokens of all starts are
compared with those of the first. `--chart` draws the rates.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from strata.bench.chart import Line, chart
from strata.bench.engine import FIRST_PLAIN_ID, Case, command, random_ids
from strata.bench.engine_process import EngineProcess
from strata.bench.report import Check, Record, Report, finish, pack_facts
from strata.engine.pack import open_pack

SHARES = (1.0, 0.75, 0.5, 0.25, 0.1, 0.0)
WAYS = ("--pcie-frac 1", "--pcie-frac auto")
FIXED = ("--adapt-every", "0")
"""Experts stay where they are, unless a way says otherwise."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pack", type=Path, required=True, help="the GGUF file (the first shard of a split pack)")
    parser.add_argument("--exe", help="the engine program; default: the strata-engine of this installation")
    parser.add_argument("--device", default="cuda", help="passed to the engine (default: cuda)")
    parser.add_argument("--threads", type=int, help="passed to the engine; default: its own choice")
    parser.add_argument("--shares", type=float, nargs="+", default=list(SHARES), metavar="S", help="of the experts")
    both = " and ".join(WAYS)
    parser.add_argument("--way", action="append", metavar="OPTIONS", help=f"for what VRAM lacks; default: {both}")
    parser.add_argument("-p", "--prompt", type=int, default=32, metavar="N", help="ids of a prompt (32)")
    parser.add_argument("-n", "--generate", type=int, default=128, metavar="N", help="tokens to generate (128)")
    parser.add_argument("-r", "--runs", type=int, default=3, help="measured runs of each start (3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    parser.add_argument("--chart", type=Path, metavar="FILE", help="draw them there, as SVG")
    parser.add_argument("--extra", nargs=argparse.REMAINDER, default=[], help="everything after it goes to the engine")


@dataclass(frozen=True, slots=True)
class Start:
    """An engine with so many experts in VRAM, and what was measured. cache: 0 = all of them."""

    share: float
    way: str
    cache: int

    @property
    def name(self) -> str:
        return f"{self.share:.0%} in VRAM" + (f", {self.way}" if self.cache else "")

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
    spec = open_pack(args.pack).spec
    todo = starts(args.shares, args.way or WAYS, spec.layers * spec.experts)
    found: dict[Start, Measured] = {}
    for start in todo:
        console.print(f"{start.name} ..")
        found[start] = measure(args, start)
    report = report_of(args, found)
    if args.chart:
        args.chart.write_text(drawn(found, args.generate))
        console.print(f"written: {args.chart}")
    return finish(report, args.json, console)


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


def drawn(found: dict[Start, Measured], generate: int) -> str:
    """Median rates by the share of experts in VRAM, a line a way."""
    whole = [(100 * start.share, sorted(one.rates)) for start, one in found.items() if not start.cache]
    lines = []
    for way in dict.fromkeys(start.way for start in found if start.cache):
        own = [(100 * start.share, sorted(one.rates)) for start, one in found.items() if start.way == way]
        points = [(share, rates[len(rates) // 2]) for share, rates in [*whole, *own]]
        lines.append(Line(way, sorted(points)))
    return chart(lines, f"tokens per second, {generate} tokens", "experts in VRAM, %")

"""`strata-bench peers`: this engine and its peers on the same file, on the same machine, in turns.

    strata-bench peers --pack cut.gguf --llama-bench PROGRAM                              # the host
    strata-bench peers --synth --pack /dev/shm/full.gguf --device cuda -p 2048 8192 -n 128 \\
        --llama-bench PROGRAM --flyweight PROGRAM                                         # a card, the full geometry

A peer is a program whose path is given: llama.cpp's `llama-bench`, or `flyweight`; nothing of them is part of this
project. A round starts this engine, runs its tests and ends it, then does so with each peer, so that one of them at a
time has the machine and a slow minute meets all. The table shows our figure, the peer's, and the ratio; without a peer,
our figures alone. With --synth a pack that is not there is written first (`strata-bench synth`, its defaults).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from strata.bench import marks
from strata.bench.engine import Case, command, plan, random_ids
from strata.bench.engine_process import EngineProcess
from strata.bench.report import Record, Report, Summary, finish, pack_facts
from strata.bench.synthetic import FULL, Pools, Types, write

Rates = dict[str, float]
"""Tokens per second by the name of the case."""


class PeerFailed(OSError):
    """The peer program did not run or did not print what it should."""


class Peer(Protocol):
    @property
    def name(self) -> str: ...

    def rates(self, cases: Sequence[Case]) -> Rates:
        """Runs every case once. Raises PeerFailed."""
        ...


def answer(argv: list[str]) -> Any:
    """The JSON that a program prints. Raises PeerFailed with the end of what it said."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        return json.loads(done.stdout)
    except OSError as error:
        raise PeerFailed(f"{argv[0]} does not start: {error.strerror}") from error
    except json.JSONDecodeError as error:
        tail = (done.stderr or done.stdout).strip()[-500:]
        raise PeerFailed(f"{Path(argv[0]).name} ended with code {done.returncode}: {tail}") from error


@dataclass(frozen=True)
class LlamaBench:
    """llama.cpp. On a card with the whole model there; `more`: arguments of its own, such as -ub 4096."""

    program: Path
    pack: Path
    device: str
    threads: int
    more: tuple[str, ...] = ()
    name: str = "llama.cpp"

    def rates(self, cases: Sequence[Case]) -> Rates:
        argv = [str(self.program), "-m", str(self.pack), "-t", str(self.threads), "-r", "1", "-o", "json"]
        argv += ["-ngl", "0"] if self.device == "host" else ["-ngl", "999"]
        reads, writes = ([c for c in cases if c.name.startswith(kind)] for kind in ("pp", "tg"))
        for flag, sizes in (("-p", [c.prompt for c in reads]), ("-n", [c.generate for c in writes])):
            argv += [flag, ",".join(map(str, sizes)) or "0"]
        results = answer([*argv, *self.more])
        try:
            seen = {(r["n_prompt"], r["n_gen"]): float(r["avg_ts"]) for r in results}
            return {c.name: seen[(c.prompt, 0) if c in reads else (0, c.generate)] for c in cases}
        except (KeyError, TypeError) as error:
            raise PeerFailed(f"{self.program.name} printed no rate for {error}: {json.dumps(results)[:300]}") from error


@dataclass(frozen=True)
class Flyweight:
    """flyweight's `benchmark`, one process a case."""

    program: Path
    pack: Path
    device: str
    vocab: int
    more: tuple[str, ...] = ()
    name: str = "flyweight"

    def rates(self, cases: Sequence[Case]) -> Rates:
        return {case.name: self._rate(case) for case in cases}

    def _rate(self, case: Case) -> float:
        reads = case.name.startswith("pp")
        ids = ",".join(map(str, random_ids(case.prompt, self.vocab, seed=1)))
        argv = [str(self.program), "benchmark", str(self.pack), "--tokens", ids, "--warmup", "1"]
        argv += ["--iterations", str(1 if reads else case.generate), "--context", str(case.prompt + case.generate + 64)]
        argv += ["--backend", "cpu"] if self.device == "host" else []
        result = answer([*argv, *self.more])
        try:
            if reads:
                return float(case.prompt / result["prompt_and_first_token_seconds"])
            return float(result["decode_tokens_per_second"])
        except (KeyError, TypeError, ZeroDivisionError) as error:
            raise PeerFailed(f"{self.program.name} printed no rate: {error}") from error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pack", type=Path, required=True, help="the GGUF file that all read")
    parser.add_argument("--synth", action="store_true", help="write the full-size synthetic pack there, if it is not")
    parser.add_argument("--llama-bench", type=Path, metavar="PROGRAM", help="llama.cpp's llama-bench")
    parser.add_argument("--llama-args", default="", metavar="ARGS", help='more of its arguments: "-ub 4096 -b 4096"')
    parser.add_argument("--flyweight", type=Path, metavar="PROGRAM", help="flyweight")
    parser.add_argument("--exe", help="the engine program; default: the strata-engine of this installation")
    parser.add_argument("--device", default="host", help="passed to the engine (host)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of all (all cores)")
    parser.add_argument("-p", "--prompt", type=int, nargs="*", default=[512], metavar="N", help="prompt tokens (512)")
    parser.add_argument(
        "-n", "--generate", type=int, nargs="*", default=[64], metavar="N", help="tokens to generate (64)"
    )
    parser.add_argument("-r", "--runs", type=int, default=3, help="rounds (3)")
    marks.add_arguments(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")


def run(args: argparse.Namespace, console: Console) -> int:
    cases = plan(args.prompt, args.generate, [0])
    if min([args.runs, args.threads, *args.prompt, *args.generate]) < 1 or not cases:
        console.print("--runs, --prompt, --generate and --threads: at least 1 each")
        return 2
    if args.synth and not args.pack.exists():
        write(args.pack, FULL, Types(), Pools(), console)
    ours: list[Rates] = []
    theirs: dict[str, list[Rates]] = {}
    starts: list[float] = []
    for i in range(args.runs):
        console.print(f"round {i + 1} of {args.runs}: strata")
        rates, vocab, start_s = own_rates(args, cases, seed=i)
        ours.append(rates)
        starts.append(start_s)
        for peer in peers(args, vocab):
            console.print(f"round {i + 1} of {args.runs}: {peer.name}")
            theirs.setdefault(peer.name, []).append(peer.rates(cases))
    flags = {"device": args.device, "threads": args.threads, "start_s": round(max(starts), 2)}
    found = records(cases, ours, theirs)
    report = Report(tool="strata-bench peers", records=found, flags=flags, pack=pack_facts(args.pack))
    return finish(marks.marked(report, args), args.json, console)


def own_rates(args: argparse.Namespace, cases: Sequence[Case], seed: int) -> tuple[Rates, int, float]:
    """Every case once, after one to warm up; the vocabulary; seconds until READY."""
    rates: Rates = {}
    with EngineProcess(command(args, list(cases), runs=1, extra=())) as engine:
        vocab = int(engine.info.get("vocab", 64))
        for case in cases:
            for warm in (True, False):
                g = engine.generate(random_ids(case.prompt, vocab, seed=2 * seed + warm), case.generate)
                rates[case.name] = case.rate(g)
    return rates, vocab, engine.start_s


def peers(args: argparse.Namespace, vocab: int) -> list[Peer]:
    found: list[Peer] = []
    if args.llama_bench:
        more = tuple(args.llama_args.split())
        found.append(LlamaBench(args.llama_bench, args.pack, args.device, args.threads, more))
    if args.flyweight:
        found.append(Flyweight(args.flyweight, args.pack, args.device, vocab))
    return found


def records(cases: Sequence[Case], ours: Sequence[Rates], theirs: dict[str, list[Rates]]) -> list[Record]:
    """One a case and peer; one a case when there is none."""
    out = []
    for case in cases:
        for name in theirs or {"": []}:
            record = Record.of(case.name, "tok/s", [r[case.name] for r in ours])
            if name:
                s = Summary.of([r[case.name] for r in theirs[name]])
                record.peer = {"name": name, "median": s.median, "min": s.min, "max": s.max, "runs": s.runs}
            out.append(record)
    return out

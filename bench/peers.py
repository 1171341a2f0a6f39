"""`strata-bench peers`: this engine and a peer on the same file, on the same machine, in turns.

The peer is llama.cpp's `llama-bench`, whose path is given; nothing of it is part of this project. Runs alternate, so
that a slow minute of the machine meets both. The table shows our figure, the peer's, and the ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from pathlib import Path

from rich.console import Console

from strata.bench.engine import plan, random_ids
from strata.bench.engine_process import EngineProcess, engine_command, pack_argument
from strata.bench.report import Record, Report, Summary, pack_facts, show


class PeerFailed(OSError):
    """The peer program did not run or did not print what it should."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pack", type=Path, required=True, help="the GGUF file both read")
    parser.add_argument("--llama-bench", type=Path, required=True, metavar="PROGRAM", help="llama.cpp's llama-bench")
    parser.add_argument("--exe", help="the engine program; default: the strata-engine of this installation")
    parser.add_argument("--device", default="host", help="passed to the engine (host)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of both (all cores)")
    parser.add_argument("-p", "--prompt", type=int, default=512, help="prompt tokens (512)")
    parser.add_argument("-n", "--generate", type=int, default=64, help="tokens to generate (64)")
    parser.add_argument("-r", "--runs", type=int, default=3, help="runs of each (3)")
    parser.add_argument("--target", default="", help="name of the target the figures belong to")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")


def run(args: argparse.Namespace, console: Console) -> int:
    if min(args.runs, args.prompt, args.generate, args.threads) < 1:
        console.print("--runs, --prompt, --generate and --threads: at least 1 each")
        return 2
    todo = plan([args.prompt], [args.generate], [0])
    ours: dict[str, list[float]] = {test.name: [] for test in todo}
    theirs: dict[str, list[float]] = {test.name: [] for test in todo}
    argv = [*engine_command(args.exe), *pack_argument(args.pack), "--device", args.device]
    argv += [
        "--threads",
        str(args.threads),
        "--eos-ids",
        "none",
        "--max-context",
        str(args.prompt + args.generate + 72),
    ]
    with EngineProcess(argv) as engine:
        vocab = int(engine.info.get("vocab", 64))
        for i in range(args.runs + 1):
            for test in todo:
                console.print(f"run {i} of {args.runs}: {test.name}" if i else f"warming up: {test.name}")
                g = engine.generate(random_ids(test.prompt, vocab, seed=i), test.generate)
                if i:
                    ours[test.name].append(test.rate(g))
                    reads = test.prompt if test.name.startswith("pp") else 0
                    theirs[test.name].append(_llama_bench(args, reads, test.generate))
    records = [_beside(Record.of(name, "tok/s", ours[name], args.target), theirs[name]) for name in ours]
    flags = {"device": args.device, "threads": args.threads, "start_s": round(engine.start_s, 2)}
    report = Report(tool="strata-bench peers", records=records, flags=flags, pack=pack_facts(args.pack))
    show(report, console)
    if args.json:
        report.write(args.json)
        console.print(f"written: {args.json}")
    return 0


def _beside(record: Record, values: list[float]) -> Record:
    s = Summary.of(values)
    record.peer = {"name": "llama.cpp", "median": s.median, "min": s.min, "max": s.max, "runs": s.runs}
    return record


def _llama_bench(args: argparse.Namespace, prompt: int, generate: int) -> float:
    """Tokens per second of one llama-bench test: a prompt when `prompt` > 0, else decoding."""
    work = ["-p", str(prompt), "-n", "0"] if prompt else ["-p", "0", "-n", str(generate)]
    argv = [str(args.llama_bench), "-m", str(args.pack), "-t", str(args.threads), "-r", "1", "-o", "json", *work]
    if args.device == "host":
        argv += ["-ngl", "0"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    try:
        return float(json.loads(done.stdout)[0]["avg_ts"])
    except (json.JSONDecodeError, KeyError, IndexError, TypeError) as e:
        tail = (done.stderr or done.stdout).strip()[-500:]
        raise PeerFailed(f"{args.llama_bench.name} ended with code {done.returncode}: {tail}") from e

"""`strata-bench engine`: prompt and decode rates of an engine over stdin.

Each test is run once to warm up and then `--runs` times. `pp N` reads N random ids and generates one token; `tg N`
reads one id and generates N tokens greedily; `tg N @ D` does so after a prompt of D tokens.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from strata.bench.engine_process import EngineProcess, Generation, engine_command, pack_argument
from strata.bench.report import Record, Report, pack_facts, show

FIRST_PLAIN_ID = 32
"""Random prompts avoid the first ids, which a tokenizer may give to controls."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pack", type=Path, required=True, help="the GGUF file (the first shard of a split pack)")
    parser.add_argument("--exe", help="the engine program; default: the strata-engine of this installation")
    parser.add_argument("--device", default="host", help="passed to the engine (default: host)")
    parser.add_argument("--threads", type=int, help="passed to the engine; default: its own choice")
    parser.add_argument("-p", "--prompt", type=int, nargs="*", default=[512], metavar="N", help="prompt lengths (512)")
    parser.add_argument(
        "-n", "--generate", type=int, nargs="*", default=[128], metavar="N", help="tokens to generate (128)"
    )
    parser.add_argument(
        "-d", "--depth", type=int, nargs="*", default=[0], metavar="N", help="prompt before generating (0)"
    )
    parser.add_argument("-r", "--runs", type=int, default=3, help="measured runs of each test (3)")
    parser.add_argument(
        "--target",
        nargs="*",
        default=[],
        metavar="NAME=TEST",
        help="the target that a test belongs to, such as 'P1=tg 128' (docs/performance.md lists them)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    parser.add_argument("--extra", nargs=argparse.REMAINDER, default=[], help="everything after it goes to the engine")


def plan(prompts: list[int], generate: list[int], depths: list[int]) -> list[tuple[str, int, int]]:
    """(name, prompt tokens, tokens to generate) of every test."""
    out = [(f"pp {n}", n, 1) for n in prompts]
    out += [(f"tg {n}" + (f" @ {d}" if d else ""), max(d, 1), n) for d in depths for n in generate]
    return out


def random_ids(n: int, vocab: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(min(FIRST_PLAIN_ID, vocab - 1), vocab) for _ in range(n)]


def rate(name: str, g: Generation) -> float:
    return g.prompt_tok_s if name.startswith("pp") else g.decode_tok_s


def run(args: argparse.Namespace, console: Console) -> int:
    if args.runs < 1:
        console.print("--runs: at least 1")
        return 2
    todo = plan(args.prompt, args.generate, args.depth)
    if not todo:
        console.print("nothing to measure: give --prompt or --generate a length")
        return 2
    report = measure(args, todo, console)
    show(report, console)
    if args.json:
        report.write(args.json)
        console.print(f"written: {args.json}")
    return 0


def measure(args: argparse.Namespace, todo: list[tuple[str, int, int]], console: Console) -> Report:
    """Runs the tests, interleaved, so that a slow minute of the machine meets all of them."""
    context = max(p + g for _, p, g in todo) + 8
    argv = [*engine_command(args.exe), *pack_argument(args.pack), "--device", args.device]
    argv += ["--max-context", str(max(context, 512)), "--eos-ids", "none"]
    if args.threads:
        argv += ["--threads", str(args.threads)]
    values: dict[str, list[float]] = {name: [] for name, _, _ in todo}
    with EngineProcess([*argv, *args.extra]) as engine:
        vocab = int(engine.info.get("vocab", FIRST_PLAIN_ID))
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("warming up", total=len(todo) * (args.runs + 1))
            for i in range(args.runs + 1):
                for name, prompt, generate in todo:
                    bar.update(task, description=f"{name}, run {i} of {args.runs}" if i else f"{name}, warming up")
                    g = engine.generate(random_ids(prompt, vocab, seed=i * 1000 + prompt), generate)
                    if i:
                        values[name].append(rate(name, g))
                    bar.advance(task)
        flags = {
            "device": args.device,
            "threads": args.threads,
            "extra": args.extra,
            "start_s": round(engine.start_s, 2),
        }
    targets = {test: name for name, _, test in (word.partition("=") for word in args.target)}
    records = [Record.of(name, "tok/s", values[name], targets.get(name, "")) for name, _, _ in todo]
    records.append(Record.of("start to READY", "s", [engine.start_s], targets.get("start", "")))
    return Report(tool="strata-bench engine", records=records, flags=flags, pack=pack_facts(args.pack))

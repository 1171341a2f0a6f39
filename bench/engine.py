"""`strata-bench engine`: prompt and decode rates of an engine over stdin.

Each test is run once to warm up and then `--runs` times. `pp N` reads N random ids and generates one token; `tg N`
reads one id and generates N tokens greedily; `tg N @ D` does so after a prompt of D tokens. `pp N @ D` reads N ids
behind D that the session holds; its runs follow each other, so each is N tokens deeper than the one before. Where not
all experts lie in a card's memory, the share of those that were found there is a figure as well. On a card `tg N: host
work` is what the engine itself counts between two waits (`--stats`): its schedule, its lines and its launches.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from strata.bench import marks
from strata.bench.engine_process import EngineFailed, EngineProcess, Generation, engine_command, pack_argument
from strata.bench.report import Record, Report, finish, pack_facts
from strata.engine.window_cost import laps

ALL = 100.0
"""Percent."""
TOLD_S = 5.0
"""The log of an engine is waited for so long: its last line may come after the line that ends the last request."""
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
    parser.add_argument(
        "--prompt-at", type=int, nargs="*", default=[], metavar="D", help="also read each prompt behind D held tokens"
    )
    parser.add_argument("-r", "--runs", type=int, default=3, help="measured runs of each test (3)")
    parser.add_argument("--starts", type=int, default=1, help="starts of the engine that are measured (1)")
    marks.add_arguments(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    parser.add_argument("--extra", nargs=argparse.REMAINDER, default=[], help="everything after it goes to the engine")


@dataclass(frozen=True, slots=True)
class Case:
    """Tokens held before · tokens of the prompt · tokens to generate."""

    name: str
    held: int
    prompt: int
    generate: int

    def rate(self, g: Generation) -> float:
        """Tokens per second of what the test is about."""
        return g.prompt_tok_s if self.name.startswith("pp") else g.decode_tok_s


def plan(prompts: list[int], generate: list[int], depths: list[int], prompts_at: list[int] | None = None) -> list[Case]:
    """Every test, in the order of the table."""
    out = [Case(f"pp {n}", 0, n, 1) for n in prompts]
    out += [Case(f"tg {n}" + (f" @ {d}" if d else ""), 0, max(d, 1), n) for d in depths for n in generate]
    return out + [Case(f"pp {n} @ {d}", d, n, 1) for d in prompts_at or () for n in prompts]


def random_ids(n: int, vocab: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(min(FIRST_PLAIN_ID, vocab - 1), vocab) for _ in range(n)]


def run(args: argparse.Namespace, console: Console) -> int:
    if min(args.runs, args.starts) < 1:
        console.print("--runs, --starts: at least 1")
        return 2
    todo = plan(args.prompt, args.generate, args.depth, args.prompt_at)
    if not todo:
        console.print("nothing to measure: give --prompt or --generate a length")
        return 2
    return finish(marks.marked(measure(args, todo, console), args), args.json, console)


def measure(args: argparse.Namespace, todo: list[Case], console: Console) -> Report:
    """Runs the tests, interleaved, so that a slow minute of the machine meets all of them; those behind held tokens are
    run last, one after the other, since each goes on in the session of its own."""
    values: dict[str, list[float]] = {test.name: [] for test in todo}
    cached: dict[str, list[float]] = {test.name: [] for test in todo}
    order: list[str] = []  # of the requests without held tokens: "" for those that warm up
    stats = [] if args.device == "host" else ["--stats"]
    argv, starts = command(args, todo, runs=args.runs + 1, extra=[*stats, *args.extra]), []
    for _ in range(args.starts - 1):
        with EngineProcess(argv) as engine:
            starts.append(engine.start_s)
    with EngineProcess(argv) as engine:
        starts.append(engine.start_s)
        vocab = int(engine.info.get("vocab", FIRST_PLAIN_ID))
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("warming up", total=len(todo) * (args.runs + 1))
            for i, test, g in chain(fresh(engine, todo, args.runs, vocab), behind(engine, todo, args.runs, vocab)):
                bar.update(task, description=f"{test.name}, run {i} of {args.runs}")
                if i:
                    values[test.name].append(test.rate(g))
                    cached[test.name] += [] if g.done.hit_rate is None else [100 * g.done.hit_rate]
                if not test.held:
                    order.append(test.name if i else "")
                bar.advance(task)
        spent = host_work(engine, order) if stats else {}
        flags = {
            "device": args.device,
            "threads": args.threads,
            "extra": args.extra,
            "start_s": round(starts[-1], 2),
        }
    records = [Record.of(test.name, "tok/s", values[test.name]) for test in todo]
    if args.device != "host":
        shares = {name: found for name, found in cached.items() if found and min(found) < ALL}
        records += [Record.of(f"{name}: experts in VRAM", "%", found) for name, found in shares.items()]
    records += [Record.of(f"{name}: host work", "us a window", found) for name, found in spent.items()]
    records.append(Record.of("start to READY", "s", starts))
    return Report(tool="strata-bench engine", records=records, flags=flags, pack=pack_facts(args.pack))


def host_work(engine: EngineProcess, order: Sequence[str]) -> dict[str, list[float]]:
    """By name, microseconds of the host for a window, a request. order: the names of its first requests, "" for those
    that do not count. Those without windows that were started ahead have none, as has an engine that does not tell."""
    until = time.monotonic() + TOLD_S
    while len(told := laps(engine.log_text())) < len(order) and time.monotonic() < until:
        time.sleep(0.01)
    found: dict[str, list[float]] = {}
    for name, lap in zip(order, told, strict=False):
        if name and lap.windows:
            found.setdefault(name, []).append(lap.us)
    return found


def command(args: argparse.Namespace, todo: list[Case], *, runs: int, extra: Sequence[str]) -> list[str]:
    """The engine with room for the longest test. `args`: exe, pack, device, threads."""
    context = max(t.prompt + t.generate + (t.held + runs * t.prompt if t.held else 0) for t in todo) + 8
    argv = [*engine_command(args.exe), *pack_argument(args.pack), "--device", args.device]
    argv += ["--max-context", str(max(context, 512)), "--eos-ids", "none"]
    if args.threads:
        argv += ["--threads", str(args.threads)]
    if any(t.held for t in todo):
        argv += ["--prompt-cache", "1"]  # the session goes on; no prompt begins like another
    return [*argv, *extra]


def fresh(engine: EngineProcess, todo: list[Case], runs: int, vocab: int) -> Iterator[tuple[int, Case, Generation]]:
    """(run, test, what came of it); run 0 warms up."""
    for i in range(runs + 1):
        for test in todo:
            if not test.held:
                yield (
                    i,
                    test,
                    engine.generate(random_ids(test.prompt, vocab, seed=i * 1000 + test.prompt), test.generate),
                )


def behind(engine: EngineProcess, todo: list[Case], runs: int, vocab: int) -> Iterator[tuple[int, Case, Generation]]:
    """The tests whose prompts follow tokens that the session holds. Raises EngineFailed when it does not hold them."""
    for test in todo:
        if not test.held:
            continue
        ids = random_ids(test.held, vocab, seed=test.held)
        engine.generate(ids, 1)
        for i in range(runs + 1):
            more = random_ids(test.prompt, vocab, seed=i * 1000 + test.prompt)
            ids = [*ids, *more]
            g = engine.generate(ids, 1)
            if g.done.prompt_read != len(more):
                raise EngineFailed(f"{test.name}: the engine read {g.done.prompt_read} tokens again, not {len(more)}")
            yield i, test, g

"""`strata-bench serve`: load on a running server through POST /v1/chat/completions, streamed.

`--concurrency` clients send `--requests` requests in all, each with a prompt of random words. Reported: time to the
first token (TTFT), time between tokens (ITL), whole requests, tokens per second over all clients; median and
percentiles. A request that fails is counted by its reason; any failure makes the exit code 1.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import random
import time
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from strata.bench.http_client import Answer, Client, ServerRefused, connected, user
from strata.bench.report import Record, Report, percentile, show

WORDS = (
    "river",
    "stone",
    "light",
    "paper",
    "morning",
    "window",
    "garden",
    "number",
    "travel",
    "quiet",
    "signal",
    "copper",
)
SHARES = ((0.5, "p50"), (0.9, "p90"), (0.99, "p99"))


@dataclass
class Load:
    """What has been seen so far."""

    samples: list[Answer] = field(default_factory=list)
    failures: collections.Counter[str] = field(default_factory=collections.Counter)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="http://127.0.0.1:8080", help="the server (http://127.0.0.1:8080)")
    parser.add_argument("--api-key", help="sent as a bearer token")
    parser.add_argument("--model", default="strata", help="model name of the requests")
    parser.add_argument("-c", "--concurrency", type=int, default=4, help="clients at a time (4)")
    parser.add_argument("-n", "--requests", type=int, default=32, help="requests in all (32)")
    parser.add_argument("--prompt-words", type=int, default=64, help="random words of a prompt (64)")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens asked of each request (64)")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds before a request counts as failed (600)")
    parser.add_argument("--seed", type=int, default=1, help="of the random words (1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")


def run(args: argparse.Namespace, console: Console) -> int:
    if min(args.concurrency, args.requests, args.prompt_words, args.max_tokens) < 1:
        console.print("--concurrency, --requests, --prompt-words and --max-tokens: at least 1 each")
        return 2
    started = time.monotonic()
    load = asyncio.run(_drive(args, console))
    seconds = time.monotonic() - started
    for reason, count in load.failures.most_common():
        console.print(f"{count} failed: {reason}")
    if not load.samples:
        console.print("no request was answered")
        return 1
    report = Report(tool="strata-bench serve", records=summarise(load.samples, seconds), flags=_flags(args))
    show(report, console)
    if args.json:
        report.write(args.json)
        console.print(f"written: {args.json}")
    return 1 if load.failures else 0


def summarise(samples: list[Answer], seconds: float) -> list[Record]:
    """Percentiles of the times and the rates over the whole run."""
    records = []
    columns = {
        "time to first token": [s.ttft * 1e3 for s in samples],
        "between tokens": [gap * 1e3 for s in samples for gap in s.gaps],
        "whole request": [s.seconds * 1e3 for s in samples],
    }
    for name, values in columns.items():
        for share, label in SHARES if values else ():
            r = Record.of(f"{name}, {label}", "ms", values)
            r.median = percentile(values, share)
            records.append(r)
    tokens = sum(s.completion_tokens for s in samples)
    records.append(Record.of("output of all clients", "tok/s", [tokens / seconds]))
    records.append(Record.of("requests", "1/s", [len(samples) / seconds]))
    return records


async def _drive(args: argparse.Namespace, console: Console) -> Load:
    load = Load()
    numbers = iter(range(args.requests))
    columns = (
        TextColumn("requests"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=args.requests)

        async def work(client: Client) -> None:
            for i in numbers:
                try:
                    load.samples.append(await client.chat(_messages(args, i), args.max_tokens))
                except (aiohttp.ClientError, TimeoutError, ServerRefused) as e:
                    load.failures[str(e) or type(e).__name__] += 1
                failed = sum(load.failures.values())
                bar.update(task, advance=1, description=f"{failed} failed" if failed else "")

        where = {"api_key": args.api_key, "model": args.model, "timeout_s": args.timeout, "exact": False}
        async with connected(args.url, **where) as client:
            await asyncio.gather(*(work(client) for _ in range(args.concurrency)))
    return load


def words(rng: random.Random, n: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(n))


def _messages(args: argparse.Namespace, number: int) -> list[dict[str, str]]:
    return user(words(random.Random(f"{args.seed}/{number}"), args.prompt_words))


def _flags(args: argparse.Namespace) -> dict[str, object]:
    names = ("concurrency", "requests", "prompt_words", "max_tokens", "seed")
    return {name: getattr(args, name) for name in names}

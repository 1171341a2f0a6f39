"""`python -m strata.bench.short_reads_cuda`: what a read of a few tokens takes on a card, by each way there is.

    windows         decode windows of 8 tokens, as `--short-read` has them
    pass            one prompt pass; `host` is the part of it until the last launch is queued
    ... by tiles    the same where products of few rows go through tiles as those of many do: all of them, the experts'
                    alone, or those of other matrices alone

The logits of all ways are compared bit for bit. --depth: the tokens are read behind so many others that the slot holds.

Errors   exit code 1 and the ways when a bit differs
"""

from __future__ import annotations

import argparse
import cProfile
import io
import pstats
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final
from unittest import mock

import numpy as np
from rich.console import Console

from strata.bench.report import Record, Report, pack_facts, show
from strata.engine.cuda_runner import CudaRunner
from strata.engine.flags import WINDOW_ROWS
from strata.engine.model import Rows
from strata.engine.options import fitted, parse
from strata.engine.pack import open_pack
from strata.engine.schedule.ports import SOLO
from strata.kernels.cuda import few_plans
from strata.kernels.ops import I32

LENGTHS: Final = (8, 16, 24, 32, 48, 64, 96, 128, 200, 300, 512, 1000)
TILES: Final[dict[str, dict[str, int]]] = {
    "pass by tiles": {"MOST_ROWS": 0, "MOST_EACH": 0},
    "pass, experts by tiles": {"MOST_EACH": 0},
    "pass, others by tiles": {"MOST_ROWS": 0},
    "pass, all others by warps": {"MOST_RESULTS": 1 << 24},
    "pass, experts of 32 rows by warps": {"MOST_EACH": 32},
}
RUNS: Final = 3
PROFILED: Final = 40
"""Functions of a profile of the host."""

Timed = tuple[float, float, bytes]
"""Milliseconds of a read, those until it is queued, its logits."""


@contextmanager
def limits(changed: dict[str, int]) -> Iterator[None]:
    """Inside, `few_plans` has these limits."""
    with ExitStack() as stack:
        for name, value in changed.items():
            stack.enter_context(mock.patch.object(few_plans, name, value))
        yield


class Reads:
    """Reads of the solo slot behind `depth` tokens that it holds: each begins from a copy of them."""

    def __init__(self, runner: CudaRunner, depth: int) -> None:
        self.runner = runner
        self.depth = depth
        vocab = runner._model.spec.vocab
        self.tokens: I32 = np.random.default_rng(1).integers(32, vocab, depth + max(LENGTHS), np.int32)
        self._begin()
        for at in range(0, depth, runner.chunk):
            end = min(at + runner.chunk, depth)
            runner.feed(SOLO, at, self.tokens[at:end], False)
        if depth:
            runner.state.copy(SOLO, 1)

    def _begin(self) -> None:
        self.runner.state.reset(SOLO)

    def _timed(self, n: int, work: Callable[[I32], Any]) -> Timed:
        runner, driver = self.runner, self.runner._device.driver
        if self.depth:
            runner.state.copy(1, SOLO)
        else:
            self._begin()
        driver.synchronize()
        begun = time.perf_counter()
        logits = work(self.tokens[self.depth : self.depth + n])
        queued = time.perf_counter()
        driver.synchronize()
        ended = time.perf_counter()
        return 1e3 * (ended - begun), 1e3 * (queued - begun), bytes(runner._device.read(logits).tobytes())

    def launch(self, n: int) -> None:
        """A pass of which only the kernels count."""
        self.one_pass(n)

    def windows(self, n: int) -> Timed:
        def work(tokens: I32) -> Any:
            for at in range(0, n, WINDOW_ROWS):
                part = tokens[at : at + WINDOW_ROWS]
                logits = self.runner.feed(SOLO, self.depth + at, part, at + len(part) == n)
            return logits

        return self._timed(n, work)

    def one_pass(self, n: int) -> Timed:
        runner = self.runner

        def work(tokens: I32) -> Any:
            rows = Rows.of([(SOLO, self.depth, tokens)])
            return runner._model.read(rows, runner.state, [n - 1])[0][0]

        return self._timed(n, work)


def host_profile(reads: Reads, n: int) -> str:
    """Where the host's time of a pass goes, by function: it is what a pass of a few tokens waits for."""
    reads.one_pass(n)
    profile, said = cProfile.Profile(), io.StringIO()
    for _ in range(RUNS):
        profile.runcall(reads.one_pass, n)
    pstats.Stats(profile, stream=said).sort_stats("tottime").print_stats(PROFILED)
    return said.getvalue()


def measure(reads: Reads, lengths: list[int], console: Console) -> tuple[list[Record], list[str]]:
    """The records of all ways, and those that differ in a bit."""
    records, wrong = [], []
    behind = f" behind {reads.depth}" if reads.depth else ""
    precompile = reads.runner._device.driver.precompile
    for n in lengths:
        ways: dict[str, tuple[Callable[[int], Timed], dict[str, int]]] = {"windows": (reads.windows, {})}
        ways["pass"] = reads.one_pass, {}
        ways |= {name: (reads.one_pass, changed) for name, changed in TILES.items() if n > 2 * WINDOW_ROWS}
        want = b""
        for name, (way, changed) in ways.items():
            with limits(changed):
                precompile(partial(reads.launch, n))
                found = [way(n) for _ in range(1 + RUNS)][1:]
            want = want or found[0][2]
            if any(logits != want for _, _, logits in found):
                wrong.append(f"{name} of {n}{behind}")
            records.append(Record.of(f"{n} tokens{behind}: {name}", "ms", [ms for ms, _, _ in found]))
            if name == "pass":
                records.append(Record.of(f"{n} tokens{behind}: host", "ms", [queued for _, queued, _ in found]))
            console.print(f"{records[-1].work}: {found[-1][0]:.2f} ms, queued in {found[-1][1]:.2f}")
    return records, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pack", type=Path, required=True, help="the GGUF file")
    parser.add_argument("--lengths", type=int, nargs="*", default=list(LENGTHS), help="tokens of the reads")
    parser.add_argument("--depth", type=int, default=30000, help="tokens held, for a second table (30000); 0: none")
    parser.add_argument(
        "--host-profile", type=int, default=0, metavar="N", help="and the host's functions in a pass of N"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    args = parser.parse_args()
    pack, console = open_pack(args.pack), Console()
    context = str(args.depth + max(*args.lengths, *LENGTHS) + 64)
    argv = ["--serve", "--pack", str(args.pack), "--device", "cuda", "--max-context", context, "--batch", "2"]
    runner = CudaRunner(pack, fitted(parse(argv), pack.spec))
    runner.warm()
    console.print(f"short reads of this card: {runner.short}")
    records, wrong = measure(Reads(runner, 0), args.lengths, console)
    if args.depth:
        few = [n for n in args.lengths if n in (16, 64, 200)]
        deep = measure(Reads(runner, args.depth), few, console)
        records, wrong = records + deep[0], wrong + deep[1]
    flags = {"depth": args.depth, "short": runner.short.most, "chunk": runner.chunk}
    if args.host_profile:
        console.print(host_profile(Reads(runner, 0), args.host_profile), highlight=False, markup=False)
    report = Report(tool="short_reads_cuda", records=records, flags=flags, pack=pack_facts(args.pack))
    show(report, console)
    if args.json:
        report.write(args.json)
    for each in wrong:
        console.print(f"another bit: {each}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())

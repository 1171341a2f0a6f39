"""The hyper-connections of a window on a card, for 1 and 8 rows, each between two products as a window has them.

    python -m strata.bench.window_streams_cuda --out results.json [--rows 1,8] [--ways]

A round is hyper_add and hyper_mix of one module, the product with its result and the product that makes the next
block's output; a chain is a captured graph of rounds over modules that together leave the cache. u, beta and x of a
round are first compared with the host's, bit for bit. Timed with overlapping launches and with launches in turn; then
what each kernel adds to a round (window_launches.py): the time of the chain less that of the chain without it. All that
with kernels that hand numbers on while they work (words.cuh), and the round alone without.
--ways: also with other shares of the first cache as shared memory, and four rows of `down` a block.

Errors   exit code 1 and the array when a bit differs
Cost     half a minute on an H200, most of it for the compiler
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
from rich.console import Console

from strata.bench.kernels_cuda import CACHE_BYTES, Bench
from strata.bench.report import Report, show
from strata.bench.window_launches import Launch, Launches
from strata.kernels import cpu
from strata.kernels.cuda import card as cards
from strata.kernels.cuda import hyper, hyper_window, product
from strata.kernels.cuda.kernel import WINDOW_SHARED
from strata.kernels.formats import Weight
from strata.kernels.ops import Hyper

STREAMS, HIDDEN, RANK, INNER = 4, 2560, 320, 6144
EPS = 1e-6
REPLAYS = 15
SCALES = {"Q6_K": (208, 2e-5), "Q8_0": (0, 1e-3)}
"""Where a block has its scale, and one that gives products of ordinary size: no saturated gate, no subnormal number."""


def _rows(launch: Launch) -> int:
    """Of a product's matrix; 0 of other kernels."""
    struct = launch.arguments[0]
    return int(struct["matrix"]["rows"].sum()) if isinstance(struct, np.ndarray) and struct.dtype.names else 0


SHARED: dict[str, Callable[[Launch], bool]] = {
    "no kernel": lambda launch: False,
    "hyper-connections": lambda launch: launch.kernel.name.startswith("hyper"),
    "hyper-connections and the product before": lambda launch: _rows(launch) != INNER,
    "every kernel": lambda launch: True,
}
"""Which kernels ask for all of the first cache as shared memory, where the others ask for half."""
FEWER = 100
"""Multiprocessors for which blocks of `down` get four rows."""


class Rounds:
    """Modules, the products between them, and the arrays of n rows."""

    def __init__(self, bench: Bench, n: int) -> None:
        self.bench, self.n = bench, n
        self.into, self.out = self._weight("Q6_K", INNER, HIDDEN), self._weight("Q6_K", HIDDEN, INNER)
        self.modules = [self._module()]
        one = sum(w.data.nbytes for w in (self.modules[0].down, self.modules[0].up))
        self.modules += [self._module() for _ in range(CACHE_BYTES // one)]
        self.words = bench.cp.zeros(hyper.MOST_WORDS, np.float32)
        self.x, self.y = bench.inputs(n * STREAMS, HIDDEN).reshape(n, STREAMS, HIDDEN), bench.inputs(n, HIDDEN)
        self.beta = bench.inputs(n, STREAMS) * np.float32(0.1)

    def _module(self) -> Hyper:
        bench = self.bench
        return Hyper(
            abs(bench.inputs(STREAMS, HIDDEN)) + np.float32(0.5),
            self._weight("Q6_K", RANK, STREAMS * HIDDEN),
            self._weight("Q8_0", STREAMS * HIDDEN, RANK),
            bench.weight("F32", STREAMS, STREAMS * HIDDEN),
        )

    def _weight(self, kind: str, rows: int, cols: int) -> Weight:
        w, (at, scale) = self.bench.weight(kind, rows, cols), SCALES[kind]
        blocks = w.data.reshape(-1, w.type.block_bytes)
        blocks[:, at : at + 2] = self.bench.cp.asarray(np.array([scale], np.float16).view(np.uint8))
        return w

    def mix(self, module: Hyper, beta: Any, y: Any) -> tuple[Any, Any]:
        return hyper.hyper_mix(self.bench.workspace, self.x, module, EPS, self.n, (beta, y), self.words)

    def run(self) -> None:
        """A chain."""
        space, beta, y = self.bench.workspace, self.beta, self.y
        with space.scratch():
            for module in self.modules:
                u, beta = self.mix(module, beta, y)
                (wide,) = product.linear(space, [self.into], u)
                (y,) = product.linear(space, [self.out], wide)

    def check(self) -> None:
        """One round of the first module against the host. Exits when a bit differs."""
        bench, module = self.bench, self.modules[0]
        x, beta, y = (bench.cp.asnumpy(a) for a in (self.x, self.beta, self.y))
        with bench.stream, bench.workspace.scratch():
            made = (*self.mix(module, self.beta, self.y), self.x)
            bench.stream.synchronize()
            got = [bench.cp.asnumpy(a) for a in made]
        cpu.hyper_add(x, beta, y)
        inject = self._host(module.inject) if module.inject else None
        host = Hyper(bench.cp.asnumpy(module.norm), self._host(module.down), self._host(module.up), inject)
        for name, a, want in zip(("u", "beta", "x"), got, (*cpu.hyper_mix(x, host, EPS), x), strict=True):
            wrong = int((a.view(np.uint32) != want.view(np.uint32)).sum())
            if wrong:
                raise SystemExit(f"{name} of {self.n} rows: {wrong} of {a.size} numbers differ")

    def _host(self, w: Weight) -> Weight:
        return self.bench.host(w)


def measure(rounds: Rounds) -> None:
    """What a round takes, and what each kernel adds to it."""
    bench, n, count = rounds.bench, rounds.n, len(rounds.modules)

    def each(without: tuple[str, ...] = ()) -> list[float]:
        return [t / count for t in bench.times([lambda: launches.queue(without)], REPLAYS)]

    with bench.stream:
        launches = Launches.of(rounds.run)
        whole, kernels = each(), [label for label in launches.counts() if label.startswith("hyper")]
        launches.overlap(False)
        in_turn = float(np.median(each()))
        launches.overlap(True)
        with mock.patch.object(rounds, "words", None):
            ended = Launches.of(rounds.run)
        apart = [t / count for t in bench.times([ended.queue], REPLAYS)]
        bench.add(f"round of {n} rows, the rest waits for the end of down", "us", apart)
        bench.add(f"round of {n} rows", "us", whole, f"{in_turn:8.2f} us in turn")
        for names in (*((name,) for name in kernels), tuple(kernels)):
            shares = [float(np.median(whole)) - t for t in each(names)]
            bench.add(f"round of {n} rows: {' + '.join(names)}", "us", shares)


def ways(rounds: Rounds) -> None:
    """Other shares of the first cache, and other blocks."""
    bench, n, count = rounds.bench, rounds.n, len(rounds.modules)

    def add(launches: Launches, note: str) -> None:
        bench.add(f"round of {n} rows, {note}", "us", [t / count for t in bench.times([launches.queue], REPLAYS)])

    few = SimpleNamespace(card=lambda: replace(cards.card(), multiprocessors=FEWER))
    with bench.stream:
        for rows, seen in (("", cards), (", four rows a block", few)):
            with mock.patch.object(hyper_window, "cards", seen):
                launches = Launches.of(rounds.run)
            for name, wants in SHARED.items():
                for launch in launches:
                    launch.kernel.prefer_shared(100 if wants(launch) else WINDOW_SHARED)
                add(launches, f"all shared: {name}{rows}")
            launches.prefer_shared(WINDOW_SHARED)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the records here as JSON")
    parser.add_argument("--rows", default="1,8", help="rows of a window, by comma")
    parser.add_argument("--ways", action="store_true", help="also other shares of the cache, other blocks")
    args = parser.parse_args(argv)
    bench = Bench(Console(width=150))
    flags = {"rows": args.rows, "ways": args.ways}
    for n in map(int, args.rows.split(",")):
        rounds = Rounds(bench, n)
        rounds.check()
        measure(rounds)
        if args.ways:
            ways(rounds)
        del rounds
    report = Report(tool="window_streams_cuda", records=bench.records, flags=flags)
    if args.out:
        report.write(args.out)
    show(report, bench.console)
    return 0


if __name__ == "__main__":
    sys.exit(main())

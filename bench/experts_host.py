"""What experts cost that the processor computes for windows of a card (kernels/cpu/handover.py), without a card.

    python -m strata.bench.experts_host --types IQ3_S IQ3_S IQ4_NL --experts 1 2 5 10 --rows 1 4 8 --json FILE

A desk is served and asked as a card would ask: so many distinct experts, each of them by every row. A figure is the
time from writing the number until its answer is there, and the bytes of the experts in that time. Before, the answers
are compared with the written order of the products, bit for bit. Some 20 s beside compilation.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numba import njit
from rich.console import Console

from strata.bench.report import Record, Report, show
from strata.bench.synthetic import blocks
from strata.kernels.cpu.handover import Server
from strata.kernels.cpu.math import silu_f32
from strata.kernels.cpu.team import set_threads, threads
from strata.kernels.desk import ANSWERED, ASKED, LAYER, PAIRS, USED, Desk
from strata.kernels.formats import BY_NAME, Weight
from strata.kernels.reference.linear import ordered_linear

LIMIT_S = 10.0
RUNS = 30


class Asked:
    """A desk, its server, and experts of a layer that lie one behind the other."""

    def __init__(self, types: Sequence[str], inner: int, width: int, experts: int, rows: int) -> None:
        rng = np.random.default_rng(1)
        kinds = [BY_NAME[name] for name in types]
        shapes = [(inner, width), (inner, width), (width, inner)]
        each = [blocks(k, r * c // k.block, 0.02, rng).reshape(-1) for k, (r, c) in zip(kinds, shapes, strict=True)]
        sizes = [-(-data.size // 256) * 256 for data in each]
        self.begins = (0, sizes[0], sizes[0] + sizes[1])
        self.memory = np.zeros((experts, sum(sizes)), np.uint8)
        for data, begin in zip(each, self.begins, strict=True):
            self.memory[:, begin : begin + data.size] = data
        self.matrices = [
            Weight(k, shape, data.reshape(shape[0], -1)) for k, shape, data in zip(kinds, shapes, each, strict=True)
        ]
        stacks = [Weight(w.type, (1, *w.shape), w.data[None]) for w in self.matrices]
        self.desk = Desk.within(np.zeros(Desk.n_bytes(rows, width), np.uint8), rows, width)
        self.desk.x[:] = rng.standard_normal(self.desk.x.shape).astype(np.float32)
        self.server = Server(self.desk, 1, inner)
        self.server.layer(0, stacks, self.begins)
        self.server.start()

    def request(self, first: int, experts: int, rows: int) -> float:
        """Seconds of so many experts, each for so many rows."""
        words, n = self.desk.words, len(self.memory)
        which = (first + np.arange(experts)) % n
        self.desk.at[: experts * rows] = np.tile(self.memory.ctypes.data + self.memory.shape[1] * which, rows)
        words[[LAYER, PAIRS, USED]] = 0, experts * rows, experts
        number = int(words[ASKED]) + 1
        begun = time.perf_counter()
        words[ASKED] = number
        while words[ANSWERED] != number:
            if time.perf_counter() - begun > LIMIT_S:
                raise OSError(f"no answer within {LIMIT_S:.0f} s")
        return time.perf_counter() - begun

    def check(self, rows: int) -> bool:
        """Whether an expert's outputs are those of the written order."""
        self.request(0, 1, rows)
        x = self.desk.x[:rows]
        gate, up = ordered_linear(self.matrices[:2], x)
        (wanted,) = ordered_linear(self.matrices[2:], _silu(gate) * up)
        got = self.desk.out[self.desk.places[:rows]]
        return bool((got.view(np.uint32) == wanted.view(np.uint32)).all())


@njit
def _silu(x):
    out = np.empty_like(x)
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            out[i, j] = silu_f32(x[i, j])
    return out


def run(args: argparse.Namespace, console: Console) -> int:
    set_threads(args.threads or threads())
    asked = Asked(args.types, args.inner, args.width, args.stored, max(args.rows))
    if not asked.check(max(args.rows)):
        console.print("the outputs are not those of the written order")
        return 1
    records = []
    for rows in args.rows:
        for experts in args.experts:
            times = [asked.request(i * experts, experts, rows) for i in range(RUNS + 5)][5:]
            n_bytes = experts * asked.memory.shape[1]
            work = f"{experts} experts, {rows} rows"
            records.append(Record.of(work, "us", [1e6 * t for t in times]))
            records.append(Record.of(work, "GB/s", [n_bytes / t / 1e9 for t in times]))
    flags = {"types": args.types, "inner": args.inner, "width": args.width, "threads": threads(), "stored": args.stored}
    report = Report(tool="experts-host", records=records, flags=flags)
    show(report, console)
    if args.json:
        report.write(args.json)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", nargs=3, default=["IQ3_S", "IQ3_S", "IQ4_NL"], metavar="T", help="gate, up and down")
    parser.add_argument("--width", type=int, default=2560, help="of the model (2560)")
    parser.add_argument("--inner", type=int, default=640, help="hidden values of an expert (640)")
    parser.add_argument("--stored", type=int, default=512, help="experts in RAM: more than the caches hold (512)")
    parser.add_argument("--experts", type=int, nargs="*", default=[1, 2, 5, 10], help="of a request (1 2 5 10)")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 4, 8], help="that pick each of them (1 4 8)")
    parser.add_argument("--threads", type=int, help="of the processor (all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    return run(parser.parse_args(), Console())


if __name__ == "__main__":
    raise SystemExit(main())

"""Decode windows of several sequences on a card, without the serve loop: tokens per second of all rows together.

    python -m strata.bench.windows_cuda --pack model.gguf [--rows 1 2 4 8] [--depth 0] [--steps 256] [--json FILE]

Every sequence reads a prompt of its own and then feeds itself: a window is started before the ids of the one before
are read, as the engine does. A run is `--steps` windows after some to warm up; the host's share is what it does
between two waits.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
from rich.console import Console

from strata.bench.report import Record, Report, pack_facts, show
from strata.engine.device.cuda import CudaDevice
from strata.engine.model import Rows
from strata.engine.model.resident import AUTO_CHUNKS, WINDOW_ROWS, Resident
from strata.engine.model.window import Draw, Ticket
from strata.engine.pack import open_pack
from strata.kernels.ops import Sampling

WARM_STEPS = 16
TARGET = {(8, 0): "P3"}
"""(rows, depth) -> name in the list of targets."""


class Decode:
    """`n` sequences of `depth` tokens that have been read."""

    def __init__(self, resident: Resident, n: int, depth: int) -> None:
        self.resident, self.n = resident, n
        rng = np.random.default_rng(n)
        for slot in range(n):
            resident.state.reset(slot)
            ids = rng.integers(0, resident.model.spec.n_tokens, max(depth, 1)).astype(np.int32)
            for begin in range(0, len(ids), resident.chunk):
                rows = Rows.of([(slot, begin, ids[begin : begin + resident.chunk])])
                resident.model.forward(rows, resident.state)
        resident.windows.sample_with([Draw(Sampling(temperature=1.0, seed=s), ids[:0], 0) for s in range(n)])
        self.position = max(depth, 1)
        self._reserve()
        self.ticket = resident.windows.start(Rows.of([(slot, self.position, [slot]) for slot in range(n)]), n)
        self._advance()

    def _reserve(self) -> None:
        self.resident.state.reserve_all([(slot, 1) for slot in range(self.n)])

    def _advance(self) -> None:
        self.position += 1
        for slot in range(self.n):
            self.resident.state.advance(slot, 1)

    def run(self, steps: int) -> tuple[float, float]:
        """Seconds of so many windows, and what the host spent of them outside of waits."""
        begun, waited = time.perf_counter(), 0.0
        for _ in range(steps):
            self._reserve()
            following: Ticket = self.resident.windows.step(self.ticket, self.position)
            before = time.perf_counter()
            self.ticket.wait()
            waited += time.perf_counter() - before
            self._advance()
            self.ticket = following
        self.ticket.wait()
        seconds = time.perf_counter() - begun
        return seconds, seconds - waited


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pack", type=Path, required=True)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 2, 4, 8], help="sequences of a window (1 2 4 8)")
    parser.add_argument("--depth", type=int, nargs="*", default=[0], help="tokens that each has read before (0)")
    parser.add_argument("--steps", type=int, default=256, help="windows of a run (256)")
    parser.add_argument("--runs", type=int, default=3, help="runs of each case (3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    args = parser.parse_args(argv)
    console = Console()
    if not 1 <= min(args.rows) <= max(args.rows) <= WINDOW_ROWS:
        console.print(f"--rows: 1 to {WINDOW_ROWS}")
        return 2
    pack, most = open_pack(args.pack), max(args.depth) + WARM_STEPS + args.runs * args.steps + 8
    device = CudaDevice()
    chunks = [n for n in AUTO_CHUNKS if n <= max(32, *args.depth)]
    resident = Resident(pack, device, max_context=most, n_slots=max(args.rows), chunks=chunks)
    records: list[Record] = []
    for depth in args.depth:
        for n in args.rows:
            decode = Decode(resident, n, depth)
            decode.run(WARM_STEPS)
            runs = [decode.run(args.steps) for _ in range(args.runs)]
            name = f"windows of {n}" + (f" @ {depth}" if depth else "")
            rates = [n * args.steps / seconds for seconds, _ in runs]
            records.append(Record.of(name, "tok/s", rates, TARGET.get((n, depth), "")))
            records.append(Record.of(f"{name}, host", "us a window", [host / args.steps * 1e6 for _, host in runs]))
    flags = {"card": device.name, "steps": args.steps}
    report = Report(tool="windows_cuda", records=records, flags=flags, pack=pack_facts(args.pack))
    show(report, console)
    if args.json:
        report.write(args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())

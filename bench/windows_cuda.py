"""Decode windows of several sequences on a card, without the serve loop: tokens per second of all rows together.

    python -m strata.bench.windows_cuda --pack model.gguf [--rows 1 2 4 8] [--depth 0] [--steps 256] [--json FILE]
        [--launches 1 8] [--check 24]

Every sequence reads a prompt of its own and then feeds itself: a window is started before the ids of the one before
are read, as the engine does. A run is `--steps` windows after some to warm up; the host's share is what it does
between two waits, without schedule and protocol (with them: `strata-bench engine`, "host work"). First of all
`--check` windows are run with and without overlapping launches: ids and last logits must be the same bits.
`--launches`: for windows of so many rows, what each kernel adds to their time (window_launches.py).
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
from rich.console import Console

from strata.bench.report import Check, Record, Report, pack_facts, show
from strata.bench.window_launches import Launches, microseconds
from strata.engine.device.cuda import CudaDevice
from strata.engine.flags import WINDOW_ROWS
from strata.engine.model import Rows
from strata.engine.model.resident import AUTO_CHUNKS, Resident
from strata.engine.model.window import Draw, Ticket
from strata.engine.pack import open_pack
from strata.kernels.cuda.kernel import WINDOW_SHARED
from strata.kernels.ops import Sampling

WARM_STEPS = 16
CHECKED_DEPTH = 300
"""Tokens before the windows that are compared: past a page and an index block."""
TARGET = {(8, 0): "P3"}
"""(rows, depth) -> name in the list of targets."""


class Spent:
    """Seconds of a run: the whole, and what the host spent on each part of it."""

    def __init__(self) -> None:
        self.whole = 0.0
        self.parts: dict[str, float] = {}

    def add(self, part: str, begun: float, ended: float) -> float:
        """Returns the end."""
        self.parts[part] = self.parts.get(part, 0.0) + ended - begun
        return ended

    @property
    def host(self) -> float:
        """All but the waits."""
        return sum(self.parts.values()) - self.parts["wait"]


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

    def run(self, steps: int) -> Spent:
        """So many windows."""
        clock, spent, windows = time.perf_counter, Spent(), self.resident.windows
        begun = at = clock()
        for _ in range(steps):
            self._reserve()
            at = spent.add("reserve", at, clock())
            following: Ticket = windows.step(self.ticket, self.position)
            at = spent.add("step", at, clock())
            self.ticket.wait()
            at = spent.add("wait", at, clock())
            self._advance()
            self.ticket = following
            at = spent.add("advance", at, clock())
        self.ticket.wait()
        spent.whole = clock() - begun
        return spent

    def ids(self, steps: int) -> list[list[int]]:
        """The ids of so many windows."""
        found = [self.ticket.wait()]
        for _ in range(steps - 1):
            self._reserve()
            self.ticket = self.resident.windows.step(self.ticket, self.position)
            self._advance()
            found.append(self.ticket.wait())
        return found


def launches_of(resident: Resident, decode: Decode) -> Launches:
    """What a window of these sequences launches. The card is one window ahead afterwards."""
    resident.state.reserve_all([(slot, 2) for slot in range(decode.n)])
    found = Launches.of(lambda: resident.windows.compute(decode.ticket.layout))
    resident.device.driver.synchronize()
    return found


def check(resident: Resident, n: int, steps: int) -> Check:
    """Windows of n sequences give the same bits with overlapping launches, and without."""
    launches = launches_of(resident, Decode(resident, n, CHECKED_DEPTH))
    found = []
    for overlap in (True, False):
        launches.overlap(overlap)
        resident.windows.forget_graphs()
        decode = Decode(resident, n, CHECKED_DEPTH)
        ids = decode.ids(steps)
        found.append((ids, resident.device.read(decode.ticket.logits).tobytes()))
    launches.overlap(True)
    resident.windows.forget_graphs()
    differ = [i for i in range(steps) if found[0][0][i] != found[1][0][i]]
    same = not differ and found[0][1] == found[1][1]
    detail = f"{steps} windows" if same else f"ids differ at windows {differ[:4]}, or the last logits do"
    return Check(name=f"windows of {n}: overlapping launches give the bits of launches in turn", ok=same, detail=detail)


def graph_launches(resident: Resident, decode: Decode) -> list[float]:
    """Microseconds of the host for a launch of a window's graph on an idle card, and right behind another."""
    driver = resident.device.driver
    launches = launches_of(resident, decode)
    graph, times = driver.capture(launches.queue), []
    for _ in range(3):
        driver.synchronize()
        for _ in range(2):
            begun = time.perf_counter()
            graph.launch()
            times.append((time.perf_counter() - begun) * 1e6)
    driver.synchronize()
    return times


def ways(resident: Resident, n: int) -> list[Record]:
    """A window of n sequences with launches that overlap and in turn, and with shares of the first cache."""
    launches, driver = launches_of(resident, Decode(resident, n, CHECKED_DEPTH)), resident.device.driver
    records = [Record.of(f"window of {n}, {len(launches)} launches", "us", [microseconds(driver, launches)])]
    launches.overlap(False)
    records.append(Record.of(f"window of {n}, launches in turn", "us", [microseconds(driver, launches)]))
    launches.overlap(True)
    for percent in (50, -1, WINDOW_SHARED):  # the last one is what kernels have
        launches.prefer_shared(percent)
        times = [microseconds(driver, launches)]
        records.append(Record.of(f"window of {n}, {percent} % of the first cache as shared memory", "us", times))
    return records


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pack", type=Path, required=True)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 2, 4, 8], help="sequences of a window (1 2 4 8)")
    parser.add_argument("--depth", type=int, nargs="*", default=[0], help="tokens that each has read before (0)")
    parser.add_argument("--steps", type=int, default=256, help="windows of a run (256)")
    parser.add_argument("--runs", type=int, default=3, help="runs of each case (3)")
    parser.add_argument("--check", type=int, default=24, help="windows that are compared first (24)")
    parser.add_argument(
        "--launches",
        type=int,
        nargs="*",
        default=[],
        help="rows of windows to run in other ways too",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    args = parser.parse_args(argv)
    console = Console()
    if not 1 <= min(args.rows) <= max(args.rows) <= WINDOW_ROWS:
        console.print(f"--rows: 1 to {WINDOW_ROWS}")
        return 2
    pack, most = open_pack(args.pack), max(*args.depth, CHECKED_DEPTH) + WARM_STEPS + args.runs * args.steps + 8
    device = CudaDevice()
    chunks = [n for n in AUTO_CHUNKS if n <= max(32, *args.depth)]
    resident = Resident(pack, device, max_context=most, n_slots=max(args.rows), chunks=chunks)
    records: list[Record] = []
    checks = [check(resident, n, args.check) for n in args.rows if args.check]
    for depth in args.depth:
        for n in args.rows:
            decode = Decode(resident, n, depth)
            decode.run(WARM_STEPS)
            runs = [decode.run(args.steps) for _ in range(args.runs)]
            name = f"windows of {n}" + (f" @ {depth}" if depth else "")
            rates = [n * args.steps / run.whole for run in runs]
            records.append(Record.of(name, "tok/s", rates, TARGET.get((n, depth), "")))
            host = [run.host / args.steps * 1e6 for run in runs]
            records.append(Record.of(f"{name}, host", "us a window", host))
            for part in ("reserve", "step", "advance"):
                spent = [run.parts[part] / args.steps * 1e6 for run in runs]
                records.append(Record.of(f"{name}, host: {part}", "us a window", spent))
            records.append(Record.of(f"{name}, host: graph launch", "us a launch", graph_launches(resident, decode)))
    for n in args.launches:
        records += ways(resident, n)
    flags = {"card": device.name, "steps": args.steps}
    report = Report(tool="windows_cuda", records=records, checks=checks, flags=flags, pack=pack_facts(args.pack))
    show(report, console)
    for each in checks:
        console.print(f"{'ok' if each.ok else 'DIFFERS'}: {each.name} ({each.detail})")
    if args.json:
        report.write(args.json)
    return 0 if all(each.ok for each in checks) else 1


if __name__ == "__main__":
    sys.exit(main())

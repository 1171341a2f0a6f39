"""Where the blocks of a decode window are when.

    python -m strata.bench.window_trace_cuda --pack model.gguf [--rows 1] [--json FILE]

The kernels of a decode window are compiled with records (trace.cuh): every block notes its multiprocessor's clock at
its first line, when it begins to wait for the kernel before, when it need not wait any more, and at marks behind that.
They run as the engine runs them, one graph with launches that overlap. The table has a row for each kernel: what a
launch adds to the window, from the last block of the launch before to its own last one, and after how many microseconds
of that the middle and the last block reached each mark. A record is made before a block waits, which takes half a
microsecond where nothing hides it: the window's time without records stands beside the whole.

Errors   exit code 2 where the pack cannot be opened
Cost     half a minute on an H200 beside the load of the pack, most of it for the compiler
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from rich.console import Console

from strata.bench.report import Record, Report, finish, pack_facts
from strata.bench.window_launches import ADVANCES, Launches, microseconds
from strata.bench.window_trace import WORDS, Clocks, Row, launch_times, set_clocks, summary
from strata.bench.windows_cuda import CHECKED_DEPTH, WARM_STEPS, Decode, launches_of
from strata.engine.device.cuda import CudaDevice
from strata.engine.flags import WINDOW_ROWS
from strata.engine.model.resident import AUTO_CHUNKS, Resident
from strata.engine.pack import PackError, open_pack
from strata.kernels.cuda import card, compile, precompile

MOST_RECORDS = 1 << 18
SAMPLES = 24
"""Of each multiprocessor's clock, a microsecond or so apart."""
WARM_REPLAYS = 5
DEFINE = "TRACED"
NAMES: dict[str, tuple[str, ...]] = {
    "hyper_down": ("y there", "normed", "quantised", "terms", "sum"),
    "hyper_window": ("normed", "inputs quantised", "gates", "mean"),
    "product_row": ("inputs quantised", "work", "all warps"),
    "product_row_beside": (
        "inputs quantised",
        "shared expert",
        "work",
        "all warps",
        "joined",
        "picks found",
        "bytes sent for",
    ),
    "product_window": ("inputs quantised", "work"),
    "route_window": ("products", "last block", "picked"),
    "gdn_slots": ("convolved", "delta rule"),
}
"""Marks behind READY."""
UNTRACED = ("sample.cu",)
"""Sources whose shared memory has no room for a word more: their time is in the step of the kernel before."""


class Traced:
    """Kernels with records, each source and its constants by a number, and the memory where the records go."""

    def __init__(self) -> None:
        import cupy

        self.numbers: dict[tuple[Any, ...], int] = {}
        self.of_kernel: dict[int, int] = {}
        self.memory = cupy.zeros(((MOST_RECORDS + 1), WORDS), np.uint64)
        self._kernel = compile._kernel
        cupy.cuda.Device().synchronize()  # its zeros are there for every stream

    def constants(self, source: str, constants: tuple[tuple[str, int | str], ...]) -> tuple[tuple[str, int | str], ...]:
        number = self.numbers.setdefault((source, tuple(sorted(constants))), len(self.numbers) + 1)
        return tuple(sorted((*constants, (DEFINE, number))))

    def kernel(self, source: str, name: str, constants: tuple[tuple[str, int | str], ...]) -> Any:
        import cupy

        if source in UNTRACED:
            return self._kernel(source, name, constants)
        own = self.constants(source, constants)
        kernel = self._kernel(source, name, own)
        self.of_kernel[id(kernel)] = dict(own)[DEFINE]  # type: ignore[assignment]
        pointer = compile._module(source, own).get_global("trace_to")
        cupy.ndarray((1,), np.uint64, pointer).fill(self.memory.data.ptr)
        return kernel

    @contextmanager
    def in_use(self) -> Iterator[None]:
        with mock.patch.object(compile, "_kernel", self.kernel):
            yield

    def compile(self, work: Callable[[], Any]) -> None:
        """The kernels that the work launches, by several processes."""
        with compile.collecting() as jobs:
            work()
        traced = [(source, self.constants(source, c)) for source, c in jobs if source not in UNTRACED]
        precompile.compile_missing(traced, card.card().arch)

    def records(self) -> np.ndarray[Any, Any]:
        taken = self.memory.get()
        count = int(taken[0, 0])
        if count > MOST_RECORDS:
            raise ValueError(f"{count} records, room for {MOST_RECORDS}")
        return np.ascontiguousarray(taken[1 : count + 1])


def clocks() -> Clocks:
    """Of this card, now."""
    import cupy

    n = card.card().multiprocessors
    samples = cupy.zeros((n, SAMPLES, 2), np.uint64)
    kernel = compile.load_kernel("trace_clocks.cu", "trace_clocks")
    kernel((n,), (32,), (samples, np.int32(SAMPLES)), shared_mem=card.card().shared_block - 1024)
    return Clocks.of(samples.get())


def traced(resident: Resident, n: int, console: Console) -> list[Record]:
    """A window of n sequences."""
    decode = Decode(resident, n, CHECKED_DEPTH)
    driver, real = resident.device.driver, launches_of(resident, decode)
    without, trace = microseconds(driver, real), Traced()

    def compute() -> Any:
        return resident.windows.compute(decode.ticket.layout)

    trace.compile(compute)
    with trace.in_use():
        launches = Launches.planned(compute, real)
    graph = driver.capture(launches.queue)
    for _ in range(WARM_REPLAYS):
        trace.memory.fill(0)
        graph.launch()
    driver.synchronize()
    time = clocks()
    records = trace.records()
    queued = [each for each in launches if each.label != ADVANCES and id(each.kernel) in trace.of_kernel]
    kernels = [trace.of_kernel[id(launch.kernel)] for launch in queued]
    blocks = [math.prod(each.grid) for each in queued]
    times = launch_times(records, set_clocks(records, time.nanoseconds(records), kernels, blocks), kernels, blocks)
    rows = summary(times, [each.label for each in queued], NAMES)
    whole = sum(row.us * row.launches for row in rows)
    console.print(f"window of {n}: {len(queued)} launches with records, {without:.0f} us, with them {whole:.0f}")
    show(rows, whole, console)
    out = [
        Record.of(f"window of {n}, {len(queued)} launches", "us", [without]),
        Record.of(f"window of {n} with records, behind its first launch", "us", [whole]),
    ]
    return out + [record for row in rows for record in of_row(n, row)]


def of_row(n: int, row: Row) -> Iterator[Record]:
    what = f"window of {n}, {row.label}"
    yield Record.of(f"{what}, {row.launches} steps of", "us", [row.us])
    for name, middle, last in row.marks:
        yield Record.of(f"{what}: {name}, middle block", "us", [middle])
        yield Record.of(f"{what}: {name}, last block", "us", [last])


def show(rows: list[Row], whole: float, console: Console) -> None:
    for row in sorted(rows, key=lambda row: -row.us * row.launches):
        share = 100 * row.us * row.launches / whole
        said = "   ".join(f"{name} {middle:.2f} / {last:.2f}" for name, middle, last in row.marks)
        console.print(
            f"{row.launches:4d} x {row.us:6.2f} us = {share:4.1f} %  {row.label}", markup=False, highlight=False
        )
        console.print(f"        {said}", markup=False, highlight=False)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="window_trace_cuda", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pack", type=Path, required=True, help="the GGUF file")
    parser.add_argument("--rows", type=int, nargs="*", default=[1], help="sequences of a window (1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    args = parser.parse_args(argv)
    console = Console(width=200)
    if not args.rows or not 1 <= min(args.rows) <= max(args.rows) <= WINDOW_ROWS:
        parser.error(f"--rows: 1 to {WINDOW_ROWS}")
    try:
        pack = open_pack(args.pack)
    except (OSError, PackError) as error:
        console.print(str(error), markup=False)
        return 2
    chunks = [n for n in AUTO_CHUNKS if n <= CHECKED_DEPTH]
    resident = Resident(
        pack, CudaDevice(), max_context=CHECKED_DEPTH + 2 * WARM_STEPS, n_slots=max(args.rows), chunks=chunks
    )
    records = [record for n in args.rows for record in traced(resident, n, console)]
    report = Report(tool="window_trace_cuda", records=records, flags={"rows": args.rows}, pack=pack_facts(args.pack))
    return finish(report, args.json, Console(width=160))


if __name__ == "__main__":
    sys.exit(main())

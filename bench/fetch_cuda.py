"""What windows pay for experts that lie in RAM: read in place by the products, or brought to the card before them.

    python -m strata.bench.fetch_cuda [--experts 1 4 10 40] [--types IQ3_S IQ3_S IQ4_NL] [--json FILE]

A layer's experts lie in page-locked RAM. First of all, one row's mixture is computed both ways, and the bits must be
the same. Then, for so many different experts of a row: a copy of their bytes by the driver, the copying kernel cut in
several ways, and the whole mixture both ways, each as a captured graph. Some 15 s beside compilation.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console

from strata.bench.report import Check, Record, Report, show
from strata.bench.synthetic import blocks
from strata.engine.device.driver import Array, CupyDriver
from strata.engine.experts.placement import ExpertSize
from strata.kernels.cuda.arguments import address
from strata.kernels.cuda.fetch import Stage
from strata.kernels.cuda.mixture import Bank, mixture
from strata.kernels.cuda.workspace import Workspace
from strata.kernels.formats import BY_NAME

CUTS = ((4, 1), (4, 2), (4, 4), (8, 1), (8, 2), (2, 2), (2, 8))
"""Words of 16 bytes that a thread has under way, blocks of a multiprocessor."""
RUNS = 15
MOST_PAIRS = 80


class Layer:
    """`stored` experts of one layer in page-locked RAM, all with the same bytes but their own places."""

    def __init__(self, driver: CupyDriver, types: Sequence[str], inner: int, width: int, stored: int) -> None:
        import cupy

        self.cupy, self.driver, rng = cupy, driver, np.random.default_rng(1)
        kinds = [BY_NAME[name] for name in types]
        shapes = [(inner, width), (inner, width), (width, inner)]
        each = [blocks(k, r * c // k.block, 0.02, rng).reshape(-1) for k, (r, c) in zip(kinds, shapes, strict=True)]
        size = ExpertSize(*(data.size for data in each))
        self.n_bytes, self.width, self.stored = size.n_bytes, width, stored
        self.ram = driver.pinned(stored * size.n_bytes)
        experts = self.ram.reshape(stored, size.n_bytes)
        for data, begin in zip(each, size.begins, strict=True):
            experts[:, begin : begin + data.size] = data
        experts[:, :2] ^= np.arange(stored, dtype=np.uint16).view(np.uint8).reshape(stored, 2) & 7  # not all the same
        base = address(driver.mapped(self.ram)) + size.n_bytes * np.arange(stored)
        tables = [cupy.asarray((base + begin).astype(np.uint64)) for begin in size.begins]
        self.plain = [Bank(k, r, c, table) for k, (r, c), table in zip(kinds, shapes, tables, strict=True)]
        self.staging = driver.allocate(MOST_PAIRS * size.n_bytes)
        self.stage = Stage(self.staging, MOST_PAIRS, size.n_bytes, size.begins, 0, 0)
        self.workspace = Workspace(driver.allocate(64 << 20))
        self.weights = cupy.full(MOST_PAIRS, 0.1, np.float32)
        self.x = cupy.asarray(rng.standard_normal((1, width)).astype(np.float32))

    def ids(self, n: int, first: int) -> Array:
        return self.cupy.asarray(((first + 7 * np.arange(n)) % self.stored).astype(np.int32).reshape(1, n))

    def mixture(self, ids: Array, fetched: bool) -> Array:
        gate, up, down = self.plain
        gate = replace(gate, stage=self.stage) if fetched else gate
        weights = self.weights[: ids.size].reshape(ids.shape)
        self.workspace.release(0)
        return mixture(self.workspace, gate, up, down, self.x, ids, weights)

    def fetch(self, ids: Array, each: int, per: int) -> None:
        self.workspace.release(0)
        self.stage.fetch(self.workspace, ids, tuple(bank.addresses for bank in self.plain), each, per)

    def times(self, work: Callable[[Array], object], n: int) -> list[float]:
        """Microseconds of a replay for fresh experts each time."""
        found, ids = [], self.ids(n, 0)
        work(ids)  # compiles
        self.driver.synchronize()
        graph = self.driver.capture(lambda: _do(work, ids))
        for run in range(RUNS + 2):
            ids[...] = self.ids(n, 1 + 97 * run)
            begin, end = self.cupy.cuda.Event(), self.cupy.cuda.Event()
            begin.record()
            graph.launch()
            end.record()
            end.synchronize()
            found.append(self.cupy.cuda.get_elapsed_time(begin, end) * 1e3)
        return found[2:]

    def copy_times(self, n: int) -> list[float]:
        size, found = n * self.n_bytes, []
        for run in range(RUNS + 2):
            at = run * size % (self.ram.size - size)
            begin, end = self.cupy.cuda.Event(), self.cupy.cuda.Event()
            begin.record()
            self.driver.upload(self.staging[:size], self.ram[at : at + size])
            end.record()
            end.synchronize()
            found.append(self.cupy.cuda.get_elapsed_time(begin, end) * 1e3)
        return found[2:]


def _do(work: Callable[[Array], object], ids: Array) -> None:
    work(ids)


def run(args: argparse.Namespace, console: Console) -> int:
    layer, records = Layer(CupyDriver(), args.types, args.inner, args.width, args.stored), []
    got = [layer.cupy.asnumpy(layer.mixture(layer.ids(10, 3), way)) for way in (False, True)]
    same = bool((got[0].view(np.uint32) == got[1].view(np.uint32)).all() and np.isfinite(got[0]).all())

    def record(work: str, times: list[float], n_bytes: int) -> None:
        records.append(Record.of(work, "us", times))
        records.append(Record.of(work, "GB/s", [n_bytes / t / 1e3 for t in times]))

    for n in args.experts:
        n_bytes = n * layer.n_bytes
        record(f"{n} experts, copied by the driver", layer.copy_times(n), n_bytes)
        for each, per in CUTS:
            name = f"{n} experts, {each} x 16 bytes a thread, {per} blocks"
            record(name, layer.times(partial(layer.fetch, each=each, per=per), n), n_bytes)
        for fetched in (False, True):
            name = f"{n} experts, mixture, {'brought over' if fetched else 'read in place'}"
            record(name, layer.times(partial(layer.mixture, fetched=fetched), n), n_bytes)
    flags = {"types": args.types, "inner": args.inner, "width": args.width, "stored": args.stored}
    report = Report(
        tool="fetch-cuda", records=records, flags=flags, checks=[Check("both ways have the same bits", same)]
    )
    show(report, console)
    if args.json:
        report.write(args.json)
    return 0 if same else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", nargs=3, default=["IQ3_S", "IQ3_S", "IQ4_NL"], metavar="T", help="gate, up and down")
    parser.add_argument("--width", type=int, default=2560, help="of the model (2560)")
    parser.add_argument("--inner", type=int, default=640, help="hidden values of an expert (640)")
    parser.add_argument("--stored", type=int, default=512, help="experts in RAM (512)")
    parser.add_argument("--experts", type=int, nargs="*", default=[1, 4, 10, 40], help="of a row (1 4 10 40)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    return run(parser.parse_args(), Console())


if __name__ == "__main__":
    raise SystemExit(main())

"""Kernels of a card, one by one: each is checked against the written arithmetic first, then timed.

    python -m strata.bench.kernels_cuda --out results.json [--only window,experts]

Timed with events around replays of a graph that holds many launches, over enough copies of the weights to leave the
cache; a figure is the median of the replays. Window figures are GB/s of weight bytes and their share of what a plain
read of device memory reaches in the same run. Products of prompts: prompt_products_cuda.py.

Shapes   those of the model: hidden 2560, 10240 channels, experts 640 wide, 512 of them, 10 used
Errors   exit code 1 and the case when a result differs from the written arithmetic in any bit
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from strata.bench.report import Record, Report, show
from strata.kernels.cuda import card as cards
from strata.kernels.cuda import mixture, plans, product
from strata.kernels.cuda.plans import UNTUNED, Tuning
from strata.kernels.cuda.workspace import Workspace
from strata.kernels.formats import BY_NAME, TensorType, Weight
from strata.kernels.reference.linear import ordered_linear

CACHE_BYTES = 128 << 20
"""Weights of a timed case are at least this large together: twice the largest cache."""
REPLAYS = 9


class Bench:
    """Device memory, a stream, and the records so far."""

    def __init__(self, console: Console) -> None:
        import cupy

        self.cp = cupy
        self.console = console
        self.stream = cupy.cuda.Stream()
        self.rng = np.random.default_rng(7)
        self.records: list[Record] = []
        self.workspace = Workspace(cupy.empty(3 << 30, cupy.uint8))
        self.made: dict[tuple[str, int, int], list[Weight]] = {}
        self.peak = self.read_rate()

    # --------------------------------------------------------------------------------------------------------- tools

    def times(self, launches: Sequence[Callable[[], Any]], replays: int = REPLAYS) -> list[float]:
        """Microseconds of one launch, one figure for each replay of a graph of all launches."""
        with self.stream:
            for launch in launches:
                launch()
            self.cp.cuda.Device().synchronize()
            self.stream.begin_capture()
            for launch in launches:
                launch()
            graph = self.stream.end_capture()
            graph.launch()
            self.stream.synchronize()
            result = []
            for _ in range(replays):
                begin, end = self.cp.cuda.Event(), self.cp.cuda.Event()
                begin.record()
                graph.launch()
                end.record()
                end.synchronize()
                result.append(self.cp.cuda.get_elapsed_time(begin, end) * 1e3 / len(launches))
        return result

    def read_rate(self) -> float:
        """GB/s of reading device memory once."""
        a, out = self.cp.zeros(2 << 30, self.cp.uint8), self.cp.zeros(1, self.cp.uint32)
        kernel = self.cp.RawKernel(READ, "read_all")
        count = np.int64(a.nbytes // 16)
        us = min(self.times([lambda: kernel((132 * 16,), (512,), (a, out, count))] * 4))
        return float(a.nbytes / us / 1e3)

    def blocks(self, kind: TensorType, shape: tuple[int, ...]) -> Any:
        """Random bytes of a type on the device, with scales of ordinary size."""
        cp = self.cp
        n = int(np.prod(shape)) // kind.block
        if kind.is_float:
            values = cp.random.standard_normal(n, cp.float32) * np.float32(0.02)
            if kind.name == "BF16":
                return (values.view(cp.uint32) >> 16).astype(cp.uint16).view(cp.uint8)
            return values.astype(cp.float16 if kind.name == "F16" else cp.float32).view(cp.uint8)
        data = cp.random.randint(0, 256, (n, kind.block_bytes), dtype=cp.uint8)
        half = cp.asarray(np.array([0.01], np.float16).view(np.uint8))
        for at in SCALES_AT.get(kind.name, (0,)):
            data[:, at : at + 2] = half
        if kind.name == "MXFP4":
            data[:, 0] = 120
        return data

    def weight(self, name: str, *shape: int) -> Weight:
        kind = BY_NAME[name]
        return Weight(kind, shape, self.blocks(kind, shape).reshape(*shape[:-1], kind.row_bytes(shape[-1])))

    def inputs(self, n: int, cols: int) -> Any:
        return self.cp.asarray(self.rng.standard_normal((n, cols)).astype(np.float32))

    def bank(self, w: Weight) -> mixture.Bank:
        return mixture.Bank(w.type, w.rows, w.cols, self.cp.asarray(mixture.stack_addresses(w)))

    def add(self, work: str, unit: str, values: Sequence[float], more: str = "") -> None:
        record = Record.of(work, unit, values)
        self.records.append(record)
        self.console.print(f"{work:<64} {record.median:9.2f} {unit:<7} {record.min:9.2f} {record.max:9.2f}  {more}")

    def host(self, w: Weight) -> Weight:
        return Weight(w.type, w.shape, self.cp.asnumpy(w.data))

    # -------------------------------------------------------------------------------------------------------- checks

    def check(self, w: Weight, n: int, tuning: Tuning = UNTUNED, rows: int = 48) -> None:
        """A product of a few weight rows against the written order. Exits when a bit differs."""
        part = Weight(w.type, (rows, w.cols), w.data.reshape(-1, w.data.shape[-1])[:rows])
        x = self.inputs(n, w.cols)
        with self.stream, self.workspace.scratch():
            (y,) = product.linear(self.workspace, [part], x, tuning=tuning)
            self.stream.synchronize()
            got = self.cp.asnumpy(y)
        (want,) = ordered_linear([self.host(part)], self.cp.asnumpy(x))
        if not np.array_equal(got.view(np.uint32), want.view(np.uint32)):
            wrong = int((got.view(np.uint32) != want.view(np.uint32)).sum())
            raise SystemExit(f"{w.type.name} {rows} x {w.cols}, {n} rows: {wrong} of {got.size} results differ")

    # --------------------------------------------------------------------------------------------------------- cases

    def window(self, name: str, rows: int, cols: int, n: int, tuning: Tuning = UNTUNED, note: str = "") -> None:
        """One matrix and n rows."""
        if (name, rows, cols) not in self.made:
            self.made.clear()
            w = self.weight(name, rows, cols)
            copies = max(2, -(-CACHE_BYTES // w.data.nbytes))
            self.made[name, rows, cols] = [w] + [Weight(w.type, w.shape, w.data.copy()) for _ in range(copies - 1)]
        weights = self.made[name, rows, cols]
        first = weights[0]
        self.check(first, n, tuning)
        x = self.inputs(n, cols)

        def launch(w: Weight) -> None:
            with self.workspace.scratch():
                product.linear(self.workspace, [w], x, tuning=tuning)

        us = self.times([lambda w=w: launch(w) for w in weights])  # type: ignore[misc]
        rates = [first.data.nbytes / t / 1e3 for t in us]
        share = 100 * float(np.median(rates)) / self.peak
        self.add(
            f"window {name} {rows}x{cols} n={n}{note}", "GB/s", rates, f"{share:4.0f} %  {float(np.median(us)):7.2f} us"
        )

    def experts(
        self, types: tuple[str, str], n: int, layers: int = 4, tuning: Tuning = UNTUNED, note: str = ""
    ) -> None:
        """The mixture of one layer: n rows, 10 of 512 experts each."""
        kinds = (types[0], types[0], types[1])
        shapes = ((512, 640, 2560), (512, 640, 2560), (512, 2560, 640))
        stacks = [[self.weight(kind, *shape) for kind, shape in zip(kinds, shapes, strict=True)] for _ in range(layers)]
        banks = [[self.bank(w) for w in stack] for stack in stacks]
        picks = [
            self.cp.asarray(np.stack([self.rng.permutation(512)[:10] for _ in range(n)]).astype(np.int32))
            for _ in range(layers)
        ]
        weights = self.cp.asarray(self.rng.random((n, 10)).astype(np.float32))
        x = self.inputs(n, 2560)

        def launch(i: int) -> None:
            gate, up, down = banks[i]
            with self.workspace.scratch():
                mixture.mixture(self.workspace, gate, up, down, x, picks[i], weights, tuning=tuning)

        us = self.times([lambda i=i: launch(i) for i in range(layers)])  # type: ignore[misc]
        label = f"experts {types[0]}/{types[1]} n={n}{note}"
        if n > plans.WINDOW_ROWS:
            macs = n * 10 * 3 * 640 * 2560
            self.add(label, "TMAC/s", [macs / t / 1e6 for t in us], f"{float(np.median(us)):9.1f} us")
            return
        one = sum(w.data.nbytes for w in stacks[0]) / 512
        unique = float(np.mean([len(np.unique(self.cp.asnumpy(p))) for p in picks]))
        rates = [unique * one / t / 1e3 for t in us]
        share = 100 * float(np.median(rates)) / self.peak
        self.add(label, "GB/s", rates, f"{share:4.0f} %  {float(np.median(us)):7.2f} us")


READ = r"""
extern "C" __global__ void read_all(const uint4* a, unsigned* out, long long n) {
    unsigned x = 0;
    const long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n; i += 4 * step) {
        uint4 v[4];
#pragma unroll
        for (int k = 0; k < 4; k++) v[k] = i + k * step < n ? a[i + k * step] : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int k = 0; k < 4; k++) x ^= v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
    }
    if (x == 12345) *out = x;
}
"""
"""Reads everything, writes nothing."""

SCALES_AT = {
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "IQ4_NL_CARD": (0, 2, 4, 6),
    "Q6_K_CARD": (208,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ1_M": (),
}
"""Byte offsets of a block's half-precision numbers, where they are not its first two bytes."""

DENSE_SHAPES = ((10240, 2560), (6144, 2560), (2560, 6144), (2560, 2560), (320, 10240))


def windows(bench: Bench) -> None:
    """Large matrices of every common type, then the model's shapes."""
    for name in ("Q6_K", "Q5_K", "Q8_0", "Q4_K", "IQ4_NL", "IQ3_S", "Q2_0", "IQ2_XS", "Q2_K", "BF16"):
        for n in (1, 8):
            bench.window(name, 65536, 2560, n)
    bench.window("Q6_K", 65536, 2560, 16)
    for rows, cols in DENSE_SHAPES:
        for n in (1, 8):
            bench.window("Q6_K", rows, cols, n)
    for n in (1, 8):
        bench.window("F32", 512, 2560, n)


def mixtures(bench: Bench) -> None:
    for n in (1, 2, 4, 8):
        bench.experts(("IQ3_S", "IQ4_NL"), n)
    for n in (512, 2048, 8192):
        bench.experts(("IQ3_S", "IQ4_NL"), n, layers=1)


SECTIONS: dict[str, Callable[[Bench], None]] = {
    "window": windows,
    "experts": mixtures,
}


def chosen(args: argparse.Namespace) -> Iterator[str]:
    names = args.only.split(",") if args.only else list(SECTIONS)
    for name in names:
        if name not in SECTIONS:
            raise SystemExit(f"--only knows {', '.join(SECTIONS)}, not {name}")
        yield name


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the records here as JSON")
    parser.add_argument("--only", help=f"sections, by comma: {', '.join(SECTIONS)}")
    args = parser.parse_args(argv)
    console = Console(width=140)
    bench = Bench(console)
    device = bench.cp.cuda.runtime.getDeviceProperties(0)["name"].decode()
    console.print(f"{device}: {cards.card()}, read {bench.peak:.0f} GB/s")
    flags = {"card": device, "read_gb_s": round(bench.peak), "sections": list(chosen(args))}
    for name in chosen(args):
        SECTIONS[name](bench)
        if args.out:
            Report(tool="kernels_cuda", records=bench.records, flags=flags).write(args.out)
    show(Report(tool="kernels_cuda", records=bench.records, flags=flags), console)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Products of a prompt on a card: the model's matrices and experts, and what the card could give.

    python -m strata.bench.prompt_products_cuda --out results.json [--only ceiling,dense,hyper,experts] [--cuts]

Every product is first compared, bit for bit, with the window product of some of its rows; other cuts are compared with
all of the chosen one. A figure is the time of one
kernel between two events, so it holds no other launch; TMAC/s are 10^12 multiply-adds a second. The ceiling is
measured: matrix steps whose sums are scaled and added, with all operands in registers. --cuts times
other cuts beside the chosen one.

Shapes   those of the model, 2,048 and 8,192 rows; 512 experts with 10 of them picked at random for a row
Errors   exit code 1 and the case when a bit differs
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from strata.bench.kernels_cuda import Bench
from strata.bench.report import Report, show
from strata.kernels.cuda import arguments, compile, hyper, mixture, product, prompt_plans, wide
from strata.kernels.cuda import card as cards
from strata.kernels.cuda.plans import DENSE, GATE_UP, PAIRS, order
from strata.kernels.cuda.prompt_plans import CUTS, Cut, expected, fitted, prompt_plan
from strata.kernels.formats import BY_NAME
from strata.kernels.ops import Hyper

SECTIONS = ("ceiling", "dense", "hyper", "experts")
ROWS = (8192, 2048)
DENSE_SHAPES = (
    ("Q6_K_CARD", 16384, 2560), ("Q6_K_CARD", 2560, 6144), ("Q6_K", 320, 10240), ("Q8_0", 10240, 320),
    ("Q8_0", 640, 2560), ("Q6_K", 16384, 2560), ("Q5_K", 16384, 2560), ("Q8_0", 16384, 2560),
    ("IQ3_S", 16384, 2560), ("IQ4_NL", 16384, 2560),
)  # fmt: skip
SWEPT = DENSE_SHAPES[:5]
EXPERTS, USED, HIDDEN, INNER, STREAMS, RANK = 512, 10, 2560, 640, 4, 320
EXPERT_TYPES = ("IQ3_S_CARD", "IQ4_NL_CARD")
"""Of gate and up, of down, as a card keeps them."""
TRIED = (*CUTS[:9], Cut(64, 2, 4, 3), Cut(64, 2, 3, 2))
CHECKED = 8
REPEATS = 5
MODULES = (arguments, compile, mixture, product, wide)
"""Modules that ask for kernels."""

Kernels = set[tuple[str, str, tuple[tuple[str, int | str], ...]]]


# ------------------------------------------------------------------------------------------------------------ compiling


def kernels_of(cuts: tuple[Cut, ...], only: set[str], types: tuple[str, str]) -> Kernels:
    """(source, name, constants) of the prompt kernels that will be asked for, beside the small ones."""
    card, found = cards.card(), set()

    def add(kind: str, mode: str, rows: int, cols: int, n: int, cut: Cut | None) -> None:
        t = BY_NAME[kind]
        plan = fitted(card, t, cut) if cut else prompt_plan(card, t, mode, (rows,), cols, n)
        if plan:
            constants = plan.constants(t, mode, BY_NAME[types[1]] if mode == GATE_UP else None)
            found.add(("product_prompt.cu", "product_prompt", tuple(sorted(constants.items()))))

    for n in ROWS:
        if "dense" in only:
            for kind, rows, cols in DENSE_SHAPES:
                add(kind, DENSE, rows, cols, n, None)
            for swept in cuts:
                for kind, rows, cols in SWEPT:
                    add(kind, DENSE, rows, cols, n, swept)
        if "experts" in only:
            for cut in (None, *cuts):
                add(types[0], GATE_UP, INNER, HIDDEN, expected(n * USED, EXPERTS), cut)
                add(types[1], PAIRS, HIDDEN, INNER, expected(n * USED, EXPERTS), cut)
    for kind in dict.fromkeys(kind for kind, _, _ in DENSE_SHAPES):
        constants: dict[str, int | str] = {"INPUT_ORDER": order(BY_NAME[kind]), "SUMS": BY_NAME[kind].sums}
        found.add(("quantize.cu", "quantize", tuple(sorted(constants.items()))))
    return found


def load(kernel: tuple[str, str, tuple[tuple[str, int | str], ...]]) -> None:
    """Compile one kernel into the cache on disk."""
    source, name, constants = kernel
    compile.load_kernel(source, name, **dict(constants))


def compile_all(kernels: Kernels) -> None:
    """The compiler works on one source at a time, so each process takes some."""
    workers = max(1, min(len(kernels), (os.cpu_count() or 2) - 1, 14))
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        list(pool.map(load, sorted(kernels)))


# --------------------------------------------------------------------------------------------------------------- timing


class Recorder:
    """Events around every launch while it is in place."""

    def __init__(self, cp: Any) -> None:
        self._cp = cp
        self._load = compile.load_kernel
        self.events: list[tuple[str, Any, Any]] = []

    def __call__(self, source: str, name: str, **constants: int | str) -> Callable[..., None]:
        kernel = self._load(source, name, **constants)
        label = " ".join(str(part) for part in (name, constants.get("MODE"), constants.get("TYPE")) if part)

        def launched(*arguments: Any, **more: Any) -> None:
            begin, end = self._cp.cuda.Event(), self._cp.cuda.Event()
            begin.record()
            kernel(*arguments, **more)
            end.record()
            self.events.append((label, begin, end))

        return launched

    def take(self) -> dict[str, float]:
        """Milliseconds of each kernel since the last call."""
        self._cp.cuda.get_current_stream().synchronize()
        found: dict[str, float] = defaultdict(float)
        for label, begin, end in self.events:
            found[label] += self._cp.cuda.get_elapsed_time(begin, end)
        self.events.clear()
        return found


def milliseconds(bench: Bench, call: Callable[[], Any]) -> dict[str, list[float]]:
    """Of each kernel of a call: one figure a repeat."""
    recorder = Recorder(bench.cp)
    before = [module.load_kernel for module in MODULES]
    for module in MODULES:
        module.load_kernel = recorder  # type: ignore[attr-defined]
    try:
        found: dict[str, list[float]] = defaultdict(list)
        for repeat in range(REPEATS + 1):
            with bench.workspace.scratch():
                call()
            for label, ms in recorder.take().items():
                if repeat:
                    found[label].append(ms)
        return found
    finally:
        for module, load_kernel in zip(MODULES, before, strict=True):
            module.load_kernel = load_kernel  # type: ignore[attr-defined]


def product_of(ms: dict[str, list[float]], mode: str) -> list[float]:
    """The figures of the product in this mode, whichever kernel it was."""
    products = [k for k in ms if k == "prompt_wide" or (k.startswith("product_") and k.split()[1] == mode)]
    return ms[products[0]]


@contextmanager
def cut_to(cut: Cut | None) -> Iterator[None]:
    """Plans take this cut and no other; None leaves the choice to them."""
    before = prompt_plans.CUTS
    prompt_plans.CUTS = (cut,) if cut else before  # type: ignore[misc, assignment]
    prompt_plan.cache_clear()
    try:
        yield
    finally:
        prompt_plans.CUTS = before  # type: ignore[misc]
        prompt_plan.cache_clear()


def named(cut: Cut | None) -> str:
    return f" {cut.rows}x{cut.columns} warps of {16 * cut.sixteens}x{8 * cut.eights} x{cut.blocks}" if cut else ""


# ------------------------------------------------------------------------------------------------------------- products


class Products:
    """Cases, each checked and then timed. `ceiling`: measured TMAC/s by group of a format."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.ceiling: dict[int, float] = {}
        self.weights: dict[tuple[str, int, int], Any] = {}
        self.inputs: dict[tuple[int, int], Any] = {}
        self.wrong: list[str] = []
        """Cases with other bits."""
        self.chosen: Any = None
        """The result of the last case that was cut as the plan wants."""

    def _inputs(self, n: int, cols: int) -> Any:
        if (n, cols) not in self.inputs:
            self.inputs[n, cols] = self.bench.inputs(n, cols)
        return self.inputs[n, cols]

    def _same(self, got: Any, want: Any, case: str) -> bool:
        wrong = int((got.view(np.uint32) != want.view(np.uint32)).sum())
        if wrong:
            first = np.unravel_index(int((got.view(np.uint32) != want.view(np.uint32)).argmax()), got.shape)
            values = f"{float(got[first]):g} for {float(want[first]):g}"
            self.wrong.append(f"{case}: {wrong} of {got.size} values differ, first {values} at {first}")
        return not wrong

    def _add(self, case: str, ms: list[float], macs: float, group: int) -> None:
        rates = [macs / t / 1e9 for t in ms]
        of = self.ceiling.get(group)
        share = f"{100 * float(np.median(rates)) / of:4.0f} % of {of:.0f}" if of else ""
        self.bench.add(case, "TMAC/s", rates, f"{float(np.median(ms)):8.3f} ms  {share}")

    def dense(self, kind: str, rows: int, cols: int, n: int, cut: Cut | None = None) -> None:
        bench, key = self.bench, (kind, rows, cols)
        if cut and not fitted(cards.card(), BY_NAME[kind], cut):
            return
        if key not in self.weights:
            self.weights[key] = bench.weight(kind, rows, cols)
        w, x = self.weights[key], self._inputs(n, cols)
        case = f"dense {kind} {n}x{rows}x{cols}{named(cut)}"
        with cut_to(cut):
            with bench.workspace.scratch():
                (got,) = product.linear(bench.workspace, [w], x)
                if cut and not self._same(got, self.chosen, case):
                    return
                for begin in () if cut else (0, n // 2 - 3, n - CHECKED):
                    (want,) = product.linear(bench.workspace, [w], x[begin : begin + CHECKED])
                    self._same(got[begin : begin + CHECKED], want, case)
                if not cut:
                    self.chosen = got.copy()
            ms = milliseconds(bench, lambda: product.linear(bench.workspace, [w], x))
        self._add(case, product_of(ms, DENSE), n * rows * cols, BY_NAME[kind].group)
        if not cut and rows >= HIDDEN:
            bench.add(f"quantize {kind} {n}x{cols}", "us", [1e3 * t for t in ms["quantize"]])

    def experts(self, banks: list[mixture.Bank], n: int, cut: Cut | None = None) -> None:
        bench, (gate, up, down) = self.bench, banks
        if cut and not all(fitted(cards.card(), bank.type, cut) for bank in banks):
            return
        x, rng = self._inputs(n, HIDDEN), np.random.default_rng(n)
        ids = bench.cp.asarray(np.argsort(rng.random((n, EXPERTS)), 1)[:, :USED].astype(np.int32))
        weights = bench.cp.asarray(rng.random((n, USED), np.float32))
        case = f"experts {gate.type.name}/{down.type.name} {n}{named(cut)}"
        with cut_to(cut):
            with bench.workspace.scratch():
                got = mixture.mixture(bench.workspace, gate, up, down, x, ids, weights)
                if cut and not self._same(got, self.chosen, case):
                    return
                for begin in () if cut else (0, n - CHECKED):
                    part = slice(begin, begin + CHECKED)
                    want = mixture.mixture(bench.workspace, gate, up, down, x[part], ids[part], weights[part])
                    self._same(got[part], want, case)
                if not cut:
                    self.chosen = got.copy()
            ms = milliseconds(bench, lambda: mixture.mixture(bench.workspace, gate, up, down, x, ids, weights))
        macs = n * USED * HIDDEN * INNER
        first, second = product_of(ms, GATE_UP), product_of(ms, PAIRS)
        both = [a + b for a, b in zip(first, second, strict=True)]
        self._add(f"{case}: gate and up", first, 2 * macs, gate.type.group)
        self._add(f"{case}: down", second, macs, down.type.group)
        self._add(f"{case}: products", both, 3 * macs, gate.type.group)
        if not cut:
            self._add(f"{case}: all", [sum(t) for t in zip(*ms.values(), strict=True)], 3 * macs, gate.type.group)
            for label in ("count_rows", "group_rows", "quantize", "join_pairs"):
                if label in ms:
                    bench.add(f"{case}: {label}", "us", [1e3 * t for t in ms[label]])

    def streams(self, n: int) -> None:
        """A hyper-connection, kernel by kernel."""
        bench, cp = self.bench, self.bench.cp
        cols = STREAMS * HIDDEN
        x, y, beta = (
            bench.inputs(n, cols).reshape(n, STREAMS, HIDDEN),
            self._inputs(n, HIDDEN),
            cp.zeros((n, STREAMS), "f"),
        )
        down, up = bench.weight("Q6_K", RANK, cols), bench.weight("Q8_0", cols, RANK)
        hc = Hyper(cp.ones((STREAMS, HIDDEN), "f"), down, up, bench.weight("F32", STREAMS, cols))
        ms = milliseconds(bench, lambda: hyper.hyper_mix(bench.workspace, x, hc, 1e-6, n, (beta, y)))
        for label, times in ms.items():
            bench.add(f"hyper {n}: {label}", "us", [1e3 * t for t in times])
        bench.add(f"hyper {n}: all", "us", [1e3 * sum(t) for t in zip(*ms.values(), strict=True)])


# -------------------------------------------------------------------------------------------------------------- ceiling

CEILING = r"""
template <int GROUP>
__device__ __forceinline__ void step(int (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    if (GROUP == 32)
        asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3},"
                     "{%4,%5,%6,%7},{%8,%9},{%10,%10,%10,%10};"
            : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(0x4B400000));
    else
        asm volatile("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3},{%4,%5},{%6},{%7,%7,%7,%7};"
            : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(b[0]), "r"(0x4B400000));
}
extern "C" __global__ __launch_bounds__(THREADS, 1) void ceiling(float* out, int rounds, float s, float d) {
    unsigned a[4][4], b[8][2];
    for (int i = 0; i < 4; i++) for (int j = 0; j < 4; j++) a[i][j] = threadIdx.x * 0x01010101u + 16 * i + j;
    for (int u = 0; u < 8; u++) b[u][0] = threadIdx.x * 77 + u, b[u][1] = b[u][0] * 5;
    float acc[4][4] = {};
    int c[2][4][4];
    for (int i = 0; i < 4; i++) step<K>(c[0][i], a[i], b[0]);
    for (int r = 0; r < rounds; r++) {
#pragma unroll
        for (int u = 0; u < 8; u++) {
            b[u][0]++;
#pragma unroll
            for (int i = 0; i < 4; i++) step<K>(c[u + 1 & 1][i], a[i], b[u]);
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int k = 0; k < 4; k++)
                    acc[i][k] = SUMS ? __fmaf_rn(__fmaf_rn(__int_as_float(c[u & 1][i][k]), s, -s), d, acc[i][k])
                                     : __int_as_float(__float_as_int(acc[i][k]) ^ (k ? 0 : c[u & 1][i][0]));
        }
    }
    float sum = 0;
    for (int i = 0; i < 4; i++) for (int k = 0; k < 4; k++) sum += acc[i][k];
    if (sum == 12345.0f) *out = sum;
}
"""
"""Four matrix steps under way while 64 sums of the four before are scaled and added; SUMS = 0: the steps alone."""


def ceilings(products: Products) -> None:
    """Matrix steps in registers: alone, and with the sums that the written order asks for."""
    bench, cp = products.bench, products.bench.cp
    out, rounds = cp.zeros(1, cp.float32), np.int32(500)
    blocks = cards.card().multiprocessors
    for group in (16, 32):
        for sums in (0, 1):
            for threads in (256, 512):
                text = f"#define K {group}\n#define SUMS {sums}\n#define THREADS {threads}\n" + CEILING
                kernel = cp.RawModule(code=text, options=("-std=c++17",)).get_function("ceiling")
                args = (out, rounds, np.float32(0.5), np.float32(0.25))
                us = bench.times([partial(kernel, (blocks,), (threads,), args)] * 4)
                macs = blocks * threads / 32 * int(rounds) * 8 * 4 * 16 * 8 * group
                rates = [macs / t / 1e6 for t in us]
                what = "scaled sums" if sums else "steps"
                bench.add(f"ceiling group {group}, {what}, {threads} threads", "TMAC/s", rates)
                if sums:
                    products.ceiling[group] = max(products.ceiling.get(group, 0.0), float(np.median(rates)))


def run(products: Products, only: set[str], cuts: tuple[Cut, ...], types: tuple[str, str]) -> None:
    bench = products.bench
    if "ceiling" in only:
        ceilings(products)
    if "dense" in only:
        for n in ROWS:
            for kind, rows, cols in DENSE_SHAPES:
                for cut in (None, *cuts) if (kind, rows, cols) in SWEPT else (None,):
                    products.dense(kind, rows, cols, n, cut)
    for n in ROWS if "hyper" in only else ():
        products.streams(n)
    if "experts" in only:
        stacks = [bench.weight(types[0], EXPERTS, INNER, HIDDEN) for _ in range(2)]
        stacks.append(bench.weight(types[1], EXPERTS, HIDDEN, INNER))
        banks = [bench.bank(w) for w in stacks]
        for n in ROWS:
            for cut in (None, *cuts):
                products.experts(banks, n, cut)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the records here as JSON")
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, by comma")
    parser.add_argument("--experts", nargs=2, default=EXPERT_TYPES, help="types of gate and up, and of down")
    parser.add_argument("--cuts", action="store_true", help="also time other cuts")
    args = parser.parse_args(argv)
    only, cuts = set(args.only.split(",")), TRIED if args.cuts else ()
    types = (args.experts[0], args.experts[1])
    if unknown := only - set(SECTIONS):
        parser.error(f"--only knows {', '.join(SECTIONS)}, not {', '.join(sorted(unknown))}")
    console = Console(width=140)
    compile_all(kernels_of(cuts, only, types))
    bench = Bench(console)
    with bench.stream:
        products = Products(bench)
        try:
            run(products, only, cuts, types)
        finally:
            card = bench.cp.cuda.runtime.getDeviceProperties(0)["name"].decode()
            flags = {"card": card, "cuts": args.cuts}
            report = Report(tool="prompt_products_cuda", records=bench.records, flags=flags)
            if args.out:
                report.write(args.out)
    show(report, console)
    for line in products.wrong:
        print(line, file=sys.stderr)
    return int(bool(products.wrong))


if __name__ == "__main__":
    sys.exit(main())

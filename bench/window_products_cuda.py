"""Products of a window on a card: the model's matrices and experts, for 1 and 8 rows, in chains as a window has them.

    python -m strata.bench.window_products_cuda --out results.json [--only down,experts] [--ways] [--rows 1,8]

Every case is first compared with the written arithmetic, bit for bit. A chain is a captured graph of the product over
copies of its weights that together leave the cache, each launch after the other, so a figure holds what a launch costs
inside a window; `layer` is all products of a layer in their order. Timed with overlapping launches and with launches in
turn. GB/s are bytes of weights; the share is that of a plain read of device memory in the same run. --ways: also other
ways to cut the products (RowTuning).

Errors   exit code 1 and the case when a bit differs
Cost     under a minute on an H200, some of it for the compiler; --ways two more
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from rich.console import Console

from strata.bench.kernels_cuda import CACHE_BYTES, Bench
from strata.bench.report import Report, show
from strata.bench.window_launches import Launches
from strata.kernels.cuda import arguments, compile, forms, mixture, product
from strata.kernels.cuda.plans import RowTuning, Tuning
from strata.kernels.formats import Weight
from strata.kernels.reference.fma import fma
from strata.kernels.reference.linear import ordered_linear

HIDDEN, INNER, EXPERTS, USED = 2560, 640, 512, 10
DENSE = {
    "down": ("Q6_K", (320,), 10240),
    "up": ("Q8_0", (10240,), 320),
    "in": ("Q6_K_CARD", (10240, 6144), HIDDEN),
    "out": ("Q6_K_CARD", (HIDDEN,), 6144),
    "gates": ("Q8_0", (INNER, INNER), HIDDEN),
    "small": ("Q8_0", (HIDDEN,), INNER),
    "head": ("Q5_K", (248320,), HIDDEN),
}
"""Name -> type, rows of each matrix, columns. Up and small are Q8_0, since their rows are no whole blocks of Q6_K."""
EXPERT_TYPES = ("IQ3_S_CARD", "IQ4_NL_CARD")
"""Of gate and up, of down, as a card keeps them."""
LAYER = ("down", "up", "in", "out", "down", "up", "gates", "small", "experts")
LAYERS = 4
REPLAYS = 9
MODULES = (arguments, product, mixture)
"""Modules that ask for kernels."""

WAYS = (
    RowTuning(bulk=False),
    RowTuning(warps=32, depth=1),
    RowTuning(warps=28, depth=1),
    RowTuning(warps=24),
    RowTuning(warps=20),
    RowTuning(warps=16),
    RowTuning(warps=12),
    RowTuning(depth=1),
    RowTuning(lanes=1),
    RowTuning(lanes=1, depth=1),
    RowTuning(terms_room=16 << 10),
    RowTuning(terms_room=64 << 10),
    RowTuning(piece_room=6 << 10),
)
"""Of one row and of experts."""
TABLE_WAYS = (
    RowTuning(table_room=16 << 10),
    RowTuning(table_room=64 << 10),
    RowTuning(table_room=64 << 10, depth=1),
    RowTuning(table_room=64 << 10, lanes=1, depth=1),
    RowTuning(table_room=64 << 10, warps=16),
)
"""Of experts, beside WAYS: copies of the table of a type that has one."""
TILE_WAYS = (
    RowTuning(tiled=True),
    RowTuning(tiled=True, bulk=False),
    *(RowTuning(tiled=True, warps=warps, depth=1) for warps in (4, 6, 7, 8, 12, 16)),
)
"""Of experts, by matrix steps."""
WINDOW_WAYS = (
    Tuning(together=False, row=RowTuning(bulk=False)),
    Tuning(together=False, row=RowTuning(warps=12)),
    Tuning(together=False, row=RowTuning(spans=1)),
    Tuning(together=False, row=RowTuning(spans=5)),
    Tuning(together=True, rows=16),
    Tuning(together=True, rows=16, ring=4),
    Tuning(together=True, ring=2),
    Tuning(together=True, ring=8),
    Tuning(together=True, stages=2),
    Tuning(together=True, stages=4),
    Tuning(together=True, stages=5),
)
"""Of several rows, by product_row.cu and by product_window.cu."""
KERNELS = (Tuning(together=False), Tuning(together=True))
"""Of dense matrices, by product_row.cu and by product_window.cu: `plans.together` should choose the better."""


@dataclass(slots=True)
class Case:
    """Launches that follow each other, and the weight bytes of all of them."""

    name: str
    n: int
    launches: list[Callable[[Tuning], None]]
    n_bytes: int
    check: Callable[[Tuning], None]


# --------------------------------------------------------------------------------------------------------------- cases


def inputs(bench: Bench, n: int, cols: int, w: Weight) -> Any:
    """Activations as a window has them: who made them has left them as the weights want them, too."""
    values = bench.cp.asnumpy(bench.inputs(n, cols))
    with bench.stream:
        x = bench.workspace.upload(values)
        forms.leave(bench.workspace, x)
        known = forms.known(bench.workspace, x, w.type)
        with bench.workspace.scratch():
            made = product.quantize(bench.workspace, x, w.type)
            for to, values in ((known.q, made.q), (known.d, made.d), (known.sums, made.sums)) if known else ():
                if to is not None:
                    to[...] = values
        bench.stream.synchronize()
    return x


def dense(bench: Bench, name: str, n: int, copies: int | None = None) -> Case:
    """One product with its matrices, over copies that leave the cache."""
    kind, rows, cols = DENSE[name]
    first = [bench.weight(kind, r, cols) for r in rows]
    one = sum(w.data.nbytes for w in first)
    count = copies or max(2, -(-CACHE_BYTES // one))
    sets = [first] + [[Weight(w.type, w.shape, w.data.copy()) for w in first] for _ in range(count - 1)]
    x = inputs(bench, n, cols, first[0])

    def launch(weights: list[Weight], tuning: Tuning) -> None:
        with bench.workspace.scratch():
            product.linear(bench.workspace, weights, x, tuning=tuning)

    def check(tuning: Tuning) -> None:
        for w in first:
            bench.check(w, n, tuning, rows=min(w.rows, 300))

    return Case(name, n, [lambda t, s=s: launch(s, t) for s in sets], one * count, check)  # type: ignore[misc]


def experts(bench: Bench, n: int, types: Sequence[str], layers: int = LAYERS) -> Case:
    """The picked experts of some layers: gate, up and down. types: of gate and up, of down."""
    shapes = ((EXPERTS, INNER, HIDDEN), (EXPERTS, INNER, HIDDEN), (EXPERTS, HIDDEN, INNER))
    kinds = (types[0], types[0], types[1])
    stacks = [[bench.weight(k, *s) for k, s in zip(kinds, shapes, strict=True)] for _ in range(layers)]
    banks = [[bench.bank(w) for w in stack] for stack in stacks]
    picked = [np.stack([bench.rng.permutation(EXPERTS)[:USED] for _ in range(n)]) for _ in range(layers)]
    ids = [bench.cp.asarray(p.astype(np.int32)) for p in picked]
    weights = bench.cp.asarray(bench.rng.random((n, USED)).astype(np.float32))
    x = inputs(bench, n, HIDDEN, stacks[0][0])
    n_bytes = sum(len(np.unique(p)) * sum(w.data.nbytes // EXPERTS for w in stacks[0]) for p in picked)

    def launch(i: int, tuning: Tuning) -> None:
        with bench.workspace.scratch():
            gate, up, down = banks[i]
            mixture.mixture(bench.workspace, gate, up, down, x, ids[i], weights, tuning=tuning)

    def check(tuning: Tuning) -> None:
        with bench.stream, bench.workspace.scratch():
            gate, up, down = banks[0]
            y = mixture.mixture(bench.workspace, gate, up, down, x, ids[0], weights, tuning=tuning)
            bench.stream.synchronize()
            got = bench.cp.asnumpy(y)
        row = n - 1
        want = expert_row(bench, stacks[0], x[row : row + 1], picked[0][row], weights[row])
        same(got[row], want, f"experts, row {row} of {n}")

    return Case("experts", n, [lambda t, i=i: launch(i, t) for i in range(layers)], n_bytes, check)  # type: ignore[misc]


def expert_row(bench: Bench, stack: Sequence[Weight], x: Any, ids: np.ndarray, weights: Any) -> np.ndarray:
    """One row by the written arithmetic; silu by the card's own kernel, which its tests compare."""
    asnumpy, asarray = bench.cp.asnumpy, bench.cp.asarray
    total = np.zeros(HIDDEN, np.float32)
    for e, weight in zip(ids, asnumpy(weights), strict=True):
        gate, up, down = (bench.host(Weight(w.type, w.shape[1:], w.data[int(e)])) for w in stack)
        g, u = ordered_linear([gate, up], asnumpy(x))
        hidden = asarray(g)
        with bench.stream:
            mixture.gate_times_up(hidden, asarray(u))
            bench.stream.synchronize()
        (y,) = ordered_linear([down], asnumpy(hidden))
        total = fma(np.float32(weight), y[0], total)
    return total


def same(got: np.ndarray, want: np.ndarray, what: str) -> None:
    """Exits when a bit differs."""
    wrong = int((got.view(np.uint32) != want.view(np.uint32)).sum())
    if wrong:
        raise SystemExit(f"{what}: {wrong} of {got.size} results differ")


def layer(bench: Bench, cases: dict[str, Case], n: int) -> Case:
    """All products of some layers in their order."""
    launches: list[Callable[[Tuning], None]] = []
    n_bytes = 0
    for i in range(LAYERS):
        for k, name in enumerate(LAYER):
            case = cases[name]
            launches.append(case.launches[(i * LAYER.count(name) + LAYER[:k].count(name)) % len(case.launches)])
            n_bytes += case.n_bytes // len(case.launches)
    return Case("layer", n, launches, n_bytes, lambda tuning: None)


# -------------------------------------------------------------------------------------------------------------- timing


def timed(bench: Bench, case: Case, tuning: Tuning, overlap: bool) -> list[float]:
    """Microseconds of a launch (of a layer), one figure a replay."""

    def work() -> None:
        for launch in case.launches:
            launch(tuning)

    with bench.stream:
        launches = Launches.of(work)
        launches.overlap(overlap)
        us = bench.times([lambda: launches.queue(())], REPLAYS)
        launches.overlap(True)
    return [t / (LAYERS if case.name == "layer" else len(case.launches)) for t in us]


def measure(bench: Bench, case: Case, tuning: Tuning, note: str = "") -> None:
    case.check(tuning)
    per = LAYERS if case.name == "layer" else len(case.launches)
    plain = float(np.median(timed(bench, case, tuning, False)))
    us = timed(bench, case, tuning, True)
    rate = case.n_bytes / per / float(np.median(us)) / 1e3
    more = f"{rate:6.0f} GB/s {100 * rate / bench.peak:4.0f} %   {plain:8.2f} us in turn"
    bench.add(f"{case.name} n={case.n}{note}", "us", us, more)


def note_of(way: Tuning) -> str:
    named = [(f.name, getattr(part, f.name)) for part in (way.row, way) for f in fields(part) if f.name != "row"]
    return "".join(f" {name}={value}" for name, value in named if value is not None)


def ways(case: Case) -> Iterator[Tuning]:
    if case.name != "experts":
        yield from KERNELS
    if case.n > 1 and case.name != "experts":
        yield from WINDOW_WAYS
        return
    if case.name != "experts":
        yield from (Tuning(row=way) for way in WAYS)
        return
    yield from (Tuning(row=way) for way in TILE_WAYS)
    yield from (Tuning(row=replace(way, tiled=False)) for way in (RowTuning(), *WAYS, *TABLE_WAYS))


# ----------------------------------------------------------------------------------------------------------- compiling


class Asked:
    """A loader that writes down what is asked for and runs nothing."""

    def __init__(self) -> None:
        self.kernels: set[tuple[str, str, tuple[tuple[str, int | str], ...]]] = set()

    def __call__(self, source: str, name: str, **constants: int | str) -> Callable[..., None]:
        self.kernels.add((source, name, tuple(sorted(constants.items()))))
        return lambda *arguments, **more: None


def load(kernel: tuple[str, str, tuple[tuple[str, int | str], ...]]) -> None:
    """Compile one kernel into CuPy's cache on disk."""
    source, name, constants = kernel
    compile.load_kernel(source, name, **dict(constants))


def compile_all(cases: Sequence[Case], more: bool) -> int:
    """All kernels that the cases will ask for, by several processes: the compiler works on one source at a time."""
    asked = Asked()
    patches = [mock.patch.object(module, "load_kernel", asked) for module in MODULES]
    for patch in patches:
        patch.start()
    for case in cases:
        for tuning in (Tuning(), *(ways(case) if more else ())):
            try:
                case.launches[0](tuning)
            except ValueError:  # does not fit
                continue
    for patch in patches:
        patch.stop()
    asked.kernels.add(("gate_times_up.cu", "gate_times_up", ()))
    with ProcessPoolExecutor(max(1, min(14, (os.cpu_count() or 2) - 1)), get_context("spawn")) as pool:
        list(pool.map(load, sorted(asked.kernels)))
    return len(asked.kernels)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the records here as JSON")
    parser.add_argument("--only", default=",".join((*DENSE, "experts", "layer")), help="cases, by comma")
    parser.add_argument("--rows", default="1,8", help="rows of a window, by comma")
    parser.add_argument("--experts", nargs=2, default=EXPERT_TYPES, help="types of gate and up, and of down")
    parser.add_argument("--ways", action="store_true", help="also time other ways to cut the products")
    args = parser.parse_args(argv)
    only, console = args.only.split(","), Console(width=150)
    if unknown := set(only) - {*DENSE, "experts", "layer"}:
        parser.error(f"--only knows {', '.join((*DENSE, 'experts', 'layer'))}, not {', '.join(sorted(unknown))}")
    bench = Bench(console)
    wanted = set(LAYER) | set(only) - {"layer"} if "layer" in only else set(only)
    sets = {
        n: {name: dense(bench, name, n) for name in DENSE if name in wanted} for n in map(int, args.rows.split(","))
    }
    for n, cases in sets.items():
        if "experts" in wanted:
            cases["experts"] = experts(bench, n, args.experts)
        if "layer" in only:
            cases["layer"] = layer(bench, cases, n)
    alone = [case for cases in sets.values() for case in cases.values() if case.name != "layer"]
    count = compile_all(alone, args.ways)
    console.print(f"{count} kernels compiled; plain read {bench.peak:.0f} GB/s")
    for cases in sets.values():
        for name in only:
            measure(bench, cases[name], Tuning())
    for cases in sets.values() if args.ways else ():
        for case in (cases[name] for name in only if name != "layer"):
            for way in ways(case):
                try:
                    measure(bench, case, way, note_of(way))
                except ValueError:  # does not fit
                    continue
    flags = {"card": bench.cp.cuda.runtime.getDeviceProperties(0)["name"].decode(), "read_gb_s": round(bench.peak)}
    report = Report(tool="window_products_cuda", records=bench.records, flags=flags)
    if args.out:
        report.write(args.out)
    show(report, console)
    return 0


if __name__ == "__main__":
    sys.exit(main())

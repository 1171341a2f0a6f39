"""The operations beside the products on a card, one by one, at the sizes of the model.

    python -m strata.bench.operations_cuda --out results.json [--only gdn,attention]

Sections: gdn, attention, streams, ends; floats, scan, formats of prompt_operations; window of window_operations.

Timed like the products (`kernels_cuda`): events around replays of a graph of many launches, which together touch more
memory than the cache holds where the model's layers do. A figure is microseconds of one operation of one layer.

Shapes   4 streams of 2560; delta net 16 / 48 heads of 128; attention 24 / 2 heads of 256 with indexer 4 x 128, blocks
         of 4, budget 2048; 512 experts, 10 used; vocabulary 248,320
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from strata.bench.kernels_cuda import Bench
from strata.bench.prompt_operations import floats, formats, scan
from strata.bench.report import Report, show
from strata.bench.window_operations import window
from strata.kernels.cuda.backend import CudaKernels
from strata.kernels.cuda.sample import pack
from strata.kernels.ops import PAGE, AttentionPages, Gdn, Hyper, Norms, Rope, Sampling

EPS = 1e-6
STREAMS, HIDDEN, RANK = 4, 2560, 320
KEY_HEADS, VALUE_HEADS, HEAD = 16, 48, 128
CHANNELS = (2 * KEY_HEADS + VALUE_HEADS) * HEAD
HEADS, KV_HEADS, DIM, INDEX_HEADS, INDEX_DIM, ROTATED, R, BUDGET = 24, 2, 256, 4, 128, 64, 4, 2048
EXPERTS, USED, VOCAB = 512, 10, 248_320
DELTA_LAYERS = 36


class Operations:
    """The backend on the bench's stream and workspace, and arrays of random numbers."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.cp = bench, bench.cp
        with bench.stream:
            self.kernels = CudaKernels(bench.workspace)

    def f(self, *shape: int, scale: float = 1.0) -> Any:
        return self.cp.random.standard_normal(shape, self.cp.float32) * np.float32(scale)

    def ints(self, values: Any) -> Any:
        return self.cp.asarray(np.asarray(values, np.int32))

    def time(self, work: str, calls: Sequence[Callable[[], Any]], replays: int = 9, more: str = "") -> None:
        """Microseconds of one call."""

        def scratch(call: Callable[[], Any]) -> None:
            with self.bench.workspace.scratch():
                call()

        us = self.bench.times([partial(scratch, call) for call in calls], replays)
        self.bench.add(work, "us", us, more)


def segments(n: int, slots: int) -> list[list[int]]:
    """n rows split evenly over slots."""
    each = n // slots
    return [[slot, slot * each, (slot + 1) * each] for slot in range(slots)]


def gdn(ops: Operations) -> None:
    """Convolution, recurrence, gated norm: windows over the states of all layers, prompts."""
    w = Gdn(
        ops.f(CHANNELS, 4, scale=0.5), -abs(ops.f(VALUE_HEADS)), ops.f(VALUE_HEADS), abs(ops.f(HEAD)) + np.float32(0.5)
    )
    for n, slots, layers in ((1, 1, DELTA_LAYERS), (8, 8, 8), (8, 1, DELTA_LAYERS), (2048, 1, 2), (8192, 1, 2)):
        inputs = (ops.f(n, CHANNELS), ops.f(n, VALUE_HEADS * HEAD), ops.f(n, VALUE_HEADS), ops.f(n, VALUE_HEADS))
        rows = ops.ints(segments(n, slots))
        states = [(ops.f(slots, 3, CHANNELS), ops.f(slots, VALUE_HEADS, HEAD, HEAD, scale=0.1)) for _ in range(layers)]
        calls = [partial(ops.kernels.gdn, w, *inputs, rows, *state, EPS) for state in states]
        ops.time(f"gdn {n} rows of {slots} slots", calls)


def attention(ops: Operations) -> None:
    """Store and attend at several depths: windows of one row and of eight sequences, prompts."""
    cp = ops.cp
    norms = Norms(*(abs(ops.f(d)) + np.float32(0.5) for d in (DIM, DIM, INDEX_DIM, INDEX_DIM)))
    for depth, n, slots, layers in (
        (1024, 1, 1, 4),
        (4096, 1, 1, 4),
        (32768, 1, 1, 4),
        (131072, 1, 1, 2),
        (4096, 8, 8, 2),
        (2048, 2048, 1, 1),
        (8192, 8192, 1, 1),
        (32768, 8192, 1, 1),
        (131072, 2048, 1, 1),
    ):
        per_slot = depth // PAGE
        angles = cp.arange(depth, dtype=cp.float32)[:, None] * 1e-3 * cp.arange(1, ROTATED // 2 + 1, dtype=cp.float32)
        rope = Rope(cp.cos(angles), cp.sin(angles))
        n_pages = per_slot * slots
        layer_pages = [
            AttentionPages(
                ops.f(n_pages, PAGE, KV_HEADS, DIM),
                ops.f(n_pages, PAGE, KV_HEADS, DIM),
                ops.f(n_pages, PAGE, INDEX_DIM),
                ops.f(n_pages, PAGE // R, INDEX_DIM),
            )
            for _ in range(layers)
        ]
        tables = ops.ints(np.arange(n_pages).reshape(slots, per_slot))
        each = n // slots
        where = (
            tables,
            ops.ints(np.repeat(np.arange(slots), each)),
            ops.ints(np.tile(np.arange(depth - each, depth), slots)),
        )
        rows = (ops.f(n, KV_HEADS, DIM), ops.f(n, KV_HEADS, DIM), ops.f(n, INDEX_DIM))
        queries = (ops.f(n, HEADS, 2, DIM), ops.f(n, INDEX_HEADS, INDEX_DIM))
        ops.kernels.bound = depth
        more = (*where, *rows, *queries, norms, rope, BUDGET, EPS)
        calls = [partial(ops.kernels.qsa, pages, *more) for pages in layer_pages]
        ops.time(f"attention {n} rows of {slots} slots at {depth}", calls * (4 if n < 16 else 1), 5)
        del layer_pages, calls
        cp.get_default_memory_pool().free_all_blocks()
    ops.kernels.bound = None


def streams(ops: Operations) -> None:
    """The two mixers of a layer with their products in Q6_K, and the norm alone."""
    bench = ops.bench
    mixers = [
        Hyper(
            abs(ops.f(STREAMS, HIDDEN)) + np.float32(0.5),
            bench.weight("Q6_K", RANK, STREAMS * HIDDEN),
            bench.weight("Q8_0", STREAMS * HIDDEN, RANK),
            bench.weight("F32", STREAMS, STREAMS * HIDDEN),
        )
        for _ in range(24)
    ]
    for n in (1, 8, 2048, 8192):
        x, beta, y = ops.f(n, STREAMS, HIDDEN), ops.f(n, STREAMS, scale=0.1), ops.f(n, HIDDEN, scale=0.1)
        calls = [partial(ops.kernels.hyper_add_mix, x, beta, y, hc, EPS) for hc in mixers[: 24 if n < 16 else 2]]
        ops.time(f"hyper_add and hyper_mix {n} rows", calls)
        ops.time(f"rms_norm {n} x {STREAMS} x {HIDDEN}", [partial(ops.kernels.rms_norm, x, mixers[0].norm, EPS)] * 4)


def ends(ops: Operations) -> None:
    """Routing and sampling."""
    for n in (1, 8, 8192):
        logits = ops.f(n, EXPERTS)
        ops.time(f"route {n} rows", [partial(ops.kernels.route, logits, USED)] * 8)
    ways = {
        "argmax": (Sampling(), 0),
        "top 20": (Sampling(temperature=1.0, seed=1), 0),
        "penalties over 256": (Sampling(temperature=1.0, penalty_repeat=1.1, seed=1), 256),
        "penalties over 4096": (Sampling(temperature=1.0, penalty_repeat=1.1, seed=1), 4096),
    }
    for n in (1, 8):
        logits = ops.f(n, VOCAB, scale=3.0)
        for name, (how, last) in ways.items():
            settings, seeds = (ops.cp.asarray(a) for a in pack([how] * n))
            recent = ops.ints(np.random.default_rng(1).integers(0, VOCAB, (n, last)))
            arrays = (logits, settings, seeds, ops.ints(np.arange(n)), recent)
            ops.time(f"sample {n} rows, {name}", [partial(ops.kernels.sample_rows, *arrays)] * 4)


SECTIONS: dict[str, Callable[[Operations], None]] = {
    "gdn": gdn,
    "attention": attention,
    "streams": streams,
    "ends": ends,
    "floats": floats,
    "scan": scan,
    "formats": formats,
    "window": window,
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the records here as JSON")
    parser.add_argument("--only", default=",".join(SECTIONS), help=f"sections, by comma: {', '.join(SECTIONS)}")
    args = parser.parse_args(argv)
    unknown = [name for name in args.only.split(",") if name not in SECTIONS]
    if unknown:
        parser.error(f"--only knows {', '.join(SECTIONS)}, not {unknown[0]}")
    console = Console(width=140)
    bench = Bench(console)
    with bench.stream:
        ops = Operations(bench)
        flags = {
            "card": bench.cp.cuda.runtime.getDeviceProperties(0)["name"].decode(),
            "sections": args.only.split(","),
        }
        for name in args.only.split(","):
            SECTIONS[name](ops)
            if args.out:
                Report(tool="operations_cuda", records=bench.records, flags=flags).write(args.out)
    show(Report(tool="operations_cuda", records=bench.records, flags=flags), console)
    return 0


if __name__ == "__main__":
    sys.exit(main())

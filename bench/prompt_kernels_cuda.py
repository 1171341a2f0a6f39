"""What the kernels of a prompt's attention and delta net take one by one, ways to cut them, and float products.

    python -m strata.bench.prompt_kernels_cuda --out results.json [--only peak,floats,scan,attention,ways]

Bits are checked first, as prompt_operations does. A kernel's figure is what lies between two events around its launches
in one call of the operation, outside a graph: microseconds, all its launches together.

Sections   peak: multiply-adds of a loop of nothing else, and of loops that read shared memory beside them in the ways
           the sources count on; ways: rows of a block
Errors     exit code 1 and the case when a bit differs
Cost       some 40 s on an H200, half of them for the compiler
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import numpy as np
from rich.console import Console

from strata.bench import prompt_operations as parts
from strata.bench.kernels_cuda import Bench
from strata.bench.operations_cuda import Operations
from strata.bench.report import Report, show
from strata.kernels.cuda import gdn, qsa
from strata.kernels.ops import Gdn

REPEATS: Final = 5
DEPTHS: Final = (8192, 2048)

PEAK: Final = r"""
// Dots of 64 tokens with 12 heads by a warp, as qsa_prompt_keys computes them, many times from the same memory. A lane
// has CHAINS of the four chains of TOKENS x OWN sums. CHAINS 0: the sums alone.
template <int N> struct Word { typedef float T; };
template <> struct Word<2> { typedef float2 T; };
template <> struct Word<4> { typedef float4 T; };
constexpr int N = CHAINS ? CHAINS : 4, TOKENS = CHAINS == 4 || CHAINS == 0 ? 4 : 8, OWN = CHAINS == 1 ? 12 : 6;
extern "C" __global__ void __launch_bounds__(128, 3) peak(float* out, int turns, float a) {
    __shared__ __align__(16) float keys[256 * 20], queries[12 * 272];
    for (int i = threadIdx.x; i < 256 * 20; i += 128) keys[i] = a + i * 1e-6f;
    for (int i = threadIdx.x; i < 12 * 272; i += 128) queries[i] = a - i * 1e-6f;
    __syncthreads();
    float c[TOKENS][OWN][N];
#pragma unroll
    for (int i = 0; i < 96; i++) (&c[0][0][0])[i] = a + i + threadIdx.x;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int set = CHAINS == 1 ? 0 : lane & 1, chain = CHAINS == 1 ? lane & 3 : CHAINS == 2 ? lane >> 2 & 1 : 0;
    const int group = CHAINS == 1 ? lane >> 2 : CHAINS == 2 ? lane >> 1 & 1 | lane >> 3 << 1 : lane >> 1;
    const int apart = 64 / TOKENS, sets = CHAINS == 1 ? 1 : 2;
    typedef typename Word<N>::T T;
    float k[TOKENS][N], q[OWN][N];
#pragma unroll
    for (int i = 0; i < TOKENS; i++)
#pragma unroll
        for (int n = 0; n < N; n++) k[i][n] = a + i + n;
#pragma unroll
    for (int i = 0; i < OWN; i++)
#pragma unroll
        for (int n = 0; n < N; n++) q[i][n] = a - i - n;
#pragma unroll 1
    for (int t = 0; t < turns; t++) {
        const float* tokens = keys + (((t + warp) & 3) * 64 + group) * 20 + chain * N;
        const float* heads = queries + set * 272 + chain * N + (t & 7) * 16;
#pragma unroll
        for (int x = 0; x < 16; x += 4) {
            if (CHAINS) {
#pragma unroll
                for (int i = 0; i < TOKENS; i++) *(T*)k[i] = *(const T*)(tokens + i * apart * 20 + x);
#pragma unroll
                for (int i = 0; i < OWN; i++) *(T*)q[i] = *(const T*)(heads + i * sets * 272 + x);
            }
#pragma unroll
            for (int i = 0; i < TOKENS; i++)
#pragma unroll
                for (int h = 0; h < OWN; h++)
#pragma unroll
                    for (int n = 0; n < N; n++) c[i][h][n] = fmaf(q[h][n], k[i][n], c[i][h][n]);
        }
    }
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 96; i++) sum += (&c[0][0][0])[i];
    if (sum == 12345.0f) *out = sum;
}
"""


def peak(ops: Operations, ways: Sequence[int] = (0, 1, 2, 4)) -> None:
    """Multiply-adds with nothing beside them, and with reads of shared memory for one, two or four chains of a lane."""
    cp, out = ops.cp, ops.cp.zeros(1, ops.cp.float32)
    blocks, turns = cp.cuda.Device().attributes["MultiProcessorCount"] * 3, 5000
    for chains in ways:
        kernel = cp.RawKernel(PEAK, "peak", options=(f"-DCHAINS={chains}", "--fmad=false", "-std=c++17"))
        call = partial(kernel, (blocks,), (128,), (out, np.int32(turns), np.float32(0.5)))
        what = f"from shared memory, {chains} chains a lane" if chains else "and nothing else"
        parts.rates(ops, f"multiply-adds {what}", float(blocks * 128 * 96 * 4 * turns), [call])


@contextmanager
def timed_kernels(ops: Operations, *modules: Any) -> Iterator[dict[str, float]]:
    """Inside, launches of these modules are timed; microseconds by kernel name when it ends."""
    events: list[tuple[str, Any, Any]] = []
    spent: dict[str, float] = defaultdict(float)

    def wrap(launch: Callable[..., None]) -> Callable[..., None]:
        def timed(source: str, name: str, *args: Any, **more: Any) -> None:
            begin, end = ops.cp.cuda.Event(), ops.cp.cuda.Event()
            begin.record()
            launch(source, name, *args, **more)
            end.record()
            events.append((name, begin, end))

        return timed

    patches = [patch.object(m, "launch", wrap(m.launch)) for m in modules]
    for p in patches:
        p.start()
    try:
        yield spent
    finally:
        for p in patches:
            p.stop()
        ops.cp.cuda.get_current_stream().synchronize()
        for name, begin, end in events:
            spent[name] += ops.cp.cuda.get_elapsed_time(begin, end) * 1e3


def by_kernel(ops: Operations, work: str, call: Callable[[], Any], macs: dict[str, float], *modules: Any) -> None:
    """A line for each kernel of a call; macs: multiply-adds of those that have many."""

    def run() -> None:
        with ops.bench.workspace.scratch():
            call()

    run()
    runs: list[dict[str, float]] = []
    for _ in range(REPEATS):
        with timed_kernels(ops, *modules) as spent:
            run()
        runs.append(spent)
    for name in runs[0]:
        us = [r[name] for r in runs]
        rate = f"{macs[name] / float(np.median(us)) / 1e6:6.2f} TMAC/s" if name in macs else ""
        ops.bench.add(f"{work}: {name}", "us", us, rate)


def scan(ops: Operations) -> None:
    """The delta net as a whole, its recurrence alone, and its kernels."""
    parts.scan(ops)
    heads, d = parts.VALUE_HEADS, parts.HEAD
    w = Gdn(ops.f(parts.CHANNELS, 4, scale=0.5), -abs(ops.f(heads)), ops.f(heads), abs(ops.f(d)) + np.float32(0.5))
    for n in DEPTHS:
        inputs = (ops.f(n, parts.CHANNELS), ops.f(n, heads * d), ops.f(n, heads), ops.f(n, heads))
        state = (ops.f(1, 3, parts.CHANNELS), ops.f(1, heads, d, d, scale=0.1))
        call = partial(ops.kernels.gdn, w, *inputs, ops.ints([[0, 0, n]]), *state, parts.EPS)
        by_kernel(ops, f"delta net {n} rows", call, {"gdn_scan": float(n * heads * d * d * 3)}, gdn)


def layer_of(ops: Operations, kv: str, depth: int, n: int) -> tuple[Callable[[], Any], float]:
    """A call of the attention of the last n of depth tokens, and the multiply-adds of its keys."""
    ops.kernels.bound = depth
    layer = parts.Attention(ops, kv, depth)
    rows = (*layer.where(depth - n, depth), *layer.stored(n), *layer.asked(n))
    call = partial(ops.kernels.qsa, layer.pages, *rows, layer.norms, layer.rope, parts.BUDGET, parts.EPS)
    return call, float(parts.HEADS * parts.DIM * sum(parts.kept(p) for p in range(depth - n, depth)))


def attention(ops: Operations) -> None:
    """Kernels of the attention of whole prompts, after a check of the bits."""
    for kv, depths in (("fp32", DEPTHS), ("fp16", (8192,))):
        ops.kernels.bound = None
        parts.Attention(ops, kv, 2304).check(kv)
        for depth in depths:
            call, macs = layer_of(ops, kv, depth, depth)
            rates = {"qsa_prompt_keys": macs, "qsa_prompt_values": macs}
            by_kernel(ops, f"attention {kv}, {depth} rows", call, rates, qsa)
            parts.rates(ops, f"attention {kv}, {depth} rows", 2 * macs, [call])
    ops.kernels.bound = None


def ways(ops: Operations) -> None:
    """Rows of a block that find each other's values in the first cache."""
    for depth in DEPTHS:
        call, macs = layer_of(ops, "fp32", depth, depth)
        for rows in (4, 8, qsa.ROWS_OF_A_BLOCK):
            with patch.object(qsa, "ROWS_OF_A_BLOCK", rows):
                by_kernel(ops, f"{depth} rows, {rows} share values", call, {"qsa_prompt_values": macs}, qsa)
        del call
        ops.cp.get_default_memory_pool().free_all_blocks()
    ops.kernels.bound = None


SECTIONS: Final[dict[str, Callable[[Operations], None]]] = {
    "peak": peak,
    "floats": parts.floats,
    "scan": scan,
    "attention": attention,
    "ways": ways,
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the records here as JSON")
    parser.add_argument("--only", default=",".join(SECTIONS), help=f"sections, by comma: {', '.join(SECTIONS)}")
    args = parser.parse_args(argv)
    names = args.only.split(",")
    unknown = [name for name in names if name not in SECTIONS]
    if unknown:
        parser.error(f"--only knows {', '.join(SECTIONS)}, not {unknown[0]}")
    console = Console(width=140)
    bench = Bench(console)
    with bench.stream:
        ops = Operations(bench)
        card = bench.cp.cuda.runtime.getDeviceProperties(0)["name"].decode()
        for name in names:
            SECTIONS[name](ops)
            bench.cp.get_default_memory_pool().free_all_blocks()
            if args.out:
                flags = {"card": card, "sections": names}
                Report(tool="prompt_kernels_cuda", records=bench.records, flags=flags).write(args.out)
    show(Report(tool="prompt_kernels_cuda", records=bench.records, flags={"card": card, "sections": names}), console)
    return 0


if __name__ == "__main__":
    sys.exit(main())

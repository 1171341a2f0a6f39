"""The operations of a prompt beside its quantised products: float products, delta scan, attention in every format.

    python -m strata.bench.operations_cuda --only floats,scan,formats --out results.json

Each is checked first on a smaller input: float products against the written order, delta scan and attention as a
prompt against the same rows as windows, bit for bit, and attention against the reference. A figure is the rate of
one operation of one layer, its share of the limit (float32 multiply-adds at the card's highest clock, or what a plain
read of device memory reaches), and its microseconds.

Errors   exit code 1 and the case when a bit differs
Cost     some 40 s on an H200, half of them for the compiler
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from strata.kernels import reference
from strata.kernels.cuda import gdn, product
from strata.kernels.cuda.launch import I32, launch
from strata.kernels.formats import Weight
from strata.kernels.kv import KV
from strata.kernels.ops import PAGE, AttentionPages, Gdn, Norms, Rope
from strata.kernels.reference.linear import ordered_linear

if TYPE_CHECKING:
    from strata.bench.operations_cuda import Operations

EPS = 1e-6
ROWS: Final = (8192, 2048)
KEY_HEADS, VALUE_HEADS, HEAD = 16, 48, 128
CHANNELS = (2 * KEY_HEADS + VALUE_HEADS) * HEAD
HEADS, KV_HEADS, DIM, INDEX_HEADS, INDEX_DIM, ROTATED, R, BUDGET = 24, 2, 256, 4, 128, 64, 4, 2048
FLOATS: Final = (
    ("router", "F32", (512, 1), 2560),
    ("delta gates", "F32", (48, 48), 2560),
    ("inject", "F32", (4,), 10240),
    ("indexer", "BF16", (512, 128), 2560),
)
"""Float products of the model: name, type, rows of each matrix, columns."""
_LANES_OF_A_MULTIPROCESSOR: Final = 128


def multiply_adds(ops: Operations) -> float:
    """Float32 multiply-adds a microsecond at the card's highest clock."""
    attributes = ops.cp.cuda.Device().attributes
    return float(attributes["MultiProcessorCount"] * _LANES_OF_A_MULTIPROCESSOR * attributes["ClockRate"]) / 1e3


def rates(ops: Operations, work: str, macs: float, calls: Sequence[Callable[[], Any]], gigabytes: float = 0) -> None:
    """Time the calls; the rate in TMAC/s, and its share of the limit that is nearer."""

    def scratch(call: Callable[[], Any]) -> None:
        with ops.bench.workspace.scratch():
            call()

    us = ops.bench.times([partial(scratch, call) for call in calls], 5)
    limit = max(macs / multiply_adds(ops), gigabytes / ops.bench.peak * 1e6)
    median = float(np.median(us))
    ops.bench.add(work, "TMAC/s", [macs / t / 1e6 for t in us], f"{100 * limit / median:4.0f} %  {median:10.1f} us")


def same(ops: Operations, what: str, got: Any, want: Any) -> None:
    """Exit unless two arrays have the same bits."""
    got, want = (np.ascontiguousarray(ops.cp.asnumpy(a) if not isinstance(a, np.ndarray) else a) for a in (got, want))
    wrong = int((got.view(np.uint8) != want.view(np.uint8)).sum())
    if wrong or got.shape != want.shape:
        raise SystemExit(f"{what}: {wrong} of {got.nbytes} bytes differ")


def floats(ops: Operations) -> None:
    """Float matrices with the rows of a prompt."""
    bench = ops.bench
    for name, kind, rows, cols in FLOATS:
        weights = [bench.weight(kind, n, cols) for n in rows]
        some = [Weight(w.type, (min(w.rows, 40), cols), w.data[:40]) for w in weights]
        x = bench.inputs(70, cols)
        with bench.workspace.scratch():
            got = [ops.cp.asnumpy(y) for y in product.linear(bench.workspace, some, x)]
        want = ordered_linear([bench.host(w) for w in some], ops.cp.asnumpy(x))
        for y, z in zip(got, want, strict=True):
            same(ops, f"{name} {kind}", y, z)
        for n in ROWS:
            x = ops.f(n, cols)
            calls = [partial(product.linear, bench.workspace, weights, x)] * 2
            shape = f"{'+'.join(map(str, rows))} x {cols}"
            rates(ops, f"{name} {kind} {shape}, {n} rows", float(n * sum(rows) * cols), calls, x.nbytes / 1e9)


def scan(ops: Operations) -> None:
    """The delta net, and its recurrence alone."""
    w = Gdn(
        ops.f(CHANNELS, 4, scale=0.5), -abs(ops.f(VALUE_HEADS)), ops.f(VALUE_HEADS), abs(ops.f(HEAD)) + np.float32(0.5)
    )

    def inputs(n: int) -> list[Any]:
        return [ops.f(n, CHANNELS), ops.f(n, VALUE_HEADS * HEAD), ops.f(n, VALUE_HEADS), ops.f(n, VALUE_HEADS)]

    def fresh() -> list[Any]:
        return [ops.f(1, 3, CHANNELS), ops.f(1, VALUE_HEADS, HEAD, HEAD, scale=0.1)]

    rows, start = inputs(43), fresh()
    results = []
    for cuts in ([43], [16, 16, 8, 3]):
        at, state, out = 0, [a.copy() for a in start], list[Any]()
        for n in cuts:
            part: Any = (*(a[at : at + n] for a in rows), ops.ints([[0, 0, n]]), *state, EPS)
            with ops.bench.workspace.scratch():
                out.append(ops.kernels.gdn(w, *part).copy())
            at += n
        results.append((ops.cp.concatenate(out), *state))
    for got, want in zip(*results, strict=True):
        same(ops, "delta scan of a prompt and of windows", got, want)
    for n in ROWS:
        states = [fresh() for _ in range(2)]
        arrays, segments = inputs(n), ops.ints([[0, 0, n]])
        calls: list[Any] = [(*arrays, segments, *state, EPS) for state in states]
        macs = float(n * VALUE_HEADS * HEAD * HEAD * 3)
        rates(ops, f"delta net {n} rows", macs, [partial(ops.kernels.gdn, w, *call) for call in calls])
        c, decay, beta, o = (
            ops.f(n, CHANNELS),
            ops.f(n, VALUE_HEADS),
            ops.f(n, VALUE_HEADS),
            ops.f(n, VALUE_HEADS * HEAD),
        )
        decay, beta = abs(decay) % np.float32(1), abs(beta) % np.float32(1)

        grid, block, of_block = gdn.scan_plan(VALUE_HEADS, KEY_HEADS, HEAD, 1)

        def recurrence(state: list[Any]) -> None:
            launch(
                "gdn_scan.cu", "gdn_scan", grid, block,  # noqa: B023
                c, decay, beta, arrays[0], *state, segments, o, I32(KEY_HEADS), I32(VALUE_HEADS),  # noqa: B023
                HEAD_SIZE=HEAD, TAPS=4, HEADS=of_block,  # noqa: B023
            )  # fmt: skip

        rates(ops, f"delta scan alone {n} rows", macs, [partial(recurrence, s) for s in states])


class Attention:
    """A layer's pages in a format, filled with `depth` random tokens."""

    def __init__(self, ops: Operations, kv: str, depth: int) -> None:
        cp, self.ops, self.depth = ops.cp, ops, depth
        angles = cp.arange(depth, dtype=cp.float32)[:, None] * 1e-3 * cp.arange(1, ROTATED // 2 + 1, dtype=cp.float32)
        self.rope = Rope(cp.cos(angles), cp.sin(angles))
        self.norms = Norms(*(abs(ops.f(d)) + np.float32(0.5) for d in (DIM, DIM, INDEX_DIM, INDEX_DIM)))
        pages = depth // PAGE
        k, v = (cp.zeros((pages, PAGE, KV_HEADS, form.row(DIM)), form.dtype) for form in KV[kv])
        raw, block = cp.zeros((pages, PAGE, INDEX_DIM), cp.float32), cp.zeros((pages, PAGE // R, INDEX_DIM), cp.float32)
        self.pages = AttentionPages(k, v, raw, block)
        self.tables = ops.ints(np.random.default_rng(1).permutation(pages)[None])
        for begin in range(0, depth, 8192):
            where = self.where(begin, min(begin + 8192, depth))
            ops.kernels.qsa_store(self.pages, *where, *self.stored(len(where[1])), self.norms, self.rope, EPS)

    def where(self, begin: int, end: int) -> tuple[Any, Any, Any]:
        return self.tables, self.ops.ints(np.zeros(end - begin)), self.ops.ints(np.arange(begin, end))

    def stored(self, n: int) -> tuple[Any, Any, Any]:
        f = self.ops.f
        return f(n, KV_HEADS, DIM), f(n, KV_HEADS, DIM), f(n, INDEX_DIM)

    def asked(self, n: int) -> tuple[Any, Any]:
        return self.ops.f(n, HEADS, 2, DIM), self.ops.f(n, INDEX_HEADS, INDEX_DIM)

    def attend(self, where: tuple[Any, Any, Any], asked: tuple[Any, Any]) -> Any:
        with self.ops.bench.workspace.scratch():
            args = (self.pages, *where, *asked, self.norms, self.rope, BUDGET, EPS)
            return self.ops.kernels.qsa_attend(*args).copy()

    def check(self, kv: str) -> None:
        """Rows of a prompt are those rows of windows, in every bit, and near the reference."""
        begin, n = self.depth - 75, 75
        where, asked = self.where(begin, self.depth), self.asked(n)
        whole = self.attend(where, asked)
        for first, last in ((0, 1), (1, 17), (60, 75)):
            part = (where[0], where[1][first:last], where[2][first:last])
            window = self.attend(part, (asked[0][first:last], asked[1][first:last]))
            same(
                self.ops,
                f"attention of {kv}, rows {first} to {last} of a prompt and of a window",
                whole[first:last],
                window,
            )
        host = [self.ops.cp.asnumpy(a) for a in (*where, *asked)]
        of_layer: Any = (
            type(a)(*(self.ops.cp.asnumpy(getattr(a, name)) for name in a.__slots__))
            for a in (self.pages, self.norms, self.rope)
        )
        pages, norms, rope = of_layer
        few: Any = (host[0], *(a[:8] for a in host[1:]), norms, rope, BUDGET, EPS)
        want = reference.qsa_attend(pages, *few)
        far = np.abs(self.ops.cp.asnumpy(whole[:8]) - want).max() / np.abs(want).max()
        if not far < 5e-5:
            raise SystemExit(f"attention of {kv}: {far:.1e} from the reference")


def kept(position: int) -> int:
    """Tokens that a row attends to."""
    complete = (position + 1) // R
    return position + 1 if complete <= BUDGET // R else BUDGET + position + 1 - complete * R


def formats(ops: Operations) -> None:
    """Attention of prompts by format: all of a prompt, and a chunk of a long one. Counted are keys and values:
    scores of index blocks come on top where the blocks compete."""
    ops.kernels.bound = None
    for kv in ("fp32", "fp16", "int8", "k8v4"):
        Attention(ops, kv, 2304).check(kv)
        deep = ((32768, 8192), (131072, 2048)) if kv == "fp16" else ()
        for depth, n in ((2048, 2048), (8192, 8192), *deep):
            ops.kernels.bound = depth
            layer = Attention(ops, kv, depth)
            macs = 2.0 * HEADS * DIM * sum(kept(p) for p in range(depth - n, depth))
            more = (
                *layer.where(depth - n, depth),
                *layer.stored(n),
                *layer.asked(n),
                layer.norms,
                layer.rope,
                BUDGET,
                EPS,
            )
            rates(ops, f"attention {kv}, {n} rows at {depth}", macs, [partial(ops.kernels.qsa, layer.pages, *more)])
            del layer, more
            ops.cp.get_default_memory_pool().free_all_blocks()
        ops.kernels.bound = None

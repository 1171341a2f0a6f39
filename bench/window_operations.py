"""The kernels of a window beside its products, for 1 and 8 rows: each as a chain of launches that overlap, in a graph.

    python -m strata.bench.operations_cuda --only window --out results.json

Every way to cut a kernel is compared with the others first, bit for bit. A line is the microseconds of one operation of
one layer; indented lines are its kernels, each as a chain of its own. Weights and states are those of enough layers to
leave the cache.

Errors   exit code 1 and the case when a bit differs
Cost     some 20 s on an H200, half of them for the compiler
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

import numpy as np

from strata.bench.window_launches import Launch, Launches
from strata.kernels.cuda import chains, compile, gdn, product, qsa, route
from strata.kernels.cuda.chains import ChainsPlan
from strata.kernels.cuda.precompile import compile_missing
from strata.kernels.cuda.sample import pack
from strata.kernels.ops import PAGE, AttentionPages, Gdn, Norms, Ple, Rope, Sampling

if TYPE_CHECKING:
    from strata.bench.operations_cuda import Operations

EPS = 1e-6
KEY_HEADS, VALUE_HEADS, HEAD = 16, 48, 128
CHANNELS = (2 * KEY_HEADS + VALUE_HEADS) * HEAD
HEADS, KV_HEADS, DIM, INDEX_HEADS, INDEX_DIM, ROTATED, R, BUDGET = 24, 2, 256, 4, 128, 64, 4, 2048
HIDDEN, EXPERTS, USED, VOCAB, STREAMS = 2560, 512, 10, 248_320, 4
LAYERS: Final = 24
REPLAYS: Final = 5

Plans = dict[str, Callable[..., Any]]


@dataclass(slots=True)
class Case:
    """An operation of some layers. `again(i)`: results of layer 0, the same for all cases of a `group`; `ways`: what is
    set while it runs."""

    label: str
    calls: Sequence[Callable[[], Any]]
    group: str = ""
    results: Callable[[], list[Any]] | None = None
    ways: list[tuple[Any, str, Any]] = field(default_factory=list)
    kernels: bool = False

    def patched(self) -> Any:
        """The context in which it runs."""
        from contextlib import ExitStack

        stack = ExitStack()
        for owner, name, value in self.ways:
            stack.enter_context(mock.patch.object(owner, name, value))
        return stack


def window(ops: Operations) -> None:
    """All of them."""
    cases = [*floats(ops), *delta(ops), *attention(ops), *ends(ops)]
    with compile.collecting() as jobs:
        for case in cases:
            with case.patched(), ops.bench.workspace.scratch():
                case.calls[0]()
    compile_missing(jobs, int(ops.cp.cuda.Device().compute_capability))
    compare(ops, cases)
    for case in cases:
        with case.patched():
            ops.time(case.label, case.calls, REPLAYS)
            if case.kernels:
                alone(ops, case)


def compare(ops: Operations, cases: Sequence[Case]) -> None:
    """Cases of a group have the same bits. Exits when they have not."""
    first: dict[str, list[np.ndarray]] = {}
    for case in cases:
        if case.results is None:
            continue
        with case.patched(), ops.bench.workspace.scratch():
            got = [ops.cp.asnumpy(a) for a in case.results()]
        want = first.setdefault(case.group, got)
        for i, (a, b) in enumerate(zip(want, got, strict=True)):
            if a.tobytes() != b.tobytes():
                raise SystemExit(f"{case.label}: result {i} has other bits than the first way")


def alone(ops: Operations, case: Case) -> None:
    """Each kernel of the operation as a chain of its own."""
    found: list[Launch] = []
    for call in case.calls:
        with ops.bench.workspace.scratch():
            found += Launches.of(call)
    for name in dict.fromkeys(launch.label for launch in found):
        same = [launch for launch in found if launch.label == name]
        times = ops.bench.times([partial(x.kernel, x.grid, x.block, x.arguments, x.shared) for x in same], REPLAYS)
        ops.bench.add(f"    {name}", "us", times)


def floats(ops: Operations) -> Iterator[Case]:
    """Router, gates of the delta net, indexer."""
    bench = ops.bench
    routers = [(bench.weight("F32", EXPERTS, HIDDEN), bench.weight("F32", 1, HIDDEN)) for _ in range(LAYERS)]
    gates = [[bench.weight("F32", VALUE_HEADS, HIDDEN) for _ in range(2)] for _ in range(LAYERS)]
    indexers = [
        [bench.weight("BF16", rows, HIDDEN) for rows in (INDEX_HEADS * INDEX_DIM, INDEX_DIM)] for _ in range(LAYERS)
    ]
    ended = ops.cp.zeros(1, ops.cp.uint32)
    for n in (1, 8):
        x = ops.f(n, HIDDEN)
        cuts: dict[str, tuple[int, int, int]] = {"": (0, 0, 0)}
        cuts |= {f", {i} inputs x {g} groups, {r} rows": (r, i, g) for r, i, g in router_cuts(n)}
        for note, (rows, inputs, groups) in cuts.items():
            ways: list[Any] = []
            if rows:
                plan = ChainsPlan(rows, inputs, groups, -(-(EXPERTS + 1) // rows), 1)
                ways = [(chains, "router_plan", lambda *_, plan=plan: plan)]
            routes = [partial(route.route_window, bench.workspace, ended, *w, x, USED) for w in routers]
            yield Case(f"router {n} rows{note}", routes, f"router {n}", _listed(routes[0]), ways)
        for name, sets, rows_of_all in (("gates 48+48", gates, 96), ("indexer 512+128", indexers, 640)):
            cuts = {"": (0, 0, 0)}
            cuts |= {f", {r} rows, {i} inputs x {p} parts": (r, i, p) for r, i, p in dense_cuts(n)}
            for note, (rows, inputs, parts) in cuts.items():
                ways = []
                if rows:
                    plan = ChainsPlan(rows, inputs, 1, -(-rows_of_all // rows), parts)
                    ways = [(chains, "chains_plan", lambda *_, plan=plan: plan)]
                calls = [partial(product.linear, bench.workspace, w, x) for w in sets]
                yield Case(f"{name} {n} rows{note}", calls, f"{name} {n}", _listed(calls[0]), ways)


def router_cuts(n: int) -> Iterator[tuple[int, int, int]]:
    """Rows, inputs, groups."""
    yield from ((2, 1, 1),) if n == 1 else ((4, 4, 1), (4, 2, 2), (4, 1, 4), (2, 2, 4), (2, 1, 8))


def dense_cuts(n: int) -> Iterator[tuple[int, int, int]]:
    """Rows, inputs, parts."""
    yield from ((1, 1, 1),) if n == 1 else ((4, 4, 2), (4, 2, 2), (4, 1, 8), (2, 2, 4))


def _listed(call: Callable[[], Any]) -> Callable[[], list[Any]]:
    return lambda: list(call())


def _one(call: Callable[[], Any]) -> Callable[[], list[Any]]:
    return lambda: [call()]


def delta(ops: Operations) -> Iterator[Case]:
    """The delta net of some slots with the products of its gates: three launches, two, or one."""
    bench, ended = ops.bench, ops.cp.zeros(1024, ops.cp.uint32)
    w = Gdn(
        ops.f(CHANNELS, 4, scale=0.5), -abs(ops.f(VALUE_HEADS)), ops.f(VALUE_HEADS), abs(ops.f(HEAD)) + np.float32(0.5)
    )
    gates = [[bench.weight("F32", VALUE_HEADS, HIDDEN) for _ in range(2)] for _ in range(LAYERS)]
    for slots, layers in ((1, LAYERS), (2, LAYERS), (4, 12), (8, 8)):
        p, z, u = ops.f(slots, CHANNELS), ops.f(slots, VALUE_HEADS * HEAD), ops.f(slots, HIDDEN)
        rows = ops.ints([[slot | slots << 16, slot, slot + 1] for slot in range(slots)])
        states = [
            (ops.f(2 * slots, 3, CHANNELS), ops.f(2 * slots, VALUE_HEADS, HEAD, HEAD, scale=0.1)) for _ in range(layers)
        ]

        def call(
            i: int, made: bool, known: tuple[Any, ...] = (p, z, u, rows), states: list[tuple[Any, Any]] = states
        ) -> Any:
            p, z, u, rows = known
            if made:
                b, a = product.linear(bench.workspace, gates[i], u)
                return gdn.gdn(bench.workspace, w, p, z, b, a, rows, *states[i], EPS, ended)
            own = gdn.Gates(gates[i][0], gates[i][1], u)
            return gdn.gdn(bench.workspace, w, p, z, None, None, rows, *states[i], EPS, ended, own)

        ways = (
            (", gates apart", True, 0, 90, 0), (", gates apart", True, 128, 90, 0), ("", False, 64, 90, 0),
            ("", False, 128, 90, 0), (", in registers", False, 64, 90, 1), (", in registers", False, 128, 90, 1),
            (", copied by lanes", False, 128, 999, 0),
        )  # fmt: skip
        for note, made, columns, bulk, held in ways:
            calls = [partial(call, i, made) for i in range(layers)]

            def results(call: Callable[[], Any] = calls[0], state: tuple[Any, Any] = states[0]) -> list[Any]:
                return [call(), *state]

            set_ = [(gdn, "slots_columns", lambda *_, columns=columns: columns), (gdn, "BULK_ARCH", bulk)]
            set_.append((gdn, "in_registers", lambda _, held=held: bool(held)))
            label = f"gdn {slots} slots, {f'{columns} columns' if columns else 'gdn_window'}{note}"
            yield Case(label, calls, f"gdn {slots}", results, set_, kernels=True)


def attention(ops: Operations) -> Iterator[Case]:
    """Store and attend at some depths; bits are those of the tests, there is one way."""
    cp = ops.cp
    norms = Norms(*(abs(ops.f(d)) + np.float32(0.5) for d in (DIM, DIM, INDEX_DIM, INDEX_DIM)))
    for depth, n, layers in ((320, 1, 12), (320, 8, 12), (4096, 1, 8), (4096, 8, 2)):
        per_slot = -(-depth // PAGE)
        angles = cp.arange(depth, dtype=cp.float32)[:, None] * 1e-3 * cp.arange(1, ROTATED // 2 + 1, dtype=cp.float32)
        rope, pages = Rope(cp.cos(angles), cp.sin(angles)), per_slot * n
        all_pages = [
            AttentionPages(
                ops.f(pages, PAGE, KV_HEADS, DIM),
                ops.f(pages, PAGE, KV_HEADS, DIM),
                ops.f(pages, PAGE, INDEX_DIM),
                ops.f(pages, PAGE // R, INDEX_DIM),
            )
            for _ in range(layers)
        ]
        where = (
            ops.ints(np.arange(pages).reshape(n, per_slot)), ops.ints(np.arange(n)), ops.ints(np.full(n, depth - 1)),
        )  # fmt: skip
        rows = (ops.f(n, KV_HEADS, DIM), ops.f(n, KV_HEADS, DIM), ops.f(n, INDEX_DIM))
        asked = (ops.f(n, HEADS, 2, DIM), ops.f(n, INDEX_HEADS, INDEX_DIM))
        bound = BUDGET if depth < BUDGET else None
        more = (*where, *rows, *asked, norms, rope, BUDGET, EPS)

        def call(own: AttentionPages, more: tuple[Any, ...] = more, bound: int | None = bound) -> Any:
            ops.kernels.bound = bound
            out = ops.kernels.qsa(own, *more)
            ops.kernels.bound = None
            return out

        calls = [partial(call, own) for own in all_pages]
        for note, chunks in (("", 0), (", 1 chunk", 1), (", 3 chunks", 3)):
            ways: list[Any] = [(qsa, "value_chunks", lambda *_, chunks=chunks: chunks)] if chunks else []
            group = f"attention {n} {depth}"
            yield Case(f"{group}{note}", calls, group, _one(calls[0]), ways, kernels=True)


def ends(ops: Operations) -> Iterator[Case]:
    """Embeddings and sampling."""
    cp, bench = ops.cp, ops.bench
    table = bench.weight("Q6_K", 65536, HIDDEN)
    for n in (1, 8):
        tokens = ops.ints(np.arange(n) * 7919 % 65536)
        yield Case(f"embed {n} rows", [partial(ops.kernels.embed, table, tokens, STREAMS)] * 4, kernels=True)
        logits = ops.f(n, VOCAB, scale=3.0)
        for name, how in (("argmax", Sampling()), ("top 20", Sampling(temperature=1.0, seed=1))):
            settings, seeds = (cp.asarray(a) for a in pack([how] * n))
            arrays = (logits, settings, seeds, ops.ints(np.arange(n)), ops.ints(np.zeros((n, 0))))
            calls = [partial(ops.kernels.sample_rows, *arrays)] * 4
            yield Case(f"sample {n} rows, {name}", calls, kernels=True)
        yield _ngrams(ops, n)


def _ngrams(ops: Operations, n: int) -> Case:
    cp, bench, order, heads, width, wide = ops.cp, ops.bench, 3, 16, 64, 4
    sizes = np.full(heads, 4093, np.uint64)
    w = Ple(
        table=bench.weight("Q8_0", 4093 * heads, width),
        key=bench.weight("Q6_K", STREAMS * HIDDEN, heads * width),
        value=bench.weight("Q6_K", HIDDEN, heads * width),
        norm_key=abs(ops.f(STREAMS, HIDDEN)),
        norm_query=abs(ops.f(STREAMS, HIDDEN)),
        norm_conv=abs(ops.f(STREAMS, HIDDEN)),
        conv=ops.f(STREAMS * HIDDEN, wide),
        multipliers=cp.asarray(np.array([3, 5, 7], np.uint64)),
        sizes=cp.asarray(sizes),
        offsets=cp.asarray(np.arange(heads, dtype=np.uint64) * sizes),
        eos=0,
    )
    rows = ops.ints([[slot, slot, slot + 1] for slot in range(n)])
    tokens, history = ops.ints(np.arange(n) + 5), ops.ints(np.zeros((n, order - 1)))
    conv, x = ops.f(n, (wide - 1) * order, STREAMS * HIDDEN), ops.f(n, STREAMS, HIDDEN)

    def call() -> None:
        at = ops.kernels.ple_rows(w, tokens, rows, history)
        ops.kernels.ple(w, x, at, rows, conv, EPS)

    return Case(f"n-grams {n} rows", [call] * 4, kernels=True)

"""Sparse attention on a card: what lands in the pages, what is selected, what rows see; cut and mixed in every way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from strata.kernels import cpu, reference
from strata.kernels.cuda import qsa
from strata.kernels.cuda.launch import I32, launch
from strata.kernels.kv import BLOCK, KV, KvFormat
from strata.kernels.ops import PAGE, AttentionPages, FarPages, Norms, Rope
from strata.kernels.reference.kv import decode, encode

LEVEL = "-O2"  # long rows: what -Og saves at the compiler its kernels lose
EPS = 1e-6
SCRATCH = 1 << 18


@dataclass(frozen=True)
class Shape:
    heads: int
    kv: int
    d: int
    index_heads: int
    index_dim: int
    half: int
    r: int
    budget: int


TINY = Shape(heads=4, kv=2, d=64, index_heads=4, index_dim=32, half=8, r=4, budget=32)
ODD = Shape(heads=3, kv=1, d=64, index_heads=3, index_dim=32, half=16, r=8, budget=48)
LONG = Shape(heads=6, kv=1, d=128, index_heads=2, index_dim=64, half=20, r=4, budget=272)
WIDE = Shape(heads=24, kv=2, d=256, index_heads=4, index_dim=128, half=32, r=4, budget=64)
DENSE = Shape(heads=2, kv=2, d=64, index_heads=2, index_dim=32, half=16, r=0, budget=1)


class Sequences:
    """Random tokens of several slots and the pages they are read into, on the host and on the target."""

    def __init__(self, target: Any, shape: Shape, pages: int, slots: int = 3, kv: str = "fp32") -> None:
        self.target, self.shape, self.slots = target, shape, slots
        self.rng = np.random.default_rng([shape.d, shape.heads, pages])
        n = pages * slots + 3
        angles = np.arange(pages * PAGE)[:, None] * 1e4 ** (-np.arange(shape.half) / shape.half)
        self.rope = Rope(np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32))
        self.norms = Norms(*(1 + 0.1 * self.f(d) for d in (shape.d, shape.d, shape.index_dim, shape.index_dim)))
        self.tables = self.rng.permutation(n)[: pages * slots].reshape(slots, pages).astype(np.int32)
        self.kv = KV[kv]
        self.host = self._pages(n, KV["fp32"])
        self.device = target.put(self._pages(n, self.kv))
        self.space = target.workspace(16)
        self.limits = qsa.limits(self.space, SCRATCH)
        self.fixed = [target.put(a) for a in (self.norms, self.rope)]
        self.held = [0] * slots

    def f(self, *shape: int) -> np.ndarray:
        return self.rng.standard_normal(shape).astype(np.float32)

    def _pages(self, n: int, kv: tuple[KvFormat, KvFormat]) -> AttentionPages:
        s = self.shape
        k, v = (np.full((n, PAGE, s.kv, f.row(s.d) * f.dtype.itemsize), 0xFF, np.uint8).view(f.dtype) for f in kv)
        raw = np.full((n, PAGE, s.index_dim), np.nan, np.float32)
        return AttentionPages(k, v, raw, np.full((n, PAGE // s.r if s.r else 0, s.index_dim), np.nan, np.float32))

    def rows(self, *parts: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
        """slots and positions of (slot, tokens) that continue their sequences."""
        slots = np.concatenate([np.full(n, slot, np.int32) for slot, n in parts])
        positions = np.concatenate([np.arange(self.held[s], self.held[s] + n, dtype=np.int32) for s, n in parts])
        for slot, n in parts:
            self.held[slot] += n
        return slots, positions

    def store(self, slots: np.ndarray, positions: np.ndarray) -> None:
        """Random keys and values of the rows, into the pages of both sides."""
        s, n, put = self.shape, len(slots), self.target.put
        rows = (self.f(n, s.kv, s.d), self.f(n, s.kv, s.d), self.f(n, s.index_dim))
        where = (self.tables, slots, positions)
        cpu.qsa_store(self.host, *where, *rows, self.norms, self.rope, EPS)
        qsa.qsa_store(self.device, *map(put, where), *map(put, rows), *self.fixed, EPS)

    def queries(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        s = self.shape
        return self.f(n, s.heads, 2, s.d), self.f(n, s.index_heads, s.index_dim)

    def attend(self, slots: np.ndarray, positions: np.ndarray, queries: tuple[np.ndarray, ...]) -> np.ndarray:
        arrays = [self.target.put(a) for a in (self.tables, slots, positions, *queries)]
        with self.space.scratch():
            out = qsa.qsa_attend(self.space, self.limits, self.device, *arrays, *self.fixed, self.shape.budget, EPS)
            return self.target.host(out)

    def on_host(self, module: Any, slots: np.ndarray, positions: np.ndarray, queries: tuple[np.ndarray, ...]) -> Any:
        where = (self.host, self.tables, slots, positions)
        return module.qsa_attend(*where, *queries, self.norms, self.rope, self.shape.budget, EPS)


def in_soak(value):
    """A case that costs the emulator too much for every run."""
    return pytest.param(value, marks=pytest.mark.soak)


def kinds(formats: list[str], shapes: dict[str, Any], quick: dict[str, tuple[str, ...]]) -> list[Any]:
    """Every format with every shape; those of `quick` are in every run, the others in the soak."""
    return [
        pytest.param(kv, shape, id=f"{kv}-{name}", marks=() if name in quick.get(kv, ()) else pytest.mark.soak)
        for kv in formats
        for name, shape in shapes.items()
    ]


@pytest.mark.parametrize(("tokens", "rows"), [(600, 1), (300, 2), (2100, 1), (2100, 3)])
def test_a_few_rows_share_a_value_head_over_several_blocks_and_parts(target, same_bits, tokens, rows):
    """Five query heads to a value head: a block has three of them and another two, or one all of them."""
    case = Sequences(
        target, Shape(heads=5, kv=1, d=64, index_heads=2, index_dim=32, half=8, r=0, budget=1), -(-tokens // PAGE)
    )
    case.store(*case.rows((1, tokens - rows)))
    where = case.rows((1, rows))
    case.store(*where)
    queries = case.queries(rows)
    for _ in range(2):
        same_bits(case.attend(*where, queries), case.on_host(cpu, *where, queries))
    assert not target.host(case.limits.ended).any()
    assert qsa.value_chunks(rows, 5) == (2 if rows <= 2 else 1)


@pytest.mark.parametrize(
    ("kv", "shape"),
    kinds(
        ["fp32", "fp16", "int8", "k8v4"],
        {"tiny": TINY, "odd": ODD, "wide": WIDE, "dense": DENSE},
        {"fp32": ("tiny", "odd", "wide", "dense"), "k8v4": ("odd",)},
    ),
)
def test_a_window_that_stores_on_its_way_has_the_bits_of_one_that_stores_first(target, same_bits, shape, kv):
    """Below the budget: rows of several sequences, some of the same one, at edges of pages, tiles and index blocks."""
    first, second = (Sequences(target, shape, pages=2, kv=kv) for _ in range(2))
    held = min(shape.budget, 96) - 8 if shape.r else 61
    for case in (first, second):
        case.limits.bound = shape.budget if shape.r else None
        case.store(*case.rows((1, held), (2, held // 2)))
    put = target.put
    for parts in ([(0, 1), (1, 3), (2, 1)], [(0, 2)], [(1, 1)], [(2, 4), (0, 1)]):
        where = first.rows(*parts)
        second.rows(*parts)
        n = len(where[0])
        rows = (first.f(n, shape.kv, shape.d), first.f(n, shape.kv, shape.d), first.f(n, shape.index_dim))
        queries = first.queries(n)
        arrays = [put(a) for a in (first.tables, *where)]
        made = [put(a) for a in (*rows, *queries)]
        assert qsa.stores_on_its_way(first.limits, first.device, arrays[0], n, shape.budget)
        given, later = [*made], put(np.full_like(rows[2], np.nan))
        given[2] = later
        with first.space.scratch():
            y = qsa.qsa(
                first.space, first.limits, first.device, *arrays, *given, *first.fixed, shape.budget, EPS,
                beside=lambda later=later, rows=rows: target.update(later, rows[2]),
            )  # fmt: skip
            y = target.host(y)
        qsa.qsa_store(second.device, *arrays, *made[:3], *second.fixed, EPS)
        same_bits(y, second.attend(*where, queries))
        for name in ("k", "v", "raw", "block"):
            same_bits(target.host(getattr(first.device, name)), target.host(getattr(second.device, name)))


@pytest.mark.parametrize("shape", [TINY, ODD, WIDE, DENSE], ids=["tiny", "odd", "wide", "dense"])
def test_pages_hold_the_bits_of_the_host_after_prompts_and_single_rows(target, same_bits, shape):
    case = Sequences(target, shape, pages=3)
    for parts in ([(1, 70), (0, 13)], [(0, 1), (2, 3), (1, 1)], [(0, 2), (1, 7)]):
        case.store(*case.rows(*parts))
    for name in ("k", "v", "raw", "block"):
        same_bits(target.host(getattr(case.device, name)), getattr(case.host, name))


@pytest.mark.parametrize("shape", [TINY, ODD, WIDE], ids=["tiny", "odd", "wide"])
@pytest.mark.parametrize("kv", ["fp16", "int8", "q4_0", "k8v4"])
def test_pages_of_a_format_hold_the_bits_of_the_reference(target, same_bits, shape, kv):
    case = Sequences(target, shape, pages=2, kv=kv)
    case.store(*case.rows((0, 70), (1, 5)))
    case.store(*case.rows((2, 1), (1, 1)))
    written = np.isfinite(case.host.k[:, :, 0, 0])
    assert written.sum() == 77
    for name, form in zip("kv", case.kv, strict=True):
        stored = encode(form, getattr(case.host, name)[written])
        used = shape.d * form.bits // 8 + shape.d // BLOCK * 2 if form.packed else shape.d
        same_bits(target.host(getattr(case.device, name))[written][..., :used], stored[..., :used])


GEOMETRIES = pytest.mark.parametrize(
    ("shape", "pages", "start"),
    [(TINY, 4, 150), (ODD, 4, 190), (LONG, 6, 340), (WIDE, 3, 130), (DENSE, 6, 300)],
    ids=["tiny", "odd", "long", "wide", "dense"],
)


@GEOMETRIES
def test_rows_of_windows_and_prompts_see_what_the_reference_sees(target, shape, pages, start):
    case = Sequences(target, shape, pages)
    for parts in ([(1, start), (0, 20)], [(0, 1), (1, 2), (2, 1)]):
        rows = case.rows(*parts)
        case.store(*rows)
        queries = case.queries(len(rows[0]))
        got, want = case.attend(*rows, queries), case.on_host(reference, *rows, queries)
        assert np.abs(got - want).max() < 2e-5 * np.abs(want).max()


@GEOMETRIES
def test_rows_of_windows_and_prompts_have_the_bits_of_the_host(target, same_bits, shape, pages, start):
    case = Sequences(target, shape, pages)
    for parts in ([(1, start), (0, 20)], [(0, 1), (1, 2), (2, 1)]):
        rows = case.rows(*parts)
        case.store(*rows)
        queries = case.queries(len(rows[0]))
        same_bits(case.attend(*rows, queries), case.on_host(cpu, *rows, queries))


@GEOMETRIES
def test_a_row_of_a_prompt_is_that_row_of_a_window_in_every_bit(target, same_bits, shape, pages, start):
    case = Sequences(target, shape, pages)
    rows = case.rows((1, start), (0, 60))
    case.store(*rows)
    queries = case.queries(len(rows[0]))
    prompt = case.attend(*rows, queries)
    chosen = [0, start - 1, start // 2, start + 59, start + 33]
    for part in (chosen[:1], chosen[1:2], chosen[2:], chosen):
        window = case.attend(*(a[part] for a in rows), tuple(q[part] for q in queries))
        same_bits(window, prompt[part])


@pytest.mark.parametrize("kv", ["fp32", in_soak("int8")])
@pytest.mark.parametrize(("shape", "pages", "start"), [(LONG, 6, 340), (WIDE, 3, 130)], ids=["long", "wide"])
def test_rows_of_one_block_do_not_wait_for_or_see_each_other(target, same_bits, monkeypatch, shape, pages, start, kv):
    case = Sequences(target, shape, pages, kv=kv)
    rows = case.rows((1, start), (0, 20))
    case.store(*rows)
    queries = case.queries(len(rows[0]))
    many = case.attend(*rows, queries)
    for together in (1, 5):
        monkeypatch.setattr(qsa, "ROWS_OF_A_BLOCK", together)
        same_bits(case.attend(*rows, queries), many)


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize(("kv", "shape", "pages", "start"), [("fp32", WIDE, 3, 130), ("k8v4", LONG, 6, 340)])
def test_slices_of_keys_under_way_change_no_bit(target, same_bits, monkeypatch, stages, kv, shape, pages, start):
    monkeypatch.setattr(qsa, "key_stages", lambda card: stages)
    case = Sequences(target, shape, pages, kv=kv)
    rows = case.rows((1, start), (0, 20))
    case.store(*rows)
    queries = case.queries(len(rows[0]))
    same_bits(case.attend(*(a[-2:] for a in rows), tuple(q[-2:] for q in queries)), case.attend(*rows, queries)[-2:])


@pytest.mark.parametrize("kv", ["fp16", in_soak("int8"), in_soak("q4_0"), "k8v4"])
@pytest.mark.parametrize(
    ("shape", "pages", "start"), [(LONG, 6, 340), (ODD, 4, 190), (WIDE, 3, 130)], ids=["long", "odd", "wide"]
)
def test_rows_over_a_format_are_those_over_what_it_says(target, same_bits, shape, pages, start, kv):
    case = Sequences(target, shape, pages, kv=kv)
    rows = case.rows((1, start), (0, 20))
    case.store(*rows)
    said = [decode(f, target.host(getattr(case.device, name)), shape.d) for name, f in zip("kv", case.kv, strict=True)]
    case.host.k[...], case.host.v[...] = said
    queries = case.queries(len(rows[0]))
    prompt = case.attend(*rows, queries)
    same_bits(prompt, case.on_host(cpu, *rows, queries))
    for part in ([0, start - 1, start // 2, start + 19], [start + 3]):
        same_bits(case.attend(*(a[part] for a in rows), tuple(q[part] for q in queries)), prompt[part])


@pytest.mark.parametrize(("kv", "near"), [("fp16", 5e-3), ("int8", 0.05), ("q4_0", 0.5)])
def test_a_format_is_as_near_to_float32_as_its_bits_allow(target, kv, near):
    results = []
    for case in (Sequences(target, LONG, 6, kv=kv), Sequences(target, LONG, 6)):
        rows = case.rows((1, 340))
        case.store(*rows)
        results.append(case.attend(*rows, case.queries(340)))
    far = np.abs(results[0] - results[1])
    assert np.median(far) > 0 and np.quantile(far, 0.9) < near, "a rounded key may change few rows' last block"


@pytest.mark.parametrize("bound", [152, 1000])
def test_the_bound_on_positions_changes_no_bit(target, same_bits, bound):
    case = Sequences(target, TINY, pages=4)
    rows = case.rows((1, 152))
    case.store(*rows)
    queries = case.queries(152)
    windows = [[151], list(range(140, 152)), list(range(152))]
    free = [case.attend(*(a[w] for a in rows), tuple(q[w] for q in queries)) for w in windows]
    case.limits.bound = bound
    for part, want in zip(windows, free, strict=True):
        same_bits(case.attend(*(a[part] for a in rows), tuple(q[part] for q in queries)), want)


@pytest.mark.parametrize("parts", [[(1, 1), (0, 2)], [(1, 40), (2, 30)]], ids=["window", "prompt"])
def test_storing_and_attending_at_once_is_one_after_the_other(target, same_bits, parts):
    apart, together = (Sequences(target, TINY, pages=4) for _ in range(2))
    outs = []
    for case in (apart, together):
        case.store(*case.rows((1, 150), (0, 77)))
        slots, positions = case.rows(*parts)
        n, put = len(slots), target.put
        rows = [put(a) for a in (case.f(n, TINY.kv, TINY.d), case.f(n, TINY.kv, TINY.d), case.f(n, TINY.index_dim))]
        queries = [put(a) for a in case.queries(n)]
        where = (case.device, *map(put, (case.tables, slots, positions)))
        if case is apart:
            qsa.qsa_store(*where, *rows, *case.fixed, EPS)
            y = qsa.qsa_attend(case.space, case.limits, *where, *queries, *case.fixed, TINY.budget, EPS)
        else:
            y = qsa.qsa(case.space, case.limits, *where, *rows, *queries, *case.fixed, TINY.budget, EPS)
        outs.append([target.host(a) for a in (y, case.device.k, case.device.v, case.device.raw, case.device.block)])
    for a, b in zip(*outs, strict=True):
        same_bits(b, a)


def test_a_row_does_not_see_what_another_slot_or_a_later_token_holds(target, same_bits):
    case = Sequences(target, TINY, pages=3)
    first = case.rows((0, 60))
    case.store(*first)
    queries = case.queries(60)
    before = case.attend(*first, queries)
    case.store(*case.rows((0, 40), (1, 100)))
    same_bits(case.attend(*first, queries), before)


def test_counters_of_parts_are_zero_again_after_every_window(target):
    case = Sequences(target, LONG, pages=6)
    rows = case.rows((1, 340))
    case.store(*rows)
    case.attend(*(a[[339, 20, 300]] for a in rows), case.queries(3))
    assert not target.host(case.limits.ended).any()


def test_a_captured_window_replayed_for_other_rows_gives_what_they_get_eagerly(target, same_bits):
    case = Sequences(target, LONG, pages=6)
    rows = case.rows((1, 340), (0, 130), (2, 5))
    case.store(*rows)
    parts = ([0, 20, 339], [339, 474, 345], [469, 338, 100])  # short rows first, then long ones, other slots
    everything = case.queries(len(rows[0]))
    arrays = [target.put(a[parts[0]].copy()) for a in (*rows, *everything)]
    tables, results = target.put(case.tables), []

    def window() -> None:
        with case.space.scratch():
            y = qsa.qsa_attend(case.space, case.limits, case.device, tables, *arrays, *case.fixed, LONG.budget, EPS)
        results[:] = [y]

    replay = target.graph(window)
    for part in parts:
        want = case.attend(*(a[part] for a in rows), tuple(q[part] for q in everything))
        for array, value in zip(arrays, (*rows, *everything), strict=True):
            target.update(array, value[part])
        replay()
        same_bits(target.host(results[0]), want)


@pytest.mark.parametrize(("index_heads", "index_dim", "rows"), [(4, 128, 40), (3, 32, 25), (1, 64, 70), (64, 32, 3)])
def test_rows_that_share_a_tile_do_not_get_each_others_scores(target, same_bits, index_heads, index_dim, rows):
    """Rows of three slots, some of which keep all that they see; blocks that do not compete get no score."""
    rng = np.random.default_rng([rows, index_dim])
    pages, r, picked, stride = 9, 4, 20, 160
    tables = rng.permutation(3 * pages).reshape(3, pages).astype(np.int32)
    block = rng.standard_normal((3 * pages, PAGE // r, index_dim)).astype(np.float32)
    slots = np.repeat(np.array([1, 0, 2], np.int32), [rows // 3, 1, rows - rows // 3 - 1])
    positions = rng.integers(60, pages * PAGE, rows).astype(np.int32)
    iq = rng.standard_normal((rows, index_heads, index_dim)).astype(np.float32)
    arrays = [target.put(a) for a in (block, tables, slots, positions, iq)]
    numbers = (stride, pages, index_heads, index_dim, r, picked)
    alone, tiled = (target.put(np.full((rows, stride), -1, np.float32)) for _ in range(2))
    shared = 4 * (64 * (index_dim + 4) + index_heads * (index_dim + 64))
    launch("qsa_score.cu", "qsa_score", (3, rows), (128,), *arrays, alone, *numbers, shared=shared)
    grid = (-(-pages * PAGE // r // qsa.TILE_KEYS), -(-rows // min(64 // index_heads, 32)))
    constants = {"TILE_KEYS": qsa.TILE_KEYS, "BLOCKS": qsa.TILE_BLOCKS}
    launch("qsa_score_tile.cu", "qsa_score_tile", grid, (128,), *arrays, tiled, *numbers, rows, **constants)
    same_bits(target.host(tiled), target.host(alone))


@pytest.mark.parametrize("threads", [256, 1024])
@pytest.mark.parametrize("kind", ["spread", "half zero", "coarse", "equal"])
def test_selection_is_exact_and_takes_the_lower_index_of_equals(target, threads, kind):
    rng = np.random.default_rng(len(kind))
    for n, picked in ((9, 8), (33, 8), (1000, 64), (5000, 512)):
        scores = np.abs(rng.standard_normal((2, n))).astype(np.float32)
        if kind == "half zero":
            scores[rng.random(scores.shape) < 0.5] = 0
        elif kind == "coarse":
            scores = np.round(2 * scores) / 2
        elif kind == "equal":
            scores[:] = 1
        chosen = target.put(np.full((2, picked), -1, np.int32))
        arguments = (target.put(scores), target.put(np.full(2, n - 1, np.int32)), chosen, I32(n), I32(1), I32(picked))
        launch("qsa_select.cu", "qsa_select", (2,), (threads,), *arguments)
        want = np.sort(np.argsort(-scores, axis=1, kind="stable")[:, :picked], axis=1)
        np.testing.assert_array_equal(target.host(chosen), want)


def test_pages_of_another_shape_are_refused_before_anything_is_written(target):
    case = Sequences(target, TINY, pages=2)
    slots, positions = case.rows((0, 3))
    k = target.put(case.f(3, 2, 128))
    with pytest.raises(ValueError, match=r"norm_k must be \(head_dim\) with head_dim = 128, got \(64,\)"):
        qsa.qsa_store(
            case.device, *map(target.put, (case.tables, slots, positions)), k, k,
            target.put(case.f(3, 32)), *case.fixed, EPS,
        )  # fmt: skip
    assert np.isnan(target.host(case.device.k)).all()


SLOT = 1


class Apart(Sequences):
    """The same sequences, about two of three pages in RAM. `numbers`: tables of all pages; `tables`: of the host."""

    def __init__(self, target: Any, shape: Shape, pages: int, kv: str = "fp32") -> None:
        super().__init__(target, shape, pages, kv=kv)
        rng, n = np.random.default_rng(7), len(self.host.k)
        near = rng.permutation(n)[: n // 3 + 1]
        place = np.full(n, -1)
        place[near] = rng.permutation(len(near))
        whole, homes = self._pages(n, self.kv), rng.permutation(n).astype(np.int32)
        self.places = np.where(place[self.tables] >= 0, place[self.tables], ~homes[self.tables]).astype(np.int32)
        few, one = self._pages(len(near), self.kv), self._pages(pages, self.kv)
        order = np.tile(np.arange(pages, dtype=np.int32), (self.slots, 1))
        far = FarPages(whole.k, whole.v, whole.raw, self.tables, one.k, one.v, order)
        self.device = target.put(AttentionPages(few.k, few.v, few.raw, self._pages(n, self.kv).block, far))

    def stored_and_attended(self, where: tuple[np.ndarray, np.ndarray], made: list[np.ndarray]) -> np.ndarray:
        arrays = [self.target.put(a) for a in (self.places, *where, *made)]
        with self.space.scratch():
            out = qsa.qsa(self.space, self.limits, self.device, *arrays, *self.fixed, self.shape.budget, EPS)
            return self.target.host(out)


FAR = {"tiny": (TINY, 4, 150), "odd": (ODD, 4, 190), "long": (LONG, 6, 340), "wide": (WIDE, 3, 130)}
FAR["dense"] = (DENSE, 5, 250)


@pytest.mark.parametrize(
    ("kv", "how"),
    kinds(
        ["fp32", "fp16", "k8v4", "int8", "q4_0"],
        FAR,
        {"fp32": ("tiny", "odd", "long", "dense"), "k8v4": ("odd", "long")},
    ),
)
def test_pages_in_ram_change_no_bit(target, same_bits, kv, how):
    shape, pages, start = how
    near, far = Sequences(target, shape, pages, kv=kv), Apart(target, shape, pages, kv=kv)
    for parts in ([(SLOT, start)], [(SLOT, 1)], [(0, 5), (SLOT, 3), (2, 1)], [(0, 60)], [(0, 1), (SLOT, 1)]):
        where = near.rows(*parts)
        n = len(where[0])
        rows = [near.f(n, shape.kv, shape.d), near.f(n, shape.kv, shape.d), near.f(n, shape.index_dim)]
        made = [*rows, *near.queries(n)]
        arrays = [target.put(a) for a in (near.tables, *where, *made)]
        with near.space.scratch():
            wanted = qsa.qsa(near.space, near.limits, near.device, *arrays, *near.fixed, shape.budget, EPS)
            wanted = target.host(wanted)
        same_bits(far.stored_and_attended(where, made), wanted)
    same_bits(target.host(far.device.block), target.host(near.device.block))


def test_rows_below_the_budget_store_in_ram_on_their_way(target, same_bits):
    """Every length of a sequence, a row at a time: keys, values and raw keys of open blocks lie in both memories."""
    near, far = Sequences(target, TINY, 3), Apart(target, TINY, 3)
    near.limits.bound = far.limits.bound = TINY.budget
    for _ in range(TINY.budget - 1):
        where = near.rows((SLOT, 1), (0, 1))
        made = [near.f(2, TINY.kv, TINY.d), near.f(2, TINY.kv, TINY.d), near.f(2, TINY.index_dim), *near.queries(2)]
        arrays = [target.put(a) for a in (near.tables, *where, *made)]
        with near.space.scratch():
            wanted = qsa.qsa(near.space, near.limits, near.device, *arrays, *near.fixed, TINY.budget, EPS)
            wanted = target.host(wanted)
        same_bits(far.stored_and_attended(where, made), wanted)
    same_bits(target.host(far.device.block), target.host(near.device.block))

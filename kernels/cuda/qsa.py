"""Sparse attention over pages: store, score index blocks, select, attend. Contracts: `ops.Kernels.qsa_*`.

Slots, positions and tables are read on the device, so a captured graph sees new ones. How long a row is, only the
device knows; the host knows a bound (`Limits.bound`), which sizes grids and scratch: blocks past a row's end stop at
once. Up to WINDOW_ROWS rows the work of a row is spread over the card; above, a row is the work of a block, and rows
are taken as many at a time as the scratch holds. The bits are the same.

Shapes   head_dim 64, 128, 192 or 256; index_dim a multiple of 32 up to 256; keys and values in the formats of kv.py
Errors   ValueError for shapes; positions, slots and tables are the caller's to check (they are on the device)
Cost     a row reads its kept keys and values once for the query heads that share them, and, where the blocks compete,
         all its block keys; many rows share a read of the block keys
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from strata.kernels.check import check, require
from strata.kernels.cuda import card as cards
from strata.kernels.cuda.arguments import address
from strata.kernels.cuda.launch import F32, I32, launch
from strata.kernels.cuda.workspace import DeviceArray, Workspace
from strata.kernels.kv import KvFormat, format_of
from strata.kernels.ops import ATTENTION_PART, PAGE, AttentionPages, FarPages, Norms, Rope

WINDOW_ROWS: Final = 16
"""Rows up to which the work of one row is spread over the card."""
PROJECTED: Final = np.dtype(
    [(name, np.uint64) for name in ("k", "v", "index_k", "q_gate", "norm_k", "norm_index_k", "norm_q", "cos", "sin",
                                    "cached_k", "cached_v", "far_k", "far_v", "raw", "far_raw", "block", "numbers")]
    + [("index_dim", I32), ("half", I32), ("eps", F32)],
    align=True,
)  # fmt: skip
"""Projected of qsa_window.cu."""
_NOTHING: Final = np.zeros((), PROJECTED)
FEW_ROWS: Final = 2
"""Rows up to which the values of a row are read again for every few query heads."""
HEADS_OF_WARP: Final = 3
"""Query heads of a warp of qsa_values at a time, where its block has all that share a value head."""
KEY_WARPS: Final = 12
"""Warps of a block of qsa_keys with few rows, whose heads wait for each other otherwise."""
MOST_UNITS: Final = 64
"""Value heads times slices of 32 dims of a row, at most."""
HEADS_OF_A_THREAD: Final = (12, 6, 4, 3, 2, 1)
"""Query heads that share keys and are computed by one thread, as compiled."""
TILE_KEYS: Final = 48
TILE_BLOCKS: Final = 3
"""Keys of a tile of qsa_score_tile.cu and its blocks of a multiprocessor: 459 us for a prompt of 8,192 tokens, 2,598
for the last 8,192 of 32,768. 64 and 2: 503 and 2,738; 32 and 4: 458 and 2,738; tiles of 64 keys whose lanes have two
chains of 4 x 8 dots: 629 and 3,093 (H200, 2026-11-30)."""

_WARP: Final = 32
_WARPS: Final = 4
_THREADS: Final = 128
_KEYS: Final = 64
_SCORED_QUERIES: Final = 64
_SCORED_ROWS: Final = 32
"""Rows of a tile of qsa_score_tile.cu at most: a row a lane."""
_SCORE_BLOCKS: Final = 528
"""Blocks of the scores of a window: four for each multiprocessor of a large card; each takes tiles in turn."""
_SELECT_FEW: Final = 1024
_SELECT_MANY: Final = 256
_SLICE: Final = 32
ROWS_OF_A_BLOCK: Final = 12
"""Rows of a block of qsa_prompt_values at most, a warp each: as many as the registers allow, so that they
find each other's values in the first cache."""
_CHUNK: Final = 32
"""Tokens whose exponentials a row of qsa_prompt_values has in shared memory, twice."""
_KEYS_SLICE: Final = 16
"""Dims of keys that a stage of qsa_prompt_keys has."""
_KEPT_AT_ONCE: Final = 32
_MOST_KEY_BLOCKS: Final = 1024
_INT: Final = 4
_FLOAT: Final = 4

FORMATS: Final = {"fp32": "Float32", "fp16": "Float16", "int8": "Packed8", "q4_0": "Packed4"}
"""Formats of keys and values, and what the sources call them."""


@dataclass(slots=True, eq=False)
class Limits:
    """What the host knows about rows whose positions are on the device.

    bound           positions are below it; None: as many tokens as a table holds
    scratch_bytes   of the scores of many rows; one row is taken where that is not enough
    ended           uint32 zeros, WINDOW_ROWS * MOST_UNITS: parts of a row that have ended; zeros again after a launch
    """

    bound: int | None
    scratch_bytes: int
    ended: DeviceArray


def limits(workspace: Workspace, scratch_bytes: int) -> Limits:
    """Limits whose counters lie in the workspace, below every later mark."""
    ended = workspace.array((WINDOW_ROWS * MOST_UNITS,), np.uint32)
    ended[...] = 0
    return Limits(None, scratch_bytes, ended)


@dataclass(frozen=True, slots=True)
class _Shape:
    """Sizes of a call. `kept`, `blocks`, `parts`: the most of one row; blocks 0 = they never compete."""

    keys: KvFormat
    values: KvFormat
    pages_of_a_slot: int
    kv_heads: int
    heads: int
    d: int
    index_heads: int
    index_dim: int
    r: int
    half: int
    picked: int
    kept: int
    blocks: int
    far: bool = False

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def parts(self) -> int:
        return -(-self.kept // ATTENTION_PART)

    @property
    def formats(self) -> dict[str, Any]:
        """Constants of the sources."""
        return {"KEYS": FORMATS[self.keys.name], "VALUES": FORMATS[self.values.name]}

    @property
    def sources(self) -> dict[str, Any]:
        """The same of those that find pages in RAM."""
        return self.formats | ({"FAR": 1} if self.far else {})


@dataclass(slots=True, eq=False)
class _Rows:
    """Rows on the device and what they are computed from. `stored`: k, v, index_k or None; `asked`: q_gate, index_q;
    `beside`: queues the product that makes index_k, beside a kernel that does not need it. `numbers`: the tables of
    index blocks, where they are others."""

    pages: AttentionPages
    tables: DeviceArray
    slots: DeviceArray
    positions: DeviceArray
    stored: tuple[DeviceArray, DeviceArray, DeviceArray] | None
    asked: tuple[DeviceArray, DeviceArray] | None
    norms: Norms
    rope: Rope
    eps: float
    beside: Callable[[], None] | None = None
    numbers: DeviceArray | None = None

    def __len__(self) -> int:
        return int(self.slots.shape[0])

    def part(self, rows: slice) -> _Rows:
        """Some of the rows, as queries only."""
        asked = None if self.asked is None else (self.asked[0][rows], self.asked[1][rows])
        return replace(self, slots=self.slots[rows], positions=self.positions[rows], stored=None, asked=asked)

    @property
    def far(self) -> tuple[DeviceArray | None, ...]:
        """Pages in RAM: keys, values, raw indexer keys; then the tables of index blocks."""
        far = self.pages.far
        return (None, None, None, None) if far is None else (far.k, far.v, far.raw, far.numbers)


def qsa_store(
    pages: AttentionPages,
    tables: DeviceArray,
    slots: DeviceArray,
    positions: DeviceArray,
    k: DeviceArray,
    v: DeviceArray,
    index_k: DeviceArray,
    norms: Norms,
    rope: Rope,
    eps: float,
) -> None:
    """Write n rows' keys (normed, rotated), values and raw indexer keys; complete the blocks that end at one."""
    rows = _Rows(pages, tables, slots, positions, (k, v, index_k), None, norms, rope, eps)
    _prepare(rows, _check(rows), True, None)


def qsa_attend(
    workspace: Workspace,
    bounds: Limits,
    pages: AttentionPages,
    tables: DeviceArray,
    slots: DeviceArray,
    positions: DeviceArray,
    q_gate: DeviceArray,
    index_q: DeviceArray,
    norms: Norms,
    rope: Rope,
    budget: int,
    eps: float,
) -> DeviceArray:
    """q_gate (n, heads, 2, head_dim), index_q (n, index_heads, index_dim) -> gated outputs (n, heads * head_dim)."""
    rows = _Rows(pages, tables, slots, positions, None, (q_gate, index_q), norms, rope, eps)
    return _attend(workspace, bounds, rows, budget)


def qsa(
    workspace: Workspace,
    bounds: Limits,
    pages: AttentionPages,
    tables: DeviceArray,
    slots: DeviceArray,
    positions: DeviceArray,
    k: DeviceArray,
    v: DeviceArray,
    index_k: DeviceArray,
    q_gate: DeviceArray,
    index_q: DeviceArray,
    norms: Norms,
    rope: Rope,
    budget: int,
    eps: float,
    beside: Callable[[], None] | None = None,
) -> DeviceArray:
    """`qsa_store`, then `qsa_attend`, in a launch less. `beside`: index_k is not there, this queues its product; where
    `stores_on_its_way`."""
    rows = _Rows(pages, tables, slots, positions, (k, v, index_k), (q_gate, index_q), norms, rope, eps, beside)
    return _attend(workspace, bounds, rows, budget)


def stores_on_its_way(bounds: Limits, pages: AttentionPages, tables: DeviceArray, n: int, budget: int) -> bool:
    """Whether `qsa` of n rows needs no indexer key before the values: a window in which no blocks compete."""
    return n <= WINDOW_ROWS and not _competing(bounds, pages.r, tables.shape[1], budget)


def _check(rows: _Rows) -> _Shape:
    """Check all arrays; the sizes of a call, without those that a budget gives."""
    norms, pages, rope = rows.norms, rows.pages, rows.rope
    arrays: dict[str, tuple[DeviceArray, str, Any]] = {}
    if rows.stored is not None:
        k, v, index_k = rows.stored
        arrays |= {
            "k": (k, "n kv_heads head_dim", F32),
            "v": (v, "n kv_heads head_dim", F32),
            "index_k": (index_k, "n index_dim", F32),
        }
    if rows.asked is not None:
        q_gate, index_q = rows.asked
        arrays |= {"q_gate": (q_gate, "n heads 2 head_dim", F32), "index_q": (index_q, "n index_heads index_dim", F32)}
    width = norms.k.shape[-1]
    keys, values = format_of("pages.k", pages.k, width), format_of("pages.v", pages.v, width)
    size = check(
        **arrays,
        slots=(rows.slots, "n", I32),
        positions=(rows.positions, "n", I32),
        tables=(rows.tables, "slots pages_of_a_slot", I32),
        norm_k=(norms.k, "head_dim", F32),
        norm_q=(norms.q, "head_dim", F32),
        norm_index_k=(norms.index_k, "index_dim", F32),
        norm_index_q=(norms.index_q, "index_dim", F32),
        pages_k=(pages.k, f"pages {PAGE} kv_heads {keys.row(width)}", keys.dtype.type),
        pages_v=(pages.v, f"pages {PAGE} kv_heads {values.row(width)}", values.dtype.type),
        pages_raw=(pages.raw, f"pages {PAGE} index_dim", F32),
        pages_block=(pages.block, f"{'pages' if pages.far is None else 'all_pages'} blocks index_dim", F32),
        cos=(rope.cos, "angles half", F32),
        sin=(rope.sin, "angles half", F32),
    )
    d, index_dim, half = size["head_dim"], size["index_dim"], size["half"]
    heads, index_heads, kv_heads = size.get("heads", 0), size.get("index_heads", 0), size["kv_heads"]
    require(d % 64 == 0 and d <= 256, f"head_dim must be a multiple of 64 up to 256, got {d}")
    require(index_dim % 32 == 0 and index_dim <= 256, f"index_dim must be a multiple of 32 up to 256, got {index_dim}")
    require(not pages.r or PAGE % pages.r == 0, f"blocks of {pages.r} tokens do not divide a page of {PAGE}")
    require(2 * half <= min(d, index_dim), f"rope turns {2 * half} dims of {min(d, index_dim)}")
    require(heads % kv_heads == 0, f"q_gate must have a multiple of {kv_heads} heads, got {heads}")
    require(kv_heads * d // _SLICE <= MOST_UNITS, f"kv_heads * head_dim must be at most {MOST_UNITS * _SLICE}")
    require(index_heads <= _SCORED_QUERIES, f"index_q must have at most {_SCORED_QUERIES} heads, got {index_heads}")
    if pages.far is not None:
        _check_far(rows, pages.far, keys, values, width)
    return _Shape(
        keys, values, size["pages_of_a_slot"], kv_heads, heads, d, index_heads, index_dim, pages.r, half, 0, 0, 0,
        pages.far is not None,
    )  # fmt: skip


def _check_far(rows: _Rows, far: FarPages, keys: KvFormat, values: KvFormat, width: int) -> None:
    """Pages in RAM have the shapes of the others."""
    check(
        tables=(rows.tables, "slots pages_of_a_slot", I32),
        k=(rows.pages.k, f"pages {PAGE} kv_heads {keys.row(width)}", keys.dtype.type),
        raw=(rows.pages.raw, f"pages {PAGE} index_dim", F32),
        far_k=(far.k, f"far_pages {PAGE} kv_heads {keys.row(width)}", keys.dtype.type),
        far_v=(far.v, f"far_pages {PAGE} kv_heads {values.row(width)}", values.dtype.type),
        far_raw=(far.raw, f"far_pages {PAGE} index_dim", F32),
        numbers=(far.numbers, "slots pages_of_a_slot", I32),
        staged_k=(far.staged_k, f"pages_of_a_slot {PAGE} kv_heads {keys.row(width)}", keys.dtype.type),
        staged_v=(far.staged_v, f"pages_of_a_slot {PAGE} kv_heads {values.row(width)}", values.dtype.type),
        order=(far.order, "slots pages_of_a_slot", I32),
    )


def _staged(rows: _Rows, g: _Shape, bounds: Limits) -> _Rows:
    """The rows of one slot with all keys and values that they see in device memory; a launch."""
    pages, far = rows.pages, rows.pages.far
    if far is None:
        return rows
    sizes = [form.row(g.d) * form.dtype.itemsize * g.kv_heads // 16 for form in (g.keys, g.values)]
    launch(
        "qsa_stage.cu", "qsa_stage", (-(-_bound(bounds, g.pages_of_a_slot) // PAGE), 2), (256,),
        rows.tables, rows.slots, rows.positions, len(rows), g.pages_of_a_slot,
        pages.k, far.k, pages.v, far.v, far.staged_k, far.staged_v, *sizes,
    )  # fmt: skip
    near = AttentionPages(far.staged_k, far.staged_v, pages.raw, pages.block)
    return replace(rows, pages=near, tables=far.order, numbers=far.numbers)


def _bound(bounds: Limits, pages_of_a_slot: int) -> int:
    room = pages_of_a_slot * PAGE
    return room if bounds.bound is None else min(bounds.bound, room)


def _competing(bounds: Limits, r: int, pages_of_a_slot: int, budget: int) -> int:
    """Blocks of a row that compete at most; 0: never more than are kept."""
    blocks = _bound(bounds, pages_of_a_slot) // r if r else 0
    return blocks if r and blocks > budget // r else 0


def _with_budget(g: _Shape, bounds: Limits, budget: int) -> _Shape:
    """The sizes of a call with what a row can see at most."""
    require(budget >= max(g.r, 1), f"budget must be at least a block of {max(g.r, 1)} tokens, got {budget}")
    bound = _bound(bounds, g.pages_of_a_slot)
    picked = budget // g.r if g.r else 0
    blocks = _competing(bounds, g.r, g.pages_of_a_slot, budget)
    return replace(g, picked=picked, blocks=blocks, kept=min(bound, picked * g.r + g.r - 1) if g.r else bound)


def _prepare(rows: _Rows, g: _Shape, store: bool, queries: tuple[DeviceArray, DeviceArray] | None) -> None:
    """Store what the rows bring, and turn their queries into `queries`: one launch for either or both."""
    k, v, index_k = rows.stored if store and rows.stored is not None else (None, None, None)
    q_gate, index_q = rows.asked if rows.asked is not None else (None, None)
    q, iq = queries if queries is not None else (None, None)
    storing, norms, pages = g.kv_heads + 1, rows.norms, rows.pages
    first = 0 if store else storing
    last = storing if queries is None else storing + g.heads + (g.index_heads if g.blocks else 0)
    launch(
        "qsa_prepare.cu", "qsa_prepare", (-(-(last - first) // _WARPS), len(rows)), (_THREADS,),
        rows.tables, rows.slots, rows.positions, k, v, index_k, q_gate, index_q,
        norms.k, norms.index_k, norms.q, norms.index_q, rows.rope.cos, rows.rope.sin,
        pages.k, pages.v, pages.raw, *rows.far, pages.block, q, iq,
        g.pages_of_a_slot, g.kv_heads, g.heads, g.index_heads, g.d, g.index_dim, g.r, g.half, first, last,
        rows.eps, **g.sources,
    )  # fmt: skip


def _attend(workspace: Workspace, bounds: Limits, rows: _Rows, budget: int) -> DeviceArray:
    """Store where rows bring something to store, then attend: as a window, or in batches that fit the scratch."""
    g = _with_budget(_check(rows), bounds, budget)
    n = len(rows)
    out = workspace.array((n, g.heads * g.d))
    if n <= WINDOW_ROWS:
        with workspace.scratch():
            _batch(workspace, bounds, g, rows, True, out)
        return out
    if rows.stored is not None:
        _prepare(rows, g, True, None)
    rows = _staged(rows, g, bounds)
    at_once = _whole_waves(_rows_at_once(g, bounds.scratch_bytes), g.heads // _heads_together(g))
    for begin in range(0, n, at_once):
        part = slice(begin, min(begin + at_once, n))
        with workspace.scratch():
            _batch(workspace, bounds, g, rows.part(part), False, out[part])
    return out


def _stride(n: int) -> int:
    """Elements of a row of scores: whole lines of the cache."""
    return -(-n // _WARP) * _WARP


def _rows_at_once(g: _Shape, scratch_bytes: int) -> int:
    """Rows whose queries and scores fit the scratch."""
    floats = g.heads * (g.d + _stride(g.kept) + g.parts) + g.index_heads * g.index_dim + _stride(g.blocks)
    return max(1, scratch_bytes // (_FLOAT * floats + _INT * (g.picked + _stride(g.kept))))


def _whole_waves(rows: int, blocks: int) -> int:
    """As many of the rows as fill the card without a rest, where they fill it. A row has `blocks` of qsa_prompt_values,
    which all take as long."""
    wave = max(1, cards.card().multiprocessors * ROWS_OF_A_BLOCK // blocks)
    return rows // wave * wave or rows


def _batch(workspace: Workspace, bounds: Limits, g: _Shape, rows: _Rows, few: bool, out: DeviceArray) -> None:
    """Rows whose scores exist together, into out."""
    n = len(rows)
    if not n or rows.asked is None:
        return
    prepares = few and rows.stored is not None and not g.blocks
    q = iq = None
    if not prepares:
        require(rows.beside is None, "beside: these rows need their indexer keys first")
        q, iq = workspace.array((n, g.heads, g.d)), workspace.array((n, g.index_heads, g.index_dim))
        _prepare(rows, g, rows.stored is not None, (q, iq))
    chosen = _select(workspace, g, few, rows, iq) if g.blocks else None
    row = (
        rows.tables, rows.slots, rows.positions, chosen,
        g.pages_of_a_slot, g.kv_heads, g.heads, g.d, g.r, g.picked,
    )  # fmt: skip
    stride = _stride(g.kept)
    s = workspace.array((n, g.heads, stride))
    if few:
        projected = _projected(rows, g, rows.asked[0]) if prepares else None
        _attend_few(workspace, bounds, g, rows, row, q, projected, s, stride, rows.asked[0], out)
    else:
        _attend_many(workspace, g, n, row, q, s, stride, rows.pages, rows.asked[0], out)


def _select(workspace: Workspace, g: _Shape, few: bool, rows: _Rows, iq: DeviceArray) -> DeviceArray:
    """The list of kept blocks of every row whose blocks compete, int32 (n, picked)."""
    n, stride = len(rows), _stride(g.blocks)
    scores = workspace.array((n, stride))
    chosen = workspace.array((n, g.picked), I32)
    of_index = (g.index_heads, g.index_dim, g.r, g.picked)
    numbers = rows.numbers if rows.numbers is not None else rows.tables if rows.far[3] is None else rows.far[3]
    arguments = (
        rows.pages.block, numbers, rows.slots, rows.positions, iq, scores, stride, g.pages_of_a_slot,
        *of_index,
    )  # fmt: skip
    if few:
        tiles = -(-g.blocks // _KEYS)
        shared = _FLOAT * (_KEYS * (g.index_dim + 4) + g.index_heads * (g.index_dim + _KEYS))
        grid = (min(tiles, max(1, _SCORE_BLOCKS // n)), n)
        launch("qsa_score.cu", "qsa_score", grid, (_THREADS,), *arguments, shared=shared)
    else:
        grid = (-(-g.blocks // TILE_KEYS), -(-n // min(_SCORED_QUERIES // g.index_heads, _SCORED_ROWS)))
        launch(
            "qsa_score_tile.cu", "qsa_score_tile", grid, (_THREADS,), *arguments, n,
            TILE_KEYS=TILE_KEYS, BLOCKS=TILE_BLOCKS,
        )  # fmt: skip
    launch(
        "qsa_select.cu", "qsa_select", (n,), (_SELECT_FEW if few else _SELECT_MANY,),
        scores, rows.positions, chosen, stride, g.r, g.picked,
    )  # fmt: skip
    return chosen


def _row_bytes(form: KvFormat, d: int) -> int:
    return form.row(d) * form.dtype.itemsize


def _slice_bytes(form: KvFormat) -> int:
    """Bytes of _SLICE dims of a row in the shared memory of qsa_values: the word of a scale takes 16."""
    return _SLICE * form.bits // 8 + (16 if form.packed else 0)


def _attend_few(
    workspace: Workspace,
    bounds: Limits,
    g: _Shape,
    rows: _Rows,
    row: tuple[Any, ...],
    q: DeviceArray | None,
    projected: np.ndarray | None,
    s: DeviceArray,
    stride: int,
    q_gate: DeviceArray,
    out: DeviceArray,
) -> None:
    """`projected` instead of turned queries: the rows are stored on the way."""
    n, pages, prepares = len(rows), rows.pages, int(projected is not None)
    made = _NOTHING if projected is None else projected
    units, threads = g.kv_heads * g.d // _SLICE, (_THREADS,)
    chunks = value_chunks(n, g.group)
    each = -(-g.group // chunks)
    constants = g.sources | {"HEADS_OF_WARP": 1 if each <= _WARPS else HEADS_OF_WARP, "PREPARES": prepares}
    key_warps = KEY_WARPS if n <= FEW_ROWS and g.group > _WARPS else _WARPS
    partial = workspace.array((n * chunks * units * g.parts * each * (_SLICE + 2),))
    launch(
        "qsa_window.cu", "qsa_keys", (min(-(-g.kept // _KEPT_AT_ONCE), _MOST_KEY_BLOCKS) + prepares, g.kv_heads, n),
        (32 * key_warps,), *row, q, pages.k, rows.far[0], s, stride, made,
        shared=_FLOAT * g.group * g.d + _KEPT_AT_ONCE * (_row_bytes(g.keys, g.d) + 16),
        KEY_WARPS=key_warps, **constants,
    )  # fmt: skip
    if rows.beside is not None:
        rows.beside()
    launch(
        "qsa_window.cu", "qsa_values", (g.parts + prepares, units, n * chunks), threads,
        *row, s, stride, pages.v, rows.far[1], q_gate, partial, bounds.ended, out, chunks, made,
        shared=ATTENTION_PART * (_FLOAT * each + _slice_bytes(g.values)),
        **constants,
    )  # fmt: skip


def _projected(rows: _Rows, g: _Shape, q_gate: DeviceArray) -> np.ndarray:
    """Rows that bring what is stored, as qsa_keys takes them."""
    norms, rope, pages = rows.norms, rows.rope, rows.pages
    arrays = (
        *(rows.stored or ()), q_gate, norms.k, norms.index_k, norms.q, rope.cos, rope.sin,
    )  # fmt: skip
    far_k, far_v, far_raw, numbers = (0 if array is None else address(array) for array in rows.far)
    to = address(pages.k), address(pages.v), far_k, far_v, address(pages.raw), far_raw, address(pages.block), numbers
    return np.array((*map(address, arrays), *to, g.index_dim, g.half, rows.eps), PROJECTED)


def value_chunks(n: int, group: int) -> int:
    """Blocks that share the query heads of a value head in a window of n rows: with few rows a warp has one head."""
    return -(-group // _WARPS) if n <= FEW_ROWS and n * -(-group // _WARPS) <= WINDOW_ROWS else 1


def _values_bytes(heads: int) -> int:
    """Shared memory of a row of qsa_prompt_values."""
    pitch = -(-heads // 4) * 4
    return _FLOAT * ((heads + pitch) * _CHUNK + ATTENTION_PART + 4 + 3 * pitch)


def _keys_bytes(form: KvFormat, heads: int, d: int, stages: int) -> int:
    """Shared memory of a block of qsa_prompt_keys: slices of keys, of codes as float32, and the queries."""
    element = _FLOAT if form.packed else form.dtype.itemsize
    return stages * ATTENTION_PART * _KEYS_SLICE * element + heads * d * _FLOAT


def key_stages(card: cards.Card) -> int:
    """Slices of keys that a block of qsa_prompt_keys has at once: one more where three blocks find room for it."""
    return 3 if card.roomy else 2


def _heads_together(g: _Shape) -> int:
    """Query heads of a block of qsa_prompt_keys and qsa_prompt_values."""
    return next(heads for heads in HEADS_OF_A_THREAD if g.group % heads == 0)


def _attend_many(
    workspace: Workspace,
    g: _Shape,
    n: int,
    row: tuple[Any, ...],
    q: DeviceArray,
    s: DeviceArray,
    stride: int,
    pages: AttentionPages,
    q_gate: DeviceArray,
    out: DeviceArray,
) -> None:
    heads = _heads_together(g)
    chunks = g.heads // heads
    together = min(ROWS_OF_A_BLOCK, -(-n * chunks // cards.card().multiprocessors))
    constants = {"HEADS": heads, "HEAD_SIZE": g.d}
    stages = key_stages(cards.card())
    peaks, found = workspace.array((n, g.heads, g.parts)), workspace.array((n, stride), I32)
    launch(
        "qsa_prompt_keys.cu", "qsa_prompt_keys", (g.parts, chunks, n), (_THREADS,),
        *row, q, pages.k, s, stride, peaks, found, shared=_keys_bytes(g.keys, heads, g.d, stages),
        KEYS=FORMATS[g.keys.name], STAGES=stages, **constants,
    )  # fmt: skip
    launch(
        "qsa_prompt_values.cu", "qsa_prompt_values", (chunks, -(-n // together)), (_WARP * together,),
        *row, s, stride, peaks, found, g.parts, pages.v, q_gate, out, n,
        shared=together * _values_bytes(heads), VALUES=FORMATS[g.values.name], **constants,
    )  # fmt: skip

"""Sparse attention over pages: store, score index blocks, select, attend. Contracts: `ops.Kernels.qsa_*`.

Slots, positions and tables are read on the device, so a captured graph sees new ones. How long a row is, only the
device knows; the host knows a bound (`Limits.bound`), which sizes grids and scratch: blocks past a row's end stop at
once. Up to WINDOW_ROWS rows the work of a row is spread over the card; above, a row is the work of a block, and rows
are taken as many at a time as the scratch holds. The bits are the same.

Shapes   head_dim 64, 128, 192 or 256; index_dim a multiple of 32 up to 256; keys and values float32 or float16
Errors   ValueError for shapes; positions, slots and tables are the caller's to check (they are on the device)
Cost     a row reads its kept keys and values once for the query heads that share them, and, where the blocks compete,
         all its block keys; many rows share a read of the block keys
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from strata.kernels.check import check, require
from strata.kernels.cuda.launch import F32, I32, launch
from strata.kernels.cuda.workspace import DeviceArray, Workspace
from strata.kernels.ops import ATTENTION_PART, PAGE, AttentionPages, Norms, Rope

WINDOW_ROWS: Final = 16
"""Rows up to which the work of one row is spread over the card."""
MOST_UNITS: Final = 64
"""Value heads times slices of 32 dims of a row, at most."""
HEADS_OF_A_THREAD: Final = (12, 6, 4, 3, 2, 1)
"""Query heads that share keys and are computed by one thread, as compiled."""

_WARP: Final = 32
_WARPS: Final = 4
_THREADS: Final = 128
_KEYS: Final = 64
_SCORED_QUERIES: Final = 64
_SCORE_BLOCKS: Final = 528
"""Blocks of the scores of a window: four for each multiprocessor of a large card; each takes tiles in turn."""
_SELECT_FEW: Final = 1024
_SELECT_MANY: Final = 256
_SLICE: Final = 32
_KEPT_AT_ONCE: Final = 32
_MOST_KEY_BLOCKS: Final = 1024
_INT: Final = 4
_FLOAT: Final = 4

_TYPES: Final = {"float32": "Float32", "float16": "Float16"}
"""Types of keys and values, and what the sources call them."""


@dataclass(slots=True, eq=False)
class Limits:
    """What the host knows about rows whose positions are on the device.

    bound           positions are below it; None: as many tokens as a table holds
    scratch_bytes   of the scores of many rows; one row is taken where that is not enough
    ended           int32 zeros, WINDOW_ROWS * MOST_UNITS: parts of a row that have ended; zeros again after a launch
    """

    bound: int | None
    scratch_bytes: int
    ended: DeviceArray


def limits(workspace: Workspace, scratch_bytes: int) -> Limits:
    """Limits whose counters lie in the workspace, below every later mark."""
    ended = workspace.array((WINDOW_ROWS * MOST_UNITS,), I32)
    ended[...] = 0
    return Limits(None, scratch_bytes, ended)


@dataclass(frozen=True, slots=True)
class _Shape:
    """Sizes of a call. `kept`, `blocks`, `parts`: the most of one row; blocks 0 = they never compete."""

    type: str
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

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def parts(self) -> int:
        return -(-self.kept // ATTENTION_PART)


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
    size = check(
        k=(k, "n kv_heads head_dim", F32),
        v=(v, "n kv_heads head_dim", F32),
        index_k=(index_k, "n index_dim", F32),
        slots=(slots, "n", I32),
        positions=(positions, "n", I32),
        norm_k=(norms.k, "head_dim", F32),
        norm_index_k=(norms.index_k, "index_dim", F32),
    )
    kind = _check_pages(pages, tables, rope, size)
    tasks = size["kv_heads"] + 1
    launch(
        "qsa_prepare.cu", "qsa_prepare", (-(-tasks // _WARPS), size["n"]), (_THREADS,),
        tables, slots, positions, k, v, index_k, None, None, norms.k, norms.index_k, None, None, rope.cos, rope.sin,
        pages.k, pages.v, pages.raw, pages.block, None, None,
        *(I32(a) for a in (tables.shape[1], size["kv_heads"], 0, 0, size["head_dim"], size["index_dim"], pages.r,
                           rope.cos.shape[1], 0, tasks)),
        F32(eps), CACHE=kind,
    )  # fmt: skip


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
    size = check(
        q_gate=(q_gate, "n heads 2 head_dim", F32),
        index_q=(index_q, "n index_heads index_dim", F32),
        slots=(slots, "n", I32),
        positions=(positions, "n", I32),
        norm_q=(norms.q, "head_dim", F32),
        norm_index_q=(norms.index_q, "index_dim", F32),
    )
    shape = _shape(bounds, pages, tables, rope, size, budget)
    n = size["n"]
    out = workspace.array((n, shape.heads * shape.d))
    rows_at_once = n if n <= WINDOW_ROWS else _rows_at_once(shape, bounds.scratch_bytes)
    for begin in range(0, n, rows_at_once):
        rows = slice(begin, min(begin + rows_at_once, n))
        with workspace.scratch():
            _attend(
                workspace, bounds, shape, n <= WINDOW_ROWS, pages, tables, slots[rows], positions[rows], q_gate[rows],
                index_q[rows], norms, rope, eps, out[rows],
            )  # fmt: skip
    return out


def _check_pages(pages: AttentionPages, tables: DeviceArray, rope: Rope, size: dict[str, int]) -> str:
    """Check pages against the sizes of the rows; the name of the type of keys and values."""
    check(tables=(tables, "slots pages_of_a_slot", I32))
    kind = str(pages.k.dtype)
    require(kind in _TYPES, f"pages.k must be one of {', '.join(_TYPES)}, got {kind}")
    known = {
        "head_dim": size["head_dim"],
        "index_dim": size["index_dim"],
        **({"kv_heads": size["kv_heads"]} if "kv_heads" in size else {}),
    }
    words = {name: f"{known.get(name, name)}" for name in ("kv_heads", "head_dim", "index_dim")}
    element: Any = pages.k.dtype.type
    check(
        pages_k=(pages.k, f"pages {PAGE} {words['kv_heads']} {words['head_dim']}", element),
        pages_v=(pages.v, f"pages {PAGE} {words['kv_heads']} {words['head_dim']}", element),
        pages_raw=(pages.raw, f"pages {PAGE} {words['index_dim']}", F32),
        pages_block=(pages.block, f"pages blocks {words['index_dim']}", F32),
        cos=(rope.cos, "positions half", F32),
        sin=(rope.sin, "positions half", F32),
    )
    d, index_dim, half = size["head_dim"], size["index_dim"], rope.cos.shape[1]
    require(d % 64 == 0 and d <= 256, f"head_dim must be a multiple of 64 up to 256, got {d}")
    require(index_dim % 32 == 0 and index_dim <= 256, f"index_dim must be a multiple of 32 up to 256, got {index_dim}")
    require(2 * half <= min(d, index_dim), f"rope turns {2 * half} dims of {min(d, index_dim)}")
    return _TYPES[kind]


def _shape(
    bounds: Limits, pages: AttentionPages, tables: DeviceArray, rope: Rope, size: dict[str, int], budget: int
) -> _Shape:
    kind = _check_pages(pages, tables, rope, size)
    heads, d, kv_heads, r = size["heads"], size["head_dim"], pages.k.shape[2], pages.r
    require(heads % kv_heads == 0, f"q_gate must have a multiple of {kv_heads} heads, got {heads}")
    require(kv_heads * d // _SLICE <= MOST_UNITS, f"kv_heads * head_dim must be at most {MOST_UNITS * _SLICE}")
    require(size["index_heads"] <= _SCORED_QUERIES, f"index_q must have at most {_SCORED_QUERIES} heads")
    require(budget >= max(r, 1), f"budget must be at least a block of {max(r, 1)} tokens, got {budget}")
    room = tables.shape[1] * PAGE
    bound = room if bounds.bound is None else min(bounds.bound, room)
    picked = budget // r if r else 0
    blocks = bound // r if r and bound // r > picked else 0
    kept = min(bound, picked * r + r - 1) if r else bound
    return _Shape(
        kind, tables.shape[1], kv_heads, heads, d, size["index_heads"], size["index_dim"], r, rope.cos.shape[1],
        picked, kept, blocks,
    )  # fmt: skip


def _stride(n: int) -> int:
    """Elements of a row of scores: whole lines of the cache."""
    return -(-n // _WARP) * _WARP


def _rows_at_once(shape: _Shape, scratch_bytes: int) -> int:
    """Rows whose queries and scores fit the scratch."""
    floats = shape.heads * (shape.d + _stride(shape.kept)) + shape.index_heads * shape.index_dim + _stride(shape.blocks)
    return max(1, scratch_bytes // (_FLOAT * floats + _INT * shape.picked))


def _attend(
    workspace: Workspace,
    bounds: Limits,
    g: _Shape,
    few: bool,
    pages: AttentionPages,
    tables: DeviceArray,
    slots: DeviceArray,
    positions: DeviceArray,
    q_gate: DeviceArray,
    index_q: DeviceArray,
    norms: Norms,
    rope: Rope,
    eps: float,
    out: DeviceArray,
) -> None:
    """Rows that fit the scratch, into out."""
    n = len(slots)
    q = workspace.array((n, g.heads, g.d))
    iq = workspace.array((n, g.index_heads, g.index_dim))
    tasks = g.kv_heads + 1 + g.heads + (g.index_heads if g.blocks else 0)
    first = g.kv_heads + 1
    launch(
        "qsa_prepare.cu", "qsa_prepare", (-(-(tasks - first) // _WARPS), n), (_THREADS,),
        tables, slots, positions, None, None, None, q_gate, index_q, None, None, norms.q, norms.index_q, rope.cos,
        rope.sin, None, None, None, None, q, iq,
        *(I32(a) for a in (g.pages_of_a_slot, g.kv_heads, g.heads, g.index_heads, g.d, g.index_dim, g.r, g.half, first,
                           tasks)),
        F32(eps), CACHE=g.type,
    )  # fmt: skip
    chosen = _select(workspace, g, few, pages, tables, slots, positions, iq) if g.blocks else None
    row = (
        tables, slots, positions, chosen,
        *(I32(a) for a in (g.pages_of_a_slot, g.kv_heads, g.heads, g.d, g.r, g.picked)),
    )  # fmt: skip
    stride = _stride(g.kept)
    s = workspace.array((n, g.heads, stride))
    attend = _attend_few if few else _attend_many
    attend(workspace, bounds, g, n, row, q, s, stride, pages, q_gate, out)


def _select(
    workspace: Workspace,
    g: _Shape,
    few: bool,
    pages: AttentionPages,
    tables: DeviceArray,
    slots: DeviceArray,
    positions: DeviceArray,
    iq: DeviceArray,
) -> DeviceArray:
    """The list of kept blocks of every row whose blocks compete, int32 (n, picked)."""
    n, stride = len(slots), _stride(g.blocks)
    scores = workspace.array((n, stride))
    chosen = workspace.array((n, g.picked), I32)
    of_index = (I32(g.index_heads), I32(g.index_dim), I32(g.r), I32(g.picked))
    arguments = (pages.block, tables, slots, positions, iq, scores, I32(stride), I32(g.pages_of_a_slot), *of_index)
    tiles = -(-g.blocks // _KEYS)
    if few:
        shared = _FLOAT * (_KEYS * (g.index_dim + 4) + g.index_heads * (g.index_dim + _KEYS))
        grid = (min(tiles, max(1, _SCORE_BLOCKS // n)), n)
        launch("qsa_score.cu", "qsa_score", grid, (_THREADS,), *arguments, shared=shared)
    else:
        grid = (tiles, -(-n // (_SCORED_QUERIES // g.index_heads)))
        launch("qsa_score.cu", "qsa_score_tile", grid, (256,), *arguments, I32(n))
    launch(
        "qsa_select.cu", "qsa_select", (n,), (_SELECT_FEW if few else _SELECT_MANY,),
        scores, positions, chosen, I32(stride), I32(g.r), I32(g.picked),
    )  # fmt: skip
    return chosen


def _attend_few(
    workspace: Workspace,
    bounds: Limits,
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
    size, units, threads = pages.k.dtype.itemsize, g.kv_heads * g.d // _SLICE, (_THREADS,)
    partial = workspace.array((n * units * g.parts * g.group * (_SLICE + 2),))
    launch(
        "qsa_window.cu", "qsa_keys", (min(-(-g.kept // _KEPT_AT_ONCE), _MOST_KEY_BLOCKS), g.kv_heads, n),
        threads, *row, q, pages.k, s, I32(stride),
        shared=_FLOAT * g.group * g.d + _KEPT_AT_ONCE * (g.d * size + 16), CACHE=g.type,
    )  # fmt: skip
    launch(
        "qsa_window.cu", "qsa_values", (g.parts, units, n), threads,
        *row, s, I32(stride), pages.v, q_gate, partial, bounds.ended, out,
        shared=ATTENTION_PART * (_FLOAT * g.group + _SLICE * size), CACHE=g.type,
    )  # fmt: skip


def _attend_many(
    workspace: Workspace,
    bounds: Limits,
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
    heads = next(h for h in HEADS_OF_A_THREAD if g.group % h == 0)
    chunks = g.heads // heads
    launch(
        "qsa_prompt.cu", "qsa_keys_row", (g.parts, chunks, n), (_THREADS,),
        *row, q, pages.k, s, I32(stride), CACHE=g.type, HEADS=heads,
    )  # fmt: skip
    launch(
        "qsa_prompt.cu", "qsa_values_row", (chunks, n), (g.d // 2,),
        *row, s, I32(stride), pages.v, q_gate, out, CACHE=g.type, HEADS=heads,
    )  # fmt: skip

"""A hyper-connection's mix in a window: as few launches as there are waits for a whole row.

norm_streams   x + beta * y, and the norm of every stream; also as int8 for a product that wants it
takes, mix     windows whose matrices hyper_down.cu and hyper_window.cu take; `hyper.hyper_mix` does the others
parts          of a row's sum with `down`, where they are equal
linear_down    a product with `down` by `product.linear`

One row      a = down * norm(x + beta * y), where every block norms for itself; then the rest
Several      norm, quantised; a = down * normed; then the rest
The rest     u, beta and (one row) the new x

Between `down` and the rest no kernel has to end: with `words` of their own the rest comes while `down` works, and looks
there for each number of `a` (words.cuh). Without, it waits for the end; the bits are the same.

Cost   a launch is a wait for the one before, some 1.5 us and the latencies of a few reads; `down` adds the terms of a
       part of a row in their order, 160 of 2,560 inputs with groups of 16
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from strata.kernels.cuda import card as cards
from strata.kernels.cuda import plans
from strata.kernels.cuda.forms import Quantized
from strata.kernels.cuda.launch import F32, I32, I64, launch
from strata.kernels.cuda.product import linear
from strata.kernels.cuda.tables import GRID_OF
from strata.kernels.cuda.workspace import DeviceArray, Workspace
from strata.kernels.formats import TensorType, Weight
from strata.kernels.ops import ACT_BLOCK, LANES, Hyper, streams_of_a_part

WINDOW_ROWS: Final = 16
ELEMENTS: Final = 32
"""Elements of u of a block of hyper_window.cu."""
_MOST_COLS: Final = 6 * LANES
"""Inputs of a row of `up`, whose codes are registers of a warp."""
_AT_ONCE: Final = (1, 2, 5)
"""Blocks of inputs of `up` that a warp quantises at once."""
_MOST_BLOCK: Final = 64
_STREAMS: Final = (2, 4)
_STATIC: Final = 3072
"""Bytes of shared memory that a block declares itself, at most."""
_DOWN_ROWS: Final = 4
"""Rows of `down` of a block at most. Several inputs: as many, so that the blocks of hyper_window.cu, two on a
multiprocessor, find places beside them (H200, 2026-11-30, a round of eight rows: 40.6 us, 42.6 with three rows)."""
_DOWN_COLUMNS: Final = 8
"""Rows of activations that hyper_down.cu has at once, at most."""
_DOWN_WORKERS: Final = 12
"""Warps of hyper_down.cu beside those that add, at most."""
_BETWEEN: Final = 4
"""Floats between the parts of a row's terms and scales in shared memory."""
_ROW_THREADS: Final = 512
_ROW_PER_THREAD: Final = 20
"""Elements of a thread that still leave registers for a block of 512."""
MOST_WORDS: Final = WINDOW_ROWS * _MOST_COLS + max(_STREAMS)
"""Of a mix: `a` of all rows, and the streams' factors of one."""

_JOIN_THREADS: Final = 256

Added = tuple[DeviceArray, DeviceArray]


def norm_streams(
    workspace: Workspace,
    x: DeviceArray,
    hc: Hyper,
    eps: float,
    added: Added | None,
    kind: TensorType | None = None,
) -> tuple[DeviceArray, Quantized | None]:
    """[x = fma(beta, y, x), in place, then] normed (n, C * H); also quantised for hyper_down.cu and a type, which needs
    H % 128 == 0: a row's int8 are the first halves of all blocks, then the second."""
    n, streams, width = x.shape
    cols = streams * width
    normed = workspace.array((n, cols))
    made: Quantized | None = None
    constants: dict[str, Any] = {}
    if kind is not None:
        group = kind.group if kind.has_offset else 0
        sums = workspace.array((n, cols // group)) if group else None
        made = Quantized(workspace.array((n, cols), np.uint8), workspace.array((n, cols // ACT_BLOCK)), sums)
        constants = {"INPUT_ORDER": plans.order(kind), "SUMS": group}
    quantised = (None, None, None) if made is None else (made.q, made.d, made.sums)
    launch(
        "hyper.cu", "hyper_norm", (n * streams,), (LANES,),
        x, *(added or (None, None)), hc.norm, normed, *quantised,
        I32(width), I32(streams), F32(eps), PER_THREAD=-(-width // LANES), **constants,
    )  # fmt: skip
    return normed, made


def takes(hc: Hyper, n: int, streams: int, width: int) -> bool:
    """Whether `mix` does these rows."""
    if streams not in _STREAMS or n > min(WINDOW_ROWS, 4 * streams):
        return False
    kind, cols = hc.up.type, hc.up.cols
    fits = width % ELEMENTS == 0 and cols <= _MOST_COLS and kind.block <= _MOST_BLOCK
    known = _plain(kind) and kind.group == ACT_BLOCK and (hc.inject is None or hc.inject.type.name == "F32")
    return fits and known and _end_shared(hc.up, n, streams) <= _room()


def mix(
    workspace: Workspace,
    x: DeviceArray,
    hc: Hyper,
    eps: float,
    added: Added | None,
    u: DeviceArray,
    beta: DeviceArray | None,
    left: np.ndarray,
    words: DeviceArray | None,
) -> None:
    """x (n, C, H) -> u and beta, for rows that `takes` allows; `added`, x and `words` as for `hyper_mix`. `left`: where
    u goes quantised (`forms.leave`), or nothing."""
    n, streams, width = x.shape
    early = words is not None
    place = workspace.array((MOST_WORDS,)) if words is None else words
    a, factors = place[: n * hc.down.rows].reshape(n, hc.down.rows), place[-streams:]
    if n == 1 and _row_rows(hc, streams, width):
        _down_row(x, hc, eps, added, a, factors, beta, early)
        _end(hc, a, None, u, beta, left, early, (factors, hc.norm, x, *(added or (None, None))))
        return
    rows = _down_rows(hc.down, n, width)
    normed, made = norm_streams(workspace, x, hc, eps, added, hc.down.type if rows else None)
    if made is None:
        a = linear_down(workspace, hc.down, normed, streams)
        early = False
    else:
        _down(hc.down, made, a, rows, parts(hc.down, streams), early)
    _end(hc, a, normed, u, beta, left, early)


def parts(down: Weight, streams: int) -> int:
    """Parts of a row's sum with `down`; 0 where the last is shorter."""
    together = streams_of_a_part(down.type, streams, down.cols // streams)
    return 0 if streams % together else streams // together


def linear_down(workspace: Workspace, down: Weight, normed: DeviceArray, streams: int) -> DeviceArray:
    """down * normed (n, C * H) by products with whole matrices: where a row's sum has several parts, each one's columns
    are copied."""
    n, width = len(normed), down.cols // streams
    together = streams_of_a_part(down.type, streams, width)
    a = workspace.array((n, down.rows))
    for begin in range(0, streams, together):
        end = min(begin + together, streams)
        with workspace.scratch():
            part, x = down, normed
            if end - begin < streams:
                part = _columns_of(workspace, down, begin * width, end * width)
                x = workspace.array((n, (end - begin) * width))
                x[...] = normed[:, begin * width : end * width]
            if begin == 0:
                linear(workspace, [part], x, out=[a])
                continue
            (more,) = linear(workspace, [part], x)
            launch("hyper.cu", "hyper_join", (-(-a.size // _JOIN_THREADS),), (_JOIN_THREADS,), a, more, I64(a.size))
    return a


def _columns_of(workspace: Workspace, w: Weight, begin: int, end: int) -> Weight:
    """A copy of some columns of a matrix, which are whole blocks."""
    at = slice(w.type.row_bytes(begin), w.type.row_bytes(end))
    data = workspace.array((w.rows, at.stop - at.start), np.uint8)
    data[...] = w.data[:, at]
    return Weight(w.type, (w.rows, end - begin), data)


def _plain(kind: TensorType) -> bool:
    """Whether a type's codes come without a table."""
    return not kind.is_float and kind.name not in GRID_OF


def _room() -> int:
    return cards.card().shared_block - _STATIC


def _eights(n: int) -> int:
    """Of rows of activations."""
    return -(-n // 8)


def _end_shared(up: Weight, n: int, streams: int) -> int:
    """Parts of hyper_window.cu."""
    stream, columns = (ELEMENTS * up.type.row_bytes(up.cols) + 31) // 16 * 16, 8 * _eights(n)
    pitch = up.cols + (32 - up.cols) % LANES
    scales = columns * up.cols // ACT_BLOCK * 4 * (1 + up.type.has_offset)
    return streams * stream + columns * pitch + scales + n * (2 * streams * ELEMENTS + 4) * 4


def _end(
    hc: Hyper,
    a: DeviceArray,
    normed: DeviceArray | None,
    u: DeviceArray,
    beta: DeviceArray | None,
    left: np.ndarray,
    early: bool,
    fresh: tuple[DeviceArray | None, ...] = (),
) -> None:
    """All after the product with `down`. `fresh`: factors, w, x, beta and y, of which `normed` is still to be made, and
    x to be written; beta is there then."""
    (n, width), cols = u.shape, hc.up.cols
    streams = hc.up.rows // width
    n_beta, threads = 0 if beta is None or fresh else beta.size, 4 * streams * ELEMENTS
    factors, w, *added = fresh or (None,) * 5
    inject = None if hc.inject is None else hc.inject.data
    spans = cols // ACT_BLOCK
    at_once = next((h for h in _AT_ONCE if h * threads >= n * cols), _AT_ONCE[-1])
    launch(
        "hyper_window.cu", "hyper_window", (width // ELEMENTS + -(-n_beta * LANES // threads),), (threads,),
        a, factors, normed, w, hc.up.data, inject, u, beta, *added, left,
        I32(n), I32(width), I32(n_beta), F32(1) / F32(streams), I32(early),
        shared=_end_shared(hc.up, n, streams),
        TYPE=hc.up.type.name, SPANS=spans, STREAMS=streams, FRESH=int(bool(fresh)),
        EIGHTS=_eights(n), AT_ONCE=at_once,
    )  # fmt: skip


def _columns(n: int) -> int:
    """Rows of activations that hyper_down.cu has at once."""
    return min(_DOWN_COLUMNS, 1 << (n - 1).bit_length())


def _workers(cols: int) -> int:
    return min(_DOWN_WORKERS, -(-cols // (32 * ACT_BLOCK)))


def _packed(down: Weight, rows: int) -> int:
    """Bytes of packed rows in the shared memory of hyper_down.cu."""
    return rows * ((down.type.row_bytes(down.cols) + 31) // 16 * 16)


def _scales(down: Weight, cuts: int) -> int:
    """Bytes of the scales of an input there and in hyper_down_row.cu, in as many parts as the sum."""
    return (down.cols // ACT_BLOCK + cuts * _BETWEEN) * 4


def _terms(down: Weight, cuts: int) -> int:
    """Bytes of the terms of a row and an input, the same."""
    return (down.cols // down.type.group * (1 + down.type.has_offset) + cuts * _BETWEEN) * 4


def _down_shared(down: Weight, rows: int, n: int, cuts: int) -> int:
    """Parts of hyper_down.cu."""
    inputs, packed = _columns(n) * down.cols, _packed(down, rows)
    terms = n * (_scales(down, cuts) + rows * _terms(down, cuts))
    whole = down.cols <= 32 * ACT_BLOCK * _workers(down.cols)
    return inputs + (max(packed, terms) if whole else packed + terms)


def _down_rows(down: Weight, n: int, width: int) -> int:
    """Rows of a block of hyper_down.cu; 0: it does not take this product."""
    cuts = parts(down, down.cols // width)
    if not _plain(down.type) or width % LANES or not cuts:
        return 0
    beside = width // ELEMENTS // 2
    rows = min(_DOWN_ROWS, -(-down.rows // max(cards.card().multiprocessors - beside, 1)))
    while rows and _down_shared(down, rows, n, cuts) > _room():
        rows -= 1
    return rows


def _down(down: Weight, normed: Quantized, a: DeviceArray, rows: int, cuts: int, early: bool) -> None:
    """a = down * normed, `rows` of a block, sums in `cuts` parts; `early`: the kernel behind it looks for the words."""
    n, workers, summers = len(a), _workers(down.cols), -(-rows * len(a) * cuts // 32)
    launch(
        "hyper_down.cu", "hyper_down", (-(-down.rows // rows),), (32 * (workers + summers),),
        normed.q, normed.d, normed.sums, down.data, a, I32(down.rows), I32(n), I32(early),
        shared=_down_shared(down, rows, n, cuts), TYPE=down.type.name, ROWS=rows, COLS=down.cols, ROW_PARTS=cuts,
        COLUMNS=_columns(n), WORKERS=workers, SUMMERS=summers,
    )  # fmt: skip


def _row_shared(hc: Hyper, rows: int, cuts: int) -> int:
    """Parts of hyper_down_row.cu."""
    down, kind = hc.down, hc.down.type
    sums = down.cols // kind.group * 4 if kind.has_offset else 0
    codes = max(_packed(down, rows), rows * down.cols)
    return codes + rows * _terms(down, cuts) + down.cols + _scales(down, cuts) + sums + 4 * down.cols


def _row_rows(hc: Hyper, streams: int, width: int) -> int:
    """Rows of a block of hyper_down_row.cu; 0: it does not take this product."""
    threads = streams * LANES == _ROW_THREADS and width <= _ROW_PER_THREAD * LANES and width % LANES == 0
    cuts = parts(hc.down, streams)
    if not (_plain(hc.down.type) and threads and cuts):
        return 0
    rows = min(_DOWN_ROWS, -(-hc.down.rows // cards.card().multiprocessors))
    while rows and _row_shared(hc, rows, cuts) > _room():
        rows -= 1
    return rows


def _down_row(
    x: DeviceArray,
    hc: Hyper,
    eps: float,
    added: Added | None,
    a: DeviceArray,
    factors: DeviceArray,
    beta: DeviceArray | None,
    early: bool,
) -> None:
    """a, the streams' factors and beta of one row; x stays as it is. `early`: as in `_down`."""
    _, streams, width = x.shape
    rows, cuts = _row_rows(hc, streams, width), parts(hc.down, streams)
    strength, y = added or (None, None)
    blocks = -(-hc.down.rows // rows) + (0 if beta is None else streams)
    shared = _row_shared(hc, rows, cuts)  # not apart: beside a block of the product before it there is room for one
    launch(
        "hyper_down_row.cu", "hyper_down", (blocks,), (_ROW_THREADS,),
        x, strength, y, hc.norm, None if hc.inject is None else hc.inject.data, hc.down.data, a, factors, beta,
        I32(hc.down.rows), I32(early), F32(eps), F32(1) / F32(streams), shared=shared,
        TYPE=hc.down.type.name, ROWS=rows, STREAMS=streams, ROW_PARTS=cuts, PER_THREAD=width // LANES,
    )  # fmt: skip

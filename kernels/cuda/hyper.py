"""Hyper-connections: C residual streams mixed into one block input, and a block's output added back.

Contracts: `ops.Kernels.hyper_mix`, `ops.Kernels.hyper_add`. `hyper_add_mix` is one after the other: the output of a
block is added and the streams are normed for the next block in one pass over them.

Cost   two products (C*H x R and back) and, of many rows whose H is a multiple of 128, about five passes over C*H floats
       a row: the normed streams are not written, only their int8; the scratch is 2 * C*H floats for each of at most
       `rows_at_once` rows
"""

from __future__ import annotations

from typing import Final

import numpy as np

from strata.kernels.check import check
from strata.kernels.cuda import card as cards
from strata.kernels.cuda import forms, hyper_window, plans
from strata.kernels.cuda.arguments import MATRICES
from strata.kernels.cuda.launch import F32, I64, launch
from strata.kernels.cuda.product import linear, linear_of_parts, linear_quantized, quantize, room_for_quantized
from strata.kernels.cuda.workspace import DeviceArray, Workspace
from strata.kernels.ops import LANES, Hyper

_SOURCE: Final = "hyper.cu"
MAX_WIDTH: Final = 64 * LANES
"""Elements of a stream: a thread holds one in LANES of them in registers."""
MAX_WIDTH_OF_ROWS: Final = 32 * LANES
"""The same of `hyper_rows.cu`, which has several rows in registers."""
_ROWS_OF_A_BLOCK: Final = 2
"""Rows that read a line of inject together where a block of `hyper_rows.cu` is one team: 367 us for 8,192 rows. A warp
a row, with four elements a lane: 475 (H200, 2026-11-29)."""
_TEAMS_OF_A_BLOCK: Final = 4
"""Teams of `hyper_rows.cu` that share w and inject in shared memory. When each had two rows and asked for a stream only
where it used it, four took 311 us for 8,192 rows and 90 for 2,048; blocks of one team 380 and 108, of five 329 and 101
(H200, 2026-11-30)."""
_LINES_OF_SQUARES: Final = 2
"""Of LANES floats, beside those of the logits: what a team leaves in shared memory."""
_FEWEST_ROWS: Final = 8
"""Rows of a multiprocessor from which it is worth to copy w and inject to its shared memory."""
_GATE_THREADS: Final = 256
_WIDE_THREADS: Final = 128
_WIDTH_OF_LOAD: Final = 4
_FLOAT: Final = 4

MOST_WORDS: Final = hyper_window.MOST_WORDS
"""Of `words` of hyper_mix."""
Added = hyper_window.Added
"""beta (n, C) and y (n, H) of the block that ran before."""


def hyper_mix(
    workspace: Workspace,
    x: DeviceArray,
    hc: Hyper,
    eps: float,
    rows_at_once: int,
    added: Added | None = None,
    words: DeviceArray | None = None,
    out: DeviceArray | None = None,
) -> tuple[DeviceArray, DeviceArray | None]:
    """x (n, C, H) -> the block's input u (n, H), and beta (n, C) when the module injects: a new array, or `out`.

    With `added`, x[c] = fma(beta[c], y, x[c]) comes first, in place. `words`: float32 (MOST_WORDS,) for
    nothing but mixes of this stream of launches; the kernels of a window then work beside each other.
    """
    size = check(x=(x, "n C H", F32), norm=(hc.norm, "C H", F32))
    n, streams, width = size["n"], size["C"], size["H"]
    if width % _WIDTH_OF_LOAD or width > MAX_WIDTH:
        raise ValueError(f"H must be a multiple of {_WIDTH_OF_LOAD} up to {MAX_WIDTH}, got {width}")
    if added is not None:
        check(x=(x, "n C H", F32), beta=(added[0], "n C", F32), y=(added[1], "n H", F32))
    if out is not None:
        check(out=(out, f"{n} {streams}", F32))
    u = workspace.array((n, width))
    beta = None if hc.inject is None else workspace.array((n, streams)) if out is None else out
    whole = 0 < n <= rows_at_once and hyper_window.takes(hc, n, streams, width)
    left = forms.leave(workspace, u) if whole else forms.NOTHING
    if 0 < n <= rows_at_once and _quantises(hc, n, width):
        left = forms.leave_native(workspace, u)
    if 0 < n <= rows_at_once:
        with workspace.scratch():
            _mix(workspace, x, hc, eps, added, u, beta, left, words)
        return u, beta
    for begin in range(0, n, rows_at_once):
        rows = slice(begin, min(begin + rows_at_once, n))
        before = None if added is None else (added[0][rows], added[1][rows])
        with workspace.scratch():
            _mix(workspace, x[rows], hc, eps, before, u[rows], None if beta is None else beta[rows], left, words)
    return u, beta


def _mix(
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
    """One batch of rows, into u and beta."""
    n, streams, width = x.shape
    if hyper_window.takes(hc, n, streams, width):
        hyper_window.mix(workspace, x, hc, eps, added, u, beta, left, words)
        return
    scale = F32(1) / F32(streams)
    if _quantises(hc, n, width):
        _mix_rows(workspace, x, hc, eps, added, u, beta, left)
        return
    normed, _ = hyper_window.norm_streams(workspace, x, hc, eps, added)
    if hyper_window.parts(hc.down, streams) == 1:
        a, *injected = linear(workspace, [hc.down] if hc.inject is None else [hc.down, hc.inject], normed)
    else:
        a = hyper_window.linear_down(workspace, hc.down, normed, streams)
        injected = [] if hc.inject is None else linear(workspace, [hc.inject], normed)
    n_beta = 0 if beta is None else beta.size
    launch(
        _SOURCE, "hyper_gate", (-(-(a.size + n_beta) // _GATE_THREADS),), (_GATE_THREADS,),
        a, I64(a.size), injected[0] if injected else None, beta, I64(n_beta), scale,
    )  # fmt: skip
    (gates,) = linear(workspace, [hc.up], a)
    launch(
        _SOURCE, "hyper_mean", _wide_grid(n, width), (_WIDE_THREADS,),
        gates, normed, u, None, None, width // _WIDTH_OF_LOAD, scale, forms.NOTHING, STREAMS=streams,
    )  # fmt: skip


def _quantises(hc: Hyper, n: int, width: int) -> bool:
    """Whether `hyper_rows.cu` takes these rows: a prompt whose streams are whole lines of chains."""
    plain = hc.inject is None or hc.inject.type.name == "F32"
    fits = n > plans.WINDOW_ROWS and width % LANES == 0 and width <= MAX_WIDTH_OF_ROWS
    cut = 1 <= hyper_window.parts(hc.down, hc.norm.shape[0]) <= MATRICES
    return fits and plain and cut and not hc.down.type.is_float and not hc.up.type.is_float


def teams_of_a_block(card: cards.Card, n: int, streams: int, width: int, injects: bool) -> tuple[int, int]:
    """Teams that share w and inject in `hyper_rows.cu`, and bytes of dynamic shared memory for these; (0, 0), blocks of
    one team that shares nothing: without inject, of few rows, and where a block of the card has no room."""
    if not injects or n < _FEWEST_ROWS * card.multiprocessors:
        return 0, 0
    shared = _FLOAT * streams * (1 + streams) * width
    buffers = _FLOAT * _TEAMS_OF_A_BLOCK * (_LINES_OF_SQUARES + streams) * LANES
    return (_TEAMS_OF_A_BLOCK, shared) if shared + buffers <= card.shared_block else (0, 0)


def rows_of_a_team(teams: int) -> int:
    """ROWS of `hyper_rows.cu`; `teams` of a block, 0: one. A team that has the weights near needs its registers for the
    stream that it asks for early."""
    return 1 if teams else _ROWS_OF_A_BLOCK


def _mix_rows(
    workspace: Workspace,
    x: DeviceArray,
    hc: Hyper,
    eps: float,
    added: Added | None,
    u: DeviceArray,
    beta: DeviceArray | None,
    left: np.ndarray,
) -> None:
    """One batch of rows of a prompt: the normed streams exist as int8, and again where they meet the gates."""
    n, streams, width = x.shape
    kind, cols, scale = hc.down.type, streams * width, F32(1) / F32(streams)
    made = room_for_quantized(workspace, n, cols, kind)
    factors = workspace.array((n, streams))
    inject = None if hc.inject is None or beta is None else hc.inject.data
    teams, shared = teams_of_a_block(cards.card(), n, streams, width, inject is not None)
    rows = rows_of_a_team(teams)
    blocks = cards.card().multiprocessors if teams else -(-n // rows)
    launch(
        "hyper_rows.cu", "hyper_rows", (blocks,), (LANES * max(teams, 1),),
        x, *(added or (None, None)), hc.norm, inject, factors, made.q, made.d, made.sums, beta, n, eps, scale,
        shared=shared, STREAMS=streams, PER_THREAD=width // LANES, ROWS=rows, INJECTS=int(inject is not None),
        INPUT_ORDER=plans.order(kind), SUMS=kind.sums, TEAMS=teams,
    )  # fmt: skip
    parts = hyper_window.parts(hc.down, streams)
    a = linear_quantized(workspace, hc.down, made) if parts == 1 else linear_of_parts(workspace, hc.down, made, parts)
    gates = linear_quantized(workspace, hc.up, quantize(workspace, a, hc.up.type, scale))
    launch(
        _SOURCE, "hyper_mean", _wide_grid(n, width), (_WIDE_THREADS,),
        gates, x, u, factors, hc.norm, width // _WIDTH_OF_LOAD, scale, left, STREAMS=streams, FACTORS=1,
    )  # fmt: skip


def hyper_add(x: DeviceArray, beta: DeviceArray, y: DeviceArray) -> None:
    """x[c] = fma(beta[c], y, x[c]), in place."""
    size = check(x=(x, "n C H", np.float32), beta=(beta, "n C", np.float32), y=(y, "n H", np.float32))
    width = size["H"]
    if width % _WIDTH_OF_LOAD:
        raise ValueError(f"H must be a multiple of {_WIDTH_OF_LOAD}, got {width}")
    launch(
        _SOURCE, "hyper_add", _wide_grid(size["n"], width), (_WIDE_THREADS,),
        x, beta, y, width // _WIDTH_OF_LOAD, size["C"],
    )  # fmt: skip


def _wide_grid(n: int, width: int) -> tuple[int, int]:
    """Blocks of threads that handle four values each; rows in the second dimension."""
    return -(-(width // _WIDTH_OF_LOAD) // _WIDE_THREADS), n

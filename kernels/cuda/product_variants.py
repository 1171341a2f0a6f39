"""Sources of the products with the constants they are compiled with: what a check without a card compiles.

CARDS                     a card of each architecture: what its kernels may ask for
products(card, types)     (source, constants) of every kernel, for the tensor types named; fewer modes of the products
                          and sizes of windows when asked
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Final

from strata.kernels.cuda import fetch, few_plans, plans, prompt_plans, row_plans, wide_plans
from strata.kernels.cuda.card import Card
from strata.kernels.cuda.chains import chains_plan
from strata.kernels.cuda.compile import Constants
from strata.kernels.cuda.lanes import lanes_plan, vector_width
from strata.kernels.cuda.plans import DENSE, DOWN, GATE_UP, PAIRS, RowTuning
from strata.kernels.cuda.product import lanes_constants
from strata.kernels.formats import BY_NAME, CARD_FORMS, TensorType

_KIB: Final = 1 << 10
CARDS: Final = {
    75: Card(75, 40, 64 * _KIB, 64 * _KIB),
    80: Card(80, 108, 163 * _KIB, 164 * _KIB),
    86: Card(86, 84, 99 * _KIB, 100 * _KIB),
    89: Card(89, 128, 99 * _KIB, 100 * _KIB),
    90: Card(90, 132, 227 * _KIB, 228 * _KIB),
    120: Card(120, 170, 99 * _KIB, 100 * _KIB),
}

QUANTISED: Final = tuple(t.name for t in BY_NAME.values() if not t.is_float)
FLOATS: Final = tuple(t.name for t in BY_NAME.values() if t.is_float)
REPRESENTATIVE: Final = ("Q6_K", "BF16")
"""Types that take every path of the sources but the unpacking of the others."""


SIDE: Final = BY_NAME["Q8_0"]
"""The type of a shared expert."""
MODES: Final = (DENSE, GATE_UP, DOWN, PAIRS)
WINDOWS: Final = (1, 2, 8)
"""Rows of a window: one of each kind of kernel."""
MOST: Final = max(WINDOWS)
"""Of these experts are cut into tiles, too, where their type allows it."""
PROMPTS: Final = (48, 8192)
"""Rows of a prompt: of small tiles and of large ones."""
FEW: Final = (4, 12, 40)
"""Rows of a prompt, or of an expert, of each number of columns that a warp has."""


def products(
    card: Card, types: Sequence[str], modes: Sequence[str] = MODES, windows: Sequence[int] = WINDOWS
) -> Iterator[tuple[str, Constants]]:
    """Every source of the products for these types: windows, prompts, rows as float32."""
    for kind in (BY_NAME[name] for name in types):
        if kind.is_float:
            yield from _floats(card, kind, modes)
        else:
            yield from _blocks(card, kind, modes, windows)
    for order in ("NATIVE", "EIGHT", "EVEN_ODD"):
        yield "quantize.cu", {"INPUT_ORDER": order, "SUMS": 16 if order == "NATIVE" else 0}
    yield "quantize.cu", {"INPUT_ORDER": "NATIVE", "SUMS": 0, "SILU": 1}
    yield "quantize.cu", {"INPUT_ORDER": "NATIVE", "SUMS": 0, "SILU": 1, "PARTS": 4}
    for sums in (0, 16):
        yield "quantize.cu", {"INPUT_ORDER": "NATIVE", "SUMS": sums, "SILU": 1, "TIMES": 1}
    if card.arch == wide_plans.ARCH:
        yield "prompt_wide_inputs.cu", {}
    yield "join_pairs.cu", {"USED": 10}
    for name in ("group_rows", "gate_times_up", "count_hits", "handover", "mapped_rows"):
        yield f"{name}.cu", {}
    yield "fetch.cu", {"EACH": fetch.EACH}


def _blocks(
    card: Card, kind: TensorType, modes: Sequence[str], windows: Sequence[int]
) -> Iterator[tuple[str, Constants]]:
    for mode in modes:
        cols, experts = (
            640 if kind.block == 128 else 256 if kind.block == 256 else 320,
            (0,) if mode == DENSE else (0, 2) if mode == GATE_UP else (2,),
        )
        for n, used, wide in product(windows, experts, sorted({False, row_plans.aligned(kind, ())})):
            for tuning in (RowTuning(), RowTuning(tiled=True)) if n == MOST and used else (RowTuning(),):
                row = row_plans.row_plan(card, kind, mode, (512,), cols, n, used, wide, tuning)
                yield "product_row.cu", row.constants(kind, mode)
                side = row_plans.side_plan(card, row, SIDE, mode, 512, cols, n) if used and mode != PAIRS else None
                if side is not None:
                    own = side.constants(SIDE, DENSE if mode == DOWN else mode)
                    yield "product_row_beside.cu", row.constants(kind, mode) | own
        for n in windows if mode == DENSE else ():
            yield "product_window.cu", plans.window_plan(card, kind, (512,), 256, n).constants(kind)
        if mode != DOWN:
            for n in FEW if card.arch >= few_plans.ASYNC_ARCH else ():
                few = few_plans.cut(card, kind, mode, (512,), cols, n)
                if few is not None:
                    yield "prompt_few.cu", few.constants(kind, mode)
            for n in PROMPTS:
                tile = prompt_plans.prompt_plan(card, kind, mode, (512,), 256, n)
                yield "product_prompt.cu", tile.constants(kind, mode)
                ready = prompt_plans.ready_plan(card, kind, tile, (1 << 14,), 1 << 12, n) if mode == DENSE else None
                if ready is not None:
                    yield "product_prompt.cu", ready.constants(kind, mode)
                    yield "prompt_unpack.cu", ready.unpacking(kind)[0]
                by_four = wide_plans.wide_plan(card, kind, (1 << 14,), 1 << 12, n) if mode == DENSE else None
                if by_four is not None:
                    yield "prompt_wide.cu", by_four.constants(kind)
                    yield "prompt_wide_weights.cu", wide_plans.unpacking(kind)[0]
                if mode == GATE_UP:
                    yield "product_prompt.cu", tile.constants(kind, mode, kind)
    yield "dequantize.cu", {"TYPE": kind.name}
    if kind.name in CARD_FORMS:
        yield "repack.cu", {"TYPE": kind.name}


def _floats(card: Card, kind: TensorType, modes: Sequence[str]) -> Iterator[tuple[str, Constants]]:
    for mode in modes:
        for cols in (256, 257):
            for n in (1, 8):
                if mode == DENSE:
                    yield "chains_window.cu", chains_plan(512, n).constants(kind, cols)
                else:
                    yield "lanes_window.cu", lanes_constants(kind, cols, mode, n)
            if mode != DOWN:
                yield "lanes_prompt.cu", lanes_plan(card, kind, cols, 33, 16).constants(kind, mode, cols)
            if mode == DENSE:
                yield "lanes_thin.cu", {"TYPE": kind.name, "VEC": vector_width(cols)}
    yield "float_rows.cu", {"TYPE": kind.name}

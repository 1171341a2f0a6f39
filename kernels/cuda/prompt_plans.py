"""How a product with many rows is cut for a card: constants of product_prompt.cu or product_wgmma.cu, shared memory.
Pure functions.

    prompt_plan(card, kind, mode, rows, cols, n)     the cheapest of CUTS for these matrices and rows

No plan changes a bit of the result: an output's sum has the order of the row, whoever computes it.
Errors   ValueError when no cut fits the card's shared memory
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Final

from strata.kernels.cuda.card import Card
from strata.kernels.cuda.plans import ACTIVATION_BLOCK, DENSE, GATE_UP, chunk_pitch, order, table_bytes, table_copies
from strata.kernels.formats import TensorType

MIX: Final = "MIX"
"""The mode of `up` of a hyper-connection, whose gates mix the streams where they are made."""
MIXED_STREAMS: Final = 4
STEP: Final = 128
"""Columns of a step of a tile."""
CHUNKS: Final = (2, 1)
"""Chunks of raw bytes that a block may hold, the most first."""
RUNS: Final = (1, 2, 3, 4, 6, 8)
"""Tiles of a block that are tried. Of GATE_UP it has one: the results take the place of the operands."""
LONG_RUN: Final = 2048
"""Columns of all tiles of a block together that hide its beginning, for experts."""
OF_A_RESULT: Final = 40
"""What storing a result takes, and OF_A_BLOCK what its beginning does, in multiply-adds of a multiprocessor."""
OF_A_BLOCK: Final = 2_000_000
_RESERVED: Final = 1024
"""Bytes of a multiprocessor's shared memory that each block takes beside its own."""


@dataclass(frozen=True, slots=True)
class Cut:
    """rows: weight rows of a block · sixteens: of rows of a warp, and warps side by side · eights: of columns of a
    warp · blocks of a multiprocessor · cost of a multiply-add, relative · spans of 32 columns without a jump between
    them."""

    rows: int
    sixteens: int
    eights: int
    blocks: int
    cost: float = 1.0
    spans: int = 1

    @property
    def columns(self) -> int:
        """Activation rows of a block."""
        return 8 * self.eights * self.sixteens

    @property
    def threads(self) -> int:
        """A warp for 16 rows."""
        return 2 * self.rows


@dataclass(frozen=True, slots=True)
class WideCut:
    """Of product_wgmma.cu. fours: of warps of a block, each with 16 weight rows · eights: of columns of a part · parts:
    of a tile · blocks of a multiprocessor · cost of a multiply-add, relative."""

    fours: int
    eights: int
    parts: int
    blocks: int
    cost: float = 1.0

    @property
    def rows(self) -> int:
        """Weight rows of a block."""
        return 64 * self.fours

    @property
    def columns(self) -> int:
        """Activation rows of a block."""
        return 8 * self.eights * self.parts

    @property
    def threads(self) -> int:
        return 128 * self.fours


WIDE_ARCH: Final = 90
"""The architecture whose matrix steps take four warps together."""
WIDE_COLS: Final = 64
"""Columns must be a multiple of it."""
NOT_WIDE: Final = ("Q2_0", "MXFP4")
"""An order of weights, and scales of a size, that product_wgmma.cu does not take."""

CUTS: Final[tuple[Cut | WideCut, ...]] = (
    Cut(128, 4, 8, 1),
    Cut(64, 4, 6, 2, 1.05),
    Cut(128, 2, 8, 2, 1.15),
    Cut(64, 2, 8, 2, 1.25),
    Cut(128, 2, 4, 2, 1.35),
    Cut(64, 2, 4, 2, 1.5),
    Cut(64, 4, 6, 1, 1.6),
    Cut(64, 2, 8, 1, 1.8),
    Cut(64, 2, 4, 1, 2.0),
    Cut(64, 2, 2, 1, 3.0),
)
"""Tiles, the cheapest first."""


WIDE_CUTS: Final = (
    WideCut(1, 8, 2, 2),
    WideCut(1, 8, 1, 3),
    WideCut(1, 6, 2, 2),
    WideCut(1, 10, 2, 2),
    WideCut(1, 12, 2, 2),
    WideCut(2, 6, 4, 1),
    WideCut(2, 8, 4, 1),
    WideCut(2, 8, 2, 1),
    WideCut(2, 12, 2, 1),
    WideCut(3, 4, 4, 1),
    WideCut(1, 4, 2, 3),
    WideCut(1, 6, 1, 4),
    WideCut(1, 4, 1, 4),
)


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """A cut · chunks of raw bytes held at once · copies of the table · bytes of shared memory · tiles of a block, one
    below the other."""

    cut: Cut | WideCut
    chunks: int
    copies: int
    shared: int
    run: int = 1

    def constants(
        self, kind: TensorType, mode: str, made_for: TensorType | None = None, next_order: str | None = None
    ) -> dict[str, int | str]:
        """Macros of the source; SHARED is checked there against its own layout. next_order and made_for: in which order
        and for which type the result of GATE_UP is quantised."""
        cut, sizes = self.cut, {}
        if isinstance(cut, WideCut):
            sizes = {"FOURS": cut.fours, "EIGHTS": cut.eights, "PARTS": cut.parts}
        else:
            sizes = {"BM": cut.rows, "MT": cut.sixteens, "NT": cut.eights, "CHUNKS": self.chunks}
            sizes["SPANS"] = cut.spans
        constants: dict[str, int | str] = {"TYPE": kind.name, "MODE": mode, **sizes}
        constants |= {"BLOCKS": cut.blocks, "COPIES": self.copies, "SHARED": self.shared}
        if made_for:
            constants |= {"NEXT_ORDER": next_order or order(made_for), "NEXT_SUMS": made_for.sums}
        return constants

    @property
    def source(self) -> str:
        """The kernel, and its source without .cu."""
        return "product_wgmma" if isinstance(self.cut, WideCut) else "product_prompt"

    def order(self, kind: TensorType) -> str:
        """The order of the activations, as quantize.cuh knows it."""
        return ("WIDE_" if isinstance(self.cut, WideCut) else "") + order(kind)

    def rows_of_a_run(self, mode: str) -> int:
        """Rows of a matrix that a block computes; of each of the pair, for GATE_UP, and of a stream, for MIX."""
        return self.run * (self.cut.rows // {GATE_UP: 2, MIX: MIXED_STREAMS}.get(mode, 1))


def _shared(kind: TensorType, cut: Cut, chunks: int, copies: int) -> int:
    """The layout of product_prompt.cu."""
    groups, line = STEP // kind.group, cut.columns + 8
    unpacked = cut.rows * STEP + groups * (cut.rows + 8) * 4 * (1 + kind.has_offset)
    fetched = cut.columns * STEP + (STEP // ACTIVATION_BLOCK + groups * kind.has_offset) * line * 4
    raw = chunks * cut.rows * chunk_pitch(kind)
    return raw + 2 * unpacked + 2 * fetched + cut.columns * 4 + table_bytes(kind) * copies


def _shared_wide(kind: TensorType, cut: WideCut, copies: int) -> int:
    """The layout of product_wgmma.cu."""
    groups, line, warps = STEP // kind.group, cut.columns + 8, 4 * cut.fours
    unpacked = 16 * STEP + groups * 8 * (16 + 8 * kind.has_offset)
    fetched = 8 * (16 * cut.columns + 16) + (STEP // ACTIVATION_BLOCK + groups * kind.has_offset) * line * 4
    constant = 2 * 8 * cut.eights * 16
    of_warps = warps * 2 * (16 * chunk_pitch(kind) + unpacked)
    return of_warps + 2 * fetched + constant + cut.columns * 4 + table_bytes(kind) * copies


def fitted(card: Card, kind: TensorType, cut: Cut | WideCut, cols: int) -> PromptPlan | None:
    """A cut with two chunks, or one, and as many copies of the type's table as there is room for; None when it does not
    fit."""
    limit = min(card.shared_block, card.shared_multiprocessor // cut.blocks - _RESERVED)
    if isinstance(cut, WideCut):
        if card.arch != WIDE_ARCH or kind.name in NOT_WIDE or cols % WIDE_COLS:
            return None
        ways = [(2, partial(_shared_wide, kind, cut))]
    else:
        ways = [(chunks, partial(_shared, kind, cut, chunks)) for chunks in CHUNKS]
    for chunks, shared in ways:
        if shared(1) <= limit:
            copies = table_copies(kind, limit - shared(1) + table_bytes(kind))
            return PromptPlan(cut, chunks, copies, shared(copies))
    return None


def cost(plan: PromptPlan, card: Card, rows: tuple[int, ...], cols: int, n: int, mode: str = DENSE) -> float:
    """Relative time of a product of whole columns: what the multiprocessor with the most blocks computes, in
    multiply-adds."""
    blocks = sum(-(-r // plan.rows_of_a_run(mode)) for r in rows) * -(-n // plan.cut.columns)
    tile = plan.cut.rows * plan.cut.columns * (cols * plan.cut.cost + OF_A_RESULT)
    return -(-blocks // card.multiprocessors) * (plan.run * tile + OF_A_BLOCK / plan.cut.blocks)


def _mixes(cut: Cut | WideCut) -> bool:
    """Whether a warp has the gates of all streams."""
    return isinstance(cut, Cut) and cut.sixteens == MIXED_STREAMS


def takes_mix(card: Card, kind: TensorType, streams: int, cols: int) -> bool:
    """Whether there is a plan for MIX."""
    return streams == MIXED_STREAMS and any(_mixes(cut) and fitted(card, kind, cut, cols) for cut in CUTS)


def expected(pairs: int, experts: int) -> int:
    """Rows that most experts stay below when a router spreads pairs evenly: mean and two deviations."""
    mean = pairs / experts
    return math.ceil(mean + 2 * math.sqrt(mean))


@lru_cache(maxsize=4096)
def prompt_plan(card: Card, kind: TensorType, mode: str, rows: tuple[int, ...], cols: int, n: int) -> PromptPlan:
    """The cheapest of CUTS that fits: rows of each matrix, or of a stream; n activation rows, or expected rows of an
    expert. Raises ValueError when none fits."""
    plans = [plan for cut in CUTS if (mode != MIX or _mixes(cut)) and (plan := fitted(card, kind, cut, cols))]
    if not plans:
        raise ValueError(f"no prompt tile of {kind.name} fits the card's {card.shared_block} bytes of shared memory")
    if mode in (DENSE, MIX):
        ways = [replace(plan, run=run) for plan in plans for run in RUNS]
        return min(ways, key=lambda plan: cost(plan, card, rows, cols, n, mode))
    wide = [plan for plan in plans if plan.cut.columns >= n]
    plan = min(wide, key=lambda plan: plan.cut.columns) if wide else plans[0]
    return replace(plan, run=1 if mode == GATE_UP else -(-LONG_RUN // cols))

"""How a product with many rows is cut for a card: constants of product_prompt.cu, shared memory. Pure functions.

    prompt_plan(card, kind, mode, rows, cols, n)     the cheapest of CUTS for these matrices and rows
    ready_plan(card, kind, plan, rows, cols, n)      the same for weights that prompt_unpack.cu has unpacked

No plan changes a bit of the result: an output's sum has the order of the row, whoever computes it.
Errors   ValueError when no cut fits the card's shared memory
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from types import MappingProxyType
from typing import Final

from strata.kernels.cuda.card import Card
from strata.kernels.cuda.plans import ACTIVATION_BLOCK, DENSE, GATE_UP, chunk_pitch, order, table_bytes, table_copies
from strata.kernels.formats import TensorType

STEP: Final = 128
"""Columns of a step of a tile."""
CHUNKS: Final = (2, 1)
"""Chunks of raw bytes that a block may hold, the most first."""
LIFTS: Final = (1, 0)
"""Whether scales are kept together with what lifts a sum's start back to 0: more room, fewer instructions."""
RUNS: Final = (1, 2, 3, 4, 6, 8)
"""Tiles of a block that are tried. Of GATE_UP it has one: the results take the place of the operands."""
LONG_RUN: Final = 2048
"""Columns of all tiles of a block together that hide its beginning, for experts."""
OF_A_RESULT: Final = 40
"""What storing a result takes, and OF_A_BLOCK what its beginning does, in multiply-adds of a multiprocessor."""
OF_A_BLOCK: Final = 2_000_000
ALONE: Final = 0.37
"""How much longer a block takes for which no other hides anything, where there is room for others. H200, 2026-11-29,
320 x 10240 Q6_K and 8,192 rows: two tiles of 64 x 192 beside each other 0.369 ms, one behind the other 0.505."""
PARTS: Final = MappingProxyType({16: 2, 32: 1})
"""Of the four spans of a step of DENSE, those in which a warp starts copies of activations, and those for raw bytes, by
a format's group. H200, 2026-11-29, ms with 1 | 2: 16384 x 2560, 8,192 rows, Q6_K 4.35 | 3.96, IQ3_S 2.46 | 2.53."""
READY_TILES: Final = 12
"""Tiles of columns from which weights are unpacked once for all of them, and READY_WORK multiply-adds of the product.
Unpacking in a block takes 280 instructions of a warp for 16 x 128 weights and each tile (sm_90, a disassembly); a
kernel of its own writes 1.5 bytes a weight, and has a beginning and an end."""
READY_WORK: Final = 8_000_000_000
_RESERVED: Final = 1024
"""Bytes of a multiprocessor's shared memory that each block takes beside its own."""


@dataclass(frozen=True, slots=True)
class Cut:
    """rows: weight rows of a block · sixteens: of rows of a warp, and warps side by side · eights: of columns of a
    warp · blocks of a multiprocessor · cost of a multiply-add, relative."""

    rows: int
    sixteens: int
    eights: int
    blocks: int
    cost: float = 1.0

    @property
    def columns(self) -> int:
        """Activation rows of a block."""
        return 8 * self.eights * self.sixteens

    @property
    def threads(self) -> int:
        """A warp for 16 rows."""
        return 2 * self.rows


CUTS: Final = (
    Cut(128, 4, 8, 1),
    Cut(64, 4, 6, 2, 1.05),
    Cut(128, 4, 7, 1, 1.05),
    Cut(128, 4, 6, 1, 1.1),
    Cut(64, 4, 5, 2, 1.1),
    Cut(128, 4, 5, 1, 1.17),
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


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """A cut · chunks of raw bytes held at once · whether scales have lifts · copies of the table · bytes of shared
    memory · tiles of a block, one below the other · whether weights come unpacked."""

    cut: Cut
    chunks: int
    lifts: int
    copies: int
    shared: int
    run: int = 1
    ready: bool = False

    source = "product_prompt"
    quantizes = True

    @property
    def columns(self) -> int:
        """Activation rows of a block."""
        return self.cut.columns

    @property
    def threads(self) -> int:
        return self.cut.threads

    def constants(self, kind: TensorType, mode: str, made_for: TensorType | None = None) -> dict[str, int | str]:
        """Macros of product_prompt.cu; SHARED is checked there against its own layout. made_for: the type for which
        the result of GATE_UP is quantised."""
        constants: dict[str, int | str] = {
            "TYPE": kind.name,
            "MODE": mode,
            "BM": self.cut.rows,
            "MT": self.cut.sixteens,
            "NT": self.cut.eights,
            "BLOCKS": self.cut.blocks,
            "CHUNKS": self.chunks,
            "PARTS": PARTS[kind.group],
            "LIFTS": self.lifts,
            "COPIES": self.copies,
            "SHARED": self.shared,
        }
        if self.ready:
            constants["READY"] = 1
        if made_for:
            constants |= {"NEXT_ORDER": order(made_for), "NEXT_SUMS": made_for.sums}
        return constants

    def unpacking(self, kind: TensorType) -> tuple[dict[str, int | str], int]:
        """Macros of prompt_unpack.cu for the weights of this plan, bytes of its shared memory."""
        constants: dict[str, int | str] = {"TYPE": kind.name, "BM": self.cut.rows, "LIFTS": self.lifts}
        return constants, self.cut.rows * chunk_pitch(kind) + table_bytes(kind)

    def unpacked(self, kind: TensorType, rows: int, cols: int) -> int:
        """Bytes of a matrix as prompt_unpack.cu writes it."""
        return -(-rows // self.cut.rows) * -(-cols // STEP) * _unpacked(kind, self.cut, self.lifts)

    def rows_of_a_run(self, mode: str) -> int:
        """Rows of a matrix that a block computes; of each of the pair, for GATE_UP."""
        return self.run * (self.cut.rows // 2 if mode == GATE_UP else self.cut.rows)


def _shared(kind: TensorType, cut: Cut, chunks: int, lifts: int, copies: int) -> int:
    """The layout of product_prompt.cu."""
    groups, line = STEP // kind.group, cut.columns + 8
    fetched = cut.columns * STEP + (STEP // ACTIVATION_BLOCK + groups * kind.has_offset) * line * 4
    raw = chunks * cut.rows * chunk_pitch(kind)
    unpacked = _unpacked(kind, cut, lifts)
    return raw + 2 * unpacked + 2 * fetched + 2 * cut.columns * 4 + table_bytes(kind) * copies


def _unpacked(kind: TensorType, cut: Cut, lifts: int) -> int:
    """Bytes of a step's weights."""
    scales = 2 * cut.rows if lifts else cut.rows + 8
    return cut.rows * STEP + STEP // kind.group * (scales + (cut.rows + 8) * kind.has_offset) * 4


def fitted(card: Card, kind: TensorType, cut: Cut) -> PromptPlan | None:
    """A cut with two chunks, or one, and as many copies of the type's table as there is room for; None when it does not
    fit."""
    limit = min(card.shared_block, card.shared_multiprocessor // cut.blocks - _RESERVED)
    for chunks, lifts in product(CHUNKS, LIFTS):
        bare = _shared(kind, cut, chunks, lifts, 1)
        if bare <= limit:
            copies = table_copies(kind, limit - bare + table_bytes(kind))
            return PromptPlan(cut, chunks, lifts, copies, _shared(kind, cut, chunks, lifts, copies))
    return None


def cost(plan: PromptPlan, card: Card, rows: tuple[int, ...], cols: int, n: int) -> float:
    """Relative time of a DENSE product: what the multiprocessor with the most blocks computes, in multiply-adds."""
    together = plan.cut.blocks
    blocks = sum(-(-r // plan.rows_of_a_run(DENSE)) for r in rows) * -(-n // plan.cut.columns)
    tile = plan.cut.rows * plan.cut.columns * (cols * plan.cut.cost + OF_A_RESULT)
    most = -(-blocks // card.multiprocessors)
    last = most % together  # blocks of the last turn, with fewer beside them
    alone = ALONE * last * (together - last) / (together - 1) if last else 0.0
    return (most + alone) * (plan.run * tile + OF_A_BLOCK / together)


def expected(pairs: int, experts: int) -> int:
    """Rows that most experts stay below when a router spreads pairs evenly: mean and two deviations."""
    mean = pairs / experts
    return math.ceil(mean + 2 * math.sqrt(mean))


@lru_cache(maxsize=4096)
def prompt_plan(card: Card, kind: TensorType, mode: str, rows: tuple[int, ...], cols: int, n: int) -> PromptPlan:
    """The cheapest of CUTS that fits: rows of each matrix; n activation rows, or rows of an expert to be expected.
    Raises ValueError when none fits."""
    plans = [plan for cut in CUTS if (plan := fitted(card, kind, cut))]
    if not plans:
        raise ValueError(f"no prompt tile of {kind.name} fits the card's {card.shared_block} bytes of shared memory")
    if mode == DENSE:
        ways = [replace(plan, run=run) for plan in plans for run in RUNS]
        return min(ways, key=lambda plan: cost(plan, card, rows, cols, n))
    wide = [plan for plan in plans if plan.cut.columns >= n]
    plan = min(wide, key=lambda plan: plan.cut.columns) if wide else plans[0]
    return replace(plan, run=1 if mode == GATE_UP else -(-LONG_RUN // cols))


def ready_plan(
    card: Card, kind: TensorType, plan: PromptPlan, rows: tuple[int, ...], cols: int, n: int
) -> PromptPlan | None:
    """A DENSE plan with weights that come unpacked; None where that does not pay."""
    if -(-n // plan.columns) < READY_TILES or sum(rows) * cols * n < READY_WORK:
        return None
    limit = min(card.shared_block, card.shared_multiprocessor // plan.cut.blocks - _RESERVED)
    for lifts in LIFTS:
        shared = _shared(kind, plan.cut, 0, lifts, 0)
        if shared <= limit:
            return replace(plan, chunks=0, lifts=lifts, copies=0, shared=shared, ready=True)
    return None

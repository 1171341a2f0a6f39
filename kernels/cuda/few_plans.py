"""How a product with a few rows of a prompt is cut for a card: constants of prompt_few.cu, shared memory. Pure.

    plan(card, kind, mode, rows, cols, n)      prompt_few.cu where there are few rows, else a tile of prompt_plans.py

A warp computes 16 weight rows by some eights of columns and walks the row alone, so narrow matrices and experts of a
row or three keep a card busy that tiles of 64 rows leave idle. No plan changes a bit of the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from strata.kernels.cuda.card import OWN_SHARED, Card
from strata.kernels.cuda.plans import ACTIVATION_BLOCK, DENSE, GATE_UP, chunk_pitch, table_bytes, table_copies
from strata.kernels.cuda.prompt_plans import PromptPlan, prompt_plan
from strata.kernels.formats import TensorType

ASYNC_ARCH: Final = 80
"""The first architecture whose copies to shared memory nobody waits for."""
TILE: Final = 16
"""Weight rows of a warp, of each matrix."""
MOST_ROWS: Final = 512
"""Activation rows of a DENSE product up to which it goes this way."""
MOST_RESULTS: Final = 1 << 20
"""Weight rows times activation rows, the same: a wide matrix fills a card with tiles sooner."""
MOST_EACH: Final = 24
"""Rows to be expected of an expert, the same. H200, 2026-11-30, a pass of 300 tokens: 64 ms, by tiles 101."""
EIGHTS: Final = (4, 2, 1)
"""Eights of columns of a warp that are tried for DENSE products; experts take as few as hold most of them."""
WAYS: Final = ((8, 3), (8, 2), (4, 3), (4, 2), (2, 2), (1, 2))
"""Warps of a block and chunks of each in shared memory, from most to least."""
OF_A_CHUNK: Final = 330
"""Instructions of a warp for 16 rows and 256 columns, and OF_AN_EIGHT more for every eight of columns and sums of 32:
those of sm_90, of a disassembly."""
OF_AN_EIGHT: Final = 100
OF_A_WARP: Final = 0.16
"""Instructions of a clock that a warp begins where it is one of few, and of a multiprocessor at most."""
AT_MOST: Final = 2.0
REGISTERS: Final = 128
"""Of a thread, at most; a multiprocessor has 64 Ki."""
BEGIN: Final = 160
"""Spans of 32 columns that hide a block's beginning: of a warp's tiles together."""
MOST_TILES: Final = 4
"""Tiles of a warp at most."""
TABLE_ROOM: Final = 32 << 10
"""Bytes for copies of a type's table."""


@dataclass(frozen=True, slots=True)
class FewPlan:
    """eights of columns · warps of a block · chunks of a warp in shared memory · copies of the type's table · tiles of
    a block · bytes of shared memory."""

    eights: int
    warps: int
    depth: int
    copies: int
    run: int
    shared: int

    source = "prompt_few"
    quantizes = False

    @property
    def columns(self) -> int:
        """Activation rows of a block."""
        return 8 * self.eights

    @property
    def threads(self) -> int:
        return 32 * self.warps

    def rows_of_a_run(self, mode: str) -> int:
        """Rows of a matrix that a block computes; of each of the pair, for GATE_UP."""
        return self.run * TILE

    def constants(self, kind: TensorType, mode: str, made_for: TensorType | None = None) -> dict[str, int | str]:
        """Macros of prompt_few.cu. Raises ValueError for a result that is to be quantised."""
        if made_for is not None:
            raise ValueError("prompt_few.cu quantises no results")
        return {
            "TYPE": kind.name,
            "MODE": mode,
            "NT": self.eights,
            "WARPS": self.warps,
            "DEPTH": self.depth,
            "COPIES": self.copies,
        }


def plan(card: Card, kind: TensorType, mode: str, rows: tuple[int, ...], cols: int, n: int) -> FewPlan | PromptPlan:
    """The way of a product: rows of each matrix; n activation rows, or rows of an expert to be expected. Raises
    ValueError when the card has no room for any."""
    return few_plan(card, kind, mode, rows, cols, n) or prompt_plan(card, kind, mode, rows, cols, n)


def limits() -> tuple[int, int, int]:
    """What `plan` depends on beside its arguments: the bench and the tests change it."""
    return MOST_ROWS, MOST_RESULTS, MOST_EACH


def is_few(mode: str, rows: tuple[int, ...], n: int) -> bool:
    """Whether a product goes through prompt_few.cu where the card has room."""
    return n <= MOST_ROWS and sum(rows) * n <= MOST_RESULTS if mode == DENSE else n <= MOST_EACH


def few_plan(card: Card, kind: TensorType, mode: str, rows: tuple[int, ...], cols: int, n: int) -> FewPlan | None:
    """`plan` where there are few rows; None where not, or when the columns do not fit the card's shared memory."""
    fits = card.arch >= ASYNC_ARCH and is_few(mode, rows, n)
    return cut(card, kind, mode, rows, cols, n) if fits else None


@lru_cache(maxsize=4096)
def cut(card: Card, kind: TensorType, mode: str, rows: tuple[int, ...], cols: int, n: int) -> FewPlan | None:
    """The same for any n."""
    found = []
    for eights in EIGHTS if mode == DENSE else (next((e for e in reversed(EIGHTS) if n <= 8 * e), EIGHTS[0]),):
        for warps, depth in WAYS:
            bare = _shared(kind, mode, cols, eights, warps, depth)
            room = card.shared_block - bare
            if room >= table_bytes(kind):
                copies = table_copies(kind, min(TABLE_ROOM, room))
                each = 1 if mode == DENSE else min(MOST_TILES, -(-BEGIN * ACTIVATION_BLOCK // cols))
                found.append(FewPlan(eights, warps, depth, copies, warps * each, bare + table_bytes(kind) * copies))
    return min(found, key=lambda each: cost(card, kind, mode, rows, cols, n, each), default=None)


def cost(
    card: Card, kind: TensorType, mode: str, rows: tuple[int, ...], cols: int, n: int, plan: FewPlan
) -> tuple[float, int, int]:
    """Clocks that a multiprocessor computes, of a DENSE product, or of experts of which there are more than enough; of
    plans that are equal in that, those with more chunks on their way, then those with fewer warps."""
    blocks = min(card.shared_multiprocessor // (plan.shared + OWN_SHARED), (1 << 16) // (REGISTERS * plan.threads))
    warps = float(max(1, blocks) * plan.warps)
    tiles = -(-n // plan.columns) * sum(-(-r // TILE) for r in rows) / card.multiprocessors
    if mode == DENSE:
        warps = min(warps, max(1, -(-tiles // 1)))
    instructions = -(-cols // 256) * (OF_A_CHUNK + OF_AN_EIGHT * plan.eights * ACTIVATION_BLOCK // kind.group)
    return max(tiles, 1.0) * instructions / min(AT_MOST, OF_A_WARP * warps), -plan.depth, plan.warps


def _shared(kind: TensorType, mode: str, cols: int, eights: int, warps: int, depth: int) -> int:
    """The layout of prompt_few.cu without the table; 128 more for its alignment."""
    rows, columns = TILE * (2 if mode == GATE_UP else 1), 8 * eights
    groups = cols // ACTIVATION_BLOCK + (cols // kind.group if kind.has_offset else 0)
    inputs = columns * (-(-cols // 128) * 128 + 32 + 4 * groups)
    return warps * depth * rows * chunk_pitch(kind) + 8 * columns + 128 + inputs

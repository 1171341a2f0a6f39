"""What storing to pages and attending over them share: where a token lies, rotation, and the checks of both.

Positions are in tokens from the start of the sequence; a table row holds the page of every PAGE tokens of a slot.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from strata.kernels.check import check, check_slots, require
from strata.kernels.cpu.lanes import get, put
from strata.kernels.cpu.math import JIT, fma
from strata.kernels.ops import I32, PAGE, AttentionPages, Rope


@njit("int64(int32[:, ::1], int64, int64)", **JIT)
def token_row(tables, slot, position):
    """The number of a token's row when the tokens of all pages are counted through."""
    return tables[slot, position // PAGE] * PAGE + position % PAGE


@njit("void(float32[::1], int64, float32[::1], float32[::1], int64, int64)", **JIT)
def rotate(x, at, cos, sin, half, position):
    """Rotate the first 2 * half elements from x[at] by the angles of a position, in place."""
    angle = position * half
    for j in range(half):
        c, s = get(cos, angle + j), get(sin, angle + j)
        a, b = get(x, at + j), get(x, at + half + j)
        put(x, at + j, fma(a, c, -(b * s)))
        put(x, at + half + j, fma(b, c, a * s))


@njit("int64(int32[:, ::1], int32[::1], int32[::1], int64)", **JIT)
def _row_without_page(tables, slots, positions, pages):
    """The first row that may see a page that does not exist, or -1."""
    for row in range(len(slots)):
        slot, position = slots[row], positions[row]
        # Rows of one slot come in runs of rising positions: what the row before has seen is not looked at again.
        known = row > 0 and slots[row - 1] == slot and positions[row - 1] <= position
        for j in range(positions[row - 1] // PAGE if known else 0, position // PAGE + 1):
            if tables[slot, j] < 0 or tables[slot, j] >= pages:
                return row
    return -1


def check_pages(
    pages: AttentionPages, tables: I32, slots: I32, positions: I32, rope: Rope, wanted: dict[str, int]
) -> None:
    """Raise ValueError unless pages and angles have the wanted sizes and every row's slot, position, pages exist.

    wanted: kv_heads, head_dim, index_dim as bound by the arguments before.
    """
    f32 = np.float32
    size = check(
        pages_k=(pages.k, "pages PAGE kv_heads head_dim", f32),
        pages_v=(pages.v, "pages PAGE kv_heads head_dim", f32),
        pages_raw=(pages.raw, "pages PAGE index_dim", f32),
        pages_block=(pages.block, "pages blocks index_dim", f32),
        rope_cos=(rope.cos, "angles half", f32),
        rope_sin=(rope.sin, "angles half", f32),
        tables=(tables, "slots pages_of_a_slot", np.int32),
    )
    for name, n in wanted.items():
        require(size[name] == n, f"pages must have {name} = {n}, got {size[name]}")
    require(size["PAGE"] == PAGE, f"pages must hold {PAGE} tokens, got {size['PAGE']}")
    require(
        size["blocks"] * pages.r in (0, PAGE), f"pages.block must divide {PAGE} tokens, got {size['blocks']} blocks"
    )
    rotated, smallest = 2 * size["half"], min(size["head_dim"], size["index_dim"])
    require(rotated <= smallest, f"rope must rotate at most {smallest} dims, got {rotated}")
    if not len(slots):
        return
    check_slots(slots, len(tables))
    limit = min(size["pages_of_a_slot"] * PAGE, size["angles"])
    low, high = int(positions.min()), int(positions.max())
    require(low >= 0 and high < limit, f"positions must be in 0 to {limit - 1}, got {low} to {high}")
    row = _row_without_page(tables, slots, positions, size["pages"])
    if row >= 0:
        used = tables[slots[row], : positions[row] // PAGE + 1]
        raise ValueError(f"tables must name pages 0 to {size['pages'] - 1} for row {row}, got {used.tolist()}")

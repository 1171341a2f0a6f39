"""What a window leaves to the next one, on the device: tokens, positions, rows of state, recent ids.

Rows are sequences: a window here has one row of each. All of it is read on the device, so that the same captured graph
is a sequence's next step again and again.

Errors   ValueError naming the argument, the wanted and the given
Cost     a launch of one warp each
"""

from __future__ import annotations

from typing import Final

from strata.kernels.check import check, require
from strata.kernels.cuda.launch import I32, launch
from strata.kernels.cuda.workspace import DeviceArray

_SOURCE: Final = "window.cu"
MOST_ROWS: Final = 32
"""Rows of one warp."""


def window_recent(tokens: DeviceArray, positions: DeviceArray, moduli: DeviceArray, recent: DeviceArray) -> None:
    """recent[i, positions[i] % moduli[i]] = tokens[i], for rows whose modulus is above 0; recent int32 (n, last)."""
    size = check(
        tokens=(tokens, "n", I32),
        positions=(positions, "n", I32),
        moduli=(moduli, "n", I32),
        recent=(recent, "n last", I32),
    )
    require(size["n"] <= MOST_ROWS, f"a window has at most {MOST_ROWS} rows, got {size['n']}")
    launch(
        _SOURCE, "window_recent", (1,), (MOST_ROWS,),
        tokens, positions, moduli, recent, I32(size["n"]), I32(size["last"]),
    )  # fmt: skip


def window_next(ids: DeviceArray, tokens: DeviceArray, positions: DeviceArray, segments: DeviceArray) -> None:
    """tokens = ids (0 for one below 0), positions + 1, and each segment reads what it wrote; segments int32 (n, 3)."""
    size = check(
        ids=(ids, "n", I32), tokens=(tokens, "n", I32), positions=(positions, "n", I32), segments=(segments, "n 3", I32)
    )
    require(size["n"] <= MOST_ROWS, f"a window has at most {MOST_ROWS} rows, got {size['n']}")
    launch(_SOURCE, "window_next", (1,), (MOST_ROWS,), ids, tokens, positions, segments, I32(size["n"]))

"""A round on the device: which drafts stay, what the draft layer goes on from, the rows of the round after it.

    round_accept(ids, tokens, ends, segment, kept, again)       # behind the sampling
    round_choose(out, kept, drafts, p, places, slot, chain, likely, fed, step)
    round_next(ids, kept, chain, tokens, positions, places, segments)

Errors   ValueError naming the argument, the wanted and the given
Cost     a launch of one warp each; of round_choose also a copy of a row
"""

from __future__ import annotations

from typing import Final

import numpy as np

from strata.kernels.check import check, require
from strata.kernels.cuda.launch import F32, I32, launch
from strata.kernels.cuda.workspace import DeviceArray

_SOURCE: Final = "round.cu"
MOST_ROWS: Final = 31
"""Rows of a round at most: a warp has one lane for each, and one that is behind them."""


def round_accept(
    ids: DeviceArray,
    tokens: DeviceArray,
    ends: DeviceArray,
    segment: DeviceArray,
    kept: DeviceArray,
    again: DeviceArray,
) -> None:
    """Of n rows, ids and tokens int32 (n,): kept[0] = 1 + the drafts tokens[1..] that the ids say too, up to an end.

    ends    int32 (m,): after one of these ids nothing stays
    segment int32 (3,), of these rows · again int32 (3,): the rows that stay, none of them where all do
    """
    size = check(
        ids=(ids, "n", I32),
        tokens=(tokens, "n", I32),
        ends=(ends, "m", I32),
        segment=(segment, "3", I32),
        kept=(kept, "1", I32),
        again=(again, "3", I32),
    )
    n = size["n"]
    require(n <= MOST_ROWS, f"a round has at most {MOST_ROWS} rows, got {n}")
    launch(_SOURCE, "round_accept", (1,), (32,), ids, tokens, ends, I32(size["m"]), segment, kept, again, I32(n))


def round_choose(
    out: DeviceArray,
    kept: DeviceArray,
    drafts: DeviceArray,
    p: DeviceArray,
    places: DeviceArray,
    slot: DeviceArray,
    chain: DeviceArray,
    likely: DeviceArray,
    fed: DeviceArray,
    step: DeviceArray,
) -> None:
    """What lies behind the last row that stays: chain[0], likely[0] = its draft and p; fed = its row of out.

    out (n, C, H), fed (1, C, H), a multiple of 4 elements a row at multiples of 16 bytes; drafts int32 and p (n,)
    places  int32 (n,): of the rows in the draft layer · slot int32 (1,) · step int32 (3,): token, place, slot
    """
    n = len(out)
    size = check(
        out=(out.reshape(n, -1), "n width", F32),
        fed=(fed.reshape(1, -1), "1 width", F32),
        kept=(kept, "1", I32),
        drafts=(drafts, "n", I32),
        p=(p, "n", F32),
        places=(places, "n", I32),
        slot=(slot, "1", I32),
        chain=(chain, "m", I32),
        likely=(likely, "m", F32),
        step=(step, "3", I32),
    )
    require(size["width"] % 4 == 0, f"a row must be a multiple of 4 elements, got {size['width']}")
    require(size["m"] > 0, "a chain has room for one draft at least")
    quarters = size["width"] // 4
    launch(
        _SOURCE, "round_choose", (-(-quarters // 256),), (256,),
        out, np.int64(quarters), kept, drafts, p, places, slot, chain, likely, fed, step,
    )  # fmt: skip


def round_next(
    ids: DeviceArray,
    kept: DeviceArray,
    chain: DeviceArray,
    tokens: DeviceArray,
    positions: DeviceArray,
    places: DeviceArray,
    segments: DeviceArray,
) -> None:
    """Rows of the next round: tokens[:1 + m] = the last id that stays (0 for one below 0) and chain (m,); positions and
    places go on behind the rows that stay; every one of the segments int32 (most, 3) reads what this round wrote."""
    size = check(
        ids=(ids, "n", I32),
        kept=(kept, "1", I32),
        chain=(chain, "m", I32),
        tokens=(tokens, "rows", I32),
        positions=(positions, "rows", I32),
        places=(places, "rows", I32),
        segments=(segments, "most 3", I32),
    )
    m, most = size["m"], size["most"]
    require(m < size["rows"] <= MOST_ROWS, f"{m} drafts and a token do not fit {size['rows']} rows of {MOST_ROWS}")
    require(most <= MOST_ROWS, f"a round has at most {MOST_ROWS} rows, got segments of {most}")
    launch(
        _SOURCE, "round_next", (1,), (32,), ids, kept, chain, tokens, positions, places, segments, I32(m), I32(most),
    )  # fmt: skip

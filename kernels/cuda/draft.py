"""Drafts on a card: rows kept, ids as tokens, the likeliest token of each row. Plain counterpart: reference/draft.py.

Errors   ValueError naming the argument, the wanted and the given
Cost     the logits are read twice, from memory and from the cache; two launches
"""

from __future__ import annotations

from typing import Final

import numpy as np

from strata.kernels.check import check, require
from strata.kernels.cuda.launch import F32, I32, launch
from strata.kernels.cuda.workspace import DeviceArray, Workspace

_SOURCE: Final = "draft.cu"
PARTS: Final = 32
"""Blocks that look through a row, as in the source."""
MOST_ROWS: Final = 32


def keep_rows(source: DeviceArray, target: DeviceArray) -> None:
    """target = source, float32 of equal shapes, C-contiguous, a multiple of 4 elements at multiples of 16 bytes."""
    check(source=(source.reshape(-1), "n", F32), target=(target.reshape(-1), "n", F32))
    require(source.size % 4 == 0, f"a copy wants a multiple of 4 elements, got {source.size}")
    quarters = source.size // 4
    launch(_SOURCE, "keep_rows", (-(-quarters // 256),), (256,), source, target, np.int64(quarters))


def draft_tokens(ids: DeviceArray, tokens: DeviceArray) -> None:
    """tokens = ids, 0 for one below 0; int32 (n,) each."""
    size = check(ids=(ids, "n", I32), tokens=(tokens, "n", I32))
    require(size["n"] <= MOST_ROWS, f"a window has at most {MOST_ROWS} rows, got {size['n']}")
    launch(_SOURCE, "draft_tokens", (1,), (MOST_ROWS,), ids, tokens, I32(size["n"]))


def likeliest(
    workspace: Workspace,
    logits: DeviceArray,
    ids: DeviceArray,
    p: DeviceArray,
    names: DeviceArray | None = None,
    step: tuple[DeviceArray, DeviceArray] | None = None,
) -> None:
    """logits (n, V) -> ids int32 (n,), of equal logits the lower one, and probabilities p (n,).

    names   int32 (V,): what the ids are called; None: as they are
    step    tokens and positions int32 (n,): set to the ids, and one on
    """
    size = check(logits=(logits, "n V", F32), ids=(ids, "n", I32), p=(p, "n", F32))
    n, vocab = size["n"], size["V"]
    if names is not None:
        check(names=(names, f"{vocab}", I32))
    if step is not None:
        check(tokens=(step[0], f"{n}", I32), positions=(step[1], f"{n}", I32))
    tokens, positions = step or (None, None)
    with workspace.scratch():
        best, first = workspace.array((n, PARTS), np.uint32), workspace.array((n, PARTS), np.uint32)
        sums = workspace.array((n, PARTS))
        launch(_SOURCE, "likeliest_parts", (PARTS, n), (256,), logits, best, first, sums, I32(vocab))
        launch(_SOURCE, "likeliest", (n,), (32,), best, first, sums, names, ids, p, tokens, positions)

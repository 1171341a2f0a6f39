"""Sampling: a token id a row as a pure function of logits, recent ids, settings, position.

Contract: `ops.Kernels.sample`.

sample_rows   many rows on the device; ids stay there and can feed the next window. Settings are arrays in memory, so a
              captured graph can be replayed with others
sample        one row, its id to the host

Errors   ValueError for settings out of range; a row whose logits are not finite has the id -1, and `sample` raises
Cost     the logits are read once by the whole card and some 4,000 of them again by one block a row; rows with penalties
         sort their recent ids first
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from strata.kernels.check import check, require
from strata.kernels.cuda.launch import I32, launch
from strata.kernels.cuda.workspace import DeviceArray, Workspace
from strata.kernels.ops import MAX_TOP_K, Sampling

_SOURCE: Final = "sample.cu"
MAX_RECENT: Final = 4096
"""Recent ids of a row."""
SETTINGS: Final = ("temperature", "top_k", "top_p", "min_p", "penalty_repeat", "penalty_freq", "penalty_present")
"""Columns of the settings of a row, float64."""
_RUN: Final = 64
_RUN_WARPS: Final = 8
_RUN_BLOCKS: Final = 528
"""Blocks that look through the logits of a row at most; each takes runs in turn."""
_WORD: Final = 32


def pack(hows: Sequence[Sampling]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.uint64]]:
    """Settings (n, SETTINGS) and seeds (n,) of rows, on the host. Raises ValueError for values out of range."""
    for how in hows:
        if how.temperature <= 0:
            continue
        require(1 <= how.top_k <= MAX_TOP_K, f"top_k must be in 1 to {MAX_TOP_K}, got {how.top_k}")
        fits = how.top_p > 0 and 0 <= how.min_p <= 1 and how.penalty_repeat > 0
        require(fits, f"top_p and penalty_repeat must be above 0 and min_p in 0 to 1, got {how}")
    settings = np.array([[getattr(how, name) for name in SETTINGS] for how in hows], np.float64)
    return settings.reshape(-1, len(SETTINGS)), np.array([how.seed for how in hows], np.uint64)


def sample_rows(
    workspace: Workspace,
    logits: DeviceArray,
    settings: DeviceArray,
    seeds: DeviceArray,
    positions: DeviceArray,
    recent: DeviceArray,
    ahead: int = 0,
    out: DeviceArray | None = None,
) -> DeviceArray:
    """logits (n, V) -> ids int32 (n,). The sampled token of a row will have the position `positions` + ahead.

    settings and seeds as `pack` makes them; recent int32 (n, last): the ids that the penalties look at, -1 = none. How
    many ids there can be is fixed for a captured graph; last = 0 leaves penalties out.
    """
    size = check(
        logits=(logits, "n V", np.float32),
        settings=(settings, f"n {len(SETTINGS)}", np.float64),
        seeds=(seeds, "n", np.uint64),
        positions=(positions, "n", I32),
        recent=(recent, "n last", I32),
    )
    n, vocab, last = size["n"], size["V"], size["last"]
    require(last <= MAX_RECENT, f"recent must have at most {MAX_RECENT} ids a row, got {last}")
    ids = workspace.array((n,), I32) if out is None else out
    check(out=(ids, f"{n}", I32))
    n_runs, words = -(-vocab // _RUN), -(-vocab // _WORD) if last else 0
    with workspace.scratch():
        runs = workspace.array((n, n_runs), np.uint32)
        seen = workspace.array((n, words), np.uint32)
        best, best_ids = workspace.array((n, MAX_TOP_K), np.float64), workspace.array((n, MAX_TOP_K), I32)
        if last:
            launch(
                _SOURCE, "sample_recent", (n,), (512,),
                logits, settings, recent, seen, best, best_ids, I32(vocab), I32(last), I32(words),
            )  # fmt: skip
        launch(
            _SOURCE, "sample_runs", (min(-(-n_runs // _RUN_WARPS), _RUN_BLOCKS), n), (32 * _RUN_WARPS,),
            logits, settings, seen, runs, I32(vocab), I32(n_runs), I32(words),
        )  # fmt: skip
        launch(
            _SOURCE, "sample_pick", (n,), (1024,),
            logits, settings, seeds, positions, seen, best, best_ids, runs, ids, I32(vocab), I32(n_runs), I32(words),
            I32(ahead),
        )  # fmt: skip
    return ids


def sample(workspace: Workspace, logits: DeviceArray, recent: DeviceArray, how: Sampling, position: int) -> int:
    """One id from logits (V,) on the device. Waits for the stream."""
    size = check(logits=(logits, "V", np.float32), recent=(recent, "last", I32))
    settings, seeds = pack([how])
    with workspace.scratch():
        ids = sample_rows(
            workspace,
            logits.reshape(1, -1),
            workspace.upload(settings),
            workspace.upload(seeds),
            workspace.upload(np.array([position], np.int32)),
            recent.reshape(1, -1),
        )
        token = int(ids[0])
    require(token >= 0, f"logits must be finite, got {size['V']} of which the best is not")
    return token

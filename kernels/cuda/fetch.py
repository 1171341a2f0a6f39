"""Missing experts of a window come from RAM to the card before its products read them.

    ids, tables = stage.fetch(workspace, ids, (gate, up, down))   # addresses by pair, of copies where there is one

The products then read the card's memory; of more different experts than `slots`, the last ones are read in place. The
bytes are the same ones, so nothing depends on which.

Errors   ValueError for more pairs than a window has
Cost     a launch a layer, and the bytes of the missing experts over PCIe, once for all rows
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from strata.kernels.check import require
from strata.kernels.cuda import card as cards
from strata.kernels.cuda.arguments import address
from strata.kernels.cuda.compile import load_kernel
from strata.kernels.cuda.workspace import DeviceArray, Workspace
from strata.kernels.desk import MOST_PAIRS

EACH: Final = 4
"""Words of 16 bytes that a thread has under way."""
BLOCKS: Final = 2
"""Of a multiprocessor. 10 experts of 2.33 MB in 463 us, 50.3 GB/s, with 2 to 8 words and 1 to 8 blocks alike, where the
driver copies 53.8 and products read 29.6 in place (H200, 2026-11-30)."""
Tables = tuple[DeviceArray, DeviceArray, DeviceArray]
"""Addresses of gate, up and down, uint64 (experts,) each."""


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """Of a layer. memory: uint8 on the card, for `slots` experts of n_bytes · begins: where gate, up and down begin in
    one, in RAM as here, the first at 0 · begin, end: addresses of the expert cache, whose experts stay there."""

    memory: DeviceArray
    slots: int
    n_bytes: int
    begins: tuple[int, int, int]
    begin: int
    end: int

    def __post_init__(self) -> None:
        require(self.n_bytes % 16 == 0 and self.begins[0] == 0, "experts are copied from gate on, 16 bytes at a time")
        require(self.slots * self.n_bytes <= self.memory.size, f"no room for {self.slots} experts")

    def takes(self, pairs: int) -> bool:
        """Whether a window of so many pairs is one for this."""
        return self.slots > 0 and 0 < pairs <= MOST_PAIRS

    def fetch(
        self, workspace: Workspace, ids: DeviceArray, tables: Tables, each: int = EACH, blocks: int = BLOCKS
    ) -> tuple[DeviceArray, DeviceArray]:
        """ids (n, used) and the addresses of all experts -> ids that name pairs, and their addresses (3, n * used)."""
        pairs = int(ids.size)
        require(self.takes(pairs), f"up to {MOST_PAIRS} pairs of a window are fetched, got {pairs}")
        named, table = workspace.array(ids.shape, np.int32), workspace.array((3, pairs), np.uint64)
        load_kernel("fetch.cu", "fetch_experts", EACH=each)(
            (blocks * cards.card().multiprocessors,),
            (MOST_PAIRS,),
            (
                *_pointers(ids, *tables),
                np.uint64(self.begin),
                np.uint64(self.end),
                np.int32(pairs),
                np.int32(self.slots),
                np.int32(self.n_bytes // 16),
                *map(np.uint64, self.begins[1:]),
                *_pointers(self.memory, named, table),
            ),
            shared_mem=0,
        )
        return named, table


def _pointers(*arrays: DeviceArray) -> list[np.uint64]:
    return [np.uint64(address(array)) for array in arrays]

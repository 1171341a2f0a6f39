"""What a window's experts ask of the processor, and its answers: the card's side. kernels/cpu/handover.py is the other.

    kept = helper.ask(workspace, x, ids, addresses)     # ids without those that the processor computes
    ... products of kept ...
    helper.take(ids, kept, given)                       # outputs of the others

Errors   ValueError for more pairs than a desk has room for. An answer that does not come within `limit_s` is a word on
         the desk (`Desk.failed`), and zeros; nothing waits for the processor any more
Cost     two launches a layer. Of a request the rows go to RAM and the outputs come from there: 4 bytes an element
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from strata.kernels.check import require
from strata.kernels.cuda.arguments import address
from strata.kernels.cuda.compile import load_kernel
from strata.kernels.cuda.workspace import DeviceArray, Workspace
from strata.kernels.desk import MOST_PAIRS, Desk

SHARE, REQUESTS, WAITS, AHEAD = 2, 6, 7, 8
OWN_WORDS: Final = 9
"""Words of `own`: how many 256ths of the missing experts the card reads itself, rounded down behind AHEAD more; how
many requests there have been, and for how many answers the card waited."""


@dataclass(frozen=True, slots=True, eq=False)
class Helper:
    """A layer at a desk. own: uint32 (OWN_WORDS,) on the card · begin, end: addresses of the expert cache, whose
    experts are never asked for."""

    desk: Desk
    own: DeviceArray
    layer: int
    begin: int
    end: int
    limit_s: float

    def ask(self, workspace: Workspace, x: DeviceArray, ids: DeviceArray, addresses: DeviceArray) -> DeviceArray:
        """x (n, width), ids (n, used) -> the ids whose experts the card computes, -1 for the others."""
        n, used = ids.shape
        rows, width = self.desk.x.shape
        require(n <= rows and n * used <= MOST_PAIRS, f"a desk has room for {MOST_PAIRS} pairs, got {n} rows of {used}")
        require(x.shape[1] == width and width % 4 == 0, f"a desk has rows of {width}, got {x.shape[1]}")
        kept = workspace.array((n, used), np.int32)
        desk = self.desk
        load_kernel("handover.cu", "ask_host")(
            (n,),
            (MOST_PAIRS,),
            (
                *_pointers(x, ids, addresses),
                np.uint64(self.begin),
                np.uint64(self.end),
                np.int32(used),
                np.int32(width),
                np.int32(self.layer),
                *_pointers(self.own, kept, desk.words, desk.at, desk.x),
            ),
            shared_mem=0,
        )
        return kept

    def take(self, ids: DeviceArray, kept: DeviceArray, given: DeviceArray) -> None:
        """given (n * used, width): the outputs of pairs without an id in `kept`."""
        pairs, width = given.shape
        desk = self.desk
        load_kernel("handover.cu", "take_answers")(
            (pairs,),
            (256,),
            (
                *_pointers(ids, kept),
                np.int32(width),
                np.int32(self.layer),
                np.uint64(int(self.limit_s * 1e9)),
                *_pointers(self.own, desk.words, desk.places, desk.out, given),
            ),
            shared_mem=0,
        )


def _pointers(*arrays: DeviceArray) -> list[np.uint64]:
    """Page-locked RAM has the same address on the card."""
    return [np.uint64(address(array)) for array in arrays]

"""Rows of a table that lies in a mapped file: the card's side of a row desk (kernels/cpu/mapped_rows.py is the other).

    table = MappedRows(w.type, w.shape, w.data, desk, own, limit_s)
    e = dequantize_mapped(workspace, table, rows)      # as `product.dequantize` of a table that the card reads

Exact    the bytes are those of the file, and the kernel that unpacks them is the same one
Errors   ValueError for rows of no int64. An answer that does not come within `limit_s` is a word on the desk
         (`RowDesk.failed`) and zeros; nothing waits for the processor any more
Cost     three launches for up to MOST_ROWS rows; a way to the processor and back (4 us), and the rows over PCIe
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from strata.kernels.check import check
from strata.kernels.cuda.arguments import address
from strata.kernels.cuda.launch import I32, launch
from strata.kernels.cuda.product import dequantize
from strata.kernels.cuda.workspace import DeviceArray, Workspace
from strata.kernels.formats import Weight
from strata.kernels.row_desk import MOST_ROWS, RowDesk

OWN_WORDS: Final = 2
_SOURCE: Final = "mapped_rows.cu"
_WORD: Final = 8
_ROUND: Final = 16
"""Bytes that a matrix must be readable behind its end."""
_ASKING: Final = 1024
_THREADS: Final = 256
_BLOCKS: Final = 32
"""Each of them asks the desk by itself whether the answer is there."""


@dataclass(frozen=True, slots=True, eq=False)
class MappedRows(Weight):
    """A table whose bytes no kernel reads. own: uint32 (OWN_WORDS,) on the card, zero at first."""

    desk: RowDesk
    own: DeviceArray
    limit_s: float


def dequantize_mapped(workspace: Workspace, w: MappedRows, rows: DeviceArray) -> DeviceArray:
    """rows int64 (n,) -> (n, cols) float32."""
    n = check(rows=(rows, "n", np.int64))["n"]
    row_bytes = w.type.row_bytes(w.cols)
    size = -(-n * row_bytes // _ROUND) * _ROUND
    brought, numbers = workspace.array((size,), np.uint8), workspace.array((n,), np.int64)
    for first in range(0, n, MOST_ROWS):
        _bring(w, rows[first : first + MOST_ROWS], brought[first * row_bytes :], numbers, first)
    copies = brought[: n * row_bytes].reshape(n, row_bytes)
    return dequantize(workspace, Weight(w.type, (n, w.cols), copies), numbers)


def _bring(w: MappedRows, rows: DeviceArray, target: DeviceArray, numbers: DeviceArray, first: int) -> None:
    """One request."""
    n, desk = len(rows), w.desk
    words = -(-n * w.type.row_bytes(w.cols) // _WORD)
    at = _pointers(w.own, desk.words)
    launch(_SOURCE, "ask_rows", (1,), (_ASKING,), *_pointers(rows), I32(n), *at, *_pointers(desk.ids))
    launch(
        _SOURCE, "bring_rows", (min(_BLOCKS, -(-max(words, n) // _THREADS)),), (_THREADS,),
        I32(n), I32(words), np.uint64(int(w.limit_s * 1e9)), *at, *_pointers(desk.rows, target, numbers), I32(first),
    )  # fmt: skip


def _pointers(*arrays: DeviceArray) -> list[np.uint64]:
    """Page-locked RAM has the same address on the card."""
    return [np.uint64(address(array)) for array in arrays]

"""Embedding: token ids to residual streams, all C of a row alike.

Cost   one row of the table a token is read; C*H floats a row are written
"""

from __future__ import annotations

from typing import Final

import numpy as np

from strata.kernels.check import check, require
from strata.kernels.cuda.launch import I32, launch
from strata.kernels.cuda.product import dequantize
from strata.kernels.cuda.workspace import DeviceArray, Workspace
from strata.kernels.formats import Weight

_SOURCE: Final = "embed.cu"
_ROW_THREADS: Final = 256
_THREADS: Final = 128
_WIDTH_OF_LOAD: Final = 4


def embed(workspace: Workspace, table: Weight, tokens: DeviceArray, streams: int) -> DeviceArray:
    """table (vocab, H), tokens int32 (n,) on the device and the caller's to check -> (n, C, H)."""
    n, width = check(tokens=(tokens, "n", I32))["n"], table.cols
    require(width % _WIDTH_OF_LOAD == 0, f"H must be a multiple of {_WIDTH_OF_LOAD}, got {width}")
    x = workspace.array((n, streams, width))
    quarter = width // _WIDTH_OF_LOAD
    with workspace.scratch():
        rows = workspace.array((n,), np.int64)
        launch(_SOURCE, "embed_rows", (-(-n // _ROW_THREADS),), (_ROW_THREADS,), tokens, rows, I32(n))
        e = dequantize(workspace, table, rows)
        launch(_SOURCE, "embed_streams", (-(-quarter // _THREADS), n), (_THREADS,), e, x, I32(quarter), I32(streams))
    return x

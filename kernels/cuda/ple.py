"""Per-layer n-gram embedding: hash the last tokens to table rows, gate them by the residual, convolve, add.

Contracts: `ops.Kernels.ple_rows`, `ops.Kernels.ple`. The table is read where its bytes are: device memory, or host
memory that the card can address; or, of `MappedRows`, in a file that the processor reads for it. Segments are read on
the device.

Cost   two products ((C + 1) * H x E), about ten passes over C*H floats; scratch C*H + H floats a row, and E + C*H more
       for each of at most `rows_at_once` rows
"""

from __future__ import annotations

from typing import Final

import numpy as np

from strata.kernels.check import check, require
from strata.kernels.cuda.launch import F32, I32, launch
from strata.kernels.cuda.mapped_rows import MappedRows, dequantize_mapped
from strata.kernels.cuda.product import dequantize, linear
from strata.kernels.cuda.workspace import DeviceArray, Workspace
from strata.kernels.ops import LANES, Ple

_SOURCE: Final = "ple.cu"
_HASH_THREADS: Final = 256
_HASH_BLOCKS: Final = 512
"""Blocks of a segment at most; each takes hashes in turn."""
_CHANNELS: Final = 128
"""Channels of a block of the convolution of few rows, and threads of every block."""
_WIDTH_OF_LOAD: Final = 4
_RUN: Final = 16
"""RUN of ple.cu: rows of a block of the convolution of many."""
FEW_ROWS: Final = 64
"""Rows up to which one block a segment hashes, and one block for 128 channels goes through a segment."""


def ple_rows(
    workspace: Workspace, w: Ple, tokens: DeviceArray, segments: DeviceArray, history: DeviceArray
) -> DeviceArray:
    """Table rows of n tokens, int64 (n, heads): per order n = 2..N the hashes of one n-gram, orders ascending.

    `history` (slots, N - 1) holds the ids before the next token, oldest first, and advances in place.
    """
    size = check(
        multipliers=(w.multipliers, "N", np.uint64),
        sizes=(w.sizes, "heads", np.uint64),
        offsets=(w.offsets, "heads", np.uint64),
        tokens=(tokens, "n", I32),
        segments=(segments, "s 3", I32),
        history=(history, "slots before", I32),
    )
    n, heads, before = size["n"], size["heads"], size["N"] - 1
    require(before >= 1 and size["before"] == before, f"history must keep {before} ids, got {history.shape}")
    require(heads % before == 0, f"sizes must be a multiple of {before} heads, got {heads}")
    rows = workspace.array((n, heads), np.int64)
    blocks = 1 if n <= FEW_ROWS else min(-(-n * heads // _HASH_THREADS), _HASH_BLOCKS)
    launch(
        _SOURCE, "ple_rows", (blocks, size["s"]), (_HASH_THREADS,),
        tokens, segments, history, w.multipliers, w.sizes, w.offsets, rows, I32(before), I32(heads), I32(w.eos),
        **_constants(w),
    )  # fmt: skip
    if blocks > 1:
        launch(_SOURCE, "ple_history", (size["s"],), (32,), tokens, segments, history, I32(before), **_constants(w))
    return rows


def ple(
    workspace: Workspace,
    w: Ple,
    x: DeviceArray,
    rows: DeviceArray,
    segments: DeviceArray,
    conv: DeviceArray,
    eps: float,
    rows_at_once: int,
    inputs: DeviceArray | None = None,
) -> None:
    """x (n, C, H) in place: x + p + d. `conv` (slots, (kernel - 1) * N, C*H) advances in place, oldest first.

    inputs   (n, C*H): where the convolution's inputs are left, for `ple_again`; None: nowhere
    """
    size = check(
        x=(x, "n C H", F32),
        norm_key=(w.norm_key, "C H", F32),
        norm_query=(w.norm_query, "C H", F32),
        norm_conv=(w.norm_conv, "C H", F32),
        w_conv=(w.conv, "C*H kernel", F32),
        rows=(rows, "n heads", np.int64),
        segments=(segments, "s 3", I32),
        conv=(conv, "slots kept C*H", F32),
    )
    n, streams, width, kernel = size["n"], size["C"], size["H"], size["kernel"]
    gap = len(w.multipliers)
    require(size["kept"] == (kernel - 1) * gap, f"conv must keep {(kernel - 1) * gap} inputs, got {conv.shape}")
    require(w.key.shape[0] == streams * width, f"key must have {streams * width} rows, got {w.key.shape}")
    require(width % _WIDTH_OF_LOAD == 0, f"H must be a multiple of {_WIDTH_OF_LOAD}, got {width}")
    require(w.value.shape[0] == width, f"value must have {width} rows, got {w.value.shape}")
    if inputs is not None:
        check(inputs=(inputs, f"{n} {streams * width}", F32))
    with workspace.scratch():
        f = workspace.array((n, streams * width)) if inputs is None else inputs
        values, gamma = workspace.array((n, width)), workspace.array((n, streams))
        for begin in range(0, n, rows_at_once):
            part = slice(begin, min(begin + rows_at_once, n))
            with workspace.scratch():
                _gate(workspace, w, x[part], rows[part], f[part], values[part], gamma[part], eps)
        sizes = (I32(streams), I32(width), I32(kernel), I32(gap))
        arguments = (f, w.conv, values, gamma, segments, conv, x, *sizes)
        blocks = -(-streams * width // _CHANNELS)
        if n <= FEW_ROWS:
            launch(_SOURCE, "ple_window", (blocks, size["s"]), (_CHANNELS,), *arguments, **_constants(w))
        else:
            grid = -(-streams * width // (_CHANNELS * _WIDTH_OF_LOAD)), -(-n // _RUN)
            launch(_SOURCE, "ple_convolve", grid, (_CHANNELS,), *arguments, I32(n), **_constants(w))
            launch(_SOURCE, "ple_keep", (blocks, size["s"]), (_CHANNELS,), *arguments, **_constants(w))


def ple_again(
    w: Ple, tokens: DeviceArray, inputs: DeviceArray, segments: DeviceArray, history: DeviceArray, conv: DeviceArray
) -> None:
    """What `ple_rows` and `ple` keep of a sequence, once more behind the first of their rows: `history` and `conv` go
    to the row that the segment names. inputs (n, C*H) as `ple` has left them; a segment without rows changes nothing.
    """
    gap, kernel = len(w.multipliers), w.conv.shape[1]
    size = check(
        tokens=(tokens, "n", I32),
        inputs=(inputs, "n width", F32),
        w_conv=(w.conv, "width kernel", F32),
        segments=(segments, "s 3", I32),
        history=(history, f"slots {gap - 1}", I32),
        conv=(conv, f"slots {(kernel - 1) * gap} width", F32),
    )
    launch(_SOURCE, "ple_history", (size["s"],), (32,), tokens, segments, history, I32(gap - 1), **_constants(w))
    sizes = (I32(1), I32(size["width"]), I32(kernel), I32(gap))
    launch(
        _SOURCE, "ple_keep", (-(-size["width"] // _CHANNELS), size["s"]), (_CHANNELS,),
        inputs, w.conv, None, None, segments, conv, None, *sizes, **_constants(w),
    )  # fmt: skip


def _constants(w: Ple) -> dict[str, int]:
    """Macros of ple.cu."""
    return {"WIDTH": w.norm_conv.shape[1], "TAPS": w.conv.shape[1]}


def _gate(
    workspace: Workspace,
    w: Ple,
    x: DeviceArray,
    rows: DeviceArray,
    f: DeviceArray,
    values: DeviceArray,
    gamma: DeviceArray,
    eps: float,
) -> None:
    """f, values and gamma of one batch of rows."""
    n, streams, width = x.shape
    flat = rows.reshape(-1)
    if isinstance(w.table, MappedRows):
        e = dequantize_mapped(workspace, w.table, flat).reshape(n, -1)
    else:
        e = dequantize(workspace, w.table, flat).reshape(n, -1)
    keys = workspace.array((n, streams * width))
    linear(workspace, [w.key, w.value], e, out=[keys, values])
    launch(
        _SOURCE, "ple_gate", (n * streams,), (LANES,),
        x, keys, values, w.norm_key, w.norm_query, w.norm_conv, f, gamma, I32(width), I32(streams), F32(eps),
        **_constants(w),
    )  # fmt: skip

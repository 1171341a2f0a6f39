"""A long product of a prompt by matrix steps of four warps: its launches. Contract: `ops.Kernels.linear`.

    way = wide(card, kind, rows, cols, n, layout)      None where wide_plans.py has no plan
    way(workspace, matrices, made, join)               where way.wants bytes are free

Weights and quantised inputs are written as halves first, into scratch.

Cost     scratch: 2.1 or 2.25 bytes a weight and 2.1 an input
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from strata.kernels.cuda import wide_plans
from strata.kernels.cuda.arguments import NO_ADDRESSES, NO_PAIRS, PROMPT, Prepared, address
from strata.kernels.cuda.card import Card
from strata.kernels.cuda.compile import load_kernel
from strata.kernels.cuda.forms import Quantized
from strata.kernels.cuda.plans import CHUNK
from strata.kernels.cuda.wide_plans import COLUMNS, OCTET, ROWS
from strata.kernels.cuda.workspace import ALIGNMENT, DeviceArray, Workspace
from strata.kernels.formats import TensorType
from strata.kernels.ops import ACT_BLOCK

_WARPS: Final = 8
"""Of a block that writes inputs: a warp takes _SPANS blocks of ACT_BLOCK columns of an octet of rows."""
_SPANS: Final = 4


@dataclass(frozen=True, slots=True)
class Wide:
    """Launches that write weights and multiply · bytes of each matrix and of the inputs as halves."""

    unpack: Prepared
    product: Prepared
    sizes: tuple[int, ...]
    of_inputs: int

    @property
    def wants(self) -> int:
        """Bytes of scratch."""
        return sum(self.sizes) + self.of_inputs + (len(self.sizes) + 1) * ALIGNMENT

    def __call__(
        self,
        workspace: Workspace,
        matrices: list[tuple[int, DeviceArray, int]],
        made: Quantized,
        join: DeviceArray | None,
    ) -> None:
        """(address, output, rows) of each matrix; `join` as in `linear`."""
        n, cols = made.q.shape
        with workspace.spare():
            weights = [workspace.array((size,), np.uint8) for size in self.sizes]
            inputs = workspace.array((self.of_inputs,), np.uint8)
            self.unpack([(data, to, rows) for (data, _, rows), to in zip(matrices, weights, strict=True)], NO_ADDRESSES)
            warps = -(-n // COLUMNS) * (COLUMNS // OCTET) * -(-cols // (_SPANS * ACT_BLOCK))
            kernel = load_kernel("prompt_wide_inputs.cu", "prompt_wide_inputs")
            kernel((-(-warps // _WARPS),), (32 * _WARPS,), (made.q, made.d, inputs, n, cols), shared_mem=0)
            self.product(
                [(address(data), out, rows) for (_, out, rows), data in zip(matrices, weights, strict=True)],
                (inputs, None, None, join, *NO_PAIRS),
            )


def wide(card: Card, kind: TensorType, rows: tuple[int, ...], cols: int, n: int, layout: dict[str, int]) -> Wide | None:
    """For matrices of these rows and n activation rows; `layout`: columns, pitch and distance of the inputs' parts."""
    plan = wide_plans.wide_plan(card, kind, rows, cols, n)
    if plan is None:
        return None
    constants, shared = wide_plans.unpacking(kind)
    tiles, chunks = wide_plans.row_tiles(rows), -(-cols // CHUNK)
    unpack = Prepared(
        PROMPT, "prompt_wide_weights", constants, tiles * chunks, 2 * ROWS, shared,
        rows, ROWS, n=chunks, divide=1, run=1, row_tiles=tiles, **layout,
    )  # fmt: skip
    product = Prepared(
        PROMPT, plan.source, plan.constants(kind), plan.blocks, plan.threads, plan.shared,
        rows, ROWS, n=n, divide=1, run=plan.band, row_tiles=tiles, **layout,
    )  # fmt: skip
    sizes = tuple([wide_plans.bytes_of_weights(kind, r, cols) for r in rows])
    return Wide(unpack, product, sizes, wide_plans.bytes_of_inputs(n, layout["pitch"]))

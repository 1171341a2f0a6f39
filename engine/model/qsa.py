"""The sparse attention block: projections, keys and values into pages, attention over the selected tokens, output.

A query head's 2 * head_dim projected values are its query, then its gate. A layer whose ratio is 0 is dense: the
pages have no index blocks and every visible token is kept.
"""

from __future__ import annotations

from dataclasses import dataclass

from strata.engine.device.base import Device
from strata.engine.model.rows import Rows
from strata.engine.model.weights import AttentionWeights
from strata.engine.state.slots import StatePool
from strata.kernels.cuda.plans import WINDOW_ROWS
from strata.kernels.ops import F32, Kernels, Rope


@dataclass(frozen=True, slots=True, eq=False)
class QsaBlock:
    """`ordinal`: the layer's place among the attention layers, where its pages are found. `budget` in tokens."""

    device: Device
    kernels: Kernels
    weights: AttentionWeights
    ordinal: int
    rope: Rope
    heads: int
    kv_heads: int
    index_heads: int
    budget: int
    eps: float

    def __call__(self, u: F32, rows: Rows, state: StatePool, out: F32 | None = None) -> F32:
        """u (n, H) -> (n, H); the rows' keys, values and index keys are in the pages afterwards. out: as of
        `Device.kept`. Raises ValueError for a prompt of several slots where pages are in RAM."""
        w, heads = self.weights, (self.heads, self.kv_heads, self.index_heads)
        pages, where = state.pages.layers[self.ordinal], (state.pages.kernel_tables, rows.slots, rows.positions)
        if pages.far is not None and len(rows) > WINDOW_ROWS and len(rows.segments) > 1:
            raise ValueError(
                f"{len(rows)} rows of {len(rows.segments)} slots: with pages in RAM a prompt is of one slot"
            )
        y = self.device.attention(w.project, u, pages, where, heads, w.norms, self.rope, self.budget, self.eps)
        left: F32 = self.device.leave(w.out, y, out)
        return left

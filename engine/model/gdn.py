"""The gated delta net block: four projections, convolution and delta rule, output projection."""

from __future__ import annotations

from dataclasses import dataclass

from strata.engine.model.rows import Rows
from strata.engine.model.weights import GdnWeights
from strata.engine.state.slots import StatePool
from strata.kernels.ops import F32, Kernels


@dataclass(frozen=True, slots=True, eq=False)
class GdnBlock:
    """`ordinal`: the layer's place among the delta net layers, where its state is found."""

    kernels: Kernels
    weights: GdnWeights
    ordinal: int
    eps: float

    def __call__(self, u: F32, rows: Rows, state: StatePool) -> F32:
        """u (n, H) -> (n, H); the slots' convolution inputs and recurrent state advance."""
        w, own = self.weights, state.recurrent.gdn[self.ordinal]
        p, z, b, a = self.kernels.linear(w.project, u)
        y = self.kernels.gdn(w.small, p, z, b, a, rows.segments, own.conv, own.state, self.eps)
        return self.kernels.linear(w.out, y)[0]

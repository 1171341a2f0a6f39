"""The gated delta net block: four projections, convolution and delta rule, output projection."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from strata.engine.model.rows import Rows
from strata.engine.model.weights import GdnWeights
from strata.engine.state.slots import StatePool
from strata.kernels.ops import F32, I32, Gdn, Kernels


@dataclass(frozen=True, slots=True, eq=False)
class GdnBlock:
    """`ordinal`: the layer's place among the delta net layers, where its state is found."""

    kernels: Kernels
    weights: GdnWeights
    ordinal: int
    eps: float
    _alone: Gdn = field(init=False)
    """The small weights for `again`, which no product follows: hints that were given for the others do not hold."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_alone", replace(self.weights.small))

    def __call__(self, u: F32, rows: Rows, state: StatePool) -> F32:
        """u (n, H) -> (n, H); the slots' convolution inputs and recurrent state advance."""
        w, own = self.weights, state.recurrent.gdn[self.ordinal]
        taped = rows.tape is not None and rows.tape.project(self, w.project, u)
        p, z, b, a = taped or self.kernels.linear(w.project, u)
        y = self.kernels.gdn(w.small, p, z, b, a, rows.segments, own.conv, own.state, self.eps)
        return self.kernels.linear(w.out, y)[0]

    def again(self, made: Sequence[F32], segments: I32, state: StatePool) -> None:
        """Let the state advance over rows whose products are there."""
        own = state.recurrent.gdn[self.ordinal]
        p, z, b, a = made
        self.kernels.gdn(self._alone, p, z, b, a, segments, own.conv, own.state, self.eps)

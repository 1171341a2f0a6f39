"""The gated delta net block: four projections, convolution and delta rule, output projection."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from strata.engine.device.base import Device
from strata.engine.model.rows import Rows
from strata.engine.model.weights import GdnWeights
from strata.engine.state.slots import StatePool
from strata.kernels.ops import F32, I32, Kernels


@dataclass(frozen=True, slots=True, eq=False)
class GdnBlock:
    """`ordinal`: the layer's place among the delta net layers, where its state is found."""

    device: Device
    kernels: Kernels
    weights: GdnWeights
    ordinal: int
    eps: float

    def __call__(self, u: F32, rows: Rows, state: StatePool, out: F32 | None = None) -> F32:
        """u (n, H) -> (n, H); the slots' convolution inputs and recurrent state advance. out: as of `Device.kept`."""
        w, own = self.weights, state.recurrent.gdn[self.ordinal]
        taped = rows.tape is not None and rows.tape.project(self, w.project, u)
        if taped:
            p, z, b, a = taped
            y = self.kernels.gdn(w.small, p, z, b, a, rows.segments, own.conv, own.state, self.eps)
        else:
            y = self.device.delta_net(w.project, w.small, u, rows.segments, own.conv, own.state, self.eps)
        left: F32 = self.device.leave(w.out, y, out)
        return left

    def again(self, made: Sequence[F32], segments: I32, state: StatePool) -> None:
        """Let the state advance over rows whose products are there."""
        own = state.recurrent.gdn[self.ordinal]
        p, z, b, a = made
        self.kernels.gdn(self.weights.small, p, z, b, a, segments, own.conv, own.state, self.eps)

"""The n-gram embedding block: hash the tokens to table rows, add what they hold to the residual."""

from __future__ import annotations

from dataclasses import dataclass

from strata.engine.model.rows import Rows
from strata.engine.state.slots import StatePool
from strata.kernels.ops import F32, Kernels, Ple


@dataclass(frozen=True, slots=True, eq=False)
class PleBlock:
    kernels: Kernels
    weights: Ple
    eps: float

    def __call__(self, x: F32, rows: Rows, state: StatePool) -> None:
        """x (n, C, H) in place; the slots' n-gram history and convolution inputs advance."""
        own = state.recurrent
        table_rows = self.kernels.ple_rows(self.weights, rows.tokens, rows.segments, own.history)
        self.kernels.ple(self.weights, x, table_rows, rows.segments, own.ple_conv, self.eps)

"""The n-gram embedding block: hash the tokens to table rows, add what they hold to the residual."""

from __future__ import annotations

from dataclasses import dataclass

from strata.engine.model.rows import Rows
from strata.engine.state.slots import StatePool
from strata.kernels.ops import F32, I32, Kernels, Ple


@dataclass(frozen=True, slots=True, eq=False)
class PleBlock:
    kernels: Kernels
    weights: Ple
    eps: float

    def __call__(self, x: F32, rows: Rows, state: StatePool) -> None:
        """x (n, C, H) in place; the slots' n-gram history and convolution inputs advance."""
        if rows.tape is None:
            self.again(x, rows.tokens, rows.segments, state)
        else:
            rows.tape.embed(self, x, rows.tokens, rows.segments, state)

    def again(self, x: F32, tokens: I32, segments: I32, state: StatePool) -> None:
        """The same on rows whose tokens and residual are there."""
        own = state.recurrent
        table_rows = self.kernels.ple_rows(self.weights, tokens, segments, own.history)
        self.kernels.ple(self.weights, x, table_rows, segments, own.ple_conv, self.eps)

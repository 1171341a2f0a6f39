"""A stage: a range of layers on one device. Between stages travels the residual, float32 (rows, C, H).

There is no norm in a layer: the hyper-connection mixers carry it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from strata.engine.model.gdn import GdnBlock
from strata.engine.model.ple import PleBlock
from strata.engine.model.qsa import QsaBlock
from strata.engine.model.rows import Rows
from strata.engine.state.slots import StatePool
from strata.kernels.ops import F32, Hyper, Kernels, Moe


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """One layer: an n-gram embedding where the model has it, a mixer of tokens, a mixture of experts."""

    kernels: Kernels
    ple: PleBlock | None
    hc_attn: Hyper
    mixer: GdnBlock | QsaBlock
    hc_ffn: Hyper
    moe: Moe
    experts_used: int
    eps: float

    def __call__(self, x: F32, rows: Rows, state: StatePool) -> None:
        """x (n, C, H) in place."""
        kernels = self.kernels
        if self.ple is not None:
            self.ple(x, rows, state)
        u, beta = kernels.hyper_mix(x, self.hc_attn, self.eps)
        _add(kernels, x, beta, self.mixer(u, rows, state))
        u, beta = kernels.hyper_mix(x, self.hc_ffn, self.eps)
        _add(kernels, x, beta, kernels.moe(self.moe, u, self.experts_used))


def _add(kernels: Kernels, x: F32, beta: F32 | None, y: F32) -> None:
    if beta is None:
        raise TypeError("a layer's hyper-connection needs its inject matrix")
    kernels.hyper_add(x, beta, y)


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """`layers` in the order of the model."""

    layers: Sequence[Layer]

    def __call__(self, x: F32, rows: Rows, state: StatePool) -> None:
        """x (n, C, H) in place; the state of the rows' slots advances."""
        for layer in self.layers:
            layer(x, rows, state)

"""A stage: a range of layers on one device. Between stages travels the residual, float32 (rows, C, H).

There is no norm in a layer: the hyper-connection mixers carry it. A block's output is added to the residual when the
next block mixes it, which a device may do in one pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from strata.engine.device.base import Array, Device
from strata.engine.model.gdn import GdnBlock
from strata.engine.model.ple import PleBlock
from strata.engine.model.qsa import QsaBlock
from strata.engine.model.rows import Rows
from strata.engine.state.slots import StatePool
from strata.kernels.ops import F32, Hyper, Kernels, Moe

Added = tuple[Array, Array]
"""beta (n, C) and output (n, H) of a block that are still to be added to the residual."""


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """One layer: an n-gram embedding where the model has it, a mixer of tokens, a mixture of experts."""

    device: Device
    kernels: Kernels
    ple: PleBlock | None
    hc_attn: Hyper
    mixer: GdnBlock | QsaBlock
    hc_ffn: Hyper
    moe: Moe
    experts_used: int
    eps: float

    def __call__(self, x: F32, rows: Rows, state: StatePool, added: Added | None) -> Added:
        """x (n, C, H) in place. `added` of the block before; returns that of the last one."""
        device, n = self.device, len(x)
        if self.ple is not None:
            flush(self.kernels, x, added)
            device.turn(n)
            self.ple(x, rows, state)
            device.turn(n)  # so that every mixer finds the same turn
            added = None
        added = self._mixed(x, rows, state, added)
        kept = device.kept(x)
        u, beta = self._mix(x, self.hc_ffn, added, kept)
        return beta, device.moe(self.moe, u, self.experts_used, None if kept is None else kept[1])

    def _mixed(self, x: F32, rows: Rows, state: StatePool, added: Added | None) -> Added:
        """The mixer of tokens, of so many rows at a time as the device takes."""
        kept = self.device.kept(x)
        if kept is None or not rows.runs:
            u, beta = self._mix(x, self.hc_attn, added, kept)
            return beta, self.mixer(u, rows, state, None if kept is None else kept[1])
        for run, part in rows.runs:
            into = kept[0][run], kept[1][run]
            u, _ = self._mix(x[run], self.hc_attn, added and (added[0][run], added[1][run]), into)
            self.mixer(u, part, state, into[1])
        return kept

    def _mix(self, x: F32, hc: Hyper, added: Added | None, kept: Added | None) -> Added:
        """A block's input u (n, H), and beta (n, C) for its output."""
        self.device.turn(len(x))
        u, beta = self.device.mix(x, hc, self.eps, added, None if kept is None else kept[0])
        if beta is None:
            raise TypeError("a layer's hyper-connection needs its inject matrix")
        return u, beta


def flush(kernels: Kernels, x: F32, added: Added | None) -> None:
    """Add what is still to be added."""
    if added is not None:
        kernels.hyper_add(x, *added)


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """`layers` in the order of the model."""

    device: Device
    layers: Sequence[Layer]

    def __call__(self, x: F32, rows: Rows, state: StatePool) -> None:
        """x (n, C, H) in place; the state of the rows' slots advances."""
        added: Added | None = None
        for layer in self.layers:
            added = layer(x, rows, state, added)
        flush(self.device.kernels, x, added)
        self.device.rest()

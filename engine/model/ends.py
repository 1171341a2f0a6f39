"""The two ends of the model: token ids to residual streams, residual streams to logits."""

from __future__ import annotations

from dataclasses import dataclass

from strata.engine.device.base import Device
from strata.kernels.formats import Weight
from strata.kernels.ops import F32, I32, Hyper, Kernels


@dataclass(frozen=True, slots=True, eq=False)
class Embedding:
    """`table` (vocab, H); C identical streams."""

    device: Device
    table: Weight
    streams: int

    def __call__(self, tokens: I32) -> F32:
        """tokens (n,) -> residual (n, C, H)."""
        x: F32 = self.device.embed(self.table, tokens, self.streams)
        return x


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """A last mixer without injection, then the output matrix (vocab, H). No norm between them."""

    kernels: Kernels
    mixer: Hyper
    output: tuple[Weight]
    eps: float

    def __call__(self, x: F32) -> F32:
        """Residual (n, C, H) -> logits (n, vocab)."""
        u, _ = self.kernels.hyper_mix(x, self.mixer, self.eps)
        return self.kernels.linear(self.output, u)[0]

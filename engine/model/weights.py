"""The pack's tensors bound to the arguments of the operations, once at start.

Matrices keep the bytes of the file, where the device wants them; small tensors (norms, gates, convolutions) become
float32 arrays. Names and shapes were checked when the pack was opened.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from strata.engine.device.base import Array, Device
from strata.engine.pack import ModelSpec, Pack
from strata.engine.pack.spec import NGRAM_TABLE, TOKEN_EMBD, PleSpec
from strata.kernels.formats import BY_NAME, Weight
from strata.kernels.ops import F32, Gdn, Hyper, Moe, Norms, Ple, Rope
from strata.kernels.reference.linear import dequantize


@dataclass(frozen=True, slots=True, eq=False)
class GdnWeights:
    """project: q k v, output gate, write strength, decay; they share the block's input. out: the output projection."""

    project: tuple[Weight, ...]
    small: Gdn
    out: tuple[Weight]


@dataclass(frozen=True, slots=True, eq=False)
class AttentionWeights:
    """project: query and gate, keys, values, indexer queries, indexer keys; they share the block's input."""

    project: tuple[Weight, ...]
    norms: Norms
    out: tuple[Weight]


class Binder:
    """Reads the tensors of one block `prefix` ("blk.3." or "") of a pack, for a device."""

    def __init__(self, pack: Pack, prefix: str, device: Device) -> None:
        self._pack = pack
        self._device = device
        self._prefix = prefix
        self._spec: ModelSpec = pack.spec

    def _file_weight(self, name: str) -> Weight:
        return self._pack.weight(f"{self._prefix}{name}.weight")

    def _weight(self, name: str) -> Weight:
        return self._device.weight(self._file_weight(name))

    def _matrix(self, name: str) -> Weight:
        """One that only products read."""
        return self._device.matrix(self._file_weight(name))

    def _array(self, name: str) -> F32:
        """Copied: a mapped tensor is read-only and may lie at any address, which compiled kernels do not take."""
        array: F32 = self._put(np.array(self._pack.array(f"{self._prefix}{name}"), np.float32, order="C"))
        return array

    def vector(self, name: str) -> F32:
        """A tensor of the block as float32, in its shape."""
        return self._array(name)

    def _put(self, array: npt.NDArray[Any]) -> Array:
        return self._device.put(array)

    def _streams(self, name: str) -> F32:
        """A norm factor per stream, stored flat."""
        factors: F32 = self._array(f"{name}.weight").reshape(self._spec.streams, self._spec.hidden)
        return factors

    def _gate(self, name: str) -> Weight:
        """A matrix of a few rows whose outputs steer whole heads or streams, held as float32.

        It then takes float activations. The cost is 0.05 GB of the full-size model; the logits come a little nearer
        to float32 arithmetic (docs/exactness.md).
        """
        w = self._file_weight(name)
        if not w.type.is_float:
            values = dequantize(w, np.arange(w.rows))
            w = Weight(BY_NAME["F32"], w.shape, values.view(np.uint8))
        return self._device.weight(w)

    def hyper(self, name: str, inject: bool = True) -> Hyper:
        return Hyper(
            norm=self._streams(f"{name}_norm"),
            down=self._matrix(f"{name}_down"),
            up=self._weight(f"{name}_up"),
            inject=self._gate(f"{name}_inject") if inject else None,
        )

    def gdn(self) -> GdnWeights:
        return GdnWeights(
            project=(
                self._matrix("attn_qkv"),
                self._matrix("attn_gate"),
                self._gate("ssm_beta"),
                self._gate("ssm_alpha"),
            ),
            small=Gdn(
                conv=self._array("ssm_conv1d.weight"),
                a=self._array("ssm_a"),
                dt=self._array("ssm_dt.bias"),
                norm=self._array("ssm_norm.weight"),
            ),
            out=(self._matrix("ssm_out"),),
        )

    def attention(self) -> AttentionWeights:
        names = ("attn_q", "attn_k", "attn_v", "indexer.q_proj", "indexer.k_proj")
        return AttentionWeights(
            project=tuple(self._matrix(n) for n in names),
            norms=Norms(
                q=self._array("attn_q_norm.weight"),
                k=self._array("attn_k_norm.weight"),
                index_q=self._array("indexer.q_norm.weight"),
                index_k=self._array("indexer.k_norm.weight"),
            ),
            out=(self._matrix("attn_output"),),
        )

    def moe(self, layer: int | None = None) -> Moe:
        """layer: of the model, whose experts the device may put anywhere; None: they lie with the other weights."""
        stacks = [self._file_weight(f"ffn_{name}_exps") for name in ("gate", "up", "down")]
        if layer is None:
            gate, up, down = map(self._device.weight, stacks)
        else:
            gate, up, down = self._device.experts(layer, stacks)
        return Moe(
            router=self._weight("ffn_gate_inp"),
            gate=gate,
            up=up,
            down=down,
            shared_router=self._weight("ffn_gate_inp_shexp"),
            shared_gate=self._matrix("ffn_gate_shexp"),
            shared_up=self._matrix("ffn_up_shexp"),
            shared_down=self._matrix("ffn_down_shexp"),
        )

    def ple(self, spec: PleSpec) -> Ple:
        return Ple(
            table=self._device.table(self._pack.weight(NGRAM_TABLE)),
            key=self._weight("ple_key"),
            value=self._weight("ple_value"),
            norm_key=self._streams("ple_norm_key"),
            norm_query=self._streams("ple_norm_query"),
            norm_conv=self._streams("ple_norm_conv"),
            conv=self._array("ple_conv1d.weight"),
            multipliers=self._put(np.array(spec.multipliers, np.uint64)),
            sizes=self._put(np.array(spec.sizes, np.uint64)),
            offsets=self._put(np.array(spec.offsets, np.uint64)),
            eos=spec.eos,
        )


def embedding_table(pack: Pack, device: Device) -> Weight:
    return device.weight(pack.weight(TOKEN_EMBD))


def output_matrix(pack: Pack, device: Device) -> Weight:
    return device.output(pack.weight("output.weight"))


def rope_table(spec: ModelSpec, positions: int, device: Device) -> Rope:
    """Angles pos * base^(-2j / dims) in float64, their cosines and sines rounded once. 8 bytes per position and pair.

    Text only: the three parts of a position are equal, so the sections of the dims do not matter.
    """
    frequencies = spec.rope_base ** (-np.arange(0, spec.rope_dims, 2, dtype=np.float64) / spec.rope_dims)
    angles = np.arange(positions, dtype=np.float64)[:, None] * frequencies
    cos, sin = (f(angles).astype(np.float32) for f in (np.cos, np.sin))
    return Rope(cos=device.put(cos), sin=device.put(sin))

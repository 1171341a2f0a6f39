"""The tensors of a qwen4exp model: name, shape, and whether only float types are read there.

Shapes are numpy order, slowest axis first: a matrix is [out, in].
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

from strata.engine.pack.errors import PackError
from strata.engine.pack.spec import NGRAM_TABLE, TOKEN_EMBD, DraftSpec, ModelSpec
from strata.kernels.formats import TensorType


class Wanted(NamedTuple):
    """shape; small: norms, convolutions and gates, which are used as float32 and so must be of a float type."""

    shape: tuple[int, ...]
    small: bool = False


class _Held(Protocol):
    @property
    def type(self) -> TensorType: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def path(self) -> Path: ...


def wanted_tensors(spec: ModelSpec) -> dict[str, Wanted]:
    """Every tensor that the forward pass reads."""
    h, v = spec.hidden, spec.vocab
    wanted = {TOKEN_EMBD: Wanted((v, h)), "output.weight": Wanted((v, h))}
    wanted |= _hyper(spec, "output_hc")
    del wanted["output_hc_inject.weight"]
    for layer, recurrent in enumerate(spec.recurrent):
        block = f"blk.{layer}."
        part = _delta_net(spec) if recurrent else _attention(spec)
        part |= _hyper(spec, "hc_attn") | _hyper(spec, "hc_ffn") | _moe(spec)
        if spec.ple is not None and spec.ple.layer == layer:
            part |= _ple(spec, spec.ple.width, spec.ple.kernel)
        wanted |= {block + name: tensor for name, tensor in part.items()}
    if spec.ple is not None:
        wanted[NGRAM_TABLE] = Wanted((spec.ple.table_rows, spec.ple.row_width))
    return wanted


def draft_tensors(spec: ModelSpec, draft: DraftSpec) -> dict[str, Wanted]:
    """Every tensor that the draft layer of a model reads from its own block."""
    h = spec.hidden
    part = _attention(spec) | _hyper(spec, "hc_attn") | _hyper(spec, "hc_ffn") | _moe(spec)
    part |= _hyper(spec, "nextn.hc_head")
    del part["nextn.hc_head_inject.weight"]
    part |= {
        "nextn.eh_proj.weight": Wanted((h, 2 * h)),
        "nextn.enorm.weight": Wanted((h,), small=True),
        "nextn.hnorm.weight": Wanted((spec.wide,), small=True),
    }
    wanted = {f"blk.{draft.block}.{name}": tensor for name, tensor in part.items()}
    if not draft.shared:
        wanted |= {name: Wanted((spec.vocab, h)) for name in (TOKEN_EMBD, "output.weight")}
    return wanted


def fitted_shapes(
    path: Path, wanted_by_name: Mapping[str, Wanted], held: Mapping[str, _Held]
) -> dict[str, tuple[int, ...]]:
    """Shapes of the wanted tensors after checking that each is there, fits the metadata and has a usable type.

    A matrix of one row may be stored as a vector: its shape comes back as that of the matrix. Raises PackError.
    """
    shapes = {}
    for name, wanted in wanted_by_name.items():
        tensor = held.get(name)
        if tensor is None:
            raise PackError(path, name, "the tensor is missing")
        if tensor.shape != wanted.shape and (1, *tensor.shape) != wanted.shape:
            reason = f"has shape {list(tensor.shape)}, but the metadata ask for {list(wanted.shape)}"
            raise PackError(tensor.path, name, reason)
        if wanted.small and not tensor.type.is_float:
            raise PackError(tensor.path, name, f"is {tensor.type.name}; only F32, F16 and BF16 are read here")
        shapes[name] = wanted.shape
    return shapes


def _hyper(spec: ModelSpec, prefix: str) -> dict[str, Wanted]:
    return {
        f"{prefix}_norm.weight": Wanted((spec.wide,), small=True),
        f"{prefix}_down.weight": Wanted((spec.rank, spec.wide)),
        f"{prefix}_up.weight": Wanted((spec.wide, spec.rank)),
        f"{prefix}_inject.weight": Wanted((spec.streams, spec.wide)),
    }


def _delta_net(spec: ModelSpec) -> dict[str, Wanted]:
    h, inner, heads = spec.hidden, spec.gdn_inner, spec.gdn_value_heads
    return {
        "attn_qkv.weight": Wanted((spec.gdn_channels, h)),
        "attn_gate.weight": Wanted((inner, h)),
        "ssm_beta.weight": Wanted((heads, h)),
        "ssm_alpha.weight": Wanted((heads, h)),
        "ssm_a": Wanted((heads,), small=True),
        "ssm_dt.bias": Wanted((heads,), small=True),
        "ssm_conv1d.weight": Wanted((spec.gdn_channels, spec.gdn_kernel), small=True),
        "ssm_norm.weight": Wanted((spec.gdn_head_dim,), small=True),
        "ssm_out.weight": Wanted((h, inner)),
    }


def _attention(spec: ModelSpec) -> dict[str, Wanted]:
    h, d, kv = spec.hidden, spec.head_dim, spec.kv_heads * spec.head_dim
    return {
        "attn_q.weight": Wanted((2 * spec.heads * d, h)),
        "attn_k.weight": Wanted((kv, h)),
        "attn_v.weight": Wanted((kv, h)),
        "attn_output.weight": Wanted((h, spec.heads * d)),
        "attn_q_norm.weight": Wanted((d,), small=True),
        "attn_k_norm.weight": Wanted((d,), small=True),
        "indexer.q_proj.weight": Wanted((spec.index_heads * spec.index_dim, h)),
        "indexer.k_proj.weight": Wanted((spec.index_dim, h)),
        "indexer.q_norm.weight": Wanted((spec.index_dim,), small=True),
        "indexer.k_norm.weight": Wanted((spec.index_dim,), small=True),
    }


def _moe(spec: ModelSpec) -> dict[str, Wanted]:
    h, e, w, s = spec.hidden, spec.experts, spec.expert_width, spec.shared_width
    return {
        "ffn_gate_inp.weight": Wanted((e, h)),
        "ffn_gate_exps.weight": Wanted((e, w, h)),
        "ffn_up_exps.weight": Wanted((e, w, h)),
        "ffn_down_exps.weight": Wanted((e, h, w)),
        "ffn_gate_inp_shexp.weight": Wanted((1, h)),
        "ffn_gate_shexp.weight": Wanted((s, h)),
        "ffn_up_shexp.weight": Wanted((s, h)),
        "ffn_down_shexp.weight": Wanted((h, s)),
    }


def _ple(spec: ModelSpec, width: int, kernel: int) -> dict[str, Wanted]:
    return {
        "ple_key.weight": Wanted((spec.wide, width)),
        "ple_value.weight": Wanted((spec.hidden, width)),
        "ple_norm_key.weight": Wanted((spec.wide,), small=True),
        "ple_norm_query.weight": Wanted((spec.wide,), small=True),
        "ple_norm_conv.weight": Wanted((spec.wide,), small=True),
        "ple_conv1d.weight": Wanted((spec.wide, kernel), small=True),
    }

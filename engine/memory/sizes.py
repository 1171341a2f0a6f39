"""What a model takes, from the header of its file alone: figures that the planners start from.

Units    bytes as they lie on a device, alignment included
Errors   none: a pack that opened has all tensors that are counted here
Cost     a look at each tensor's directory entry; no tensor is read
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from strata.engine.device.arena import padded
from strata.engine.pack import DraftPack, ModelSpec
from strata.engine.pack.spec import NGRAM_TABLE
from strata.engine.pack.tensors import Wanted, draft_tensors, wanted_tensors
from strata.kernels.cuda.repack import card_form
from strata.kernels.formats import TensorType

HEAD: Final = "output.weight"
EXPERTS: Final = ("ffn_gate_exps.weight", "ffn_up_exps.weight", "ffn_down_exps.weight")
GATES: Final = ("_inject.weight", "ssm_beta.weight", "ssm_alpha.weight")
"""Matrices of a few rows that are held as float32 (engine/model/weights.py)."""
PRODUCTS: Final = tuple(
    f"{name}.weight"
    for name in (
        "attn_qkv", "attn_gate", "ssm_out", "attn_q", "attn_k", "attn_v", "indexer.q_proj", "indexer.k_proj",
        "attn_output", "ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp", "hc_attn_down", "hc_ffn_down",
        "output_hc_down",
    )
)  # fmt: skip
"""Matrices of a layer that only products read."""
DRAFT_ROWS: Final = 1024
"""Rows of a pass of the draft layer at most: a prompt chunk is read in pieces, so the layer needs little memory."""
_FLOAT: Final = 4


class Held(Protocol):
    """A tensor's directory entry."""

    @property
    def type(self) -> TensorType: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def data(self) -> npt.NDArray[np.uint8]: ...


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Bytes of the parts of a model.

    dense      everything that is always on the device: no experts, no head, no n-gram table, no rope
    head       the output matrix
    table      the n-gram table, 0 without one
    experts    per layer: one expert, its three matrices together
    per_layer  experts of a layer
    forms      what the card forms of matrices and experts take more
    """

    dense: int
    head: int
    table: int
    experts: tuple[int, ...]
    per_layer: int
    forms: int = 0

    @property
    def largest(self) -> int:
        """Bytes of the largest expert."""
        return max(self.experts)

    @property
    def pairs(self) -> int:
        """(layer, expert) pairs."""
        return len(self.experts) * self.per_layer

    @property
    def expert_bytes(self) -> int:
        """Bytes of all experts."""
        return self.per_layer * sum(self.experts)


def model_sizes(spec: ModelSpec, held: Mapping[str, Held]) -> ModelSizes:
    """The parts of a pack."""
    experts = tuple(
        sum(padded(held[f"blk.{layer}.{name}"].data.size // spec.experts) for name in EXPERTS)
        for layer in range(spec.layers)
    )
    wanted = wanted_tensors(spec)
    apart = {HEAD, NGRAM_TABLE} | {name for name in wanted if name.endswith(EXPERTS)}
    dense = bound_bytes({name: tensor for name, tensor in wanted.items() if name not in apart}, held)
    if spec.ple is not None:
        dense += sum(padded(8 * n) for n in (len(spec.ple.multipliers), spec.ple.heads, spec.ple.heads))
    table = padded(held[NGRAM_TABLE].data.size) if spec.ple else 0
    forms = sum(_form_bytes(held[name]) for name in wanted if name.endswith((*EXPERTS, *PRODUCTS)))
    return ModelSizes(dense, padded(held[HEAD].data.size), table, experts, spec.experts, forms)


def _form_bytes(stack: Held) -> int:
    """What a stack takes more in its card form, if it has one."""
    form = card_form(stack.type, stack.shape[-1])
    if form is None:
        return 0
    return padded(int(np.prod(stack.shape[:-1])) * form.row_bytes(stack.shape[-1])) - padded(stack.data.size)


def bound_bytes(wanted: Mapping[str, Wanted], held: Mapping[str, Held]) -> int:
    """Bytes of tensors on a device: matrices as the file has them, small ones and gates as float32."""
    return sum(_bound(name, tensor.small, held[name]) for name, tensor in wanted.items())


def draft_bytes(draft: DraftPack) -> int:
    """Bytes of a draft layer with its own experts, and of the part of the output matrix that it proposes from."""
    spec, wanted = draft.pack.spec, draft_tensors(draft.pack.spec, draft.spec)
    total = padded(DRAFT_ROWS * spec.streams * _FLOAT)
    names = draft.names
    if names is not None:
        wanted = {name: tensor for name, tensor in wanted.items() if name != HEAD}
    total += bound_bytes(wanted, draft.pack)
    both = draft.pack[f"blk.{draft.spec.block}.nextn.eh_proj.weight"]
    if spec.hidden % both.type.block:  # its halves are used apart, and held as float32 where no block ends between them
        total += padded(int(np.prod(both.shape)) * _FLOAT) - padded(both.data.size)
    if names is not None:
        total += padded(len(names) * draft.output.type.row_bytes(spec.hidden)) + padded(names.nbytes)
    return total


def rope_bytes(spec: ModelSpec, max_context: int) -> int:
    """Cosines and sines of all positions."""
    return 2 * padded(max_context * (spec.rope_dims // 2) * _FLOAT)


def _bound(name: str, small: bool, tensor: Held) -> int:
    as_float = small or (name.endswith(GATES) and not tensor.type.is_float)
    return padded(int(np.prod(tensor.shape)) * _FLOAT if as_float else tensor.data.size)

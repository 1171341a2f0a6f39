"""The draft layer (MTP): one more attention layer, which proposes the token after the next one.

Row p takes X_p, the model's residual behind its last layer, and token p + 1; what it leaves predicts token p + 2:

    e = W_e (rms(embed(token p + 1)) * enorm)                       (H,)
    h = rms(X_p over all C * H values) * hnorm
    X'_c = W_h h_c + e, the same W_h for every stream               `hyper_add` with a beta of 1
    X' -> the layer, with pages of its own -> a mixer of its own, the output matrix

A further step takes X' for X and the proposed token. Text never depends on any of this: the model decides.

State    a `StatePool` of `draft_spec`: pages and nothing else. Its positions count the rows that the layer has seen
Cost     a layer, two products (H x H; one of them for each stream) and the output matrix for wanted rows
Source   docs/architecture.md; the recorded drafts of another implementation are in tests/data
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from strata.engine.device.base import Device
from strata.engine.memory.sizes import DRAFT_ROWS
from strata.engine.model.ends import Embedding, Head
from strata.engine.model.qsa import QsaBlock
from strata.engine.model.rows import Rows
from strata.engine.model.stage import Layer, flush
from strata.engine.model.weights import Binder, embedding_table
from strata.engine.pack import DraftPack, ModelSpec
from strata.engine.state.slots import StatePool
from strata.kernels.formats import BY_NAME, Weight
from strata.kernels.ops import F32, I32, Rope
from strata.kernels.reference.linear import dequantize


def draft_spec(spec: ModelSpec, ratio: int) -> ModelSpec:
    """The model that the draft layer alone would be."""
    return replace(spec, layers=1, recurrent=(False,), ratios=(ratio,), ple=None)


class DraftLayer:
    """The draft layer of a model on a device. `rope`: the model's angles; they bound the positions.

    names   ids of its logits, None where these are those of the vocabulary
    """

    def __init__(self, draft: DraftPack, device: Device, rope: Rope, ends: tuple[Embedding, Head]) -> None:
        spec, kernels = draft.pack.spec, device.kernels
        block = f"blk.{draft.spec.block}."
        bind = Binder(draft.pack, block, device)
        self.spec = draft_spec(spec, draft.spec.ratio)
        self._device = device
        table = ends[0].table if draft.spec.shared else embedding_table(draft.pack, device)
        self.names: I32 | None = None
        if draft.names is not None:
            matrix, self.names = device.weight(rows_of(draft.output, draft.names)), device.put(draft.names)
        else:
            matrix = ends[1].output[0] if draft.spec.shared else device.weight(draft.output)
        self._embedding = Embedding(device, table, 1)
        self._of_token, self._of_hidden = (
            device.weight(w) for w in halves(draft.pack.weight(f"{block}nextn.eh_proj.weight"))
        )
        self._norm_token, self._norm_hidden = bind.vector("nextn.enorm.weight"), bind.vector("nextn.hnorm.weight")
        self._ones: F32 = device.put(np.ones((DRAFT_ROWS, spec.streams), np.float32))
        self._head = Head(kernels, bind.hyper("nextn.hc_head", inject=False), (matrix,), spec.eps)
        self._layer = Layer(
            device=device,
            kernels=kernels,
            ple=None,
            hc_attn=bind.hyper("hc_attn"),
            mixer=QsaBlock(
                device=device,
                kernels=kernels,
                weights=bind.attention(),
                ordinal=0,
                rope=rope,
                heads=spec.heads,
                kv_heads=spec.kv_heads,
                index_heads=spec.index_heads,
                budget=spec.index_budget,
                eps=spec.eps,
            ),
            hc_ffn=bind.hyper("hc_ffn"),
            moe=bind.moe(),
            experts_used=spec.experts_used,
            eps=spec.eps,
        )

    def __call__(self, x: F32, rows: Rows, state: StatePool) -> F32:
        """Residual x (n, C, H) of the tokens before `rows.tokens` -> X' (n, C, H); x is only read. At most DRAFT_ROWS.

        The rows' keys and values are in the pages of `state` afterwards.
        """
        out = self._enter(x, rows.tokens)
        flush(self._device.kernels, out, self._layer(out, rows, state, None))
        self._device.rest()
        return out

    def logits(self, x: F32) -> F32:
        """X' (n, C, H) -> logits (n, vocab) of the tokens after the next ones; with `names` (m,) of these, (n, m)."""
        return self._head(x)

    def _enter(self, x: F32, tokens: I32) -> F32:
        """What enters the layer, (n, C, H)."""
        kernels, eps = self._device.kernels, self.spec.eps
        n, streams, width = x.shape
        e = kernels.rms_norm(self._embedding(tokens).reshape(n, width), self._norm_token, eps)
        h = kernels.rms_norm(x.reshape(n, streams * width), self._norm_hidden, eps)
        out: F32 = kernels.linear((self._of_hidden,), h.reshape(n * streams, width))[0].reshape(n, streams, width)
        kernels.hyper_add(out, self._ones[:n], kernels.linear((self._of_token,), e)[0])
        return out


def rows_of(w: Weight, rows: I32) -> Weight:
    """A matrix of some of the rows, copied."""
    return Weight(w.type, (len(rows), w.cols), np.ascontiguousarray(w.data[rows]))


def halves(w: Weight) -> tuple[Weight, Weight]:
    """The columns of [W_e | W_h] apart; as float32 where a half is no whole number of the type's blocks."""
    half = w.cols // 2
    if half % w.type.block:
        w = Weight(BY_NAME["F32"], w.shape, dequantize(w, np.arange(w.rows)).view(np.uint8))
    at = w.type.row_bytes(half)
    first, second = (np.ascontiguousarray(part) for part in (w.data[:, :at], w.data[:, at:]))
    return Weight(w.type, (w.rows, half), first), Weight(w.type, (w.rows, half), second)

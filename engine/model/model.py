"""The model: token rows in, logits out, over stages of layers.

Rows     at most MAX_ROWS a call; each slot's rows continue where its state ends
State    a `StatePool` from `new_state`; several may exist
Errors   ValueError for rows that do not fit the state or the vocabulary, OutOfPages when there is no room; both before
         anything is computed. After any other error the slots of the call must be reset.
Cost     everything is bound once; a call is a dozen kernel calls a layer. The head runs for wanted rows only.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from strata.engine.device.base import Device
from strata.engine.model.ends import Embedding, Head
from strata.engine.model.gdn import GdnBlock
from strata.engine.model.ple import PleBlock
from strata.engine.model.qsa import QsaBlock
from strata.engine.model.rows import Rows
from strata.engine.model.stage import Layer, Stage
from strata.engine.model.weights import Binder, embedding_table, output_matrix, rope_table
from strata.engine.pack import Pack
from strata.engine.state.slots import StatePool, require_memory
from strata.kernels.ops import F32, MAX_TOP_K, Rope

log = logging.getLogger(__name__)


class Model:
    """A pack bound to a device, for sequences of up to `max_context` tokens."""

    def __init__(self, pack: Pack, device: Device, max_context: int) -> None:
        spec = pack.spec
        if not 1 <= max_context <= spec.context_length:
            raise ValueError(f"max_context must be in 1 to {spec.context_length} for this model, got {max_context}")
        if spec.experts_used > MAX_TOP_K:
            raise ValueError(f"the model uses {spec.experts_used} experts a token, at most {MAX_TOP_K} are run")
        for warning in spec.warnings:
            log.warning("%s: %s", pack.path.name, warning)
        self.spec = spec
        self.device = device
        self.max_context = max_context
        self.rope = rope_table(spec, max_context, device)
        self._embedding, self._head, stage = bind(pack, device, self.rope)
        self.stages = (stage,)

    @property
    def ends(self) -> tuple[Embedding, Head]:
        """Embedding and output, which the draft layer shares."""
        return self._embedding, self._head

    def new_state(
        self,
        n_slots: int,
        kv: str = "fp32",
        n_checkpoints: int = 0,
        n_pages: int | None = None,
        resident: int = 0,
    ) -> StatePool:
        """An empty state, of the figures of `StatePool`. Raises StateTooLarge when the device's free memory does not
        hold it."""
        if self.device.sides == 1:
            free = self.device.memory().free
            require_memory(self.spec, n_slots, self.max_context, free, n_checkpoints, n_pages)
        return StatePool(self.spec, n_slots, self.max_context, n_pages, kv, self.device, n_checkpoints, resident)

    def forward(self, rows: Rows, state: StatePool, want: Sequence[int] | None = None) -> F32:
        """Read the rows into the state; logits (len(want), vocab) of the rows that `want` names (None: of none)."""
        return self.read(rows, state, want)[0]

    def read(
        self, rows: Rows, state: StatePool, want: Sequence[int] | None = None, count: bool = True
    ) -> tuple[F32, F32]:
        """`forward`, and the rows' residual (n, C, H) behind the last layer, which the draft layer goes on from.

        count: False leaves it to the caller to `advance` the state by the rows that stay
        """
        self.check(rows, state)
        wanted = np.asarray([] if want is None else want, np.int64)
        if len(wanted) and (wanted.min() < 0 or wanted.max() >= len(rows)):
            raise ValueError(f"wanted rows must be in 0 to {len(rows) - 1}, got {wanted.min()} to {wanted.max()}")
        lengths = [(slot, end - begin) for slot, begin, end in rows.segments.tolist()]
        state.reserve_all(lengths)
        self.device.expect(int(rows.positions.max()) + 1)
        logits, x = self.compute(state.located(rows).placed(self.device), state, wanted)
        for slot, n in lengths if count else ():
            state.advance(slot, n)
        return np.empty((0, self.spec.vocab), np.float32) if logits is None else logits, x

    def compute(self, rows: Rows, state: StatePool, wanted: npt.NDArray[np.int64]) -> tuple[F32 | None, F32]:
        """The work of a forward pass on placed rows, without checks and accounts: what a graph is captured of.

        Logits (len(wanted), vocab), None when none are wanted, and the residual (n, C, H) behind the last layer.
        """
        self.device.begin()
        x = self._embedding(rows.tokens)
        for stage in self.stages:
            stage(x, rows, state)
        return self._head(self.device.take(x, wanted)) if len(wanted) else None, x

    def logits(self, x: F32) -> F32:
        """Logits (n, vocab) of residuals x (n, C, H) that do not lie in a workspace: a pass of its own."""
        self.device.begin()
        return self._head(x)

    def check(self, rows: Rows, state: StatePool) -> None:
        """ValueError unless each segment continues its slot and every token is in the vocabulary."""
        for slot, begin, _ in rows.segments.tolist():
            if slot >= state.n_slots:
                raise ValueError(f"slots must be in 0 to {state.n_slots - 1}, got {slot}")
            if rows.positions[begin] != state.length(slot):
                raise ValueError(
                    f"slot {slot} holds {state.length(slot)} tokens, its next row cannot be at {rows.positions[begin]}"
                )
        low, high = int(rows.tokens.min()), int(rows.tokens.max())
        if low < 0 or high >= self.spec.vocab:
            raise ValueError(f"token ids must be in 0 to {self.spec.vocab - 1}, got {low if low < 0 else high}")


def bind(pack: Pack, device: Device, rope: Rope) -> tuple[Embedding, Head, Stage]:
    """All weights of the pack on one device."""
    spec, ends = pack.spec, Binder(pack, "", device)
    embedding = Embedding(device, embedding_table(pack, device), spec.streams)
    mixer = ends.hyper("output_hc", inject=False)
    head = Head(device.kernels, mixer, (output_matrix(pack, device),), spec.eps)
    return embedding, head, Stage(device, _bind_layers(pack, device, rope))


def _bind_layers(pack: Pack, device: Device, rope: Rope) -> list[Layer]:
    """All layers of the pack on one device."""
    spec, kernels = pack.spec, device.kernels
    layers = []
    for i, recurrent in enumerate(spec.recurrent):
        bind = Binder(pack, f"blk.{i}.", device)
        ordinal = spec.recurrent[:i].count(recurrent)
        mixer: GdnBlock | QsaBlock
        if recurrent:
            mixer = GdnBlock(device, kernels, bind.gdn(), ordinal, spec.eps)
        else:
            mixer = QsaBlock(
                device=device,
                kernels=kernels,
                weights=bind.attention(),
                ordinal=ordinal,
                rope=rope,
                heads=spec.heads,
                kv_heads=spec.kv_heads,
                index_heads=spec.index_heads,
                budget=spec.index_budget,
                eps=spec.eps,
            )
        has_ple = spec.ple is not None and spec.ple.layer == i
        layers.append(
            Layer(
                device=device,
                kernels=kernels,
                ple=PleBlock(kernels, bind.ple(spec.ple), spec.eps) if has_ple and spec.ple else None,
                hc_attn=bind.hyper("hc_attn"),
                mixer=mixer,
                hc_ffn=bind.hyper("hc_ffn"),
                moe=bind.moe(i),
                experts_used=spec.experts_used,
                eps=spec.eps,
            )
        )
    return layers

"""The CUDA backend: every operation of `kernels.ops` on CuPy arrays, and what a window wants besides.

    kernels = CudaKernels(workspace)
    mark = workspace.mark()
    u, beta = kernels.hyper_mix(x, hc, eps)      # arrays of the workspace, valid until the mark is released
    workspace.release(mark)

Arguments and results are arrays on the device; state arrays are updated in place. Every launch goes to the current
stream; no operation waits, allocates or reads an array on the host, so all of them can be captured in a graph and
replayed with other contents in the same arrays (`sample` waits: it answers with a number; `sample_rows` does not).
What varies between replays is therefore read on the device: tokens, positions, slots, segments, tables, settings. Their
numbers are the caller's to check; the operations check shapes. The number of rows and segments belongs to the layout.

Errors   ValueError for shapes, OutOfWorkspace, DeviceError; all before anything is launched for the argument at fault
Cost     a few microseconds of host time a launch
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from strata.kernels.check import require
from strata.kernels.cuda import embed as embeds
from strata.kernels.cuda import gdn as gdns
from strata.kernels.cuda import hyper as hypers
from strata.kernels.cuda import norm as norms_
from strata.kernels.cuda import ple as ples
from strata.kernels.cuda import product as products
from strata.kernels.cuda import qsa as qsas
from strata.kernels.cuda import route as routes
from strata.kernels.cuda import sample as samples
from strata.kernels.cuda.mixture import Bank, Placed, Shared, gate_times_up, mixture, stack_addresses
from strata.kernels.cuda.plans import WINDOW_ROWS
from strata.kernels.cuda.workspace import DeviceArray, Workspace
from strata.kernels.formats import Weight
from strata.kernels.ops import AttentionPages, Gdn, Hyper, Moe, Norms, Ple, Rope, Sampling

ROWS_AT_ONCE: Final = 8192
ATTENTION_BYTES: Final = 256 << 20
_SHARED_HEADS: Final = 1024
"""Key heads of all sequences of a window, of which the delta net keeps count."""


class CudaKernels:
    """The operations on one card. Not for several threads at a time: they share the workspace.

    rows_at_once     rows whose widest intermediates (2 * C*H floats a row) exist together; fewer need less workspace
    attention_bytes  of the scores of many rows, in the workspace
    """

    def __init__(
        self, workspace: Workspace, rows_at_once: int = ROWS_AT_ONCE, attention_bytes: int = ATTENTION_BYTES
    ) -> None:
        require(rows_at_once >= 1, f"rows_at_once must be at least 1, got {rows_at_once}")
        self.workspace = workspace
        self._rows_at_once = rows_at_once
        self._limits = qsas.limits(workspace, attention_bytes)
        self._ended, self._heads_ended = workspace.array((1,), np.uint32), workspace.array((_SHARED_HEADS,), np.uint32)
        self._ended[...] = 0
        self._heads_ended[...] = 0
        self._mix_words = workspace.array((hypers.MOST_WORDS,))
        self._banks: dict[int, tuple[Moe, tuple[Bank, Bank, Bank], Shared | None]] = {}

    @property
    def bound(self) -> int | None:
        """Positions of the rows to come are below it; None: as many as a page table holds. It sizes grids and scratch
        of the attention, never results: a tighter bound is less work for a prompt, and a graph is for its bound."""
        return self._limits.bound

    @bound.setter
    def bound(self, tokens: int | None) -> None:
        require(tokens is None or tokens >= 1, f"bound must be at least 1, got {tokens}")
        self._limits.bound = tokens

    def set_threads(self, n: int) -> None:
        """Accepted for the contract: the host computes nothing here."""
        require(n >= 1, f"threads must be at least 1, got {n}")

    def embed(self, table: Weight, tokens: DeviceArray, streams: int) -> DeviceArray:
        """tokens int32 (n,) -> residual (n, streams, H), all streams alike."""
        return embeds.embed(self.workspace, table, tokens, streams)

    def dequantize(self, w: Weight, rows: DeviceArray) -> DeviceArray:
        """`ops.Kernels.dequantize`."""
        return products.dequantize(self.workspace, w, rows)

    def linear(
        self, weights: Sequence[Weight], x: DeviceArray, out: Sequence[DeviceArray] | None = None
    ) -> list[DeviceArray]:
        """`ops.Kernels.linear`; into `out`, if given."""
        return products.linear(self.workspace, weights, x, out=out)

    def rms_norm(self, x: DeviceArray, w: DeviceArray, eps: float) -> DeviceArray:
        """`ops.Kernels.rms_norm`."""
        return norms_.rms_norm(self.workspace, x, w, eps)

    def hyper_mix(
        self, x: DeviceArray, hc: Hyper, eps: float, out: DeviceArray | None = None
    ) -> tuple[DeviceArray, DeviceArray | None]:
        """`ops.Kernels.hyper_mix`. out (n, C): where beta goes."""
        return hypers.hyper_mix(self.workspace, x, hc, eps, self._rows_at_once, None, self._mix_words, out)

    def hyper_add_mix(
        self,
        x: DeviceArray,
        beta: DeviceArray,
        y: DeviceArray,
        hc: Hyper,
        eps: float,
        out: DeviceArray | None = None,
    ) -> tuple[DeviceArray, DeviceArray | None]:
        """`hyper_add`, then `hyper_mix`, in one pass over the streams less. out (n, C): where the new beta goes."""
        return hypers.hyper_mix(self.workspace, x, hc, eps, self._rows_at_once, (beta, y), self._mix_words, out)

    def hyper_add(self, x: DeviceArray, beta: DeviceArray, y: DeviceArray) -> None:
        """`ops.Kernels.hyper_add`."""
        hypers.hyper_add(x, beta, y)

    def gdn(
        self,
        w: Gdn,
        p: DeviceArray,
        z: DeviceArray,
        b: DeviceArray,
        a: DeviceArray,
        segments: DeviceArray,
        conv: DeviceArray,
        state: DeviceArray,
        eps: float,
    ) -> DeviceArray:
        """`ops.Kernels.gdn`."""
        return gdns.gdn(self.workspace, w, p, z, b, a, segments, conv, state, eps, self._heads_ended)

    def delta_net(
        self,
        project: Sequence[Weight],
        w: Gdn,
        u: DeviceArray,
        segments: DeviceArray,
        conv: DeviceArray,
        state: DeviceArray,
        eps: float,
    ) -> DeviceArray:
        """`linear` of u (n, H) with the weights of p, z, b, a, then `gdn`, which makes b and a itself where it can."""
        _, _, of_b, of_a = project
        if gdns.takes_gates(of_b, of_a, len(u), len(segments), w.norm.shape[0], self._heads_ended):
            p, z = self.linear(project[:2], u)
            gates = gdns.Gates(of_b, of_a, u)
            return gdns.gdn(self.workspace, w, p, z, None, None, segments, conv, state, eps, self._heads_ended, gates)
        p, z, b, a = self.linear(project, u)
        return self.gdn(w, p, z, b, a, segments, conv, state, eps)

    def qsa_store(
        self,
        pages: AttentionPages,
        tables: DeviceArray,
        slots: DeviceArray,
        positions: DeviceArray,
        k: DeviceArray,
        v: DeviceArray,
        index_k: DeviceArray,
        norms: Norms,
        rope: Rope,
        eps: float,
    ) -> None:
        """`ops.Kernels.qsa_store`. Keys and values may be float16 in the pages."""
        qsas.qsa_store(pages, tables, slots, positions, k, v, index_k, norms, rope, eps)

    def qsa_attend(
        self,
        pages: AttentionPages,
        tables: DeviceArray,
        slots: DeviceArray,
        positions: DeviceArray,
        q_gate: DeviceArray,
        index_q: DeviceArray,
        norms: Norms,
        rope: Rope,
        budget: int,
        eps: float,
    ) -> DeviceArray:
        """`ops.Kernels.qsa_attend`."""
        return qsas.qsa_attend(
            self.workspace, self._limits, pages, tables, slots, positions, q_gate, index_q, norms, rope, budget, eps
        )

    def qsa(
        self,
        pages: AttentionPages,
        tables: DeviceArray,
        slots: DeviceArray,
        positions: DeviceArray,
        k: DeviceArray,
        v: DeviceArray,
        index_k: DeviceArray,
        q_gate: DeviceArray,
        index_q: DeviceArray,
        norms: Norms,
        rope: Rope,
        budget: int,
        eps: float,
    ) -> DeviceArray:
        """`qsa_store`, then `qsa_attend`, in a launch less."""
        where, asked = (pages, tables, slots, positions), (q_gate, index_q)
        return qsas.qsa(self.workspace, self._limits, *where, k, v, index_k, *asked, norms, rope, budget, eps)

    def attention(
        self,
        project: Sequence[Weight],
        u: DeviceArray,
        pages: AttentionPages,
        where: tuple[DeviceArray, DeviceArray, DeviceArray],
        heads: tuple[int, int, int],
        norms: Norms,
        rope: Rope,
        budget: int,
        eps: float,
    ) -> DeviceArray:
        """`linear` of u (n, H) with the weights of q_gate, k, v, index_q, index_k, then `qsa`. Where no blocks compete,
        the indexer's queries are not made, and its keys beside the scores. heads: of queries, keys, the indexer."""
        n = len(u)
        for_queries, for_keys, _, for_index, for_index_keys = project
        shape = (n, heads[1], for_keys.rows // heads[1])
        defers = for_index_keys.type.is_float and qsas.stores_on_its_way(self._limits, pages, where[0], n, budget)
        index_k, index_q, beside = None, None, None
        if defers:
            q_gate, k, v = self.linear(project[:3], u)
            index_k, index_q = (self.workspace.array((n, w.rows)) for w in (for_index_keys, for_index))
            kept = [index_k]

            def beside() -> None:
                products.linear(self.workspace, [for_index_keys], u, out=kept, early=True)
        else:
            q_gate, k, v, index_q, index_k = self.linear(project, u)
        q_gate = q_gate.reshape(n, heads[0], 2, for_queries.rows // (2 * heads[0]))
        index_q = index_q.reshape(n, heads[2], for_index.rows // heads[2])
        rows = (k.reshape(shape), v.reshape(shape), index_k)
        return qsas.qsa(
            self.workspace, self._limits, pages, *where, *rows, q_gate, index_q, norms, rope, budget, eps, beside
        )

    def route(self, logits: DeviceArray, used: int) -> tuple[DeviceArray, DeviceArray]:
        """`ops.Kernels.route`."""
        return routes.route(self.workspace, logits, used)

    def bind_experts(self, w: Moe) -> None:
        """Put the addresses of a block's experts on the device, once, before its first `moe` is captured."""
        if id(w) not in self._banks:
            gate, up, down = (self._bank(stack) for stack in (w.gate, w.up, w.down))
            self._banks[id(w)] = (w, (gate, up, down), self._shared(w))

    def _shared(self, w: Moe) -> Shared | None:
        """The shared expert as one of the others; None when its gate and up have different types."""
        if w.shared_gate.type is not w.shared_up.type:
            return None
        weights = w.shared_gate, w.shared_up, w.shared_down
        if not w.shared_gate.type.is_float:
            return Shared(*weights)
        gate, up = (self._bank(Weight(m.type, (1, *m.shape), m.data[None])) for m in weights[:2])
        return Shared(*weights, (gate, up, _copied(np.zeros((WINDOW_ROWS, 1), np.int32), w.shared_gate.data)))

    def _bank(self, w: Weight) -> Bank:
        if isinstance(w, Placed):
            return w.bank
        return Bank(w.type, w.rows, w.cols, _copied(stack_addresses(w), w.data))

    def moe(self, w: Moe, x: DeviceArray, used: int, out: DeviceArray | None = None) -> DeviceArray:
        """`ops.Kernels.moe`; into `out`, if given. The scores and picks of the rows stay in the workspace."""
        self.bind_experts(w)
        _, (gate, up, down), shared = self._banks[id(w)]
        ws = self.workspace
        if routes.fits_window(w.router, w.shared_router, len(x)):
            picked, weights, shared_logits = routes.route_window(ws, self._ended, w.router, w.shared_router, x, used)
        else:
            logits, shared_logits = products.linear(ws, [w.router, w.shared_router], x)
            picked, weights = routes.route(ws, logits, used)
        if shared is not None and len(x) <= WINDOW_ROWS:
            return mixture(ws, gate, up, down, x, picked, weights, None, (shared, shared_logits.reshape(-1)), out=out)
        out = mixture(ws, gate, up, down, x, picked, weights, out=out)
        with ws.scratch():
            self._shared_expert(w, x, shared_logits.reshape(-1), out)
        return out

    def _shared_expert(self, w: Moe, x: DeviceArray, join: DeviceArray, out: DeviceArray) -> None:
        """Its output joined to `out`, by products of its own."""
        ws = self.workspace
        hidden, other = products.linear(ws, [w.shared_gate, w.shared_up], x)
        if len(x) > WINDOW_ROWS and not w.shared_down.type.is_float:
            made = products.quantize(ws, hidden, w.shared_down.type, np.float32(1), other)
            products.linear_quantized(ws, w.shared_down, made, join, out)
            return
        gate_times_up(hidden, other)
        products.linear(ws, [w.shared_down], hidden, join=join, out=[out])

    def ple_rows(self, w: Ple, tokens: DeviceArray, segments: DeviceArray, history: DeviceArray) -> DeviceArray:
        """`ops.Kernels.ple_rows`."""
        return ples.ple_rows(self.workspace, w, tokens, segments, history)

    def ple(
        self,
        w: Ple,
        x: DeviceArray,
        rows: DeviceArray,
        segments: DeviceArray,
        conv: DeviceArray,
        eps: float,
        inputs: DeviceArray | None = None,
    ) -> None:
        """`ops.Kernels.ple`; with `inputs`, of the module."""
        ples.ple(self.workspace, w, x, rows, segments, conv, eps, self._rows_at_once, inputs)

    def sample_rows(
        self,
        logits: DeviceArray,
        settings: DeviceArray,
        seeds: DeviceArray,
        positions: DeviceArray,
        recent: DeviceArray,
        ahead: int = 0,
        out: DeviceArray | None = None,
    ) -> DeviceArray:
        """`sample.sample_rows`: a token id for every row, on the device; -1 for a row whose logits are not finite."""
        return samples.sample_rows(self.workspace, logits, settings, seeds, positions, recent, ahead, out)

    def sample(self, logits: DeviceArray, recent: DeviceArray, how: Sampling, position: int) -> int:
        """`ops.Kernels.sample`. Waits for the stream."""
        return samples.sample(self.workspace, logits, recent, how, position)


def _copied(host: npt.NDArray[Any], beside: DeviceArray) -> DeviceArray:
    """A host array on the device of another array, outside of the workspace: it stays as long as the model."""
    if isinstance(beside, np.ndarray):
        return host
    import cupy as cp

    return cp.asarray(host)

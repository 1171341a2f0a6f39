"""The demo pack's model in PyTorch: trunk, draft layer and their losses, over rows of packed conversations.

Weights   parameters have their names in the GGUF file (dots as "/"), master copies in float32; `ssm_a` holds the
          logarithm of the decay rate. Products are computed in the type that `forward` is given
4 bits    with `rounded` the weights that the 4-bit file holds in Q4_0 are rounded as the file rounds them; gradients
          pass through
Errors    ValueError for rows whose length is no multiple of the chunk
Cost      memory about 1 MB a token with gradients, at the demo pack's size
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strata.bench.demo_pack import layers
from strata.bench.demo_pack.config import Geometry, tensor_type
from strata.bench.demo_pack.delta import CHUNK
from strata.bench.demo_pack.layers import Rows, Weights

KEPT_FLOAT = ("norm", "ssm_a", "ssm_dt.bias", "ple_conv1d", "ffn_gate_inp", "ffn_gate_inp_shexp")
EXPERTS = (
    "hc_ffn_norm", "hc_ffn_down", "hc_ffn_up", "hc_ffn_inject", "ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps",
    "ffn_down_exps", "ffn_gate_inp_shexp", "ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp",
)  # fmt: skip
"""A block's tensors from the experts' mixer on."""
CHAIN_ROWS = 4
"""Of so many rows two go on from what the draft layer left itself; the others are the model's, as they mostly are where
drafts are made."""


class Chain(NamedTuple):
    """The draft layer behind its own proposals. logits (B, T, vocab): of the token after the next one, as the first
    draft's · depth (B, T): which proposal a row makes, 2 or 3; 1: a row of the model itself
    """

    logits: Tensor
    depth: Tensor


class Output(NamedTuple):
    """logits, draft (B, T, vocab): of the next token, and of the one after it
    balance, indexer: losses, means over the layers
    """

    logits: Tensor
    draft: Tensor
    balance: Tensor
    indexer: Tensor
    chain: Chain | None = None

    def detach(self) -> Output:
        chain = None if self.chain is None else Chain(self.chain.logits.detach(), self.chain.depth)
        return Output(self.logits.detach(), self.draft.detach(), self.balance.detach(), self.indexer.detach(), chain)


class DemoModel(nn.Module):
    """The whole model. `compiled`: compiles a function (torch.compile). Applied to the parts of layers, of which all
    layers of a kind, dense and sparse ones, use the same: each costs seconds for every length of rows."""

    def __init__(self, geometry: Geometry, seed: int = 0, compiled: Callable[[Any], Any] = lambda f: f) -> None:
        super().__init__()
        self.geometry = geometry
        generator = torch.Generator().manual_seed(seed)
        for name, shape in (geometry.shapes() | geometry.draft_shapes()).items():
            parameter = nn.Parameter(initial(name, shape, geometry, generator))
            self.register_parameter(name.replace(".", "/"), parameter)
        self._recurrent, self._experts = compiled(recurrent), compiled(experts)
        self._asking, self._choice, self._answering = compiled(asking), compiled(layers.choice), compiled(answering)
        self._ple, self._head = compiled(ple_layer), compiled(head)

    def tensors(self) -> dict[str, nn.Parameter]:
        """Master weights by their name in the file."""
        return {name.replace("/", "."): p for name, p in self.named_parameters()}

    def effective(self, dtype: torch.dtype, rounded: bool) -> dict[str, Weights]:
        """Weights as a forward pass reads them, by block ("" for what belongs to none)."""
        blocks: dict[str, Weights] = {}
        tensors: dict[str, Tensor] = dict(self.tensors())
        if rounded:
            tensors |= together(round_q4_0, {n: p for n, p in tensors.items() if tensor_type(n, "Q4_0") == "Q4_0"})
        for name, w in tensors.items():
            prefix, leaf = split(name)
            wide = any(part in leaf for part in KEPT_FLOAT)
            blocks.setdefault(prefix, {})[leaf] = w if wide else w.to(dtype)
        return blocks

    def forward(
        self,
        ids: Tensor,
        rows: Rows,
        *,
        sparse: bool,
        dtype: torch.dtype = torch.float32,
        rounded: bool = False,
        chain: int | None = None,
    ) -> Output:
        """ids (B, T) int64. `sparse`: attention over the indexer's choice. `chain`: the first row that makes a second
        proposal, 0 to CHAIN_ROWS - 1; None: there are first ones only."""
        g = self.geometry
        if ids.shape[1] % CHUNK:
            raise ValueError(f"rows must be a multiple of {CHUNK} tokens long, got {ids.shape[1]}")
        blocks = self.effective(dtype, rounded)
        ends, table = blocks[""], blocks[""].pop("per_layer_token_embd")
        x = F.embedding(ids, ends["token_embd"]).to(self.master)[:, :, None].expand(-1, -1, g.streams, -1).contiguous()
        balance, indexer = [], []
        for layer, is_recurrent in enumerate(g.recurrent):
            w = blocks[f"blk.{layer}"]
            if layer == g.ple_layer:
                x = self._ple(x, layers.table_rows(ids, g, rows.position), table, blocks[f"blk.{layer}.ple"], g, rows)
            if is_recurrent:
                x, loss = self._experts(self._recurrent(x, w, g, rows), only(w, EXPERTS), g, rows)
            else:
                x, loss, taught = self.attending(x, w, rows, sparse)
                indexer.append(taught)
            balance.append(loss)
        logits = self._head(x, mixer(ends, "output_hc"), ends["output"], g)
        last, own = blocks[f"blk.{g.layers}.nextn"], blocks[f"blk.{g.layers}"]
        embedded = F.embedding(ids.roll(-1, 1), ends["token_embd"])
        drafting = lambda x: self.attending(self.draft_input(x, embedded, last), own, rows, sparse)  # noqa: E731
        drafted = lambda x: self._head(x, mixer(last, "nextn.hc_head"), ends["output"], g)  # noqa: E731
        first, *losses = drafting(x)
        draft, chained = drafted(first), None
        if chain is not None:
            depth = depths(rows.position, chain)
            deep, *more = drafting(behind(x.detach(), first.detach(), depth, drafting))
            chained = Chain(drafted(deep), depth)
            losses = [(a + b) / 2 for a, b in zip(losses, more, strict=True)]
        balance, indexer = torch.stack([*balance, losses[0]]).mean(), torch.stack([*indexer, losses[1]]).mean()
        return Output(logits, draft, balance, indexer, chained)

    def attending(self, x: Tensor, w: Weights, rows: Rows, sparse: bool) -> tuple[Tensor, Tensor, Tensor]:
        """An attention layer: x after it, the balance loss and the indexer's."""
        g = self.geometry
        flat, asked = self._asking(x, w, g, rows)
        # a view: the same tensor twice would be compiled apart from two
        mask = rows.visible.view_as(rows.visible)
        if sparse:
            mask = self._choice(asked.index_q.detach(), asked.blocks.detach(), g, mask)
        x, taught = self._answering(x, flat, asked, mask, w, g, rows)
        return *self._experts(x, only(w, EXPERTS), g, rows), taught

    @property
    def master(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def draft_input(self, x: Tensor, embedded: Tensor, w: Weights) -> Tensor:
        """The draft layer's residual from the trunk's (B, T, C, H) and the embedding of the next token (B, T, H)."""
        h, eps, matrix = self.geometry.hidden, self.geometry.eps, w["nextn.eh_proj"]
        e = (layers.rms(embedded, eps) * w["nextn.enorm"]).to(matrix.dtype)
        n = (layers.rms(x.flatten(2), eps) * w["nextn.hnorm"]).to(matrix.dtype).view_as(x)
        return (F.linear(e, matrix[:, :h])[:, :, None] + F.linear(n, matrix[:, h:])).to(x.dtype)


def depths(position: Tensor, begin: int) -> Tensor:
    """Which proposal of the draft layer each row makes (B, T): 2 and 3 behind each other, else 1."""
    turn, ones = (position - begin) % CHAIN_ROWS, torch.ones_like(position)
    second, third = (turn == 0) & (position > 0), (turn == 1) & (position > 1)
    return torch.where(second, 2, torch.where(third, 3, ones))


def behind(x: Tensor, first: Tensor, depth: Tensor, drafting: Callable[[Tensor], tuple[Tensor, ...]]) -> Tensor:
    """The residual (B, T, C, H) that each row of a chain takes: the model's x, or what the draft layer left in the row
    before, `first` where that was a row of the model. All without gradients."""
    second = torch.where((depth == 2)[..., None, None], first.roll(1, 1), x)
    left = drafting(second)[0].detach()
    return torch.where((depth == 3)[..., None, None], left.roll(1, 1), second)


def split(name: str) -> tuple[str, str]:
    """("blk.3", "attn_q") of "blk.3.attn_q.weight". What not every layer of a kind has is a part of its own,
    ("blk.1.ple", ...) and ("blk.8.nextn", ...): so all layers of a kind are the same function of the same names."""
    name = name.removesuffix(".weight")
    if not name.startswith("blk."):
        return "", name
    _, layer, leaf = name.split(".", 2)
    part = next((f".{part}" for part in ("ple", "nextn") if leaf.startswith(part)), "")
    return f"blk.{layer}{part}", leaf


def only(w: Weights, names: tuple[str, ...]) -> Weights:
    """So that what both kinds of layers share is the same function of the same names."""
    return {name: w[name] for name in names}


def mixer(w: Weights, prefix: str) -> Weights:
    """A mixer before a head, under one name for both heads."""
    return {f"head_{part}": w[f"{prefix}_{part}"] for part in ("norm", "down", "up")}


def recurrent(x: Tensor, w: Weights, g: Geometry, rows: Rows) -> Tensor:
    u, flat = layers.mix(x, w, "hc_attn", g.eps)
    return layers.add(x, layers.delta_net(u, w, g, rows.position), flat, w["hc_attn_inject"])


def asking(x: Tensor, w: Weights, g: Geometry, rows: Rows) -> tuple[Tensor, layers.Asked]:
    u, flat = layers.mix(x, w, "hc_attn", g.eps)
    return flat, layers.ask(u, w, g, rows)


def answering(
    x: Tensor, flat: Tensor, asked: layers.Asked, mask: Tensor, w: Weights, g: Geometry, rows: Rows
) -> tuple[Tensor, Tensor]:
    y, taught = layers.answer(asked, mask, w, g, rows)
    return layers.add(x, y, flat, w["hc_attn_inject"]), taught


def experts(x: Tensor, w: Weights, g: Geometry, rows: Rows) -> tuple[Tensor, Tensor]:
    u, flat = layers.mix(x, w, "hc_ffn", g.eps)
    y, balance = layers.moe(u, w, g, rows.valid)
    return layers.add(x, y, flat, w["hc_ffn_inject"]), balance


def ple_layer(x: Tensor, found: Tensor, table: Tensor, w: Weights, g: Geometry, rows: Rows) -> Tensor:
    return x + layers.ple(x, F.embedding(found, table).flatten(2), w, g, rows.position)


def head(x: Tensor, w: Weights, output: Tensor, g: Geometry) -> Tensor:
    return F.linear(layers.mix(x, w, "head", g.eps)[0], output)


def rows_of(
    segment: Tensor,
    g: Geometry,
    n_probes: int,
    generator: torch.Generator | None = None,
    answering: Tensor | None = None,
) -> Rows:
    """Rows of a batch from the number of each token's conversation (B, T), -1 for padding.

    Conversations must begin at multiples of g.block. Probes are drawn from the generator: with `answering` (B, T) bool
    every second one from these tokens, as far as a row has them, since there the indexer's choice decides the answer.
    """
    t, device = segment.shape[1], segment.device
    at = torch.arange(t, device=device)
    begins = F.pad(segment[:, 1:] != segment[:, :-1], (1, 0), value=True)
    position = at - torch.where(begins, at, 0).cummax(1).values
    visible = (segment[:, :, None] == segment[:, None]) & (at[:, None] >= at)
    rate = torch.arange(0, g.rope_dims, 2, device=device, dtype=torch.float64) / g.rope_dims
    angle = position[..., None] * g.rope_base**-rate
    probes = torch.randint(0, t, (len(segment), n_probes), device=device, generator=generator)
    if answering is not None:
        draw = torch.rand(segment.shape, device=device, generator=generator) + answering
        probes = torch.cat([probes[:, : n_probes // 2], draw.topk(n_probes - n_probes // 2, -1).indices], 1)
    return Rows(position, visible, angle.cos().float(), angle.sin().float(), probes, segment >= 0)


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        blocks = w.reshape(-1, 32)
        most = blocks.gather(1, blocks.abs().argmax(1, keepdim=True))
        scale = most / -8
        inverse = torch.where(scale.abs() < torch.finfo(w.dtype).tiny, 0.0, 1 / scale)
        codes = (blocks * inverse + 8.5).trunc().clamp(0, 15) - 8
        return (codes * scale.half().to(w.dtype)).reshape(w.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def round_q4_0(w: Tensor) -> Tensor:
    """The values that a Q4_0 block holds for these; the gradient is passed as it is."""
    return _Rounded.apply(w)


def together(f: Callable[[Tensor], Tensor], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """f of every tensor, one after the other in one array: one call, where each would cost a dozen launches."""
    flat = f(torch.cat([w.reshape(-1) for w in tensors.values()]))
    parts = flat.split([w.numel() for w in tensors.values()])
    return {name: part.view_as(w) for (name, w), part in zip(tensors.items(), parts, strict=True)}


OUTPUTS = ("attn_output", "ssm_out", "ffn_down_exps", "ffn_down_shexp", "ple_value")


def initial(name: str, shape: tuple[int, ...], g: Geometry, generator: torch.Generator) -> Tensor:
    """Values to begin with. Matrices that write into the residual begin small, so that a layer begins near nothing."""
    _, leaf = split(name)
    normal = torch.randn(shape, generator=generator)
    even = torch.rand(shape, generator=generator)
    if "norm" in leaf:
        return torch.ones(shape)
    if leaf == "ssm_a":
        return (1 + 15 * even).log()
    if leaf == "ssm_dt.bias":
        step = torch.exp(even * (math.log(0.1) - math.log(0.001)) + math.log(0.001))
        return step + torch.log(-torch.expm1(-step))
    if leaf.endswith("conv1d"):
        return (2 * even - 1) * shape[-1] ** -0.5
    if leaf in ("token_embd", "per_layer_token_embd"):
        return 0.5 * normal
    scale = shape[-1] ** -0.5
    if leaf in OUTPUTS:
        scale *= (2 * g.layers) ** -0.5
    elif "hc_" in leaf or leaf.startswith("ffn_gate_inp"):
        scale *= 0.5
    return scale * normal

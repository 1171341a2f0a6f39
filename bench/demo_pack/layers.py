"""The blocks of a qwen4exp layer in PyTorch, for training: pure functions of activations and a block's tensors.

Rows     several conversations one after the other in a row; each begins at a multiple of the indexer's block, sees
         itself only and counts its own positions
Shapes   x (B, T, C, H) float32 · u, y (B, T, H) in the type that products are computed in, which is the weights'
Weights  `w`: tensors of one block by their name in the file without "blk.N." and ".weight"; `ssm_a` is the logarithm of
         the decay rate here
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from strata.bench.demo_pack.config import Geometry
from strata.bench.demo_pack.delta import RESET, delta_rule

Weights = dict[str, Tensor]


class Rows(NamedTuple):
    """position (B, T): of a token in its conversation · visible (B, T, T) bool: earlier tokens of the same one
    cos, sin (B, T, rope_dims / 2) · probes (B, Q): indices of the queries that the indexer is taught with
    valid (B, T) bool: no padding
    """

    position: Tensor
    visible: Tensor
    cos: Tensor
    sin: Tensor
    probes: Tensor
    valid: Tensor


def rms(x: Tensor, eps: float) -> Tensor:
    x = x.float() if x.dtype == torch.bfloat16 else x
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def mix(x: Tensor, w: Weights, prefix: str, eps: float) -> tuple[Tensor, Tensor]:
    """-> u, the input of a block, and the normed streams one after the other (B, T, C * H)."""
    c, down = x.shape[2], w[f"{prefix}_down"]
    n = (rms(x, eps) * w[f"{prefix}_norm"].view(c, -1)).to(down.dtype)
    flat = n.flatten(2)
    gate = torch.sigmoid(F.linear(F.silu(F.linear(flat, down) / c), w[f"{prefix}_up"])).view_as(n)
    return (gate * n).mean(2), flat


def add(x: Tensor, y: Tensor, flat: Tensor, inject: Tensor) -> Tensor:
    """x with a block's output y in every stream, as strongly as the normed streams ask for."""
    beta = 2 * torch.sigmoid(F.linear(flat, inject).to(x.dtype) / x.shape[2])
    return x + beta[..., None] * y[:, :, None].to(x.dtype)


def convolve(x: Tensor, w: Tensor, position: Tensor, dilation: int = 1) -> Tensor:
    """Depthwise and causal, zeros before a conversation: x (B, T, channels), w (channels, taps)."""
    taps = w.shape[1]
    total = x * w[:, -1]
    for j in range(taps - 1):
        back = (taps - 1 - j) * dilation
        moved = F.pad(x[:, : x.shape[1] - back], (0, 0, back, 0))
        total = total + torch.where((position >= back)[..., None], moved, 0) * w[:, j]
    return total


def delta_net(u: Tensor, w: Weights, g: Geometry, position: Tensor) -> Tensor:
    b, t, _ = u.shape
    k, v, d = g.key_heads, g.value_heads, g.gdn_dim
    p = F.silu(convolve(F.linear(u, w["attn_qkv"]), w["ssm_conv1d"].to(u.dtype), position))
    wide = torch.promote_types(p.dtype, torch.float32)
    q, key, value = p.to(wide).split([k * d, k * d, v * d], -1)
    # value head j reads key head j mod K
    q, key = (_unit(x.view(b, t, 1, k, d)).expand(-1, -1, v // k, -1, -1).reshape(b, t, v, d) for x in (q, key))
    step = F.linear(u, w["ssm_alpha"].to(u.dtype)).to(wide) + w["ssm_dt.bias"]
    rate = torch.logaddexp(step, torch.zeros_like(step))
    decay = torch.where((position == 0)[..., None], RESET, -w["ssm_a"].exp() * rate)
    strength = torch.sigmoid(F.linear(u, w["ssm_beta"].to(u.dtype)).to(wide))
    o = delta_rule(q * d**-0.5, key, value.view(b, t, v, d), decay, strength)
    gate = torch.sigmoid(F.linear(u, w["attn_gate"]))
    y = (rms(o, g.eps) * w["ssm_norm"]).to(u.dtype).flatten(2) * gate
    return F.linear(y, w["ssm_out"])


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (B, T, heads, d): the first dims are turned, by halves."""
    half = cos.shape[-1]
    cos, sin = cos[:, :, None], sin[:, :, None]
    first, second = x[..., :half], x[..., half : 2 * half]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, x[..., 2 * half :]], -1)


class Asked(NamedTuple):
    """q, k, v (B, T, heads, d) · gate (B, T, heads, d) of the output · the indexer's queries (B, T, heads, d) and the
    keys of its blocks (B, T / block, d)
    """

    q: Tensor
    k: Tensor
    v: Tensor
    gate: Tensor
    index_q: Tensor
    blocks: Tensor


def ask(u: Tensor, w: Weights, g: Geometry, rows: Rows) -> Asked:
    """Attention up to what it attends to."""
    b, t, _ = u.shape
    d = g.head_dim
    q, gate = F.linear(u, w["attn_q"]).view(b, t, g.heads, 2, d).unbind(3)
    kv = (b, t, g.kv_heads, d)
    k, v = F.linear(u, w["attn_k"]).view(kv), F.linear(u, w["attn_v"]).view(kv)
    q, k = (
        rotate(rms(x, g.eps) * w[f"attn_{name}_norm"], rows.cos, rows.sin).to(u.dtype)
        for x, name in ((q, "q"), (k, "k"))
    )
    k, v = (x.repeat_interleave(g.heads // g.kv_heads, 2) for x in (k, v))
    return Asked(q, k, v, torch.sigmoid(gate), *index(u.detach(), w, g, rows))


def answer(asked: Asked, mask: Tensor, w: Weights, g: Geometry, rows: Rows) -> tuple[Tensor, Tensor]:
    """-> y and the indexer's loss. mask (B, T, T) bool: rows.visible, or `choice` of it."""
    q, k, v = (x.transpose(1, 2) for x in (asked.q, asked.k, asked.v))
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None], scale=g.head_dim**-0.5).transpose(1, 2)
    y = F.linear((o * asked.gate).flatten(2), w["attn_output"])
    return y, index_loss(q.detach(), k.detach(), asked.index_q, asked.blocks, g, rows)


def index(u: Tensor, w: Weights, g: Geometry, rows: Rows) -> tuple[Tensor, Tensor]:
    """The indexer's queries (B, T, heads, d) and the keys of all blocks (B, T / block, d)."""
    b, t, _ = u.shape
    r = g.block
    q = F.linear(u, w["indexer.q_proj"]).view(b, t, g.index_heads, g.index_dim)
    q = rotate(rms(q, g.eps) * w["indexer.q_norm"], rows.cos, rows.sin).to(u.dtype)
    k = F.linear(u, w["indexer.k_proj"]).view(b, t // r, r, g.index_dim)
    k = k.to(torch.promote_types(k.dtype, torch.float32)).mean(2)
    k = (rms(k, g.eps) * w["indexer.k_norm"])[:, :, None]
    return q, rotate(k, rows.cos[:, ::r], rows.sin[:, ::r])[:, :, 0].to(u.dtype)


def choice(q: Tensor, blocks: Tensor, g: Geometry, visible: Tensor) -> Tensor:
    """Which tokens each query attends to (B, T, T): the budget's best complete blocks, and the tail after them."""
    t, r = visible.shape[-1], g.block
    complete = visible[..., r - 1 :: r]
    score = sum(torch.relu(q[:, :, h] @ blocks.transpose(-1, -2)).to(q.dtype) for h in range(q.shape[2]))
    # equal scores (mostly zeros): the lower block
    score = score.to(torch.promote_types(score.dtype, torch.float32)) - 1e-6 * torch.arange(t // r, device=q.device)
    score = score.masked_fill(~complete, float("-inf"))
    best = score.topk(min(g.budget // r, t // r), -1, sorted=False).indices
    kept = torch.zeros_like(complete).scatter(-1, best, True) & complete
    own = torch.arange(t, device=q.device)
    tail = (own[:, None] // r == own // r) & (own % r != r - 1)[:, None]
    return (kept.repeat_interleave(r, -1) | tail) & visible


def index_loss(q: Tensor, k: Tensor, index_q: Tensor, blocks: Tensor, g: Geometry, rows: Rows) -> Tensor:
    """Divergence of the indexer's weights over complete blocks from the attention's, at the probes."""
    r, heads = g.block, g.heads
    at = rows.probes
    visible = rows.visible.gather(1, at[..., None].expand(-1, -1, rows.visible.shape[-1]))
    complete = visible[..., r - 1 :: r]
    with torch.no_grad():
        probes = q.gather(2, at[:, None, :, None].expand(-1, heads, -1, q.shape[-1]))
        s = (probes @ k.transpose(-1, -2)).float() * g.head_dim**-0.5
        mass = s.masked_fill(~visible[:, None], float("-inf")).softmax(-1).mean(1)
        mass = mass.unflatten(-1, (-1, r)).sum(-1) * complete
        mass = mass / mass.sum(-1, keepdim=True).clamp_min(1e-9)
    asked = index_q.gather(1, at[..., None, None].expand(-1, -1, *index_q.shape[2:]))
    score = torch.relu(torch.einsum("bqhd,bnd->bqhn", asked, blocks).float()).sum(2) * g.index_dim**-0.5
    log = score.masked_fill(~complete, -1e9).log_softmax(-1)
    each = (torch.xlogy(mass, mass) - mass * log).sum(-1)
    return (each * (complete.sum(-1) > 1)).mean()


class _Permute(torch.autograd.Function):
    """x[forward], whose gradient is read with `backward` and summed over `times`: no atomic adds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Tensor, backward: Tensor, times: int) -> Tensor:
        ctx.save_for_backward(backward)
        ctx.times = times
        return x[forward]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (backward,) = ctx.saved_tensors
        grad = grad[backward]
        return (grad.reshape(-1, ctx.times, grad.shape[-1]).sum(1) if ctx.times > 1 else grad), None, None, None


class _OfUsed(torch.autograd.Function):
    """w (E, out, in), whose gradient is zero for experts without a row: what a grouped product leaves there is whatever
    the memory held."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(ends)
        return w.view_as(w)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (ends,) = ctx.saved_tensors
        unused = torch.cat([ends[:1] == 0, ends[1:] == ends[:-1]])
        return grad.masked_fill(unused[:, None, None], 0), None


def grouped(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """x (n, in) @ w (E, out, in) of each row's expert; rows sorted by expert, `ends` (E,) where each one's rows end."""
    w = _OfUsed.apply(w, ends)
    if x.dtype == torch.bfloat16:
        return getattr(F, "grouped_mm", torch._grouped_mm)(x, w.transpose(-1, -2), offs=ends)
    parts = x.tensor_split(ends[:-1].long().cpu())
    return torch.cat([part @ each.T for part, each in zip(parts, w, strict=True)])


def moe(u: Tensor, w: Weights, g: Geometry, valid: Tensor) -> tuple[Tensor, Tensor]:
    """-> y and the balance loss, which is 1 when every expert gets as many tokens."""
    flat = u.flatten(0, 1)
    n, used = len(flat), g.experts_used
    router = w["ffn_gate_inp"]
    logits = F.linear(flat.to(router.dtype), router)
    best, picked = logits.topk(used, -1)
    share = best.softmax(-1).to(u.dtype)
    order = picked.flatten().argsort(stable=True)
    places = torch.empty_like(order).scatter(0, order, torch.arange(n * used, device=u.device))
    experts = torch.arange(g.experts, device=u.device)
    ends = torch.searchsorted(picked.flatten()[order], experts, right=True).to(torch.int32)
    x = _Permute.apply(flat, order // used, places, used)
    h = F.silu(grouped(x, w["ffn_gate_exps"], ends)) * grouped(x, w["ffn_up_exps"], ends)
    y = _Permute.apply(grouped(h, w["ffn_down_exps"], ends), places, order, 1)
    y = (y.view(n, used, -1) * share[..., None]).sum(1)
    h = F.silu(F.linear(flat, w["ffn_gate_shexp"])) * F.linear(flat, w["ffn_up_shexp"])
    shared_gate = torch.sigmoid(F.linear(flat.to(router.dtype), w["ffn_gate_inp_shexp"])).to(u.dtype)
    y = y + shared_gate * F.linear(h, w["ffn_down_shexp"])
    counted = valid.flatten().to(logits.dtype)[:, None]
    real = counted.sum().clamp_min(1)
    load = (torch.zeros_like(logits).scatter(1, picked, 1.0) * counted).sum(0) / (real * used)
    return y.view_as(u), g.experts * (load * ((logits.softmax(-1) * counted).sum(0) / real)).sum()


def table_rows(ids: Tensor, g: Geometry, position: Tensor) -> Tensor:
    """Rows of the n-gram table that each token reads: (B, T, tables)."""
    context, cut = [ids], torch.zeros_like(ids, dtype=torch.bool)
    for back in range(1, g.ngram):
        before = F.pad(ids[:, : ids.shape[1] - back], (back, 0))
        cut = cut | (position < back) | (before == g.ngram_eos)
        context.append(torch.where(cut, g.ngram_eos, before))
    hashed, found = context[0] * g.multipliers[0], []
    for order in range(2, g.ngram + 1):
        hashed = hashed ^ (context[order - 1] * g.multipliers[order - 1])
        for i in range((order - 2) * g.heads_per_ngram, (order - 1) * g.heads_per_ngram):
            found.append(hashed % g.table_sizes[i] + g.table_offsets[i])
    return torch.stack(found, -1)


def ple(x: Tensor, embedded: Tensor, w: Weights, g: Geometry, position: Tensor) -> Tensor:
    """What the n-gram embedding (B, T, H) adds to all streams: (B, T, C, H)."""
    key = F.linear(embedded, w["ple_key"]).view_as(x)
    key, query = (
        rms(key, g.eps) * w["ple_norm_key"].view(x.shape[2:]),
        rms(x, g.eps) * w["ple_norm_query"].view(x.shape[2:]),
    )
    s = (key * query).sum(-1) * g.hidden**-0.5
    gate = torch.sigmoid(s.sign() * s.abs().clamp_min(1e-6).sqrt())
    p = gate[..., None] * F.linear(embedded, w["ple_value"])[:, :, None].to(x.dtype)
    f = (rms(p, g.eps) * w["ple_norm_conv"].view(x.shape[2:])).flatten(2)
    return p + F.silu(convolve(f, w["ple_conv1d"], position, g.ngram)).view_as(p)

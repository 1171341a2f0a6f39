"""The gated delta rule over whole sequences, in chunks, for training.

Source   the chunked form of the gated delta rule. A chunk is an affine map of the state, S' = P S + Q; the maps are
         composed in log2(chunks) steps of batched products, so that no step of a sequence waits for the one before
Precise  float32 (products may run as TF32 on a card); float64 in, float64 out
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK = 64
RESET = -30.0
"""Log decay at a conversation's first token: what was before counts 1e-13."""
_BASE = 8


def unit_lower_inverse(m: Tensor) -> Tensor:
    """(I + m)^-1 for strictly lower triangular m (N, n, n), n = 8 * 2^i. By halves: no power of m grows."""
    return _UnitLowerInverse.apply(m)


class _UnitLowerInverse(torch.autograd.Function):
    """Autograd of the inverse itself: two products, whatever way it was found."""

    @staticmethod
    def forward(ctx: Any, m: Tensor) -> Tensor:
        inverse = _inverse(m)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        turned = inverse.transpose(-1, -2)
        return -(turned @ grad @ turned).tril(-1)


def _inverse(m: Tensor) -> Tensor:
    n = m.shape[-1]
    eye = torch.eye(_BASE, dtype=m.dtype, device=m.device)
    corner = _diagonal(m, _BASE)
    square = corner @ corner
    inverse = (eye - corner) @ (eye + square) @ (eye + square @ square)
    size = _BASE
    while size < n:
        below = _diagonal(m, 2 * size)[:, size:, :size]
        first, second = inverse.view(-1, 2, size, size).unbind(1)
        corner = -(second @ below @ first)
        inverse = torch.cat([torch.cat([first, torch.zeros_like(first)], -1), torch.cat([corner, second], -1)], -2)
        size *= 2
    return inverse.view(m.shape)


def _diagonal(m: Tensor, size: int) -> Tensor:
    """The square blocks on the diagonal of m (N, n, n): (N * n / size, size, size)."""
    parts = [m[:, i : i + size, i : i + size] for i in range(0, m.shape[-1], size)]
    return torch.stack(parts, 1).view(-1, size, size)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """q, k, v (B, T, V, D), g (log decay) and beta (B, T, V) -> (B, T, V, D); T a multiple of CHUNK, state zero before.

    q and k are normalised, q scaled by D^-1/2; g is RESET where a new sequence begins.
    """
    b, t, heads, d = v.shape
    n = t // CHUNK
    # one batch of chunks (B * V * N, CHUNK, D): plain batched products everywhere
    q, k, v = (x.reshape(b, n, CHUNK, heads, d).permute(0, 3, 1, 2, 4).reshape(-1, CHUNK, d) for x in (q, k, v))
    g, beta = (x.reshape(b, n, CHUNK, heads).permute(0, 3, 1, 2).reshape(-1, CHUNK) for x in (g, beta))
    total = g.cumsum(-1)
    causal = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=v.device).tril()
    decay = (total[:, :, None] - total[:, None, :]).masked_fill(~causal, float("-inf")).exp()
    turned = k.transpose(-1, -2)
    solved = unit_lower_inverse((beta[..., None] * (k @ turned) * decay).tril(-1))
    u = solved @ (beta[..., None] * v)
    y = solved @ ((beta * total.exp())[..., None] * k)
    left = ((total[:, -1:] - total).exp()[..., None] * k).transpose(-1, -2)
    eye = torch.eye(d, dtype=v.dtype, device=v.device)
    kept = total[:, -1].exp()[:, None, None] * eye - left @ y
    state = _before(kept.view(-1, n, d, d), (left @ u).view(-1, n, d, d)).view(-1, d, d)
    o = (q @ turned * decay) @ (u - y @ state) + total.exp()[..., None] * (q @ state)
    return o.view(b, heads, n, CHUNK, d).permute(0, 2, 3, 1, 4).reshape(b, t, heads, d)


def _before(p: Tensor, q: Tensor) -> Tensor:
    """The state before each chunk: the chunks' maps S' = p S + q (B * V, N, D, D) composed from zero."""
    n, step = p.shape[1], 1
    while step < n:
        q = torch.cat([q[:, :step], q[:, step:] + p[:, step:] @ q[:, :-step]], 1)
        if 2 * step < n:
            p = torch.cat([p[:, :step], p[:, step:] @ p[:, :-step]], 1)
        step *= 2
    return torch.cat([torch.zeros_like(q[:, :1]), q[:, :-1]], 1)

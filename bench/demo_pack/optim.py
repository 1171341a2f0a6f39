"""Muon for the matrices inside the layers: momentum whose singular values are pushed to 1; gradients kept in bounds.

Which    matrices of blocks and mixers; AdamW has embeddings, head, n-gram table, norms, convolutions and narrow gates
Scale    an update has the size of AdamW's (0.2 sqrt(longer side)), so that one rate and one decay serve both
Source   Newton-Schulz with the quintic of Keller Jordan's Muon; the scale of "Muon is scalable for LLM training"
Cost     matrices of one shape are updated as one batch; a few ms a step for the demo pack
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

QUINTIC = (3.4445, -4.7750, 2.0315)
STEPS = 5
MOST = 1.0
"""The largest norm of all gradients together,"""
SPIKE = 3.0
"""and the largest in units of the usual one."""
USUAL_STEPS = 50


def orthogonal(m: Tensor) -> Tensor:
    """m (N, rows, cols) with singular values near 1 (0.7 to 1.2); bfloat16 on a card, else float32."""
    x = m.to(torch.bfloat16 if m.is_cuda else torch.float32)
    flipped = x.shape[-2] > x.shape[-1]
    x = x.transpose(-1, -2) if flipped else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = QUINTIC
    for _ in range(STEPS):
        square = x @ x.transpose(-1, -2)
        x = a * x + (b * square + c * square @ square) @ x
    return (x.transpose(-1, -2) if flipped else x).to(m.dtype)


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, made orthogonal; matrices (rows, cols) and stacks of them (N, rows, cols)."""

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if closure is not None:
            raise ValueError("Muon.step takes no closure")
        for group in self.param_groups:
            shapes: dict[tuple[int, ...], list[Tensor]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    shapes.setdefault(tuple(p.shape[-2:]), []).append(p)
            for same in shapes.values():
                self._update(same, group["lr"], group["momentum"], group["weight_decay"])

    def _update(self, params: list[Tensor], lr: float, momentum: float, decay: float) -> None:
        for p in params:
            if "momentum" not in self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(p)
        held, grads = [self.state[p]["momentum"] for p in params], [p.grad for p in params]
        torch._foreach_lerp_(held, grads, 1 - momentum)
        ahead = torch._foreach_lerp(grads, held, momentum)
        rows, cols = params[0].shape[-2:]
        updates = orthogonal(torch.cat([m.reshape(-1, rows, cols) for m in ahead]))
        counts = [p.numel() // (rows * cols) for p in params]
        parts = [u.reshape(p.shape) for u, p in zip(updates.split(counts), params, strict=True)]
        torch._foreach_mul_(params, 1 - lr * decay)
        torch._foreach_add_(params, parts, alpha=-lr * 0.2 * max(rows, cols) ** 0.5)


class Clip:
    """Scales all gradients together to a norm of at most MOST and SPIKE times the usual one, and makes them zero when
    it is no number: one bad batch costs a step and not the training.

    usual, bad: scalars on the device, the running mean of the norms and how many were no numbers; the host waits for
    nothing
    """

    def __init__(self, device: torch.device | str) -> None:
        self.usual = torch.full((), MOST, device=device)
        self.bad = torch.zeros((), dtype=torch.int64, device=device)

    @torch.no_grad()
    def __call__(self, params: Sequence[Tensor]) -> None:
        """The gradients become parts of one array."""
        held = [(p, p.grad) for p in params if p.grad is not None]
        flat = torch.cat([grad.reshape(-1) for _, grad in held])
        norm = torch.linalg.vector_norm(flat)
        good, most = torch.isfinite(norm), (SPIKE * self.usual).clamp_max(MOST)
        flat = torch.where(good, flat * (most / (norm + 1e-6)).clamp_max(1.0), 0.0)
        moved = self.usual.lerp(torch.minimum(norm, most), 1 / USUAL_STEPS)
        self.usual, self.bad = torch.where(good, moved, self.usual), self.bad + ~good
        for (p, _), part in zip(held, flat.split([p.numel() for p, _ in held]), strict=True):
            p.grad = part.view_as(p)

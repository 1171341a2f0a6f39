"""What training lowers, and what it is judged by on the way.

Loss      mean cross-entropy of the answers' tokens, that of all others at a small weight, and the draft layer's of the
          answers, behind its own proposals where there are such; the experts' balance; the indexer's divergence from
          the attention
Judged    by task: loss, share of answers whose every token is the likeliest (each after the right ones before it), and
          share of drafts that are what the model itself says, of first, second and third ones
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from strata.bench.demo_pack.data.mixture import TASKS
from strata.bench.demo_pack.model import Output

PROMPT_WEIGHT = 0.1
DRAFT_WEIGHT = 0.3
BALANCE_WEIGHT = 0.03
"""Of a mean over the layers. At 0.01 four experts of 32 took most tokens in the lower layers."""
INDEXER_WEIGHT = 1.0


class Tokens(NamedTuple):
    """A batch on the device: ids int64, mask bool, segment int32, task int64 (len(TASKS) is padding), all (B, T)."""

    ids: Tensor
    mask: Tensor
    segment: Tensor
    task: Tensor


class Losses(NamedTuple):
    """total and its parts (scalars) · by_depth (2, 2): sums of the second and third drafts' cross-entropies, and their
    tokens · by_task (2, tasks): of the answers'."""

    total: Tensor
    answers: Tensor
    draft: Tensor
    balance: Tensor
    indexer: Tensor
    by_depth: Tensor
    by_task: Tensor


def ahead(x: Tensor, n: int, fill: Any) -> Tensor:
    """x[:, t + n] at t."""
    return F.pad(x[:, n:], (0, n), value=fill)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """(B, T, vocab), (B, T) -> (B, T) float32."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)


class Objective:
    """The losses of a forward pass. `compiled`: as in DemoModel."""

    def __init__(self, compiled: Callable[[Any], Any] = lambda f: f) -> None:
        self._entropy = compiled(cross_entropy)

    def __call__(self, out: Output, tokens: Tokens) -> Losses:
        ids, mask, segment, task = tokens
        answered = [ahead(mask, n, False) & (ahead(segment, n, -1) == segment) for n in (1, 2)]
        prompt = ~answered[0] & (ahead(segment, 1, -1) == segment) & (segment >= 0)
        n_answered = answered[0].sum().clamp_min(1)
        each = self._entropy(out.logits, ahead(ids, 1, 0))
        answers = (each * answered[0]).sum() / n_answered
        rest = (each * prompt).sum() / prompt.sum().clamp_min(1)
        draft = (self._entropy(out.draft, ahead(ids, 2, 0)) * answered[1]).sum() / answered[1].sum().clamp_min(1)
        total = answers + PROMPT_WEIGHT * rest + DRAFT_WEIGHT * draft
        total = total + BALANCE_WEIGHT * out.balance + INDEXER_WEIGHT * out.indexer
        by_depth = torch.zeros(2, 2, device=ids.device)
        if out.chain is not None:
            deep = self._entropy(out.chain.logits, ahead(ids, 2, 0))
            at = torch.stack([answered[1] & (out.chain.depth == n) for n in (2, 3)])
            by_depth = torch.stack([(deep * at).sum((1, 2)), at.sum((1, 2))])
            total = total + DRAFT_WEIGHT * by_depth[0].sum() / by_depth[1].sum().clamp_min(1)
        counted = torch.stack([each.detach() * answered[0], answered[0].float()]).flatten(1)
        by_task = torch.zeros(2, len(TASKS) + 1, device=ids.device).index_add(1, task.flatten(), counted)
        return Losses(total, answers, draft, out.balance, out.indexer, by_depth, by_task[:, :-1])


class Judged(NamedTuple):
    """By task: answers, those right in every token · by depth and task (3, tasks): drafts judged, and those that agree
    with the model."""

    answers: Tensor
    right: Tensor
    drafted: Tensor
    agreed: Tensor

    def page(self) -> dict[str, dict[str, float]]:
        """For the log: {task: {"answers", "right", "draft", "second", "third"}}, shares of 1; what was not judged is
        left out."""
        found: dict[str, dict[str, float]] = {}
        for i, task in enumerate(TASKS):
            if self.answers[i]:
                found[task] = {"answers": int(self.answers[i]), "right": float(self.right[i] / self.answers[i])}
                for name, n, agreed in zip(("draft", "second", "third"), self.drafted, self.agreed, strict=True):
                    if n[i]:
                        found[task][name] = float(agreed[i] / n[i])
        return found


def judge(out: Output, tokens: Tokens) -> Judged:
    """An answer is a conversation here: all its tokens to be predicted."""
    ids, mask, segment, task = (x.cpu() for x in tokens)
    said = out.logits.argmax(-1).cpu()
    same = ahead(segment, 1, -1) == segment
    answered = ahead(mask, 1, False) & same
    wrong = answered & (said != ahead(ids, 1, 0))
    # the draft at p stands for what the model says at p + 1
    drafted, wanted = ahead(answered, 1, False) & same, ahead(said, 1, -1)
    deep, depth = out.chain or (out.draft, torch.ones_like(segment))
    drafts = [(out.draft, drafted), *((deep, drafted & (depth.cpu() == n)) for n in (2, 3))]
    n_rows, n_tasks = len(ids), len(TASKS)
    per_row = int(segment.max()) + 1
    which = torch.arange(n_rows)[:, None] * per_row + segment.clamp_min(0)
    has = torch.zeros(n_rows * per_row, dtype=torch.bool).index_put((which[answered],), torch.tensor(True))
    failed = torch.zeros_like(has).index_put((which[wrong],), torch.tensor(True))
    kind = torch.zeros(n_rows * per_row, dtype=torch.int64).index_put((which[answered],), task[answered])
    count = lambda kinds: torch.bincount(kinds, minlength=n_tasks)[:n_tasks].float()  # noqa: E731
    tried = torch.stack([count(task[at]) for _, at in drafts])
    agreed = torch.stack([count(task[at & (logits.argmax(-1).cpu() == wanted)]) for logits, at in drafts])
    return Judged(count(kind[has]), count(kind[has & ~failed]), tried, agreed)

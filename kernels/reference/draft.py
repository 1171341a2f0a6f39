"""The likeliest token of each row, and how likely it is: what a draft needs of its logits."""

from __future__ import annotations

import numpy as np

from strata.kernels.ops import F32, I32


def likeliest(logits: F32) -> tuple[I32, F32]:
    """logits (n, V) -> ids int32 (n,), equal logits: the lower id, and their probabilities of the softmax (n,)."""
    ids = logits.argmax(1).astype(np.int32)
    best = logits[np.arange(len(logits)), ids]
    return ids, (1 / np.exp(logits - best[:, None]).sum(1)).astype(np.float32)

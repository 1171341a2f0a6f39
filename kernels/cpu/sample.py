"""Sampling: one token id from logits. Contract: `ops.Kernels.sample`; the arithmetic is the reference's, float64.

What is fast is the way to the few ids that can be drawn. The k-th largest of the maxima of short runs of logits is
not above the k-th largest logit, so the logits at or above it hold the k best. Penalties move only the ids in
`recent`: those, and the best k + (how many ids they are) of all, hold every candidate.
Cost   two passes over the logits and the reference's work on about a hundred ids
"""

from __future__ import annotations

from typing import Final

import numpy as np

from strata.kernels.check import check, require
from strata.kernels.ops import F32, I32, I64, MAX_TOP_K, Sampling
from strata.kernels.reference.sample import sample as sample_few

RUN: Final = 64
"""Logits of a run."""


def sample(logits: F32, recent: I32, how: Sampling, position: int) -> int:
    """One id from logits (V,). Raises ValueError for settings out of range and for logits that are not finite."""
    vocab = check(logits=(logits, "V", np.float32), recent=(recent, "last", np.int32))["V"]
    inside = not recent.size or (recent.min() >= 0 and recent.max() < vocab)
    require(inside, f"recent ids must be in 0 to {vocab - 1}, got {recent.tolist()}")
    if how.temperature <= 0 or not 1 <= how.top_k <= MAX_TOP_K or not np.isfinite(logits.max()):
        return sample_few(logits, recent, how, position)
    seen = np.unique(recent)
    ids = _candidates(logits, how.top_k + len(seen), seen)
    return int(ids[sample_few(logits[ids], np.searchsorted(ids, recent).astype(np.int32), how, position)])


def _candidates(logits: F32, k: int, seen: I32) -> I64:
    """Ascending ids that hold the k best logits and all of `seen`."""
    runs = len(logits) // RUN
    if k > runs:
        return np.arange(len(logits))
    bound = np.partition(logits[: runs * RUN].reshape(runs, RUN).max(1), runs - k)[runs - k]
    return np.union1d(np.flatnonzero(logits >= bound), seen)

"""Sampling: a token id as a pure function of logits, recent ids, settings, position. Contract: `ops.Kernels.sample`.

Order: penalties, top-k, temperature, softmax, top-p, min-p, draw. Float64 over at most 64 candidates, so that every
backend can use this one. The draw is counter-based: the same (seed, position) gives the same number whatever was
sampled before. Source of the generator: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3 (2011).
Cost: one pass over the vocabulary and one partial sort.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from strata.kernels.check import check
from strata.kernels.ops import F32, I32, MAX_TOP_K, Sampling
from strata.kernels.reference.scalar import F64

_MASK = 0xFFFFFFFF


def sample(logits: F32, recent: I32, how: Sampling, position: int) -> int:
    """One id from logits (V,). Raises ValueError for settings out of range and for logits that are not finite."""
    check(logits=(logits, "V", np.float32), recent=(recent, "last", np.int32))
    if not np.isfinite(logits.max()):
        raise ValueError(f"logits must be finite, got {logits.max()} at id {logits.argmax()}")
    if how.temperature <= 0:
        return int(logits.argmax())
    _check_settings(how, recent, len(logits))
    ids, scores = _top_k(_penalised(logits.astype(np.float64), recent, how), how.top_k)
    e = np.exp((scores - scores[0]) / how.temperature)
    p = e / e.sum()
    if how.top_p < 1:
        p = p[: int(np.searchsorted(np.cumsum(p), how.top_p)) + 1]
    p = p[p >= how.min_p * p[0]]
    cumulated = np.cumsum(p)
    chosen = int(np.searchsorted(cumulated, uniform(how.seed, position) * cumulated[-1], side="right"))
    return int(ids[min(chosen, len(p) - 1)])


def _check_settings(how: Sampling, recent: I32, vocab: int) -> None:
    if not 1 <= how.top_k <= MAX_TOP_K:
        raise ValueError(f"top_k must be in 1 to {MAX_TOP_K}, got {how.top_k}")
    if not how.top_p > 0 or not 0 <= how.min_p <= 1 or not how.penalty_repeat > 0:
        raise ValueError(f"top_p and penalty_repeat must be above 0 and min_p in 0 to 1, got {how}")
    if recent.size and (recent.min() < 0 or recent.max() >= vocab):
        raise ValueError(f"recent ids must be in 0 to {vocab - 1}, got {recent.min()} to {recent.max()}")


def _penalised(scores: F64, recent: I32, how: Sampling) -> F64:
    """Repetition penalty once per distinct id, then frequency by count and presence."""
    ids, counts = np.unique(recent, return_counts=True)
    seen = scores[ids]
    seen = np.where(seen > 0, seen / how.penalty_repeat, seen * how.penalty_repeat)
    scores[ids] = seen - counts * how.penalty_freq - how.penalty_present
    return scores


def _top_k(scores: F64, k: int) -> tuple[npt.NDArray[np.int64], F64]:
    """The k best ids by falling score (equal: the lower id) and their scores."""
    k = min(k, len(scores))
    ids = np.flatnonzero(scores >= np.partition(scores, -k)[-k])
    ids = ids[np.argsort(-scores[ids], kind="stable")[:k]]
    return ids, scores[ids]


def uniform(seed: int, position: int) -> float:
    """A number in (0, 1) for this seed and position: the first word of Philox-4x32-10."""
    counter = (position & _MASK, position >> 32 & _MASK, 0, 0)
    return (philox(counter, (seed & _MASK, seed >> 32 & _MASK))[0] + 0.5) * 2.0**-32


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox-4x32 with 10 rounds: 128 random bits for a 128-bit counter and a 64-bit key."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        even, odd = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = odd >> 32 ^ c1 ^ k0, odd & _MASK, even >> 32 ^ c3 ^ k1, even & _MASK
        k0, k1 = k0 + 0x9E3779B9 & _MASK, k1 + 0xBB67AE85 & _MASK
    return c0, c1, c2, c3

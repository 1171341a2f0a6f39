"""What a GEN or BGEN line asks for: why it cannot be served, or the request that the schedule takes.

Errors   a reason is one line, the text of an `ERR`; None: there is none
"""

from __future__ import annotations

import time
from typing import Final

import numpy as np

from strata.engine.schedule.solo import Request
from strata.kernels.ops import Sampling
from strata.protocol.lines import BGen, Gen, SamplingKeys

SPARE_TOKENS: Final = 8
"""What the context rule keeps free behind prompt and new tokens."""
SAMPLING_RANGES: Final = {
    "temperature": (1e-100, 1e100),
    "penalty_repeat": (1e-6, 1e6),
    "penalty_freq": (-1e6, 1e6),
    "penalty_present": (-1e6, 1e6),
}
"""What a sampled request may ask for: inside, every score stays finite for any float32 logit."""


def gen_refusal(gen: Gen | BGen, max_context: int, vocab: int) -> str | None:
    """Why a request cannot be served, whatever the slots do; or None."""
    n = len(gen.ids)
    if n + gen.max_new + SPARE_TOKENS > max_context:
        return (
            f"prompt ({n} tokens) + max_new ({gen.max_new}) exceeds the context ({max_context}); "
            f"{SPARE_TOKENS} tokens stay free: shorten one of them or start with a larger --max-context"
        )
    largest = int(np.frombuffer(gen.ids, np.int32).max())
    if largest >= vocab:
        return f"a token id is outside the vocabulary: {largest}, the model has {vocab}"
    return None if gen.keys.is_greedy else _sampling_refusal(gen.keys)


def slot_refusal(gen: BGen, n_slots: int, is_free: bool) -> str | None:
    """Why an admission cannot have its slot, or None. is_free: the slot is there and does not decode."""
    if is_free and gen.max_new >= 1:
        return None
    return (
        f"BGEN: no such free slot (--batch {n_slots}) or a bad max_new: slot {gen.slot}, max_new {gen.max_new}; "
        "use a slot that does not decode, and ask for at least one token"
    )


def _sampling_refusal(keys: SamplingKeys) -> str | None:
    for name, (low, high) in SAMPLING_RANGES.items():
        value: float = getattr(keys, name)
        if not low <= value <= high:
            return f"bad request: {name}: wants a number from {low:g} to {high:g}, got {value:g}"
    return None


def request_of(gen: Gen | BGen) -> Request:
    """The request of a line that nothing speaks against. Seed 0 takes the clock."""
    keys = gen.keys
    return Request(
        prompt=np.array(gen.ids, np.int32),
        max_new=gen.max_new,
        sampling=sampling_of(keys, keys.seed or time.time_ns()),
        penalty_last_n=keys.penalty_last_n,
        spec_min_p=keys.spec_min_p,
        keep=keys.ckpt,
        pin=keys.pin,
    )


def sampling_of(keys: SamplingKeys, seed: int) -> Sampling:
    return Sampling(
        temperature=keys.temperature,
        top_k=keys.top_k,
        top_p=keys.top_p,
        min_p=keys.min_p,
        penalty_repeat=keys.penalty_repeat,
        penalty_freq=keys.penalty_freq,
        penalty_present=keys.penalty_present,
        seed=seed,
    )

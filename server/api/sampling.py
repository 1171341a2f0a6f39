"""The sampling fields of a request, and what the engine is told of them.

Order    request, then the config's `sampling`, then nothing; a null counts as absent. No temperature anywhere: greedy
Units    probabilities, tokens
Source   docs/protocol.md for the engine's keys
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from strata.protocol.config import Sampling
from strata.protocol.lines import SamplingKeys
from strata.server.errors import bad_request

MAX_TOP_K = 64
MAX_SEED = 2**64 - 1
DEFAULT_LAST_N = 64

T = TypeVar("T")

_Penalty = Annotated[float, Meta(ge=-100, le=100)]


class Tune(msgspec.Struct, frozen=True):
    """`strata_tune`: engine settings for one request."""

    pcie_frac: Annotated[float, Meta(ge=0, le=1)] | None = None
    spec_min_p: Annotated[float, Meta(ge=0, le=1)] | None = None


class SamplingFields(msgspec.Struct, kw_only=True):
    """Common to every dialect; ranges are checked when the body is decoded."""

    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: int | Literal["off"] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    frequency_penalty: _Penalty | None = None
    presence_penalty: _Penalty | None = None
    penalty_last_n: int | None = None
    seed: int | None = None
    strata_tune: Tune | None = None
    strata_checkpoint: bool | None = None
    experimental_speed_projection: bool | None = None


def sampling_keys(fields: SamplingFields, defaults: Sampling, *, pin: int | None, has_cvec: bool) -> SamplingKeys:
    """The engine's keys. A key left at its default is not sent. Raises Refused for a seed that is too large."""
    temperature = _pick(fields.temperature, defaults.temperature) or 0.0
    keys: dict[str, float | int | bool | None] = {
        "temperature": temperature,
        "top_p": _pick(fields.top_p, defaults.top_p),
        "min_p": _pick(fields.min_p, defaults.min_p),
        "penalty_repeat": _pick(fields.repetition_penalty, defaults.repetition_penalty),
        "penalty_freq": _pick(fields.frequency_penalty, defaults.frequency_penalty),
        "penalty_present": _pick(fields.presence_penalty, defaults.presence_penalty),
    }
    top_k = _pick(fields.top_k, defaults.top_k)
    if top_k is not None and temperature > 0:
        keys["top_k"] = top_k if isinstance(top_k, int) and 1 <= top_k <= MAX_TOP_K else MAX_TOP_K
    penalties = (keys["penalty_repeat"] or 1.0, keys["penalty_freq"] or 0.0, keys["penalty_present"] or 0.0)
    if penalties != (1.0, 0.0, 0.0):
        last_n = _pick(fields.penalty_last_n, defaults.penalty_last_n) or 0
        keys["penalty_last_n"] = last_n if last_n > 0 else DEFAULT_LAST_N
    seed = _pick(fields.seed, defaults.seed) or 0
    if seed > MAX_SEED:
        raise bad_request(f"seed: wants a whole number up to {MAX_SEED}, got {seed}", "seed")
    keys["seed"] = max(seed, 0)
    keys["pin"] = pin
    if fields.strata_tune is not None:
        keys["pcie_frac"] = fields.strata_tune.pcie_frac
        keys["spec_min_p"] = fields.strata_tune.spec_min_p
    if fields.strata_checkpoint is False:
        keys["ckpt"] = False
    projection = _pick(fields.experimental_speed_projection, defaults.experimental_speed_projection)
    if projection is not None and has_cvec:
        keys["cvec"] = projection
    return msgspec.convert({name: value for name, value in keys.items() if value is not None}, SamplingKeys)


def _pick(given: T | None, default: T | None) -> T | None:
    return default if given is None else given

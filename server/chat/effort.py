"""How much a request wants the model to think: the many spellings of the dialects, as one value."""

from __future__ import annotations

from typing import NamedTuple

from strata.server.chat.errors import RequestError

_OFF = frozenset({"none", "off", "minimal", "disabled"})
_LEVELS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}


class Thinking(NamedTuple):
    """enabled None and level None: the model's own default. `level` is the word for the template."""

    enabled: bool | None = None
    level: str | None = None


MODEL_DEFAULT = Thinking()
NO_THINKING = Thinking(enabled=False)


def thinking_from_effort(effort: str) -> Thinking:
    """`reasoning_effort`, `reasoning.effort`, `output_config.effort`. Raises RequestError for an unknown word."""
    if effort in _OFF:
        return NO_THINKING
    if effort not in _LEVELS:
        known = ", ".join(["none", *_LEVELS])
        raise RequestError(f"reasoning effort {effort[:40]!r} is unknown; known: {known}")
    return Thinking(enabled=True, level=_LEVELS[effort])


def thinking_from_budget(n_tokens: int) -> Thinking:
    """Anthropic's `thinking.budget_tokens`."""
    if n_tokens < 2048:
        return thinking_from_effort("low")
    return thinking_from_effort("medium" if n_tokens < 8192 else "high")

"""What the output parser says: pieces of an answer, in the order in which they are to be sent."""

from __future__ import annotations

from typing import Literal

import msgspec

EngineReason = Literal["stop", "length", "cancel"]
FinishReason = Literal["stop", "tool_calls", "length", "stop_string", "cancel"]


class Reasoning(msgspec.Struct, frozen=True):
    text: str


class Content(msgspec.Struct, frozen=True):
    text: str


class ToolStart(msgspec.Struct, frozen=True):
    """A call whose name is complete. Calls are numbered from 0 and follow one another."""

    index: int
    id: str
    name: str


class ToolArgs(msgspec.Struct, frozen=True):
    """A piece of the arguments' JSON text; the pieces of a call that ends are one JSON object."""

    index: int
    piece: str


class ToolEnd(msgspec.Struct, frozen=True):
    index: int


class Stopped(msgspec.Struct, frozen=True):
    """A stop string was found: the engine is to be stopped, nothing more will be delivered."""

    word: str


class Looped(msgspec.Struct, frozen=True):
    """The output repeats itself: the engine is to be stopped, the answer ends with "length"."""

    n_tokens: int


Event = Reasoning | Content | ToolStart | ToolArgs | ToolEnd | Stopped | Looped


class Finish(msgspec.Struct, frozen=True):
    """How the answer ended, in no dialect: OpenAI says "stop" for stop_string and cancel, Anthropic "end_turn", ..."""

    reason: FinishReason
    stop_string: str | None = None

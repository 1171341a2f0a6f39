"""One conversation with its answer, what a right answer has to say, and whether it may be learned from.

Split    a sample is held out when the hash of its key says so. The key is the problem itself ("mul 17 23", a list with
         its question), whatever its wording, so that no held-out problem is ever learned from
Pure     a generator is a function of a random.Random and a size in tokens
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from random import Random
from typing import Any, Literal

import msgspec

Split = Literal["train", "test"]
HELD_OUT_PERCENT = 6


class Number(msgspec.Struct, frozen=True, tag=True):
    """The last whole number of the answer is this one."""

    value: int


class Text(msgspec.Struct, frozen=True, tag=True):
    """The answer is this text, but for white space around it."""

    text: str


class Value(msgspec.Struct, frozen=True, tag=True):
    """The answer names this value as a whole word, and none of the `others`."""

    value: str
    others: tuple[str, ...] = ()


class Json(msgspec.Struct, frozen=True, tag=True):
    """The answer is JSON of this value and nothing else; the order of an object's keys does not count."""

    value: Any


class Call(msgspec.Struct, frozen=True, tag=True):
    """The answer is one call of this tool with these arguments."""

    name: str
    arguments: dict[str, Any]


Wants = Number | Text | Value | Json | Call


class Sample(msgspec.Struct, frozen=True):
    """messages, tools  OpenAI's shape; the last message is the assistant's, its reasoning in `reasoning_content`
    thinking         whether the request leaves thinking on
    wants            what the last answer has to say; None: nothing can be checked
    """

    task: str
    key: str
    messages: list[dict[str, Any]]
    wants: Wants | None = None
    tools: list[dict[str, Any]] = []
    thinking: bool = True


Generator = Callable[[Random, int], Sample]


def split_of(key: str) -> Split:
    """Where a problem belongs, the same on every machine and in every run."""
    digest = hashlib.blake2b(key.encode(), digest_size=4).digest()
    return "test" if int.from_bytes(digest, "little") % 100 < HELD_OUT_PERCENT else "train"


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, reasoning: str | None = None) -> dict[str, Any]:
    return {"role": "assistant", "content": text} | ({"reasoning_content": reasoning} if reasoning else {})

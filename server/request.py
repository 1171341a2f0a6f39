"""A chat request in no dialect, and the step that makes an engine's request of it.

Input    messages and tools in OpenAI's shape, as a dialect under api/ has decoded them
Output   Plan: prompt ids, token budget, and the parser for what will come back
Errors   Refused 400 with the field and the numbers
Cost     renders and encodes: call `plan` in a thread
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from .chat.effort import MODEL_DEFAULT, Thinking
from .chat.errors import RequestError
from .chat.events import EngineReason, Event, Finish
from .chat.output import OutputParser
from .chat.template import Chat
from .errors import Refused, bad_request

# The engine needs this many cells of the context beyond prompt and answer.
CONTEXT_MARGIN = 8

Json = dict[str, Any]


class PrefixMessages(msgspec.Struct, frozen=True):
    """The part of the prompt that other requests share: `messages` whole messages, or `chars` of one, or `tokens`."""

    messages: int | None = None
    message: int | None = None
    chars: int | None = None
    tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    messages: list[Json]
    tools: list[Json] | None = None
    tool_choice: str | Json | None = None
    thinking: Thinking = MODEL_DEFAULT
    template_kwargs: Json | None = None
    max_tokens: int | None = None  # None: as many as fit
    stop: Sequence[str] = ()
    prefix: PrefixMessages | None = None


class Parser(Protocol):
    """Ids in, events out. `ended`: no further token is wanted; `finished` is set by `finish`."""

    finished: Finish | None

    @property
    def ended(self) -> bool: ...
    def push(self, token: int) -> list[Event]: ...
    def finish(self, engine: EngineReason) -> list[Event]: ...


@dataclass(frozen=True, slots=True)
class Plan:
    prompt: array[int]
    max_new: int
    parser: Parser
    pin: int | None = None


def plan(chat: Chat, request: ChatRequest, context: int, *, fit: bool, repeat_stop_tokens: int) -> Plan:
    """Raises Refused."""
    try:
        prompt = chat.prompt(
            request.messages,
            tools=request.tools,
            tool_choice=request.tool_choice,
            thinking=request.thinking,
            template_kwargs=request.template_kwargs,
        )
        max_new = token_budget(len(prompt.ids), request.max_tokens, context, fit=fit)
        parser = OutputParser(
            chat.vocabulary,
            tools=prompt.tools,
            starts_in_reasoning=prompt.starts_in_reasoning,
            forced_prefix=prompt.forced_prefix,
            stop=request.stop,
            repeat_stop_tokens=repeat_stop_tokens,
        )
        pin = _pinned(chat, request, prompt.ids)
    except RequestError as error:
        raise bad_request(str(error)) from None
    return Plan(array("i", prompt.ids), max_new, parser, pin)


def token_budget(n_prompt: int, max_tokens: int | None, context: int, *, fit: bool, param: str = "messages") -> int:
    """How many tokens may be generated. None, 0 and -1 ask for all that fit. Raises Refused; `param` has the prompt."""
    room = context - CONTEXT_MARGIN - n_prompt
    if room < 1:
        raise Refused(
            400,
            f"the prompt has {n_prompt} tokens, the context holds {context} of which {CONTEXT_MARGIN} stay free and at "
            f"least 1 is needed for the answer; shorten the prompt",
            param=param,
            code="context_length_exceeded",
        )
    if max_tokens is None or max_tokens in (0, -1):
        return room
    if max_tokens <= room or fit:
        return min(max_tokens, room)
    raise Refused(
        400,
        f"the prompt has {n_prompt} tokens and max_tokens is {max_tokens}, the context holds {context} of which "
        f"{CONTEXT_MARGIN} stay free; at most {room} tokens are left for the answer",
        param="max_tokens",
        code="context_length_exceeded",
    )


def _pinned(chat: Chat, request: ChatRequest, ids: list[int]) -> int | None:
    """The token length of the shared prefix, as far as this prompt really begins with it."""
    prefix = request.prefix
    if prefix is None:
        return None
    if prefix.tokens is not None:
        return prefix.tokens if 0 < prefix.tokens < len(ids) else None
    shown = _prefix_messages(prefix, request.messages)
    if not shown:
        return None
    short = chat.prompt(
        shown,
        tools=request.tools,
        tool_choice="none" if request.tool_choice == "none" else None,
        thinking=request.thinking,
        template_kwargs=request.template_kwargs,
    ).ids
    # What follows the last turn opener is the beginning of an answer, which the prefix does not have.
    opener = chat.vocabulary.special.get("<|im_start|>")
    end = max((i for i, token in enumerate(short) if token == opener), default=len(short))
    common = next((i for i, (a, b) in enumerate(zip(short, ids, strict=False)) if a != b), min(len(short), len(ids)))
    return min(common, end) or None


def _prefix_messages(prefix: PrefixMessages, messages: list[Json]) -> list[Json]:
    if prefix.messages is not None:
        if not 0 < prefix.messages <= len(messages):
            raise RequestError(f"strata_prefix.messages: from 1 to {len(messages)} is needed, got {prefix.messages}")
        return messages[: prefix.messages]
    if prefix.message is None or prefix.chars is None:
        raise RequestError("strata_prefix: needs `messages`, or `message` and `chars`, or `tokens`")
    if not 0 <= prefix.message < len(messages) or prefix.chars < 0:
        raise RequestError(f"strata_prefix.message: a message from 0 to {len(messages) - 1} is needed")
    cut = messages[prefix.message]
    content = cut.get("content")
    if not isinstance(content, str):
        raise RequestError(f"strata_prefix: the content of message {prefix.message} is no string and cannot be cut")
    return [*messages[: prefix.message], {**cut, "content": content[: prefix.chars]}]

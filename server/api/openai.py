"""The OpenAI dialect: POST /v1/chat/completions, GET /v1/models.

Streams open as soon as the request has its place in the queue; what fails later arrives as an error event.
Fields that this server does not know are ignored; fields it knows and cannot honour are refused by name.
"""

from __future__ import annotations

import secrets
import time
from typing import Annotated, Any

import anyio.to_thread
import msgspec
from aiohttp import web
from msgspec import Meta

from strata.server.chat.effort import MODEL_DEFAULT, NO_THINKING, Thinking, thinking_from_effort
from strata.server.chat.errors import RequestError
from strata.server.chat.events import Content, FinishReason, Reasoning, ToolArgs, ToolStart
from strata.server.errors import bad_request
from strata.server.generation import Finished, Generation, Reading, Update, Usage, timings
from strata.server.request import ChatRequest, Json, PrefixMessages, plan
from strata.server.state import STATE, State

from .body import read_body
from .native import json_answer
from .respond import respond
from .sampling import SamplingFields, sampling_keys

MAX_STOP = 4
FINISH: dict[FinishReason, str] = {
    "stop": "stop",
    "tool_calls": "tool_calls",
    "length": "length",
    "stop_string": "stop",
    "cancel": "stop",
}

_MaxTokens = Annotated[int, Meta(ge=-1)]


class ResponseFormat(msgspec.Struct):
    type: str = "text"


class ChatBody(SamplingFields, kw_only=True):
    messages: list[Json]
    model: str | None = None
    stream: bool | None = None
    max_tokens: _MaxTokens | None = None
    max_completion_tokens: _MaxTokens | None = None
    stop: str | list[str] | None = None
    tools: list[Json] | None = None
    tool_choice: str | Json | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: str | None = None
    reasoning_budget_tokens: int | None = None
    chat_template_kwargs: Json | None = None
    return_progress: bool | None = None
    n: int | None = None
    logprobs: bool | int | None = None
    strata_prefix: PrefixMessages | None = None


async def chat_completions(request: web.Request) -> web.StreamResponse:
    state = request.app[STATE]
    body = await read_body(request, ChatBody)
    check_supported(body)
    generation = await begin(state, chat_request(body), body)
    answer = ChatAnswer(f"chatcmpl-{secrets.token_hex(12)}", int(time.time()), state.settings.model)
    progress = bool(body.return_progress)
    return await respond(request, generation, answer, stream=bool(body.stream), return_progress=progress)


async def models(request: web.Request) -> web.Response:
    state = request.app[STATE]
    service, settings = state.service, state.settings
    entries: list[dict[str, Any]] = []
    for name in settings.names:
        entry: dict[str, Any] = {
            "id": name,
            "object": "model",
            "created": int(state.started_at),
            "owned_by": "strata",
            "status": {"value": "loaded" if service.is_loaded else "unloaded"},
            "meta": {"n_ctx": state.context},
            "architecture": {"input_modalities": ["text"]},
        }
        if name != settings.model:
            entry["alias_of"] = settings.model
        entries.append(entry)
    return json_answer({"object": "list", "data": entries})


def check_supported(body: ChatBody) -> None:
    """Refuses what this server knows and does not do."""
    check_single(body.n, body.logprobs)
    if body.response_format is not None and body.response_format.type != "text":
        raise bad_request(
            f"response_format.type: {body.response_format.type[:40]!r} is not available; 'text' is", "response_format"
        )
    if body.reasoning_budget_tokens:
        raise bad_request("reasoning_budget_tokens: is not available; only 0 is possible", "reasoning_budget_tokens")


def check_single(n: int | None, logprobs: bool | int | None) -> None:
    if n not in (None, 1):
        raise bad_request(f"n: only 1 is possible, got {n}", "n")
    if logprobs:
        raise bad_request("logprobs: are not available", "logprobs")


def stop_list(stop: str | list[str] | None) -> list[str]:
    words = [stop] if isinstance(stop, str) else stop or []
    if len(words) > MAX_STOP:
        raise bad_request(f"stop: at most {MAX_STOP} strings are possible, got {len(words)}", "stop")
    return words


def chat_request(body: ChatBody) -> ChatRequest:
    """The request in no dialect. Raises Refused."""
    limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    return ChatRequest(
        messages=body.messages,
        tools=body.tools,
        tool_choice=body.tool_choice,
        thinking=_thinking(body),
        template_kwargs=body.chat_template_kwargs,
        max_tokens=limit,
        stop=stop_list(body.stop),
        prefix=body.strata_prefix,
    )


def _thinking(body: ChatBody) -> Thinking:
    if body.reasoning_effort is None:
        enabled = (body.chat_template_kwargs or {}).get("enable_thinking")
        return NO_THINKING if enabled is False else MODEL_DEFAULT
    try:
        return thinking_from_effort(body.reasoning_effort)
    except RequestError as error:
        raise bad_request(str(error), "reasoning_effort") from None


async def begin(state: State, wanted: ChatRequest, fields: SamplingFields) -> Generation:
    """From a request to its place in the queue. Raises Refused."""
    settings, service = state.settings, state.service
    context = await service.ready_context()
    with service.preparing():
        planned = await anyio.to_thread.run_sync(
            lambda: plan(
                state.chat,
                wanted,
                context,
                fit=settings.fit_max_tokens,
                repeat_stop_tokens=settings.repeat_stop_tokens,
            ),
            limiter=state.preparing,
        )
    has_cvec = service.info.text("cvec", "0") != "0"
    keys = sampling_keys(fields, settings.sampling, pin=planned.pin, has_cvec=has_cvec)
    return Generation(service, planned, keys)


class ChatAnswer:
    """The answer of one request: as chunks while it grows, and whole at its end."""

    def __init__(self, answer_id: str, created: int, model: str) -> None:
        self._head: dict[str, Any] = {"id": answer_id, "created": created, "model": model}
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._arguments: list[list[str]] = []
        self._end: Finished | None = None

    def opening(self) -> dict[str, Any]:
        return self.chunk({"role": "assistant", "content": ""})

    def add(self, update: Update) -> None:
        match update:
            case Reasoning(text):
                self._reasoning.append(text)
            case Content(text):
                self._content.append(text)
            case ToolStart(_, call_id, name):
                self._calls.append({"id": call_id, "type": "function", "function": {"name": name}})
                self._arguments.append([])
            case ToolArgs(index, piece):
                self._arguments[index].append(piece)
            case Finished():
                self._end = update

    def whole(self) -> dict[str, Any]:
        assert self._end is not None
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._content)}
        if self._calls and not message["content"]:
            message["content"] = None
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        for call, pieces in zip(self._calls, self._arguments, strict=True):
            call["function"]["arguments"] = "".join(pieces)
        if self._calls:
            message["tool_calls"] = self._calls
        choice = {"index": 0, "finish_reason": FINISH[self._end.finish.reason], "message": message}
        return {**self._head, "object": "chat.completion", "choices": [choice], **figures(self._end)}

    def chunk(self, delta: dict[str, Any], finish: str | None = None, **more: Any) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice], **more}

    def chunk_of(self, update: Update) -> dict[str, Any] | None:
        match update:
            case Reasoning(text):
                return self.chunk({"reasoning_content": text})
            case Content(text):
                return self.chunk({"content": text})
            case ToolStart(index, call_id, name):
                function = {"name": name, "arguments": ""}
                return self.chunk(
                    {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
                )
            case ToolArgs(index, piece):
                return self.chunk({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
            case Reading(position, total, reused, ms):
                progress = {"total": total, "cache": reused, "processed": position, "time_ms": ms}
                return self.chunk({}, prompt_progress=progress)
            case Finished():
                return self.chunk({}, FINISH[update.finish.reason], **figures(update))
            case _:
                return None


def figures(end: Finished) -> dict[str, Any]:
    return {"usage": _usage(end.usage), "timings": timings(end.done)}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }

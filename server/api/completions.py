"""POST /v1/completions: the model continues a raw prompt, without template, tools or reasoning.

The prompt is text, in which special words are special tokens (it is the client's whole prompt), or a list of ids.
"""

from __future__ import annotations

import secrets
import time
from array import array
from typing import Annotated, Any

import anyio.to_thread
from aiohttp import web
from msgspec import Meta

from strata.server.chat.errors import RequestError
from strata.server.chat.events import Content, EngineReason, Event, Finish
from strata.server.chat.output import RepeatDetector
from strata.server.chat.stream import TextStream
from strata.server.chat.vocabulary import Vocabulary
from strata.server.errors import bad_request
from strata.server.generation import Finished, Generation, Update
from strata.server.request import Plan, token_budget
from strata.server.state import STATE, State

from .body import read_body
from .openai import FINISH, check_single, figures, stop_list
from .respond import respond
from .sampling import SamplingFields, sampling_keys

_Id = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class CompletionBody(SamplingFields, kw_only=True):
    prompt: str | list[_Id]
    stream: bool | None = None
    max_tokens: Annotated[int, Meta(ge=-1)] | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    logprobs: bool | int | None = None
    model: str | None = None


async def completions(request: web.Request) -> web.StreamResponse:
    state = request.app[STATE]
    body = await read_body(request, CompletionBody)
    check_single(body.n, body.logprobs)
    context = await state.service.ready_context()
    with state.service.preparing():
        planned = await anyio.to_thread.run_sync(_plan, state, body, context, limiter=state.preparing)
    has_cvec = state.service.info.text("cvec", "0") != "0"
    keys = sampling_keys(body, state.settings.sampling, pin=None, has_cvec=has_cvec)
    generation = Generation(state.service, planned, keys)
    answer = TextAnswer(f"cmpl-{secrets.token_hex(12)}", int(time.time()), state.settings.model)
    return await respond(request, generation, answer, stream=bool(body.stream))


def _plan(state: State, body: CompletionBody, context: int) -> Plan:
    vocabulary, settings = state.chat.vocabulary, state.settings
    limit = state.chat.max_chars
    if len(body.prompt) > limit:
        unit = "characters" if isinstance(body.prompt, str) else "ids"
        raise bad_request(f"prompt: {len(body.prompt)} {unit} are too long, the limit is {limit} {unit}", "prompt")
    ids = vocabulary.encode(body.prompt) if isinstance(body.prompt, str) else body.prompt
    if not ids:
        raise bad_request("prompt: at least one token is needed", "prompt")
    max_new = token_budget(len(ids), body.max_tokens, context, fit=settings.fit_max_tokens, param="prompt")
    try:
        parser = TextParser(vocabulary, stop_list(body.stop), settings.repeat_stop_tokens)
    except RequestError as error:
        raise bad_request(str(error), "stop") from None
    return Plan(array("i", ids), max_new, parser)


class TextParser:
    """Ids to text up to a stop string, with the interface of the output parser."""

    def __init__(self, vocabulary: Vocabulary, stop: list[str], repeat_stop_tokens: int) -> None:
        self.finished: Finish | None = None
        self._text = TextStream(vocabulary, stop)
        self._repeats = RepeatDetector(repeat_stop_tokens)
        self._looped = False

    @property
    def ended(self) -> bool:
        return self._looped or self._text.stopped is not None

    def push(self, token: int) -> list[Event]:
        if self.ended:
            return []
        self._looped = self._repeats.push(token)
        return _content(self._text.push(token))

    def finish(self, engine: EngineReason) -> list[Event]:
        events = _content(self._text.finish())
        if self._text.stopped is not None:
            self.finished = Finish("stop_string", self._text.stopped)
        else:
            self.finished = Finish("length" if self._looped else engine)
        return events


def _content(text: str) -> list[Event]:
    return [Content(text)] if text else []


class TextAnswer:
    """The answer of one request: as chunks while it grows, and whole at its end."""

    def __init__(self, answer_id: str, created: int, model: str) -> None:
        self._head: dict[str, Any] = {"id": answer_id, "object": "text_completion", "created": created, "model": model}
        self._text: list[str] = []
        self._end: Finished | None = None

    def opening(self) -> dict[str, Any]:
        return self._body("")

    def add(self, update: Update) -> None:
        match update:
            case Content(text):
                self._text.append(text)
            case Finished():
                self._end = update

    def whole(self) -> dict[str, Any]:
        assert self._end is not None
        return self._body("".join(self._text), self._end)

    def chunk_of(self, update: Update) -> dict[str, Any] | None:
        match update:
            case Content(text):
                return self._body(text)
            case Finished():
                return self._body("", update)
            case _:
                return None

    def _body(self, text: str, end: Finished | None = None) -> dict[str, Any]:
        reason = FINISH[end.finish.reason] if end else None
        choice = {"index": 0, "text": text, "finish_reason": reason, "logprobs": None}
        return {**self._head, "choices": [choice], **(figures(end) if end else {})}

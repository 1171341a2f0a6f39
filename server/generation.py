"""A running request as a stream of events in no dialect.

Events   the parser's (Reasoning, Content, ToolStart, ToolArgs, ToolEnd), Progress while the prompt is read, Heartbeat
         when nothing was said for a while, and one Finished at the end
Errors   Failed ends the stream as Refused: 400, 500 or 503 with the engine's reason
Use      `async with generation: async for event in generation.events()`; leaving the block early stops the engine
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

from strata.protocol.lines import Done, Progress, Resume, SamplingKeys, Token, rate

from .chat.events import Content, Event, Finish, Looped, Reasoning, Stopped, ToolArgs, ToolEnd, ToolStart
from .effects import Failed
from .errors import Refused
from .request import Plan
from .service import Service

TAIL_CHARS = 600


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Nothing has been sent for so long that something should be."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Progress of the prompt; `position` counts reused tokens too."""

    position: int
    total: int
    reused: int
    ms: float


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Finished:
    finish: Finish
    usage: Usage
    done: Done


Update = Event | Heartbeat | Reading | Finished


class Generation:
    def __init__(self, service: Service, plan: Plan, keys: SamplingKeys) -> None:
        """Takes a place in the queue. Raises Refused."""
        self._service = service
        self._parser = plan.parser
        self._n_prompt = len(plan.prompt)
        self._heartbeat_s = service.settings.heartbeat_s
        self._ticket = service.submit(plan.prompt, plan.max_new, keys)

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(self, *error: object) -> None:
        self._service.leave(self._ticket)

    async def updates(self) -> AsyncIterator[Update]:
        """Raises Refused when the request fails."""
        clock = asyncio.get_running_loop().time
        reused = 0
        last_word = clock()
        while True:
            event = await self._ticket.next(max(last_word + self._heartbeat_s - clock(), 0.0))
            said: list[Update] = []
            match event:
                case None:
                    said = [Heartbeat()]
                case Resume():
                    reused = event.reused
                case Progress():
                    said = [Reading(event.position, event.prompt_tokens, reused, event.ms)]
                case Token():
                    said += self._heard(self._parser.push(event.id))
                case Done():
                    for last in self._heard(self._parser.finish(event.finish)):
                        yield last
                    yield self._finished(event)
                    return
                case Failed():
                    raise Refused(event.status, event.message)
            for update in said:
                yield update
                last_word = clock()

    def _heard(self, events: list[Event]) -> list[Event]:
        """What the parser said, without its own signals; stops the engine when the answer is complete."""
        if self._parser.ended:
            self._service.stop(self._ticket)
        ticket = self._ticket
        for event in events:
            match event:
                case Content(text) | Reasoning(text):
                    ticket.tail = (ticket.tail + text)[-TAIL_CHARS:]
                case ToolStart(name=name):
                    ticket.tool = name
                case ToolArgs(piece=piece):
                    ticket.tail = (ticket.tail + piece)[-TAIL_CHARS:]
                case ToolEnd():
                    ticket.tool = ""
        return [event for event in events if not isinstance(event, Stopped | Looped)]

    def _finished(self, done: Done) -> Finished:
        finish = self._parser.finished
        assert finish is not None
        cached = min(done.reused, max(self._n_prompt - 1, 0))
        return Finished(finish, Usage(self._n_prompt, done.generated, cached), done)


def timings(done: Done) -> dict[str, float | int]:
    """The `timings` object of an answer."""
    return {
        "cache_n": done.reused,
        "prompt_n": done.prompt_read,
        "prompt_ms": done.prompt_ms,
        "prompt_per_second": round(rate(done.prompt_read, done.prompt_ms), 2),
        "predicted_n": done.generated,
        "predicted_ms": done.decode_ms,
        "predicted_per_second": round(rate(done.generated, done.decode_ms), 2),
        "draft_n": done.drafts_offered,
        "draft_n_accepted": done.drafts_accepted,
    }

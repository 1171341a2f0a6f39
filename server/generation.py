"""A running request as a stream of events in no dialect.

Updates  the parser's (Reasoning, Content, ToolStart, ToolArgs, ToolEnd), Progress while the prompt is read, Heartbeat
         when nothing was said for a while, and one Finished at the end
Errors   Failed ends the stream as Refused: 400, 500 or 503 with the engine's reason
Use      `async with generation: async for updates in generation.updates()`; leaving the block early stops the engine
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

from strata.protocol.lines import Done, Progress, Resume, SamplingKeys, Token, rate

from .chat.events import Content, Event, Finish, Looped, Reasoning, Stopped, ToolArgs, ToolEnd, ToolStart
from .effects import Event as HeardEvent
from .effects import Failed
from .errors import Refused
from .request import Plan
from .service import Service

TAIL_CHARS = 600
MOST_AT_ONCE = 64  # updates: what a slow client has missed comes in pieces, between which others are served


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
        self._reused = 0
        self._over = False
        self._failed: Failed | None = None
        self._ticket = service.submit(plan.prompt, plan.max_new, keys)

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(self, *error: object) -> None:
        self._service.leave(self._ticket)

    async def updates(self) -> AsyncIterator[list[Update]]:
        """What has happened since the last time; waits for something. Raises Refused when the request fails."""
        clock = asyncio.get_running_loop().time
        last_word = clock()
        while not self._over:
            said = self._said(await self._ticket.next(max(last_word + self._heartbeat_s - clock(), 0.0)))
            while self._ticket.has_more and len(said) < MOST_AT_ONCE and not self._over:
                said += self._said(self._ticket.take())
            if said:
                yield said
                last_word = clock()
        if self._failed is not None:
            raise Refused(self._failed.status, self._failed.message)

    def _said(self, event: HeardEvent | None) -> list[Update]:
        """What an event means for the client."""
        match event:
            case None:
                return [Heartbeat()]
            case Resume():
                self._reused = event.reused
            case Progress():
                return [Reading(event.position, event.prompt_tokens, self._reused, event.ms)]
            case Token():
                return [*self._heard(self._parser.push(event.id))]
            case Done():
                self._over = True
                return [*self._heard(self._parser.finish(event.finish)), self._finished(event)]
            case Failed():
                self._over, self._failed = True, event
        return []

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

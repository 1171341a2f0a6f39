"""From a running request to an HTTP answer, whole or streamed, for the dialects with OpenAI's frames.

A stream opens at once, before the prompt is read; what fails after that arrives as an error event.
"""

from __future__ import annotations

import logging
from typing import Any, Protocol

from aiohttp import web

from strata.server.errors import Refused, failure
from strata.server.generation import Generation, Heartbeat, Reading, Update

from .native import json_answer
from .sse import EventStream

log = logging.getLogger("strata.http")


class Answer(Protocol):
    """The answer of one request: as chunks while it grows, and whole at its end."""

    def opening(self) -> dict[str, Any]:
        """The first chunk."""

    def chunk_of(self, update: Update) -> dict[str, Any] | None:
        """The chunk for an update; None: it has none."""

    def add(self, update: Update) -> None: ...
    def whole(self) -> dict[str, Any]: ...


async def respond(
    request: web.Request, generation: Generation, answer: Answer, *, stream: bool, return_progress: bool = False
) -> web.StreamResponse:
    """Raises Refused for a whole answer that fails."""
    async with generation:
        if stream:
            return await _stream(request, generation, answer, return_progress)
        async for updates in generation.updates():
            for update in updates:
                answer.add(update)
        return json_answer(answer.whole())


async def _stream(
    request: web.Request, generation: Generation, answer: Answer, return_progress: bool
) -> web.StreamResponse:
    events = await EventStream.open(request)
    events.data(answer.opening())
    await events.flush()
    try:
        async for updates in generation.updates():
            for update in updates:
                if isinstance(update, Heartbeat) or (isinstance(update, Reading) and not return_progress):
                    events.comment("keep-alive")
                elif (chunk := answer.chunk_of(update)) is not None:
                    events.data(chunk)
            await events.flush()
    except Refused as refused:
        events.data(refused.body())
    except ConnectionError:
        raise  # the client is gone; there is nobody to tell
    except Exception:
        log.exception("a streamed answer failed")
        events.data(failure().body())
    events.done()
    return await events.close()

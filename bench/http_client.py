"""A client of the server's chat endpoint, as the tools that load it need it: streamed, with the time of every piece.

Units    seconds on the monotonic clock
Errors   ServerRefused for a status other than 200, an error in the stream, or a stream without an end
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

Messages = Sequence[dict[str, str]]
EXACT: dict[str, Any] = {"temperature": 0, "chat_template_kwargs": {"enable_thinking": False}}
"""Fields of requests whose text is a function of their messages, all of it visible."""
SHOWN_CHARACTERS = 200


class ServerRefused(Exception):
    """The server answered with an error, before or in the stream."""


@dataclass
class Answer:
    """What came of a request. `whole`: it was read to its end."""

    sent_s: float = 0.0
    times: list[float] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    finish: str = ""
    end_s: float = 0.0
    whole: bool = False

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def ttft(self) -> float:
        """Seconds to the first piece of text; to the end when there was none."""
        return (self.times[0] if self.times else self.end_s) - self.sent_s

    @property
    def seconds(self) -> float:
        return self.end_s - self.sent_s

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in itertools.pairwise(self.times)]

    def take(self, event: dict[str, Any]) -> None:
        """A `data:` event of the stream. Raises ServerRefused for an error."""
        if "error" in event:
            raise ServerRefused(event["error"].get("message", "error in the stream"))
        if usage := event.get("usage"):
            self.prompt_tokens = usage["prompt_tokens"]
            self.completion_tokens = usage["completion_tokens"]
            self.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        for choice in event.get("choices") or ():
            self.finish = choice.get("finish_reason") or self.finish
            delta = choice.get("delta") or {}
            text = "".join(delta[key] for key in ("reasoning_content", "content") if delta.get(key))
            if text or delta.get("tool_calls"):
                self.times.append(time.monotonic())
                self.pieces.append(text)


class Client:
    """Many requests over one session. `fields`: of every request's body."""

    def __init__(self, session: aiohttp.ClientSession, url: str, fields: dict[str, Any]) -> None:
        self._session = session
        self._url = url.rstrip("/")
        self._fields = fields

    async def chat(self, messages: Messages, max_tokens: int, *, answer: Answer | None = None) -> Answer:
        """A request to its end. `answer`: filled while it comes."""
        answer = answer or Answer()
        async with self.stream(answer, messages, max_tokens) as events:
            async for event in events:
                answer.take(event)
        answer.end_s, answer.whole = time.monotonic(), True
        if not answer.finish:
            raise ServerRefused("the stream ended without a finish reason")
        return answer

    async def chat_and_leave(self, messages: Messages, max_tokens: int, *, pieces: int = 1) -> Answer:
        """Closes the connection after so many pieces of text. It may end by itself before."""
        answer = Answer()
        async with self.stream(answer, messages, max_tokens) as events:
            async for event in events:
                answer.take(event)
                if len(answer.pieces) >= pieces:
                    break
            else:
                answer.whole = True
        answer.end_s = time.monotonic()
        return answer

    @asynccontextmanager
    async def stream(
        self, answer: Answer, messages: Messages, max_tokens: int
    ) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        """The events of a request; leaving the context early closes its connection."""
        body = {
            "messages": list(messages),
            "max_tokens": max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._fields,
        }
        answer.sent_s = time.monotonic()
        async with self._session.post(f"{self._url}/v1/chat/completions", json=body) as response:
            if response.status != 200:
                reason = (await response.text())[:SHOWN_CHARACTERS]
                raise ServerRefused(f"HTTP {response.status}: {reason}")
            yield self._events(response)

    @staticmethod
    async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
        async for raw in response.content:
            line = raw.decode().strip()
            if line.startswith("data:") and line != "data: [DONE]":
                yield json.loads(line[5:])

    async def get(self, path: str) -> Any:
        async with self._session.get(self._url + path) as response:
            if response.status != 200:
                raise ServerRefused(f"{path}: HTTP {response.status}")
            return await response.json()


@asynccontextmanager
async def connected(
    url: str, *, api_key: str | None, model: str, timeout_s: float, exact: bool = True
) -> AsyncIterator[Client]:
    """A client without a limit of connections."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector) as session:
        yield Client(session, url, {"model": model, **(EXACT if exact else {})})


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def with_answer(messages: Messages, answer: str, text: str) -> list[dict[str, str]]:
    """The next turn of a conversation."""
    return [*messages, {"role": "assistant", "content": answer}, {"role": "user", "content": text}]

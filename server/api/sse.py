"""Server-sent events: the frames of a streamed answer."""

from __future__ import annotations

import msgspec
from aiohttp import web

_HEADERS = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
_encode = msgspec.json.Encoder().encode


class EventStream:
    """One open stream. Writing raises ConnectionError when the client is gone."""

    def __init__(self, response: web.StreamResponse) -> None:
        self._response = response

    @classmethod
    async def open(cls, request: web.Request) -> EventStream:
        response = web.StreamResponse(headers=_HEADERS)
        await response.prepare(request)
        return cls(response)

    async def data(self, value: object) -> None:
        await self._response.write(b"data: " + _encode(value) + b"\n\n")

    async def done(self) -> None:
        await self._response.write(b"data: [DONE]\n\n")

    async def comment(self, text: str) -> None:
        await self._response.write(f": {text}\n\n".encode())

    async def close(self) -> web.StreamResponse:
        await self._response.write_eof()
        return self._response

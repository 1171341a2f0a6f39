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
    """One open stream. Frames are collected and leave with `flush`, which raises ConnectionError when the client is
    gone: a write costs more than the frames in it."""

    def __init__(self, response: web.StreamResponse) -> None:
        self._response = response
        self._frames: list[bytes] = []

    @classmethod
    async def open(cls, request: web.Request) -> EventStream:
        response = web.StreamResponse(headers=_HEADERS)
        await response.prepare(request)
        return cls(response)

    def data(self, value: object) -> None:
        self._frames.append(b"data: " + _encode(value) + b"\n\n")

    def done(self) -> None:
        self._frames.append(b"data: [DONE]\n\n")

    def comment(self, text: str) -> None:
        self._frames.append(f": {text}\n\n".encode())

    async def flush(self) -> None:
        if self._frames:
            frames, self._frames = self._frames, []
            await self._response.write(b"".join(frames))

    async def close(self) -> web.StreamResponse:
        frames, self._frames = self._frames, []
        await self._response.write_eof(b"".join(frames))
        return self._response

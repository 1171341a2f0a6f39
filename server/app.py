"""The aiohttp application: which path goes where, and the order in which things start and end.

Start    listen, then start the engine: a taken port costs no load
End      streams get their error event and end, connections close, then the engine is ended
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import TracebackType

from aiohttp import web

from .api import completions, native, openai
from .chat.template import Chat
from .metrics import HISTORY_EVERY_S, LiveCollector, Metrics, sample
from .security import cors_signal, middlewares
from .service import Service
from .settings import Settings
from .state import STATE, State

_CONNECTIONS_END_S = 5.0
TURN_WORD = "<|im_start|>"  # where a turn begins, and the engine keeps a checkpoint of a conversation

_NOT_YET = (
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/v1/responses"),
    ("POST", "/slots/0"),
    ("POST", "/v1/vram"),
    ("GET", "/settings"),
    ("POST", "/settings"),
    ("GET", "/config"),
    ("POST", "/config"),
)


def build_app(settings: Settings, chat: Chat) -> web.Application:
    app = web.Application(middlewares=middlewares(settings), client_max_size=settings.max_body_bytes)
    metrics = Metrics()
    turn_token = chat.vocabulary.special.get(TURN_WORD)
    state = app[STATE] = State(settings, chat, metrics, Service(settings, metrics, turn_token))
    metrics.registry.register(LiveCollector(state.service))
    router = app.router
    router.add_post("/v1/chat/completions", openai.chat_completions)
    router.add_post("/v1/completions", completions.completions)
    for path in ("/v1/models", "/models"):
        router.add_get(path, openai.models)
    for path in ("/health", "/api/health"):
        router.add_get(path, native.health)
    router.add_get("/v1/status", native.service_status)
    router.add_get("/status", native.status)
    router.add_get("/slots", native.slots)
    router.add_get("/props", native.props)
    router.add_get("/metrics", native.metrics)
    for prefix in ("", "/v1"):
        router.add_post(f"{prefix}/load", native.load)
        router.add_post(f"{prefix}/unload", native.unload)
    for method, path in _NOT_YET:
        router.add_route(method, path, native.not_supported)
    app.on_response_prepare.append(cors_signal(settings))
    app.on_shutdown.append(_tell_everybody)
    app.cleanup_ctx.append(_background)
    return app


class RunningServer:
    """A server that listens. Leaving the `async with` ends it, engine included."""

    def __init__(self, settings: Settings, chat: Chat) -> None:
        self.app = build_app(settings, chat)
        self._settings = settings
        # A handler is cancelled when its client is gone; that is how a request leaves the queue or stops the engine.
        self._runner = web.AppRunner(
            self.app, handler_cancellation=True, access_log=None, shutdown_timeout=_CONNECTIONS_END_S
        )

    @property
    def state(self) -> State:
        return self.app[STATE]

    @property
    def url(self) -> str:
        host, port = self._runner.addresses[0][:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def __aenter__(self) -> RunningServer:
        """Raises OSError when the address cannot be had."""
        settings = self._settings
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, settings.host, settings.port, backlog=settings.backlog).start()
        except BaseException:
            await self._runner.cleanup()
            raise
        self.state.service.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        await self._runner.cleanup()


async def _tell_everybody(app: web.Application) -> None:
    app[STATE].service.tell_everybody()


async def _background(app: web.Application) -> AsyncIterator[None]:
    service = app[STATE].service
    sampler = asyncio.create_task(_sample(service), name="history")
    yield
    sampler.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await sampler
    await service.shut_down()


async def _sample(service: Service) -> None:
    while True:
        sample(service)
        await asyncio.sleep(HISTORY_EVERY_S)

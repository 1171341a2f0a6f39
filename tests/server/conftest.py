"""A running server with the scripted engine behind it, on a free port, for tests that speak HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.util
import json
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from strata.server.app import RunningServer
from strata.server.chat.template import Chat
from strata.server.chat.vocabulary import Vocabulary
from strata.server.link import Patience
from strata.server.process import Launch
from strata.server.settings import Settings

_SPEC = importlib.util.spec_from_file_location(
    "strata_test_scheduling", Path(__file__).with_name("scheduling_world.py")
)
assert _SPEC and _SPEC.loader
sys.modules[_SPEC.name] = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(sys.modules[_SPEC.name])

HELLO = [{"role": "user", "content": "Hello"}]
EVENTUALLY_S = 20.0

# Short where a test waits for the limit itself, long where it must not be met.
PATIENCE = Patience(ready_s=20.0, silence_s=20.0, stall_s=0.0, close_s=5.0, start_tries=1, retry_s=0.05)


async def eventually(condition: Callable[[], Any]) -> Any:
    """Wait until `condition()` is true; its value."""
    async with asyncio.timeout(EVENTUALLY_S):
        while not (value := condition()):  # noqa: ASYNC110 - what is waited for happens in other processes too
            await asyncio.sleep(0.005)
    return value


class Harness:
    """A server under test: its URL, its insides, and what its engine was sent."""

    def __init__(self, server: RunningServer, http: aiohttp.ClientSession, folder: Path) -> None:
        self.server = server
        self.service = server.state.service
        self.url = server.url
        self.http = http
        self._folder = folder
        self._clients: list[openai.AsyncOpenAI] = []

    @property
    def commands(self) -> list[str]:
        """Every line that the engine got, over all its lives."""
        return [line for line in self._transcript() if not line.startswith("START")]

    @property
    def engine_pids(self) -> list[int]:
        """The process of each life."""
        return [int(line.split()[1]) for line in self._transcript() if line.startswith("START")]

    def open_gate(self, name: str) -> None:
        (self._folder / name).touch()

    def openai(self, **options: Any) -> openai.AsyncOpenAI:
        """A client of the real library; it is closed with the server."""
        options = {"api_key": "none", "max_retries": 0, **options}
        self._clients.append(openai.AsyncOpenAI(base_url=f"{self.url}/v1", **options))
        return self._clients[-1]

    async def aclose(self) -> None:
        for client in self._clients:
            await client.close()

    def post(self, path: str, body: Any, **options: Any) -> Any:
        return self.http.post(self.url + path, json=body, **options)

    def chat(self, messages: Any = HELLO, **fields: Any) -> Any:
        return self.post("/v1/chat/completions", {"messages": messages, **fields})

    async def text(self, messages: Any = HELLO, **fields: Any) -> str:
        """The content of a whole answer."""
        async with self.chat(messages, **fields) as response:
            body = await response.json()
            assert response.status == 200, body
            return body["choices"][0]["message"]["content"]

    async def get(self, path: str, **options: Any) -> tuple[int, Any]:
        async with self.http.get(self.url + path, **options) as response:
            return response.status, await response.json()

    def _transcript(self) -> list[str]:
        path = self._folder / "transcript"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture(scope="session")
def pack(packs: Any) -> Path:
    return packs["odd-f32"]


@pytest.fixture(scope="session")
def chat(pack: Path) -> Chat:
    return Chat(Vocabulary.load(pack))


@pytest.fixture(name="eventually")
def eventually_() -> Callable[[Callable[[], Any]], Any]:
    return eventually


@pytest.fixture
def serve(tmp_path: Path, chat: Chat, pack: Path) -> Callable[..., Any]:
    """`async with serve(replies=[...], settings={...}) as harness`: gates in the script are files in `tmp_path`."""

    @contextlib.asynccontextmanager
    async def start(
        replies: list[dict[str, Any]] | None = None,
        *,
        wait: bool = True,
        settings: dict[str, Any] | None = None,
        patience: dict[str, Any] | None = None,
        **script: Any,
    ) -> AsyncIterator[Harness]:
        script["transcript"] = str(tmp_path / "transcript")
        if replies is not None:
            script["replies"] = replies
        path = tmp_path / "script.json"
        path.write_text(json.dumps(script))
        command = [sys.executable, "-m", "strata.server.mock_engine", "--script", str(path), "--tokenizer", str(pack)]
        launch = Launch(command, cwd=tmp_path, log=tmp_path / "engine.log")
        configured = Settings(
            model="scripted",
            launch=launch,
            port=0,
            pack=pack,
            patience=dataclasses.replace(PATIENCE, **(patience or {})),
            **(settings or {}),
        )
        async with RunningServer(configured, chat) as server, aiohttp.ClientSession() as http:
            harness = Harness(server, http, tmp_path)
            async with contextlib.aclosing(harness):
                if wait:
                    await eventually(lambda: harness.service.is_loaded)
                yield harness

    return start

"""The engine lends the output head to prompts: it dies of a head that moved, and the next one serves."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import numpy as np
import pytest
import pytest_asyncio

from strata.server.app import RunningServer
from strata.server.chat.template import Chat
from strata.server.chat.vocabulary import Vocabulary
from strata.server.link import Patience
from strata.server.process import Launch
from strata.server.settings import Settings

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("head alias")]
"""In one process: the engine that the second test asks is the one that the first has seen restart."""

ENGINE = Path(__file__).resolve().parents[1] / "engine" / "device" / "lending_engine.py"
OPTIONS = (
    "--serve --device cuda --max-context 128 --mtp own --spec 1 --short-read 0 --expert-cache 1 --prefill-head-alias "
    "--prompt-cache 0"
)
STAYS = 10
"""Tokens of a chunk up to which the head stays, as in that engine."""
LONG, SHORT = list(range(5, 45)), list(range(9, 15))


MANY, LONGEST = 500, {"emulated": 48, "card": 99}
"""Requests of mixed lengths, and the most tokens of one; the emulated card takes half a second for each chunk."""
BORDERS = [16, 17, 22, 38]
"""Lengths of the first ones: the last chunk is the longest that goes through kernels of windows, or just not."""


@pytest.fixture(
    params=[pytest.param("emulated", marks=pytest.mark.soak), pytest.param("card", marks=pytest.mark.gpu)],
    scope="module",
)
def options(request: pytest.FixtureRequest, packs: Any, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Folder, card and options of an engine."""
    cache_dir = getattr(request.config, "cache", None)
    folder = Path(cache_dir.mkdir("emulated")) if cache_dir else tmp_path_factory.mktemp("emulated")
    words = OPTIONS.replace("own", str(packs["mtp-tiny-q8_0"])).split()
    return [str(folder), *(["--card"] if request.param == "card" else []), "--pack", str(packs["tiny-iq3_xxs"]), *words]


class Served(NamedTuple):
    """http: the server's client · log: of the engine · pid: of the engine now · longest: tokens of a prompt of a long
    test · alone: nothing else takes the card's memory."""

    http: aiohttp.ClientSession
    log: Path
    pid: Callable[[], int]
    longest: int
    alone: bool

    async def ask(self, prompt: list[int]) -> tuple[int, Any]:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 2, "temperature": 0}
        async with self.http.post("/v1/completions", json=body, timeout=aiohttp.ClientTimeout(600)) as response:
            return response.status, await response.json()

    async def figures(self) -> dict[str, Any]:
        """What the engine says of itself."""
        async with self.http.get("/metrics") as response:
            return (await response.json())["engine"]

    def vram_free(self) -> list[int]:
        """MiB of the card that were free where each request began; INFO says it of the start only."""
        return [int(mib) for mib in re.findall("request: ([0-9]+) MiB of VRAM are free", self.log.read_text())]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(options: list[str], packs: Any, tmp_path_factory: Any) -> AsyncIterator[Served]:
    folder, pack = tmp_path_factory.mktemp("engine"), packs["tiny-iq3_xxs"]
    log = folder / "engine.log"
    env = {**os.environ, "STRATA_TEST_HEAD_MOVE": "1"}
    launch = Launch([sys.executable, str(ENGINE), *options], cwd=folder, env=env, log=log)
    settings = Settings(
        model="tiny", launch=launch, port=0, pack=pack, wait_for_engine=True, patience=Patience(start_tries=1)
    )
    async with (
        RunningServer(settings, Chat(Vocabulary.load(pack))) as server,
        aiohttp.ClientSession(server.url) as http,
    ):
        real = "--card" in options
        alone = not real or "PYTEST_XDIST_WORKER" not in os.environ
        yield Served(http, log, lambda: server.state.service.engine_pid, LONGEST["card" if real else "emulated"], alone)


def resident(pid: int) -> int:
    """Bytes of RAM of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


async def test_a_head_that_moved_ends_the_engine_and_the_next_requests_are_answered_by_a_new_one(served):
    status, before = await served.ask(SHORT)
    assert status == 200, before
    status, refused = await served.ask(LONG)
    assert status >= 500 and "the output head moved" in refused["error"]["message"], refused
    status, after = await served.ask(SHORT)
    assert status == 200 and after["choices"][0]["text"] == before["choices"][0]["text"]
    (status, first), (_, second) = await asyncio.gather(served.ask(LONG), served.ask(LONG))
    assert status == 200 and first["usage"]["completion_tokens"] == 2
    assert first["choices"][0]["text"] == second["choices"][0]["text"]
    said = served.log.read_text()
    assert len(re.findall("ready on", said)) == 2 and len(re.findall("loaded again in", said)) == 2
    engine = await served.figures()
    assert engine["head_alias"] == 1 and engine["head_loads"] == 2


async def test_of_many_requests_of_mixed_lengths_none_is_lost_and_no_memory(served):
    """Long reads load the head once each, short ones never; the engine's RAM stays as it is, and the card's memory."""
    random, lengths = np.random.default_rng(3), []
    before, used = (await served.figures())["head_loads"], 0
    for begun in range(0, MANY, 4):
        some = random.integers(1, served.longest + 1, 4).tolist() if begun else BORDERS
        answers = await asyncio.gather(*(served.ask(random.integers(5, 900, n).tolist()) for n in some))
        assert [status for status, _ in answers] == [200] * 4
        assert [answer["usage"]["prompt_tokens"] for _, answer in answers] == some
        lengths += some
        used = used or (resident(served.pid()) if begun >= MANY // 2 else 0)
    assert resident(served.pid()) - used < 8 << 20
    free = served.vram_free()[-MANY:]
    assert len(free) == MANY and (not served.alone or free[MANY // 2] - free[-1] < 8)
    assert (await served.figures())["head_loads"] - before == sum(n > STAYS for n in lengths)
    assert served.log.read_text().count("ready on") == 2

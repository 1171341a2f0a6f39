"""Several requests at once with the real engine: HTTP, scheduler, engine process, pack. Texts are the solo texts."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from strata.server.app import RunningServer
from strata.server.chat.template import Chat
from strata.server.link import Patience
from strata.server.process import Launch
from strata.server.settings import Settings

pytestmark = pytest.mark.asyncio(loop_scope="module")

CONTEXT, CHUNK, SLOTS = 1024, 32, 3
GREEDY: dict[str, Any] = {}
SAMPLED = {"temperature": 1.2, "top_p": 0.95, "seed": 11}
PENALISED = {"temperature": 0.9, "seed": 5, "repetition_penalty": 1.3, "presence_penalty": 0.4}


class Real:
    def __init__(self, server: RunningServer, http: aiohttp.ClientSession) -> None:
        self.service = server.state.service
        self.scheduler = self.service.scheduler
        self._url = server.url
        self._http = http

    async def ask(self, ids: list[int], max_tokens: int, **keys: Any) -> str:
        body = {"prompt": ids, "max_tokens": max_tokens, **keys}
        async with self._http.post(f"{self._url}/v1/completions", json=body) as response:
            answer = await response.json()
            assert response.status == 200, answer
            return answer["choices"][0]["text"]

    async def alone(self, ids: list[int], max_tokens: int, **keys: Any) -> str:
        """Its text when nobody else is there. Leaves nothing behind that a later request could continue from."""
        assert self.scheduler.is_idle
        return await self.ask(ids, max_tokens, strata_checkpoint=False, **keys)

    def record(self, n_prompt: int) -> Any:
        """Of the last request whose prompt had so many tokens."""
        return next(one for one in reversed(self.service.metrics.records) if one.prompt_total == n_prompt)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def real(pack: Path, chat: Chat, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Real]:
    folder = tmp_path_factory.mktemp("slots")
    engine = Path(sys.executable).with_name("strata-engine")
    options = ["--pack", str(pack), "--device", "host", "--max-context", str(CONTEXT), "--prefill", str(CHUNK)]
    command = [str(engine), *options, "--batch", str(SLOTS), "--verify-accounts", "--serve"]
    launch = Launch(command, cwd=folder, log=folder / "engine.log")
    settings = Settings(
        model="tiny", launch=launch, port=0, pack=pack, wait_for_engine=True, patience=Patience(start_tries=1)
    )
    async with RunningServer(settings, chat) as server, aiohttp.ClientSession() as http:
        yield Real(server, http)


def prompt(seed: int, n: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(1, 1000) for _ in range(n)]


async def test_the_server_uses_the_slots_that_the_engine_has(real):
    await real.ask(prompt(0, 5), 1)
    assert len(real.scheduler.slots) == SLOTS and real.scheduler.facts.keeps_slots


async def test_concurrent_texts_are_the_solo_texts(real):
    chance = random.Random(1)
    keys = [GREEDY, SAMPLED, PENALISED]
    asked = [
        (prompt(100 + i, chance.choice([3, 20, 40, 150])), chance.choice([1, 8, 24]), keys[i % 3]) for i in range(15)
    ]
    alone = [await real.alone(ids, n, **key) for ids, n, key in asked]

    async def later(i: int, ids: list[int], n: int, key: dict[str, Any]) -> str:
        await asyncio.sleep(0.02 * i)
        return await real.ask(ids, n, **key)

    together = await asyncio.gather(*(later(i, *one) for i, one in enumerate(asked)))
    assert together == alone
    assert real.scheduler.is_idle and real.scheduler.slots.n_free == SLOTS


async def test_a_request_that_moves_to_a_slot_and_back_has_its_solo_text(real, eventually, caplog):
    caplog.set_level("INFO", logger="strata.request")
    ids, other = prompt(2, 50), prompt(3, 45)
    alone, alone_other = await real.alone(ids, 90, **SAMPLED), await real.alone(other, 6)
    caplog.clear()
    moving = asyncio.create_task(real.ask(ids, 90, **SAMPLED))
    await eventually(lambda: (job := real.scheduler.holder) and len(job.output) > 3)
    assert await real.ask(other, 6) == alone_other
    assert await moving == alone
    assert re.search(r"solo > slot \d > solo", caplog.text)
    record = real.record(50)
    assert record.output_tokens == 90 and record.prompt_read <= 50 + 2


async def test_a_long_read_that_gave_way_has_its_solo_text_and_reads_nothing_twice(real, eventually, caplog):
    caplog.set_level("INFO", logger="strata.request")
    ids, other = prompt(4, 600), prompt(5, 30)
    alone, alone_other = await real.alone(ids, 12), await real.alone(other, 4)
    caplog.clear()
    long = asyncio.create_task(real.ask(ids, 12))
    await eventually(lambda: (job := real.scheduler.holder) and job.n_read >= CHUNK)
    assert await real.ask(other, 4) == alone_other
    assert not long.done()
    assert await long == alone
    assert "gave way 1 time," in caplog.text
    record = real.record(600)
    assert 600 <= record.reused + record.prompt_read <= 601  # one more when it went back to the solo path


async def test_the_next_turn_of_each_conversation_is_reused_from_its_slot(real):
    prompts = [prompt(20 + i, 60) for i in range(SLOTS)]
    await asyncio.gather(*(real.ask(ids, 40) for ids in prompts))
    held = [slot.held.tolist() for slot in real.scheduler.slots.slots]
    following = [[*ids, *prompt(30 + i, 10)] for i, ids in enumerate(held)]
    together = await asyncio.gather(*(real.ask(ids, 10) for ids in following))
    assert [real.record(len(ids)).reused for ids in following] == [len(ids) for ids in held]
    assert together == [await real.alone(ids, 10) for ids in following]


async def test_clients_that_leave_at_random_change_nobodys_text(real, eventually):
    chance = random.Random(6)
    asked = [(prompt(200 + i, chance.choice([3, 40, 150])), 12) for i in range(6)]
    alone = [await real.alone(*one) for one in asked]

    async def leaves(i: int) -> None:
        task = asyncio.create_task(real.ask(prompt(300 + i, 80), 200))
        await asyncio.sleep(chance.random() * 0.6)
        task.cancel()

    answers = await asyncio.gather(*(real.ask(*one) for one in asked), *map(leaves, range(6)))
    assert answers[: len(asked)] == alone
    await eventually(lambda: real.scheduler.is_idle)
    assert real.scheduler.slots.n_free == SLOTS


async def test_a_killed_engine_fails_its_slots_and_serves_who_waited_for_one(real, eventually):
    ids = prompt(7, 10)
    wanted = await real.alone(ids, 5)
    running = [asyncio.create_task(real.ask(prompt(40 + i, 10), 400)) for i in range(SLOTS)]
    await eventually(lambda: real.scheduler.slots.n_busy == SLOTS and real.scheduler.holder is None)
    waiting = asyncio.create_task(real.ask(ids, 5))
    await eventually(lambda: real.scheduler.waiting)
    os.kill(real.service.engine_pid, signal.SIGKILL)
    for task in running:
        with pytest.raises(AssertionError, match="SIGKILL"):
            await task
    assert await waiting == wanted
    assert real.scheduler.is_idle and real.scheduler.slots.n_free == SLOTS

"""The whole way, without a stand-in: OpenAI client, server, engine process, pack. Few tokens, as the host is slow."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
import pytest_asyncio

from strata.server.app import RunningServer
from strata.server.chat.template import Chat
from strata.server.link import Patience
from strata.server.metrics import CACHE, CACHE_COUNTERS, CACHE_NOW
from strata.server.process import Launch
from strata.server.settings import Settings

pytestmark = pytest.mark.asyncio(loop_scope="module")

HELLO = [{"role": "user", "content": "Hello"}]
NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}
CONTEXT = 512
PARKING = ("--conversation-cache-mib", "16", "--conversation-cache-min-free-mib", "0")


class Real:
    def __init__(self, server: RunningServer, client: openai.AsyncOpenAI, http: aiohttp.ClientSession) -> None:
        self.service = server.state.service
        self.client = client
        self.http = http

    async def ask(self, **fields: Any) -> Any:
        fields = {"model": "tiny", "messages": HELLO, "max_tokens": 6, "extra_body": NO_THINKING, **fields}
        return await self.client.chat.completions.create(**fields)

    async def pieces(self, **fields: Any) -> list[str]:
        """The content of a stream, piece by piece."""
        stream = await self.ask(stream=True, **fields)
        return [text async for chunk in stream if (text := chunk.choices[0].delta.content)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def real(pack: Path, chat: Chat, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Real]:
    folder = tmp_path_factory.mktemp("engine")
    engine = Path(sys.executable).with_name("strata-engine")
    options = ["--pack", str(pack), "--device", "host", "--max-context", str(CONTEXT), "--serve", *PARKING]
    options += ["--conversation-cache-disk-mib", "64", "--conversation-cache-dir", str(folder / "parked")]
    launch = Launch([str(engine), *options], cwd=folder, log=folder / "engine.log")
    settings = Settings(
        model="tiny", launch=launch, port=0, pack=pack, wait_for_engine=True, patience=Patience(start_tries=1)
    )
    async with (
        RunningServer(settings, chat) as server,
        aiohttp.ClientSession(server.url) as http,
        openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield Real(server, client, http)


async def test_raw_ids_give_the_recorded_continuation(real, golden, chat):
    ids = golden("odd-hf")["len17.ids"].tolist()
    wanted = golden("odd-hf")["len17.decode_ids"][:6].tolist()
    answer = await real.client.completions.create(model="tiny", prompt=ids, max_tokens=len(wanted))
    assert answer.choices[0].text == chat.vocabulary.decode(wanted)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), len(wanted))


async def test_a_stream_says_the_same_as_a_whole_answer(real):
    whole = await real.ask()
    assert "".join(await real.pieces()) == whole.choices[0].message.content
    assert whole.choices[0].finish_reason == "length" and whole.usage.completion_tokens == 6
    assert whole.timings["predicted_n"] == 6 and whole.timings["prompt_ms"] > 0


async def test_a_seed_repeats_a_sampled_answer(real):
    first, second = [await real.ask(temperature=1.5, seed=7) for _ in range(2)]
    assert first.choices[0].message.content == second.choices[0].message.content


async def test_a_stop_string_over_a_token_border(real):
    pieces = await real.pieces()
    text = "".join(pieces)
    borders = [left[-1] + right[0] for left, right in pairwise(pieces)]
    stop = next(pair for pair in borders[1:] if pair in text and "\ufffd" not in pair)
    answer = await real.ask(stop=stop, max_tokens=100)
    assert answer.choices[0].message.content == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop" and answer.usage.completion_tokens < 100


async def test_a_forced_tool_call_names_the_tool_and_is_no_call_when_it_is_cut_off(real):
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    choice = {"type": "function", "function": {"name": "look"}}
    stream = await real.ask(tools=[tool], tool_choice=choice, stream=True, max_tokens=3)
    names, finish = [], None
    async for chunk in stream:
        names += [call.function.name for call in chunk.choices[0].delta.tool_calls or [] if call.function.name]
        finish = chunk.choices[0].finish_reason
    assert names == ["look"] and finish == "length"


async def test_an_abort_in_mid_stream_leaves_a_clean_engine(real, eventually):
    wanted = await real.pieces()
    stream = await real.ask(stream=True, max_tokens=400)
    async for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    await stream.close()
    assert await real.pieces() == wanted
    assert real.service.metrics.records[-2].finish == "cancel"


async def test_a_prompt_that_is_too_long_is_refused_with_the_numbers(real):
    with pytest.raises(openai.BadRequestError, match=f"the prompt has [0-9]+ tokens, the context holds {CONTEXT}"):
        await real.ask(messages=[{"role": "user", "content": "long " * CONTEXT}])


async def test_forty_requests_at_once(real):
    async def one(i: int) -> Any:
        return await real.client.completions.create(model="tiny", prompt=[5 + i, 6], max_tokens=1)

    answers = await asyncio.gather(*map(one, range(40)))
    assert [answer.usage.prompt_tokens for answer in answers] == [2] * 40
    assert {answer.choices[0].finish_reason for answer in answers} <= {"length", "stop"}


async def test_metrics_count_parked_conversations_as_the_engine_does(real):
    async def counts() -> dict[str, int]:
        async with real.http.get("/metrics") as response:
            return (await response.json())["conversation_cache"]

    async def ask(ids: list[int]) -> Any:
        return await real.client.completions.create(model="tiny", prompt=ids, max_tokens=1)

    before, one, two = await counts(), list(range(20, 60)), list(range(60, 90))
    limits = {name for name in before if name.removeprefix(CACHE) not in {*CACHE_NOW, *CACHE_COUNTERS}}
    assert {CACHE + name for name in (*CACHE_NOW, *CACHE_COUNTERS)} < set(before) and CACHE + "mib" in limits
    await ask(one)
    await ask(two)
    answer = await ask([*one, 5, 6])
    assert answer.usage.prompt_tokens_details.cached_tokens == len(one)
    after = await counts()
    changed = {name: after[CACHE + name] - before[CACHE + name] for name in ("captured", "hits", "damaged")}
    assert changed["captured"] >= 2 and changed["hits"] == 1 and changed["damaged"] == 0
    assert {name: after[name] for name in limits} == {name: before[name] for name in limits}
    async with real.http.get("/metrics?format=prometheus") as response:
        text = await response.text()
    for name in CACHE_COUNTERS:
        assert f"\nstrata:{CACHE}{name}_total {float(after[CACHE + name])}\n" in text
    for name in CACHE_NOW:
        assert f"\nstrata:{CACHE}{name} {float(after[CACHE + name])}\n" in text
    (facts,) = (line for line in text.splitlines() if line.startswith("strata:engine_info{"))
    assert 'device="host"' in facts and f'context="{CONTEXT}"' in facts and "hits=" not in facts


async def test_a_killed_engine_ends_the_stream_with_an_error_and_serves_who_waits(real, eventually):
    wanted = await real.pieces()
    stream = await real.ask(stream=True, max_tokens=400)
    received = aiter(stream)
    await anext(received)
    waiting = asyncio.create_task(real.pieces())
    await eventually(lambda: real.service.scheduler.waiting and real.service.scheduler.holder.n_generated)
    os.kill(real.service.engine_pid, signal.SIGKILL)
    with pytest.raises(openai.APIError, match="SIGKILL"):
        async for _ in received:
            pass
    assert await waiting == wanted
    assert await real.pieces() == wanted

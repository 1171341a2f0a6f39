"""Several clients, one engine, over HTTP: order, heartbeats, clients that leave, engines that die."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from typing import Any

import aiohttp
import pytest

from strata.protocol.lines import SamplingKeys
from strata.server.chat.effort import NO_THINKING
from strata.server.chat.events import Content
from strata.server.chat.output import OutputParser
from strata.server.generation import MOST_AT_ONCE, Generation
from strata.server.request import ChatRequest, plan
from strata.server.turns import Rules

PLAIN = {"chat_template_kwargs": {"enable_thinking": False}}


async def frames(response: aiohttp.ClientResponse) -> list[str]:
    """The rest of a stream, one string for each event or comment."""
    return [frame for frame in (await response.text()).split("\n\n") if frame]


def chunks(frames: list[str]) -> list[dict[str, Any]]:
    return [json.loads(frame.removeprefix("data: ")) for frame in frames if frame.startswith("data: {")]


def text_of(frames: list[str]) -> str:
    return "".join(
        choice["delta"].get("content") or choice["delta"].get("reasoning_content") or ""
        for chunk in chunks(frames)
        for choice in chunk.get("choices", [])
    )


async def until(response: aiohttp.ClientResponse, word: str) -> str:
    """Read a stream until `word` came."""
    seen = ""
    async with asyncio.timeout(20):
        while word not in seen:
            piece = await response.content.readany()
            assert piece, f"the stream ended without {word!r}: {seen}"
            seen += piece.decode()
    return seen


def commands_of(harness: Any, word: str) -> list[str]:
    return [line for line in harness.commands if line.split()[0] == word]


async def test_a_request_is_one_gen_and_no_batch_line(serve):
    async with serve([{"steps": [{"text": "fine"}]}]) as harness:
        assert await harness.text(chat_template_kwargs={"enable_thinking": False}) == "fine"
        assert [line.split()[0] for line in harness.commands] == ["GEN"]


async def test_text_waits_for_the_text_after_it_that_may_still_become_a_stop_string(serve):
    steps = [{"text": "one two"}, {"text": " st"}, {"gate": "go"}, {"text": "ar"}]
    async with serve([{"steps": steps}]) as harness, harness.chat(stream=True, stop=[" stop"], **PLAIN) as response:
        seen = ""
        async with asyncio.timeout(20):
            while text_of(seen.split("\n\n")[:-1]) != "one two":
                seen += (await response.content.readany()).decode()
        harness.open_gate("go")
        assert text_of(await frames(response)) == " star"


async def test_what_was_said_before_a_failure_is_not_sent(serve):
    steps = [{"tokens": list(range(100, 180))}, {"err": "fatal: it broke"}]
    async with serve([{"steps": steps}]) as harness, harness.chat(stream=True, **PLAIN) as response:
        rest = await frames(response)
        text = harness.server.state.chat.vocabulary.decode(range(100, 180))
        assert text_of(rest).rstrip("\ufffd") == text.rstrip("\ufffd")
        assert "it broke" in rest[-2] and rest[-1] == "data: [DONE]"


async def test_a_client_that_missed_much_gets_it_in_one_piece_that_stops_the_others(serve, eventually):
    async with serve([{"steps": [{"text": "word " * 300}]}]) as harness:
        service, chat = harness.service, harness.server.state.chat
        wanted = ChatRequest(messages=[{"role": "user", "content": "go"}], thinking=NO_THINKING)
        planned = plan(chat, wanted, 4096, fit=True, repeat_stop_tokens=0)
        async with Generation(service, planned, SamplingKeys()) as generation:
            await eventually(lambda: service.scheduler.is_idle)
            sizes, text = [], ""
            async for updates in generation.updates():
                sizes.append(len(updates))
                text += "".join(update.text for update in updates if isinstance(update, Content))
        assert text == "word " * 300
        assert max(sizes) <= MOST_AT_ONCE + 1 and len(sizes) > 3


async def test_requests_are_answered_in_the_order_they_came(serve, eventually):
    reply = {"match": r"say (\w+)", "steps": [{"text": "\\1"}]}
    async with serve([{**reply, "times": 1, "before": [{"gate": "go"}]}, reply]) as harness:
        order: list[str] = []

        async def ask(word: str) -> None:
            messages = [{"role": "user", "content": f"say {word}"}]
            order.append(await harness.text(messages, chat_template_kwargs={"enable_thinking": False}))

        words = ["one", "two", "three", "four"]
        tasks = []
        for i, word in enumerate(words):
            tasks.append(asyncio.create_task(ask(word)))
            await eventually(lambda i=i: len(harness.service.scheduler.waiting) == i)
            await eventually(lambda: harness.service.scheduler.holder)
        harness.open_gate("go")
        await asyncio.gather(*tasks)
        assert order == words


async def test_sixty_connections_at_once_are_all_answered(serve):
    reply = {"match": r"say (\w+)", "steps": [{"text": "you said \\1"}]}
    async with serve([reply]) as harness:
        answers = await asyncio.gather(
            *(
                harness.text(
                    [{"role": "user", "content": f"say word{i}"}], chat_template_kwargs={"enable_thinking": False}
                )
                for i in range(60)
            )
        )
        assert answers == [f"you said word{i}" for i in range(60)]
        assert len(commands_of(harness, "GEN")) == 60


async def test_the_role_comes_before_the_prompt_is_read(serve):
    async with (
        serve([{"before": [{"gate": "go"}], "steps": [{"text": "x"}]}]) as harness,
        harness.chat(stream=True) as r,
    ):
        first = await until(r, "\n\n")
        assert '"role":"assistant","content":""' in first
        assert r.headers["Content-Type"] == "text/event-stream" and r.headers["Cache-Control"] == "no-cache"
        assert r.headers["X-Accel-Buffering"] == "no"
        harness.open_gate("go")
        rest = await frames(r)
        assert rest[-1] == "data: [DONE]" and chunks(rest)[-1]["choices"][0]["finish_reason"] == "stop"


async def test_one_heartbeat_for_each_chunk_read(serve):
    message = [{"role": "user", "content": "word " * 200}]
    async with serve([{"steps": [{"text": "x"}]}], chunk=50) as harness, harness.chat(message, stream=True) as r:
        got = await frames(r)
        n_prompt = chunks(got)[-1]["usage"]["prompt_tokens"]
        assert got.count(": keep-alive") == -(-n_prompt // 50)


async def test_progress_chunks_when_asked_for_and_reused_tokens_count_as_processed(serve):
    message = [{"role": "user", "content": "word " * 200}]
    reply = {"reused": 70, "steps": [{"text": "x"}]}
    async with serve([reply], chunk=50) as harness, harness.chat(message, stream=True, return_progress=True) as r:
        got = await frames(r)
        progress = [chunk["prompt_progress"] for chunk in chunks(got) if "prompt_progress" in chunk]
        total = chunks(got)[-1]["usage"]["prompt_tokens"]
        assert ": keep-alive" not in got
        assert [p["processed"] for p in progress] == [*range(120, total, 50), total]
        assert {p["total"] for p in progress} == {total} and {p["cache"] for p in progress} == {70}


@pytest.mark.parametrize("waiting", [True, False], ids=["in the queue", "while the engine is silent"])
async def test_heartbeats_while_nothing_happens(serve, waiting, eventually):
    reply = {"before": [{"gate": "go"}], "steps": [{"text": "x"}]}
    async with serve([reply], settings={"heartbeat_s": 0.05}) as harness:
        first = asyncio.create_task(harness.text()) if waiting else None
        if waiting:
            await eventually(lambda: harness.service.scheduler.holder)
        async with harness.chat(stream=True) as r:
            seen = await until(r, ": keep-alive\n\n: keep-alive\n\n: keep-alive")
            assert seen.index('"role"') < seen.index("keep-alive")
            assert len(harness.service.scheduler.waiting) == (1 if waiting else 0)
            harness.open_gate("go")
            assert (await frames(r))[-1] == "data: [DONE]"
        if first is not None:
            await first


async def test_a_client_that_leaves_while_it_waits_is_never_sent(serve, eventually):
    reply = {"match": r"say (\w+)", "steps": [{"text": "\\1"}, {"gate": "go"}]}
    async with serve([reply]) as harness:
        first = asyncio.create_task(harness.text([{"role": "user", "content": "say one"}]))
        await eventually(lambda: harness.service.scheduler.holder)
        async with harness.chat([{"role": "user", "content": "say two"}], stream=True) as gone:
            await until(gone, "assistant")
            gone.close()
        await eventually(lambda: not harness.service.scheduler.waiting)
        harness.open_gate("go")
        await first
        await harness.text([{"role": "user", "content": "say three"}])
        assert len(commands_of(harness, "GEN")) == 2 and "STOP" not in harness.commands


@pytest.mark.parametrize("streamed", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("state", ["reading", "decoding"])
async def test_a_client_that_leaves_frees_the_engine_and_the_next_text_is_clean(serve, state, streamed, eventually):
    endless = {"times": 1, "repeat": True, "token_ms": 1, "steps": [{"text": "never "}]}
    if state == "reading":
        endless["reading"] = [{"delay_ms": 20000}]
    async with serve([endless, {"steps": [{"text": "clean"}]}]) as harness:
        gone = asyncio.create_task(harness.text(stream=streamed))
        await eventually(lambda: (job := harness.service.scheduler.holder) and job.phase == state)
        waiting = asyncio.create_task(harness.text(chat_template_kwargs={"enable_thinking": False}))
        await eventually(lambda: harness.service.scheduler.waiting)
        gone.cancel()
        assert await waiting == "clean"
        assert [line.split()[0] for line in harness.commands] == ["GEN", "STOP", "GEN"]
        assert harness.service.metrics.records[0].finish == "cancel"


async def test_a_stop_string_stops_the_engine_and_cuts_the_text(serve):
    endless = {"repeat": True, "token_ms": 1, "steps": [{"text": "abc def "}]}
    async with serve([endless]) as harness:
        answer = await harness.text(stop=["f a"], chat_template_kwargs={"enable_thinking": False}, max_tokens=2000)
        assert answer == "abc de"
        assert [line.split()[0] for line in harness.commands] == ["GEN", "STOP"]


async def test_a_refusal_of_the_engine_fails_that_request_and_not_the_next(serve):
    refusing = {"times": 1, "before": [{"err": "a token id is outside the vocabulary"}]}
    async with serve([refusing, {"steps": [{"text": "fine"}]}]) as harness:
        async with harness.chat() as response:
            body = await response.json()
            assert response.status == 400 and "outside the vocabulary" in body["error"]["message"]
        assert await harness.text(chat_template_kwargs={"enable_thinking": False}) == "fine"
        assert len(harness.engine_pids) == 1


DEATHS = {
    "killed": ([{"text": "begin"}, {"gate": "killed"}], "SIGKILL"),
    "exit with a last ERR": ([{"text": "begin"}, {"raw": "ERR cuda: illegal access"}, {"exit": 1}], "illegal access"),
    "fatal ERR": ([{"text": "begin"}, {"raw": "ERR fatal: the output head moved"}, {"silent": True}], "head moved"),
    "words in its log": ([{"text": "begin"}, {"log": "watchdog: no progress"}, {"exit": 3}], "watchdog: no progress"),
    "a line that cannot be read": ([{"text": "begin"}, {"raw": "DONE x"}, {"silent": True}], "DONE"),
}


@pytest.mark.parametrize("steps, reason", DEATHS.values(), ids=DEATHS.keys())
async def test_an_engine_that_dies_ends_the_stream_with_the_reason_and_the_waiting_are_served(
    serve, steps, reason, eventually
):
    lives = [{"replies": [{"steps": steps}]}, {"replies": [{"steps": [{"text": "alive"}]}]}]
    plain = {"chat_template_kwargs": {"enable_thinking": False}}
    async with serve(lives=lives) as harness, harness.chat(stream=True) as dying:
        seen = await until(dying, "reasoning_content" if reason == "SIGKILL" else "role")
        waiting = asyncio.create_task(harness.text(**plain))
        if reason == "SIGKILL":
            await eventually(lambda: harness.service.scheduler.waiting)
            os.kill(harness.engine_pids[0], signal.SIGKILL)
        got = (seen + await dying.text()).split("\n\n")
        error = json.loads(got[-3].removeprefix("data: "))["error"]
        assert got[-2:] == ["data: [DONE]", ""] and error["type"] == "server_error" and reason in error["message"]
        assert await waiting == "alive"
        assert await harness.text(**plain) == "alive"
        assert len(harness.engine_pids) == 2


async def test_a_death_before_the_first_byte_of_a_whole_answer_is_a_503(serve):
    lives = [{"replies": [{"reading": [{"kill": True}]}]}, {"replies": [{"steps": [{"text": "alive"}]}]}]
    async with serve(lives=lives) as harness:
        async with harness.chat() as response:
            body = await response.json()
            assert response.status == 503 and "next request starts it again" in body["error"]["message"]
        assert await harness.text(chat_template_kwargs={"enable_thinking": False}) == "alive"


async def test_an_engine_that_keeps_dying_is_left_alone_until_a_load(serve):
    dying = {"replies": [{"reading": [{"kill": True}]}]}
    async with serve(lives=[dying, dying, dying, {"replies": [{"steps": [{"text": "alive"}]}]}]) as harness:
        messages = []
        for _ in range(4):
            async with harness.chat() as response:
                assert response.status == 503
                messages.append((await response.json())["error"]["message"])
        assert "3 times" in messages[3] and "/load" in messages[3] and len(harness.engine_pids) == 3
        assert (await harness.get("/health"))[1]["status"] == "error"
        async with harness.post("/load", None) as response:
            assert response.status == 200 and (await response.json())["loaded"] is True
        assert await harness.text(chat_template_kwargs={"enable_thinking": False}) == "alive"


async def test_a_full_queue_is_a_429(serve, eventually):
    reply = {"before": [{"gate": "go"}], "steps": [{"text": "x"}]}
    async with serve([reply], settings={"rules": Rules(max_queue=1)}) as harness:
        tasks = []
        for n_waiting in (0, 1):
            tasks.append(asyncio.create_task(harness.text()))
            await eventually(lambda: harness.service.scheduler.holder)
            await eventually(lambda n=n_waiting: len(harness.service.scheduler.waiting) == n)
        async with harness.chat(stream=True) as response:
            assert response.status == 429 and (await response.json())["error"]["type"] == "rate_limit_error"
        harness.open_gate("go")
        await asyncio.gather(*tasks)


async def test_a_client_that_reads_slowly_holds_up_nobody(serve):
    long = {"times": 1, "repeat": True, "steps": [{"text": "words and more words " * 20}]}
    replies = [long, {"steps": [{"text": "fine"}]}]
    async with serve(replies, context=60000) as harness, harness.chat(stream=True, max_tokens=50000) as slow:
        await until(slow, "role")
        assert await harness.text(chat_template_kwargs={"enable_thinking": False}) == "fine"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_bug_of_the_server_ends_the_request_and_frees_the_engine(
    serve, monkeypatch, stream, eventually, caplog
):
    endless = {"repeat": True, "token_ms": 1, "steps": [{"text": "more "}]}
    async with serve([endless]) as harness:
        with monkeypatch.context() as patch:
            patch.setattr(OutputParser, "push", lambda self, token: 1 / 0)
            async with harness.chat(stream=stream) as response:
                text = await response.text()
                assert response.status == (200 if stream else 500) and "its log says why" in text
                assert not stream or text.endswith("data: [DONE]\n\n")
        assert "ZeroDivisionError" in caplog.text
        await eventually(lambda: harness.service.scheduler.is_idle)
        assert harness.commands[-1] == "STOP"


async def test_shutting_down_ends_a_stream_with_an_error_event(serve):
    async with serve([{"steps": [{"text": "begin"}, {"gate": "never"}]}]) as harness, harness.chat(stream=True) as r:
        seen = await until(r, "reasoning_content")
        await harness.server.__aexit__(None, None, None)
        got = (seen + await r.text()).split("\n\n")
        assert "shutting down" in got[-3] and got[-2] == "data: [DONE]"

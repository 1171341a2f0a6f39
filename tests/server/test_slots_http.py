"""Several requests at once over HTTP, with the scripted engine as a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from typing import Any

import aiohttp
import pytest

from strata.server.turns import Rules

PLAIN = {"chat_template_kwargs": {"enable_thinking": False}}
ECHO = {"match": r"say (\w+)", "steps": [{"text": "you said \\1 " * 12}], "token_ms": 1}


def say(word: str, padding: int = 0) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{'pad ' * padding}say {word}"}]


def said(word: str) -> str:
    return f"you said {word} " * 12


def words(harness: Any) -> list[str]:
    return [line.split()[0] for line in harness.commands]


async def until(response: aiohttp.ClientResponse, word: str) -> str:
    seen = ""
    async with asyncio.timeout(20):
        while word not in seen:
            piece = await response.content.readany()
            assert piece, f"the stream ended without {word!r}: {seen}"
            seen += piece.decode()
    return seen


async def test_forty_requests_over_eight_slots_get_their_own_text(serve):
    async with serve([ECHO], slots=8, chunk=16) as harness:
        asked = [(f"word{i}", 200 if i % 7 == 0 else 0) for i in range(40)]
        answers = await asyncio.gather(
            *(harness.text(say(word, padding), max_tokens=300, **PLAIN) for word, padding in asked)
        )
        assert answers == [said(word) for word, _ in asked]
        scheduler = harness.service.scheduler
        assert scheduler.is_idle and scheduler.slots.n_free == 8
        assert max(int(line.split()[1]) for line in harness.commands if line.startswith("BGEN")) == 7
        totals = (await harness.get("/metrics"))[1]["totals"]
        assert totals["requests"] == 40


async def test_a_request_that_moves_is_one_answer_and_one_record(serve, eventually):
    answer = "first " + "and more " * 50 + "and last"
    replies = [{"match": "say one", "token_ms": 2, "steps": [{"text": answer}]}, ECHO]
    async with serve(replies, slots=2) as harness, harness.chat(say("one"), stream=True, **PLAIN) as first:
        await eventually(lambda: (job := harness.service.scheduler.holder) and job.output)
        second = asyncio.create_task(harness.text(say("two"), max_tokens=300, **PLAIN))
        assert await second == said("two")
        seen = await first.text()
        chunks = [json.loads(line[6:]) for line in seen.split("\n\n") if line.startswith("data: {")]
        text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
        assert text == answer
        usage = chunks[-1]["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0
        await eventually(lambda: len(harness.service.metrics.records) == 2)
        record = next(one for one in harness.service.metrics.records if one.output_tokens == usage["completion_tokens"])
        assert record.prompt_total == usage["prompt_tokens"] and record.reused == 0
        assert words(harness)[:4] == ["GEN", "STOP", "BGEN", "BGEN"]


async def test_a_long_read_gives_way_and_continues_in_its_slot(serve, eventually):
    long = {"match": "say long", "steps": [{"text": "the long answer"}]}
    rules = Rules(returns_to_solo=False)
    async with serve([long, ECHO], slots=2, chunk=16, chunk_ms=20, settings={"rules": rules}) as harness:
        first = asyncio.create_task(harness.text(say("long", 400), **PLAIN))
        await eventually(lambda: (job := harness.service.scheduler.holder) and job.n_read > 32)
        assert said("short").startswith(await harness.text(say("short"), max_tokens=4, **PLAIN))
        assert not first.done()
        assert await first == "the long answer"
        assert "BYIELD" in words(harness)
        records = harness.service.metrics.records
        assert records[0].prompt_total < records[1].prompt_total == records[1].prompt_read
        async with harness.http.get(f"{harness.url}/metrics?format=prometheus") as response:
            assert "vllm:num_preemptions_total 1.0" in await response.text()


async def test_metrics_and_slots_show_who_is_where(serve, eventually):
    async with serve([STAYS], slots=3, settings={"parallel": 4}) as harness:
        scheduler = harness.service.scheduler
        tasks = [asyncio.create_task(harness.text(say("stay"), max_tokens=3000, **PLAIN)) for _ in range(5)]
        await eventually(lambda: scheduler.slots.n_busy == 3 and scheduler.holder is None)
        await eventually(lambda: len(scheduler.waiting) == 2)
        live = (await harness.get("/metrics"))[1]["live"]
        assert (live["parallel"], live["running"], live["waiting"], live["outside_slots"]) == (3, 3, 2, 0)
        assert [(slot["slot"], slot["state"]) for slot in live["slots"]] == [(i, "decoding") for i in range(3)]
        assert all(slot["prompt_tokens"] > 0 and slot["generated"] > 0 for slot in live["slots"])
        entries = (await harness.get("/slots"))[1]
        assert [entry["is_processing"] for entry in entries] == [True] * 3 and entries[0]["n_prompt_tokens"] > 0
        async with harness.http.get(f"{harness.url}/metrics?format=prometheus") as response:
            text = await response.text()
        assert 'strata:live_slots{state="decoding"} 3.0' in text and "vllm:num_requests_running 3.0" in text
        status = (await harness.get("/v1/status"))[1]
        assert status["concurrency"] == {"serving": 3, "requested": 4} and status["activity"]["in_flight"] == 5
        assert (await harness.get("/props"))[1]["total_slots"] == 3
        assert (await harness.get("/status"))[1]["busy"] is True
        for task in tasks:
            task.cancel()
        await eventually(lambda: scheduler.is_idle)
        idle = (await harness.get("/metrics"))[1]["live"]
        assert idle["state"] == "idle" and {slot["state"] for slot in idle["slots"]} == {"idle"}
        assert all(slot["held_tokens"] > 0 for slot in idle["slots"])


async def test_a_conversation_goes_back_to_its_slot_and_is_not_read_again(serve, eventually, chat):
    turn = {"match": "alpha", "steps": [{"tokens": [70, 71, 72]}], "finish": "length"}
    async with serve([STAYS, turn], slots=3) as harness:
        company = asyncio.create_task(harness.text(say("stay"), max_tokens=3000, **PLAIN))
        await eventually(lambda: (job := harness.service.scheduler.holder) and job.output)
        prompt, cached = chat.vocabulary.encode("alpha"), []
        for _ in range(3):
            async with harness.post("/v1/completions", {"prompt": prompt, "max_tokens": 3}) as response:
                cached.append((await response.json())["usage"]["prompt_tokens_details"]["cached_tokens"])
            prompt = [*prompt, 70, 71, 72, 5, 6]
        first = len(chat.vocabulary.encode("alpha"))
        assert cached == [0, first + 2, first + 7]
        slots = [line.split()[1] for line in harness.commands if line.startswith("BGEN")]
        assert slots == ["0", "1", "1", "1"]
        company.cancel()


# --- clients that leave


ENDLESS = {"match": "say gone", "steps": [{"text": "never "}], "repeat": True, "token_ms": 1}
STAYS = {"match": "say stay", "steps": [{"text": "stay "}], "repeat": True, "token_ms": 1}


async def in_state(harness: Any, state: str, eventually: Any) -> tuple[asyncio.Task, list[asyncio.Task]]:
    """A request ("gone") in `state`, and the requests that it needs around it."""
    scheduler = harness.service.scheduler
    others: list[asyncio.Task] = []

    def ask(word: str, padding: int = 0) -> asyncio.Task:
        return asyncio.create_task(harness.text(say(word, padding), max_tokens=3000, **PLAIN))

    if state in ("solo reading", "solo decoding"):
        gone = ask("gone", 200)
        phase = "reading" if state == "solo reading" else "decoding"
        await eventually(lambda: (job := scheduler.holder) and job.phase == phase and (job.n_read or job.output))
        return gone, others
    if state == "gave way":
        gone = ask("gone", 400)
        await eventually(lambda: (job := scheduler.holder) and job.n_read)
        others.append(ask("stay", 150))
        await eventually(lambda: scheduler.waiting and scheduler.waiting[0].n_yields and scheduler.holder)
        return gone, others
    others.append(ask("stay"))
    await eventually(lambda: (job := scheduler.holder) and job.output)
    if state == "waiting for a slot":
        others.append(ask("stay"))
        await eventually(lambda: scheduler.slots.n_busy == 2 and scheduler.holder is None)
        gone = ask("gone")
        await eventually(lambda: scheduler.waiting)
        return gone, others
    gone = ask("gone", 200)
    if state == "admission reading":
        await eventually(lambda: (job := scheduler.holder) and job.slot == 1 and job.n_read)
    elif state == "slot":
        await eventually(lambda: scheduler.slots.n_busy == 2 and scheduler.holder is None)
        await eventually(lambda: all(job.leg.is_read and len(job.output) > 3 for job in scheduler.running))
    return gone, others


STATES = ["solo reading", "solo decoding", "waiting for a slot", "gave way", "admission reading", "slot"]


@pytest.mark.parametrize("state", STATES)
async def test_a_client_that_leaves_frees_its_place_and_nobody_hears_its_tokens(serve, eventually, state):
    replies = [ENDLESS, STAYS, ECHO]
    rules = Rules(returns_to_solo=False)
    async with serve(replies, slots=2, chunk=16, chunk_ms=5, settings={"rules": rules}) as harness:
        gone, others = await in_state(harness, state, eventually)
        gone.cancel()
        scheduler = harness.service.scheduler
        await eventually(lambda: len([*scheduler.running, *scheduler.waiting]) == len(others))
        if len(others) == 2:
            others.pop().cancel()
        assert await harness.text(say("next"), max_tokens=300, **PLAIN) == said("next")
        assert all(not task.done() for task in others)
        for task in others:
            task.cancel()
        await eventually(lambda: scheduler.is_idle)
        assert scheduler.slots.n_free == 2
        stop = {"waiting for a slot": None, "gave way": None, "slot": "BSTOP"}.get(state, "STOP")
        assert stop is None or stop in words(harness)


@pytest.mark.parametrize("state", STATES)
async def test_an_engine_that_dies_fails_what_was_open_and_serves_who_only_waited(serve, eventually, state):
    script = {"slots": 2, "chunk": 16, "chunk_ms": 5}
    lives = [{**script, "replies": [ENDLESS, STAYS]}, {**script, "replies": [{**ENDLESS, "repeat": False}, ECHO]}]
    async with serve(lives=lives, settings={"rules": Rules(returns_to_solo=False)}) as harness:
        gone, others = await in_state(harness, state, eventually)
        os.kill(harness.engine_pids[0], signal.SIGKILL)
        only_waited = state in ("waiting for a slot", "gave way")
        for task in others if only_waited else [*others, gone]:
            with pytest.raises(AssertionError, match="SIGKILL"):
                await task
        if only_waited:
            assert (await gone).startswith("never")
        assert await harness.text(say("next"), max_tokens=300, **PLAIN) == said("next")
        assert harness.service.scheduler.is_idle and len(harness.engine_pids) == 2


async def test_clients_that_leave_at_random_leak_no_slot(serve, eventually):
    async with serve([ECHO], slots=4, chunk=16) as harness:

        async def one(i: int) -> None:
            task = asyncio.create_task(harness.text(say(f"word{i}", i % 5 * 40), max_tokens=300, **PLAIN))
            if i % 3 == 0:
                await asyncio.sleep(0.002 * (i % 40))
                task.cancel()
                return
            assert await task == said(f"word{i}")

        await asyncio.gather(*map(one, range(60)))
        scheduler = harness.service.scheduler
        await eventually(lambda: scheduler.is_idle)
        assert scheduler.slots.n_free == 4 and len(harness.engine_pids) == 1


async def test_a_stop_string_in_a_slot_ends_the_slot_and_cuts_the_text(serve, eventually):
    endless = {"match": "say cut", "repeat": True, "token_ms": 1, "steps": [{"text": "abc def "}]}
    async with serve([endless, STAYS], slots=2) as harness:
        other = asyncio.create_task(harness.text(say("stay"), max_tokens=3000, **PLAIN))
        await eventually(lambda: (job := harness.service.scheduler.holder) and job.output)
        assert await harness.text(say("cut"), stop=["f a"], max_tokens=2000, **PLAIN) == "abc de"
        assert "BSTOP" in words(harness)
        other.cancel()


async def test_an_engine_that_says_nothing_while_only_slots_run_is_ended(serve, eventually):
    hangs = {"match": "say hang", "steps": [{"text": "a "}, {"gate": "never"}]}
    async with serve([hangs], slots=2, patience={"silence_s": 0.4}) as harness:
        tasks = [asyncio.create_task(harness.text(say("hang"), **PLAIN)) for _ in range(2)]
        for task in tasks:
            with pytest.raises(AssertionError, match="said nothing"):
                await task


async def test_heartbeats_while_a_request_waits_for_a_slot(serve, eventually):
    async with serve([STAYS, ECHO], slots=2, settings={"heartbeat_s": 0.05}) as harness:
        tasks = [asyncio.create_task(harness.text(say("stay"), max_tokens=3000, **PLAIN)) for _ in range(2)]
        await eventually(lambda: harness.service.scheduler.slots.n_busy == 2)
        async with harness.chat(say("word"), stream=True, max_tokens=300, **PLAIN) as waiting:
            await until(waiting, ": keep-alive\n\n: keep-alive")
            assert harness.service.scheduler.waiting
            tasks[0].cancel()
            await until(waiting, "[DONE]")
        tasks[1].cancel()


async def test_unload_waits_for_slots(serve, eventually):
    async with serve([STAYS], slots=2) as harness:
        tasks = [asyncio.create_task(harness.text(say("stay"), max_tokens=3000, **PLAIN)) for _ in range(2)]
        await eventually(lambda: harness.service.scheduler.slots.n_busy == 2)
        async with harness.post("/unload", None) as response:
            assert response.status == 409
        for task in tasks:
            task.cancel()


async def test_decisions_are_in_the_log_and_the_path_of_each_request(serve, eventually, caplog):
    caplog.set_level("INFO", logger="strata.request")
    caplog.set_level("DEBUG", logger="strata.scheduler")
    replies = [{**STAYS, "repeat": False, "steps": [{"text": "stay " * 60}]}, ECHO]
    async with serve(replies, slots=2) as harness:
        first = asyncio.create_task(harness.text(say("stay"), max_tokens=3000, **PLAIN))
        await eventually(lambda: (job := harness.service.scheduler.holder) and job.output)
        await harness.text(say("one"), max_tokens=300, **PLAIN)
        await first
        assert "request 1: moves to a slot after" in caplog.text and "goes to slot 1: it is empty" in caplog.text
        lines = [record.getMessage() for record in caplog.records if record.name == "strata.request"]
        assert any(line.startswith("request 1: ") and "solo > slot 0" in line for line in lines)
        assert any(line.startswith("request 2: ") and "slot 1" in line for line in lines)


async def test_a_request_whose_prompt_is_being_prepared_is_company_and_one_that_was_refused_is_not(
    serve, eventually, monkeypatch
):
    async with serve([ECHO], slots=2) as harness:
        state, scheduler = harness.server.state, harness.service.scheduler
        prompt, go_on = state.chat.prompt, threading.Event()

        def held(messages: list[dict[str, str]], **how: Any) -> Any:
            if messages == say("slow"):
                go_on.wait(timeout=20)
            return prompt(messages, **how)

        monkeypatch.setattr(state.chat, "prompt", held)
        slow = asyncio.create_task(harness.text(say("slow"), max_tokens=5, **PLAIN))
        await eventually(lambda: scheduler.n_coming == 1)
        await harness.text(say("quick"), max_tokens=5, **PLAIN)
        assert words(harness) == ["BGEN"]
        go_on.set()
        await slow
        async with harness.chat([{"role": "nobody"}]) as refused:
            assert refused.status == 400
        assert scheduler.n_coming == 0
        await harness.text(say("alone"), max_tokens=5, **PLAIN)
        assert words(harness)[-1] == "GEN"

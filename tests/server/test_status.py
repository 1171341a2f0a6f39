"""Health, status, slots, properties and figures: shapes, and numbers that agree with what happened."""

from __future__ import annotations

import asyncio

HELLO = [{"role": "user", "content": "Hello"}]


async def test_health_tells_a_balancer_when_to_come(serve, eventually):
    async with serve(start=[{"gate": "ready"}], wait=False) as harness:
        status, body = await harness.get("/health")
        assert status == 503 and body["status"] == "loading" and body["loaded"] is False
        async with harness.chat() as response:
            assert response.status == 503 and "loading" in (await response.json())["error"]["message"]
        harness.open_gate("ready")
        await eventually(lambda: harness.service.is_loaded)
        status, body = await harness.get("/api/health")
        assert (status, body) == (
            200,
            {
                "status": "ok",
                "model": "scripted",
                "max_context": 4096,
                "images": False,
                "api_key": False,
                "loaded": True,
                "service": "strata",
            },
        )


async def test_models_lists_the_aliases(serve):
    async with serve(settings={"aliases": ("other", "third")}) as harness:
        status, body = await harness.get("/v1/models")
        first, *others = body["data"]
        assert status == 200 and body["object"] == "list"
        assert first["id"] == "scripted" and first["object"] == "model" and first["status"] == {"value": "loaded"}
        assert first["meta"] == {"n_ctx": 4096} and first["architecture"] == {"input_modalities": ["text"]}
        assert [(entry["id"], entry["alias_of"]) for entry in others] == [("other", "scripted"), ("third", "scripted")]
        assert (await harness.get("/models"))[1] == body


async def test_status_slots_and_metrics_show_a_request_while_it_runs(serve, eventually):
    reply = {"steps": [{"text": "thinking"}, {"gate": "go"}, {"text": "\n</think>\n\nsaid"}]}
    async with serve([reply]) as harness:
        assert (await harness.get("/status"))[1]["busy"] is False
        assert (await harness.get("/slots"))[1] == [
            {"id": 0, "n_ctx": 4096, "is_processing": False, "n_prompt_tokens": 0}
        ]
        running = asyncio.create_task(harness.text(max_tokens=100))
        waiting = asyncio.create_task(harness.text(max_tokens=100))
        await eventually(lambda: (ticket := harness.service.first_ticket) and ticket.tail)
        await eventually(lambda: harness.service.scheduler.waiting)
        status = (await harness.get("/status"))[1]
        assert status["busy"] and status["phase"] == "decoding" and status["queued"] == 1
        assert "thinking".startswith(status["tail"]) and status["max_tokens"] == 100 and status["generated"] > 0
        slot = (await harness.get("/slots"))[1][0]
        assert slot["is_processing"] and slot["n_prompt_tokens"] == status["prompt_tokens"] > 0
        live = (await harness.get("/metrics"))[1]["live"]
        assert (live["state"], live["running"], live["waiting"], live["queued"]) == ("generating", 1, 1, 1)
        assert live["prompt_read"] == live["prompt_total"] == live["prompt_tokens"] and live["tok_s"] > 0
        harness.open_gate("go")
        assert await running == await waiting == "said"


async def test_totals_and_records_add_up(serve):
    async with serve([{"reused": 3, "steps": [{"text": "fine"}]}]) as harness:
        usages = []
        for _ in range(3):
            async with harness.chat() as response:
                usages.append((await response.json())["usage"])
        body = (await harness.get("/metrics"))[1]
        totals, records = body["totals"], body["requests"]
        assert totals["requests"] == len(records) == 3 and body["engine"]["engine"] == "mock"
        assert totals["prompt_tokens"] == sum(usage["prompt_tokens"] for usage in usages)
        assert totals["output_tokens"] == sum(usage["completion_tokens"] for usage in usages)
        assert totals["reused"] == 9 and records[0]["finish"] == "stop" and records[0]["hit_rate"] is None
        assert records[0]["time"] >= records[2]["time"]
        assert {"engine", "live", "requests", "totals", "conversation_cache", "hardware", "history", "time"} <= set(
            body
        )
        for _ in range(12):
            await harness.text()
        assert len((await harness.get("/metrics"))[1]["requests"]) == 12
        assert len((await harness.get("/metrics?requests=all"))[1]["requests"]) == 15
        status = (await harness.get("/v1/status"))[1]
        assert status["activity"]["requests"] == 15 and status["activity"]["in_flight"] == 0
        assert status["concurrency"] == {"serving": 1, "requested": 1}
        assert status["last_timings"]["cache_n"] == 3 and status["context"] == 4096


async def test_prometheus_by_query_or_accept(serve):
    async with serve([{"steps": [{"text": "fine"}]}]) as harness:
        await harness.text()
        for path, headers in (
            ("/metrics?format=prometheus", {}),
            ("/metrics", {"Accept": "text/plain"}),
            ("/metrics", {"Accept": "application/openmetrics-text"}),
        ):
            async with harness.http.get(harness.url + path, headers=headers) as response:
                text = await response.text()
            assert 'vllm:request_success_total{finished_reason="stop"} 1.0' in text
            assert "vllm:num_requests_running 0.0" in text and 'strata:live_state{state="idle"} 1.0' in text
            assert "vllm:time_to_first_token_seconds_count 1.0" in text
            assert "vllm:generation_tokens_total" in text and "vllm:prefix_cache_hits_total 0.0" in text


async def test_counters_of_the_engine_are_kept_until_it_is_another_one(serve):
    told = "INFO conversation_cache_hits=3 conversation_cache_later=7 gpu=other"
    lives = [
        {"info": {"conversation_cache_mib": 64, "conversation_cache_hits": 0, "gpu": "card-1", "odd-key": 1}},
        {"info": {"conversation_cache_mib": 32, "conversation_cache_hits": 0}},
    ]
    lives[0]["replies"] = [{"steps": [{"text": "one"}, {"raw": told}, {"text": " two"}]}]
    async with serve(lives=lives) as harness:
        assert await harness.text(chat_template_kwargs={"enable_thinking": False}) == "one two"
        body = (await harness.get("/metrics"))[1]
        assert body["conversation_cache"] == {
            "conversation_cache_mib": 64,
            "conversation_cache_hits": 3,
            "conversation_cache_later": 7,
        }
        assert body["engine"]["gpu"] == "other" and body["engine"]["odd-key"] == 1
        text = await prometheus(harness)
        assert "strata:conversation_cache_hits_total 3.0" in text and "conversation_cache_parked" not in text
        (facts,) = (line for line in text.splitlines() if line.startswith("strata:engine_info{"))
        assert 'gpu="other"' in facts and 'conversation_cache_mib="64"' in facts and facts.endswith("} 1.0")
        assert "odd-key" not in facts and "hits" not in facts
        await harness.service.unload()
        await harness.service.load()
        assert (await harness.get("/metrics"))[1]["conversation_cache"] == {
            "conversation_cache_mib": 32,
            "conversation_cache_hits": 0,
        }
        assert "strata:conversation_cache_hits_total 0.0" in await prometheus(harness)


async def test_figures_of_experts_are_counters_and_no_labels(serve):
    info = {"expert_slots": 6144, "expert_picks": 480, "expert_reads": 0, "expert_swaps": 0}
    told = "INFO expert_picks=960 expert_reads=37 expert_read_mib=70"
    lives = [{"info": info, "replies": [{"steps": [{"text": "one"}, {"raw": told}, {"text": " two"}]}]}]
    async with serve(lives=lives) as harness:
        assert await harness.text(chat_template_kwargs={"enable_thinking": False}) == "one two"
        assert (await harness.get("/metrics"))[1]["experts"] == {
            **info,
            "expert_picks": 960,
            "expert_reads": 37,
            "expert_read_mib": 70,
        }
        lines = (await prometheus(harness)).splitlines()
        for line in ("picks_total 960.0", "reads_total 37.0", "read_mib_total 70.0", "swaps_total 0.0"):
            assert f"strata:expert_{line}" in lines
        (facts,) = (line for line in lines if line.startswith("strata:engine_info{"))
        assert 'expert_slots="6144"' in facts and "expert_picks" not in facts and "expert_swaps" not in facts


async def test_drafts_in_slots_that_the_engine_cannot_make_are_said_at_its_start(serve, monkeypatch, caplog):
    monkeypatch.setenv("STRATA_BATCH_MTP", "1")
    for facts, warns in (({}, True), ({"mtp_max": 2}, False)):
        caplog.clear()
        async with serve(slots=2, info=facts):
            assert ("STRATA_BATCH_MTP=1 does nothing" in caplog.text) is warns


async def prometheus(harness) -> str:
    async with harness.http.get(f"{harness.url}/metrics?format=prometheus") as response:
        return await response.text()


async def test_props_describes_the_model_and_knows_no_other(serve):
    async with serve() as harness:
        body = (await harness.get("/props"))[1]
        assert body["default_generation_settings"]["n_ctx"] == 4096 and body["total_slots"] == 1
        assert "im_start" in body["chat_template"] and body["modalities"] == {"vision": False}
        assert (await harness.get("/props?model=scripted"))[0] == 200
        assert (await harness.get("/props?model=other"))[0] == 404


async def test_load_and_unload(serve, eventually):
    reply = {"steps": [{"text": "x"}, {"gate": "go"}]}
    async with serve([reply]) as harness:
        running = asyncio.create_task(harness.text())
        await eventually(lambda: harness.service.scheduler.holder)
        for path in ("/load", "/v1/unload"):
            async with harness.post(path, None) as response:
                assert response.status == 409 and (await response.json())["error"]["type"] == "model_busy"
        harness.open_gate("go")
        await running
        for _ in range(2):
            async with harness.post("/unload", None) as response:
                assert response.status == 200 and (await response.json())["loaded"] is False
        assert (await harness.get("/slots"))[1] == [] and harness.commands[-1] == "QUIT"
        async with harness.post("/v1/load", None) as response:
            assert response.status == 200 and (await response.json())["loaded"] is True
        await harness.text()
        assert len(harness.engine_pids) == 2


async def test_a_load_and_a_request_during_an_unload_start_one_engine(serve):
    async with serve([{"steps": [{"text": "x"}]}]) as harness:
        unloading = asyncio.create_task(harness.service.unload())
        await asyncio.sleep(0)
        loading = asyncio.create_task(harness.service.load())
        answers = await asyncio.gather(unloading, loading, harness.text(max_tokens=50), return_exceptions=True)
        assert answers[:2] == [None, None] and harness.service.is_loaded
        await harness.text()
        assert len(harness.engine_pids) == 2


async def test_a_lazy_server_starts_its_engine_with_the_first_request(serve):
    async with serve([{"steps": [{"text": "x"}]}], wait=False, settings={"lazy_load": True}) as harness:
        status, body = await harness.get("/health")
        assert (status, body["status"], body["loaded"]) == (200, "ok", False) and harness.engine_pids == []
        await asyncio.gather(*(harness.text() for _ in range(5)))
        assert len(harness.engine_pids) == 1


async def test_an_idle_engine_is_unloaded_and_comes_back(serve, eventually):
    async with serve([{"steps": [{"text": "x"}]}], settings={"idle_unload_s": 0.1}) as harness:
        for life in (1, 2):
            await harness.text()
            await eventually(lambda: not harness.service.is_loaded)
            assert (await harness.get("/health"))[0] == 200 and len(harness.engine_pids) == life


async def test_requests_may_wait_for_the_engine(serve, eventually):
    settings = {"wait_for_engine": True}
    async with serve([{"steps": [{"text": "x"}]}], start=[{"gate": "ready"}], wait=False, settings=settings) as harness:
        tasks = [asyncio.create_task(harness.text()) for _ in range(3)]
        await eventually(lambda: len(harness.service._start_waiters) == 3)
        harness.open_gate("ready")
        await asyncio.gather(*tasks)

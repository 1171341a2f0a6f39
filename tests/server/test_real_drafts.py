"""Drafts through the whole way: the answer is the same, timings and metrics count them."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from strata.server.app import RunningServer
from strata.server.chat.template import Chat
from strata.server.chat.vocabulary import Vocabulary
from strata.server.link import Patience
from strata.server.process import Launch
from strata.server.settings import Settings

PROMPT = {"model": "tiny", "prompt": [*range(40, 60)] * 2, "max_tokens": 40, "temperature": 0.7, "seed": 4}


@asynccontextmanager
async def serving(packs: Any, folder: Path, *options: str) -> AsyncIterator[aiohttp.ClientSession]:
    pack = packs["tiny-f32"]
    engine = Path(sys.executable).with_name("strata-engine")
    common = ["--pack", str(pack), "--serve", "--threads", "1", "--max-context", "256", "--eos-ids", "none"]
    launch = Launch([str(engine), *common, *options], cwd=folder, log=folder / "engine.log")
    settings = Settings(
        model="tiny", launch=launch, port=0, pack=pack, wait_for_engine=True, patience=Patience(start_tries=1)
    )
    async with (
        RunningServer(settings, Chat(Vocabulary.load(pack))) as server,
        aiohttp.ClientSession(server.url) as http,
    ):
        yield http


async def answer(http: aiohttp.ClientSession) -> tuple[dict[str, Any], dict[str, float]]:
    """An answer, and the counters of drafts behind it."""
    async with http.post("/v1/completions", json=PROMPT) as response:
        assert response.status == 200, await response.text()
        said = await response.json()
    async with http.get("/metrics", params={"format": "prometheus"}) as response:
        lines = (await response.text()).splitlines()
    words = [line.split() for line in lines if line.startswith("vllm:spec_decode_num_")]
    return said, {name.partition("{")[0]: float(value) for name, value in words if "_created" not in name}


@pytest.mark.asyncio
async def test_an_answer_with_drafts_is_the_answer_without_and_drafts_are_counted(packs, tmp_path):
    async with serving(packs, tmp_path) as http:
        plain, counted = await answer(http)
    assert plain["timings"]["draft_n"] == 0 and set(counted.values()) == {0.0}
    async with serving(packs, tmp_path, "--mtp", str(packs["mtp-tiny-q8_0"]), "--spec", "4") as http:
        drafted, counted = await answer(http)
    assert drafted["choices"][0]["text"] == plain["choices"][0]["text"]
    n, accepted = drafted["timings"]["draft_n"], drafted["timings"]["draft_n_accepted"]
    assert n > 0 and 0 <= accepted <= n
    assert counted == {
        "vllm:spec_decode_num_draft_tokens_total": n,
        "vllm:spec_decode_num_accepted_tokens_total": accepted,
    }

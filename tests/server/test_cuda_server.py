"""strata-server with a config that names --device cuda: the program, its engine process and the card."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
START_S = 300  # kernels that the machine has never seen are compiled first


def ask(url: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=START_S) as answer:
        return json.loads(answer.read())


@pytest.fixture(scope="module")
def served(pack: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("served")
    config = folder / "strata-tiny.json"
    args = ["--pack", str(pack), "--device", DEVICE, "--max-context", "1024"]
    exe = str(Path(sys.executable).with_name("strata-engine"))
    keys = {"exe": exe, "args": args, "model_name": "tiny", "log": str(folder / "engine.log"), "wait_for_engine": True}
    config.write_text(json.dumps(keys))
    command = [sys.executable, "-m", "strata.server", "--config", str(config), "--port", "0"]
    # The few lines that it writes later fit the pipe.
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield url_of(server)
    finally:
        server.send_signal(signal.SIGINT)
        said, _ = server.communicate(timeout=60)
        assert server.returncode == 0, said


def url_of(server: subprocess.Popen[str]) -> str:
    """The address that the server says it listens on."""
    said: list[str] = []
    for line in server.stdout or ():
        said.append(line)
        if found := re.search(r"http://127\.0\.0\.1:[0-9]+", line):
            return found.group()
    raise AssertionError("".join(said))


def chat(url: str, **fields: Any) -> Any:
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, **fields}
    return ask(f"{url}/v1/chat/completions", body)


def test_a_chat_is_answered_by_the_card(served):
    first, second = chat(served, temperature=0), chat(served, temperature=0)
    assert first["usage"]["completion_tokens"] == 8
    assert first["choices"][0]["message"] == second["choices"][0]["message"]


def test_metrics_show_the_card(served):
    chat(served)
    engine = ask(f"{served}/metrics")["engine"]
    assert engine["device"] == DEVICE and engine["gpu"] and engine["vram_free_mib"] > 0 and engine["expert_slots"] > 0
    with urllib.request.urlopen(f"{served}/metrics?format=prometheus", timeout=START_S) as answer:
        (facts,) = (line for line in answer.read().decode().splitlines() if line.startswith("strata:engine_info{"))
    assert f'device="{DEVICE}"' in facts and f'gpu="{engine["gpu"]}"' in facts

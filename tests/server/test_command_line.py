"""The program strata-server: what it refuses at the start, what it says, and that it leaves nothing behind."""

from __future__ import annotations

import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from strata.server.__main__ import parse_flags, settings_of, with_turn_token
from strata.server.settings import SettingsError
from strata.server.turns import Rules

PROGRAM = [sys.executable, "-m", "strata.server"]


def run_program(*argv: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PROGRAM, *argv], check=False, capture_output=True, text=True, timeout=30)


@pytest.fixture
def config(tmp_path, pack) -> Any:
    """config(key=value, ...) -> path of a config whose engine never runs."""

    def write(**keys: Any) -> Path:
        path = tmp_path / "strata-test.json"
        path.write_text(json.dumps({"exe": "strata-engine", "args": ["--pack", str(pack)], **keys}))
        return path

    return write


def settings(argv: list[str], environment: dict[str, str] | None = None) -> Any:
    return settings_of(parse_flags(argv), environment or {})


REFUSED = {
    "no config": ([], {}, {}, "--config FILE is needed"),
    "no such config": (["--config", "/no/such.json"], {}, {}, "/no/such.json"),
    "empty key": (["--api-key", ""], {}, {}, "--api-key: an empty key"),
    "empty key in a list": (["--api-key", "a,,b"], {}, {}, "--api-key: an empty key"),
    "empty key in the environment": ([], {"STRATA_API_KEY": ""}, {}, "STRATA_API_KEY: an empty key"),
    "a key with a line break": (["--api-key", "a\nb"], {}, {}, "printable"),
    "port": (["--port", "70000"], {}, {}, "--port"),
    "bad wait": ([], {"STRATA_ADMIT_MAX_WAIT_S": "-1"}, {}, "STRATA_ADMIT_MAX_WAIT_S"),
    "bad number": ([], {"STRATA_ENGINE_READY_S": "soon"}, {}, "STRATA_ENGINE_READY_S"),
    "bad key in the config": ([], {}, {"fit_max_tokens": "yes"}, "fit_max_tokens"),
    "no pack": ([], {}, {"args": []}, "--pack"),
    "not yet": (["--gpu", "0"], {}, {}, "--gpu is not available"),
    "not yet either": (["--open"], {}, {}, "--open is not available"),
    "idle": (["--idle-unload", "-1"], {}, {}, "--idle-unload"),
}


@pytest.mark.parametrize("argv, environment, keys, reason", REFUSED.values(), ids=REFUSED.keys())
def test_a_start_that_cannot_work_is_refused_with_the_reason(config, argv, environment, keys, reason):
    base = [] if "config" in reason or "/no/such" in reason else ["--config", str(config(**keys))]
    with pytest.raises(SettingsError) as error:
        settings([*base, *argv], environment)
    assert reason in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "argv, reason",
    [
        (["--api-key", ""], "empty key"),
        (["--nonsense"], "--nonsense"),
        (["--gpu", "0"], "--gpu"),
        (["--tokenizer", __file__], "test_command_line.py"),
        (["--tokenizer", "/no/such.gguf"], "/no/such.gguf"),
    ],
)
def test_the_program_ends_with_code_2_and_one_line(config, argv, reason):
    run = run_program("--config", config(), *argv)
    assert run.returncode == 2 and reason in run.stderr and "Traceback" not in run.stderr


def test_the_command_line_wins_over_the_environment_and_the_config(config):
    path = str(config(api_key="of config", host="::1", fit_max_tokens=False, idle_unload_s=5, aliases=["x"]))
    assert settings(["--config", path]).api_keys == ("of config",)
    assert settings(["--config", path], {"STRATA_API_KEY": "of environment"}).api_keys == ("of environment",)
    argv = ["--config", path, "--api-key", "a,b", "--api-key", "c", "--host", "127.0.0.2", "--idle-unload", "7"]
    got = settings([*argv, "--fit-max-tokens", "--lazy"], {"STRATA_API_KEY": "of environment"})
    assert got.api_keys == ("a", "b", "c") and got.host == "127.0.0.2" and got.idle_unload_s == 7
    assert got.fit_max_tokens and got.lazy_load and got.names == ("strata-test", "x") and got.port == 8095


def test_the_engine_is_started_as_the_config_says(config, pack, tmp_path):
    got = settings(
        ["--config", str(config(env={"STRATA_X": 5}, before_load="echo 'a b'", log="my.log"))], {"HOME": "/"}
    )
    assert got.launch.command[1:] == ["--pack", str(pack), "--serve"] and got.launch.cwd == tmp_path
    assert got.launch.env == {"HOME": "/", "STRATA_X": "5"} and got.launch.log == tmp_path / "my.log"
    assert got.pack == pack and got.before_load == ["echo", "a b"]


@pytest.mark.parametrize(
    "keys, added, asked",
    [
        ({}, [], 1),
        ({"parallel": 1}, [], 1),
        ({"parallel": 4}, ["--batch", "4"], 4),
        ({"parallel": 4, "args": ["--slots", "3"]}, [], 3),
        ({"args": ["--batch=6"]}, [], 6),
        ({"parallel": 2.5}, [], 1),
    ],
)
def test_slots_are_asked_of_the_engine_and_known_to_the_server(config, pack, keys, added, asked):
    args = ["--pack", str(pack), *keys.pop("args", [])]
    got = settings(["--config", str(config(args=args, **keys))])
    assert got.launch.command[1:] == [*args, *added, "--serve"] and got.parallel == asked


def test_the_scripted_engine_gets_the_slots_of_the_config(config):
    got = settings(["--engine", "mock", "--config", str(config(parallel=3))])
    assert got.launch.command[-2:] == ["--batch", "3"] and got.parallel == 3


def test_the_rules_of_the_scheduler_come_from_the_environment(config):
    path = str(config(max_queue=7))
    assert settings(["--config", path]).rules == Rules(max_queue=7)
    environment = {"STRATA_PARALLEL_SOLO": "0", "STRATA_ADMIT_SHORT_FIRST": "200", "STRATA_ADMIT_MAX_WAIT_S": "2.5"}
    wanted = Rules(max_queue=7, returns_to_solo=False, short_first=200, short_after_s=2.5)
    assert settings(["--config", path], environment).rules == wanted


def test_help_teaches():
    run = run_program("--help")
    assert run.returncode == 0
    for word in ("--config", "--engine", "curl", '"exe"', "/v1/chat/completions", "docs/configuration.md"):
        assert word in run.stdout


class Running:
    """A server started as a person would, and the processes below it."""

    def __init__(self, argv: list[str], tmp_path: Path) -> None:
        self.process = subprocess.Popen(
            [*PROGRAM, *argv, "--port", "0"], stderr=subprocess.PIPE, text=True, cwd=tmp_path
        )
        self.lines: list[str] = []
        self._log: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        with self.process.stderr as log:
            for line in log:
                self._log.put(line)
        self._log.put("")

    def until(self, word: str) -> str:
        """The first line of the log, of those not looked at so far, with `word` in it."""
        while True:
            line = self._log.get(timeout=30)
            assert line, f"the log ended without {word!r}: {self.lines}"
            self.lines.append(line)
            if word in line:
                return line

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()

    @property
    def children(self) -> list[int]:
        text = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(pid) for pid in text.split()]


@pytest.fixture
def start(tmp_path, pack):
    started: list[Running] = []

    def begin(script: dict[str, Any], *argv: str) -> Running:
        path = tmp_path / "script.json"
        path.write_text(json.dumps(script))
        mock = ["--engine", "mock", "--script", str(path), "--tokenizer", str(pack)]
        started.append(Running([*mock, *argv], tmp_path))
        return started[-1]

    yield begin
    for running in started:
        running.end()


def ends(descriptor: int) -> bool:
    readable, _, _ = select.select([descriptor], [], [], 15)
    os.close(descriptor)
    return bool(readable)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_server_and_engine_even_in_mid_answer(start, number):
    running = start({"replies": [{"repeat": True, "token_ms": 5, "steps": [{"text": "more "}]}]})
    url = running.until("listening on").split("listening on ")[1].split(";")[0]
    running.until("engine: ready")
    (engine,) = running.children
    descriptor = os.pidfd_open(engine)
    body = json.dumps({"messages": [{"role": "user", "content": "x"}], "stream": True}).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/chat/completions", body)) as answer:
        while b"reasoning_content" not in answer.readline():
            pass
        running.process.send_signal(number)
        rest = answer.read().decode()
    assert "shutting down" in rest and rest.endswith("data: [DONE]\n\n")
    assert ends(descriptor) and running.process.wait(15) == 0


def test_a_second_ctrl_c_does_not_wait_for_a_deaf_engine(start):
    running = start({"replies": [{"reading": [{"silent": True}]}]})
    url = running.until("listening on").split("listening on ")[1].split(";")[0]
    running.until("engine: ready")
    descriptor = os.pidfd_open(running.children[0])
    body = json.dumps({"messages": [{"role": "user", "content": "x"}], "stream": True}).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/chat/completions", body)) as answer:
        while b"keep-alive" not in answer.readline():
            pass
        running.process.send_signal(signal.SIGINT)
        running.until("SIGINT: ending the engine")
        running.process.send_signal(signal.SIGINT)
        answer.read()
    running.until("killing the engine")
    assert ends(descriptor) and running.process.wait(15) == 0


def test_a_taken_port_is_said_before_an_engine_is_loaded(start):
    first = start({})
    port = first.until("listening on").split("http://127.0.0.1:")[1].split(";")[0]
    run = run_program(*first.process.args[3:-1], port)
    assert run.returncode == 1 and f"cannot listen on 127.0.0.1:{port}" in run.stderr
    assert "engine: started" not in run.stderr and "Traceback" not in run.stderr


def test_the_log_tells_how_to_call_and_has_a_line_for_each_request(start):
    running = start({"replies": [{"reused": 2, "steps": [{"text": "fine"}]}]})
    url = running.until("listening on").split("listening on ")[1].split(";")[0]
    assert "curl" in running.until("try:") and "/v1/chat/completions" in running.lines[-1]
    running.until("engine: ready")
    body = json.dumps({"messages": [{"role": "user", "content": "x"}]}).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/chat/completions", body)) as answer:
        usage = json.load(answer)["usage"]
    line = running.until("prompt ")
    for words in (
        f"prompt {usage['prompt_tokens']}",
        "reused 2",
        f"generated {usage['completion_tokens']}",
        "finish stop",
        "solo",
    ):
        assert words in line


def test_keys_are_never_written_to_the_log(start):
    running = start({}, "--api-key", "very-secret")
    running.until("engine: ready")
    assert "with API key" in "".join(running.lines) and "very-secret" not in "".join(running.lines)


def test_the_engine_is_told_the_token_that_begins_a_turn_in_this_vocabulary(config, chat):
    """With another model's token nothing of a conversation whose thinking was dropped would ever be found again."""
    turn = chat.vocabulary.special["<|im_start|>"]
    told = with_turn_token(settings(["--config", str(config())]), chat.vocabulary)
    assert told.launch.command[-2:] == ["--turn-token", str(turn)]
    own = settings(["--config", str(config(args=["--pack", "x.gguf", "--turn-token=5"]))])
    assert with_turn_token(own, chat.vocabulary) == own

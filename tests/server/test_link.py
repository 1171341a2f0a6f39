"""The engine's process: starts that fail, engines that hang, endings that leave nothing behind."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import select
import subprocess
import sys
from array import array
from pathlib import Path

import pytest

from strata.protocol.lines import Gen, Info, Output, Progress, Ready, SamplingKeys, Token
from strata.server.link import EngineLink, Patience
from strata.server.process import EngineError, EngineProcess, Launch

PATIENCE = Patience(ready_s=20, silence_s=20, stall_s=0, close_s=5, start_tries=1, retry_s=0.01)


class Recorder:
    """A listener that remembers, and lets a test wait for what it wants to see."""

    def __init__(self) -> None:
        self.events: list[tuple[str, object]] = []
        self._news = asyncio.Event()

    def on_started(self, info: Info, ready: Ready) -> None:
        self._add("started", ready)

    def on_start_failed(self, reason: str) -> None:
        self._add("failed", reason)

    def on_line(self, output: Output) -> None:
        self._add("line", output)

    def on_ended(self, reason: str) -> None:
        self._add("ended", reason)

    def _add(self, kind: str, value: object) -> None:
        self.events.append((kind, value))
        self._news.set()

    async def wait_for(self, kind: str, what: type = object) -> object:
        async with asyncio.timeout(20):
            while True:
                for name, value in self.events:
                    if name == kind and isinstance(value, what):
                        return value
                self._news.clear()
                await self._news.wait()


@pytest.fixture
async def engine(tmp_path):
    """engine(script, patience) -> (link, recorder); ended after the test."""
    links: list[EngineLink] = []

    def make(script: dict, before_load: list[str] | None = None, command: list[str] | None = None, **patience):
        path = tmp_path / "script.json"
        path.write_text(json.dumps({"transcript": str(tmp_path / "transcript"), **script}))
        launch = Launch(
            command or [sys.executable, "-m", "strata.server.mock_engine", "--script", str(path)],
            cwd=tmp_path,
            log=tmp_path / "engine.log",
        )
        recorder = Recorder()
        link = EngineLink(launch, recorder, dataclasses.replace(PATIENCE, **patience), before_load)
        links.append(link)
        return link, recorder

    yield make
    for link in links:
        link.kill_now()
        await link.close()


def starts(tmp_path: Path) -> list[int]:
    path = tmp_path / "transcript"
    lines = path.read_text().splitlines() if path.exists() else []
    return [int(line.split()[1]) for line in lines if line.startswith("START")]


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"


FAILED_STARTS = {
    "an ERR": ([{"raw": "ERR pack: tensor x: truncated"}, {"exit": 1}], "pack: tensor x: truncated"),
    "words in the log": ([{"log": "loading"}, {"log": "CUDA out of memory"}, {"exit": 1}], "CUDA out of memory"),
    "nothing": ([{"exit": 3}], "exit code 3"),
    "a signal": ([{"kill": True}], "SIGKILL"),
    "noise before": ([{"raw": "DONE x"}, {"raw": "hello"}, {"raw": "ERR why"}, {"exit": 1}], "why"),
}


@pytest.mark.parametrize("steps, reason", FAILED_STARTS.values(), ids=FAILED_STARTS.keys())
async def test_a_failed_start_says_why(engine, steps, reason):
    link, heard = engine({"start": steps})
    link.start()
    assert reason in await heard.wait_for("failed")


async def test_a_failed_start_is_tried_three_times(engine, tmp_path):
    good = {"replies": []}
    link, heard = engine({"lives": [{"start": [{"exit": 1}]}, {"start": [{"exit": 1}]}, good]}, start_tries=3)
    link.start()
    await heard.wait_for("started")
    assert len(starts(tmp_path)) == 3
    await link.close()


async def test_an_engine_that_refuses_its_options_is_not_asked_again(engine, tmp_path):
    link, heard = engine({"start": [{"raw": "ERR --spec: unknown"}, {"exit": 2}]}, start_tries=3)
    link.start()
    assert "--spec: unknown" in await heard.wait_for("failed") and len(starts(tmp_path)) == 1


async def test_a_program_that_is_not_there_is_named(engine):
    link, heard = engine({}, command=["/no/such/engine"])
    link.start()
    assert "/no/such/engine" in await heard.wait_for("failed")


async def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(EngineError, match="nowhere"):
        await EngineProcess.spawn(Launch(["true"], cwd=tmp_path / "nowhere", log=tmp_path / "log"))


async def test_an_engine_that_never_gets_ready_is_ended(engine, tmp_path):
    link, heard = engine({"start": [{"silent": True}]}, ready_s=0.5)
    link.start()
    assert "STRATA_ENGINE_READY_S" in await heard.wait_for("failed")
    assert not is_running(starts(tmp_path)[0])


async def test_before_load_runs_first_and_its_failure_is_a_failed_start(engine, tmp_path):
    link, heard = engine({}, before_load=["touch", "prepared"])
    link.start()
    await heard.wait_for("started")
    assert (tmp_path / "prepared").exists()
    await link.close()
    link, heard = engine({}, before_load=["false"])
    link.start()
    assert "before_load" in await heard.wait_for("failed")


async def start_request(link: EngineLink, heard: Recorder) -> None:
    link.start()
    await heard.wait_for("started")
    link.send(Gen(5, array("i", [1, 2, 3]), SamplingKeys()))


async def test_an_engine_that_falls_silent_in_a_request_is_ended(engine, tmp_path):
    link, heard = engine({"replies": [{"steps": [{"tokens": [5]}, {"silent": True}]}]}, silence_s=0.4)
    await start_request(link, heard)
    assert "said nothing" in await heard.wait_for("ended")
    assert ("line", Token(5)) in heard.events and not is_running(starts(tmp_path)[0])


async def test_a_slow_engine_that_says_something_is_not_ended(engine, eventually):
    slow = [{"tokens": [5]}, {"delay_ms": 300}] * 4
    link, heard = engine({"replies": [{"steps": slow}]}, silence_s=0.8)
    await start_request(link, heard)
    await eventually(lambda: heard.events.count(("line", Token(5))) == 4)
    assert not any(kind == "ended" for kind, _ in heard.events)
    await link.close()


async def test_a_frozen_process_is_found_before_the_silence_timer(engine):
    link, heard = engine({"replies": [{"reading": [{"silent": True}]}]}, stall_s=0.4, silence_s=60)
    await start_request(link, heard)
    await heard.wait_for("line", Progress)
    assert "frozen" in await heard.wait_for("ended")


async def test_an_idle_engine_is_neither_silent_nor_frozen(engine):
    link, heard = engine({}, stall_s=0.1, silence_s=0.1)
    link.start()
    await heard.wait_for("started")
    await asyncio.sleep(0.6)
    assert [kind for kind, _ in heard.events] == ["started"]
    await link.close()


async def test_no_line_comes_after_the_end(engine):
    steps = [{"raw": "ERR fatal: moved"}, {"tokens": [5]}, {"raw": "DONE 1 3 0.0 0.0 stop 0 0 0"}]
    link, heard = engine({"replies": [{"steps": steps}]})
    await start_request(link, heard)
    assert "fatal: moved" in await heard.wait_for("ended")
    kinds = [kind for kind, _ in heard.events]
    assert kinds.count("ended") == 1 and kinds[-1] == "ended" and ("line", Token(5)) not in heard.events


async def test_lines_of_later_engines_are_ignored(engine):
    link, heard = engine({"replies": [{"steps": [{"raw": "PFSTATE 1 2"}, {"raw": ""}, {"tokens": [5]}]}]})
    await start_request(link, heard)
    await heard.wait_for("line", Token)
    await link.close()


async def test_closing_asks_first_and_kills_what_does_not_listen(engine, tmp_path):
    link, heard = engine({})
    link.start()
    await heard.wait_for("started")
    await link.close()
    assert (tmp_path / "transcript").read_text().splitlines()[-1] == "QUIT"
    deaf = [
        sys.executable,
        "-c",
        "import signal,time\nsignal.signal(15,1)\nprint('READY 9',flush=True)\ntime.sleep(60)",
    ]
    link, heard = engine({}, command=deaf, close_s=0.2)
    link.start()
    await heard.wait_for("started")
    pid = link.pid
    await link.close()
    assert pid is not None and not is_running(pid)
    assert [kind for kind, _ in heard.events] == ["started"], "an ending that was asked for is no death"


async def test_closing_in_the_middle_of_a_start_leaves_nothing(engine, tmp_path, eventually):
    link, _ = engine({"start": [{"silent": True}]})
    link.start()
    await eventually(lambda: starts(tmp_path))
    await link.close()
    assert not is_running(starts(tmp_path)[0])


async def test_the_last_words_come_from_this_life_only(tmp_path):
    launch = Launch([sys.executable, "-c", "import sys; sys.stderr.write('second life')"], log=tmp_path / "log")
    (tmp_path / "log").write_text("CUDA out of memory\n")
    process = await EngineProcess.spawn(launch)
    await process.reap(10)
    assert process.last_words() == "second life"
    assert (tmp_path / "log").read_text().startswith("CUDA")


async def test_a_log_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(EngineError, match="no/such/folder"):
        await EngineProcess.spawn(Launch(["true"], log=tmp_path / "no/such/folder/engine.log"))


def test_an_engine_dies_with_a_server_that_was_killed(tmp_path):
    code = f"""
import asyncio, os, sys
from pathlib import Path
from strata.server.process import EngineProcess, Launch
async def main():
    process = await EngineProcess.spawn(Launch(["sleep", "60"], log=Path({str(tmp_path / "log")!r})))
    print(process.pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        child = int(server.stdout.readline())
        assert is_running(child)
        descriptor = os.pidfd_open(child)
        server.kill()
        server.wait()
    readable, _, _ = select.select([descriptor], [], [], 10)
    os.close(descriptor)
    assert readable, "the child outlived its parent"


async def test_ctrl_c_in_the_terminal_reaches_the_engine_not_before_the_server(tmp_path):
    """The engine leads a session of its own: a signal to the server's group does not hit it."""
    process = await EngineProcess.spawn(Launch(["sleep", "60"], log=tmp_path / "log"))
    assert os.getpgid(process.pid) != os.getpgid(0)
    await process.kill()
    assert not is_running(process.pid)

"""The bench tools against the real engine and the real server."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from strata.bench.__main__ import main
from strata.bench.engine import Case, host_work, plan, random_ids
from strata.bench.engine_process import EngineFailed, EngineProcess, engine_command, pack_argument
from strata.engine.window_cost import Lap

EMULATED = Path(__file__).resolve().parents[1] / "engine" / "device" / "emulated_engine.py"


def test_every_length_is_measured_once():
    assert plan([512], [64], [0, 100], [700]) == [
        Case("pp 512", 0, 512, 1),
        Case("tg 64", 0, 1, 64),
        Case("tg 64 @ 100", 0, 100, 64),
        Case("pp 512 @ 700", 700, 512, 1),
    ]


def test_random_prompts_stay_in_the_vocabulary_and_repeat():
    ids = random_ids(1000, vocab=40, seed=3)
    assert ids == random_ids(1000, vocab=40, seed=3)
    assert set(ids) <= set(range(40))


def test_engine_bench_writes_rates_of_the_real_engine(packs, tmp_path: Path):
    out = tmp_path / "r.json"
    work = ["-p", "16", "-n", "4", "-d", "0", "8", "--prompt-at", "40", "-r", "2", "--starts", "2"]
    argv = ["engine", "--pack", str(packs["odd-q8_0"]), *work, "--target", "P4=pp 16", "--json", str(out)]
    assert main(argv) == 0
    figures = json.loads(out.read_text())
    assert [r["work"] for r in figures["records"]] == ["pp 16", "tg 4", "tg 4 @ 8", "pp 16 @ 40", "start to READY"]
    assert all(r["median"] > 0 for r in figures["records"])
    assert figures["records"][0]["target"] == "P4" and figures["records"][0]["runs"] == 2
    assert figures["records"][-1]["runs"] == 2
    assert figures["pack"]["name"] == "odd-q8_0.gguf"


@pytest.mark.soak  # it starts an emulated card
def test_engine_bench_on_a_card_has_the_host_work_of_every_measured_request(packs, request, tmp_path: Path):
    cache = getattr(request.config, "cache", None)
    kernels, out = cache.mkdir("emulated") if cache else tmp_path / "kernels", tmp_path / "r.json"
    exe = tmp_path / "engine"
    exe.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{EMULATED}" "{kernels}" "$@"\n')
    exe.chmod(0o755)
    work = ["--device", "cuda", "--threads", "1", "-p", "3", "-n", "5", "-r", "2", "--target", "P10=tg 5: host work"]
    argv = ["engine", "--pack", str(packs["odd-q8_0"]), "--exe", str(exe), *work, "--json", str(out)]
    assert main([*argv, "--extra", "--prefill", "18", "--short-read", "0"]) == 0
    records = json.loads(out.read_text())["records"]
    assert [record["work"] for record in records] == ["pp 3", "tg 5", "tg 5: host work", "start to READY"]
    assert (records[2]["target"], records[2]["runs"]) == ("P10", 2) and records[2]["min"] > 0


def test_host_work_is_that_of_the_measured_requests_with_windows():
    told = [Lap(900.0, 4), Lap(0.0, 0), Lap(80.0, 4), Lap(120.5, 4)]
    engine = SimpleNamespace(log_text=lambda: "".join(f"11:45:52 engine: stats: {lap}\n" for lap in told))
    assert host_work(engine, ["", "pp 3", "tg 5", "tg 5"]) == {"tg 5": [80.0, 120.5]}


def test_a_pack_that_is_none_ends_the_bench_with_the_engines_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"no GGUF at all")
    assert main(["engine", "--pack", str(bad)]) == 1
    assert "bad.gguf" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["tiers", "quality", "score", "read-join http"])
def test_a_file_that_is_no_pack_ends_a_tool_with_one_line(tmp_path: Path, capsys, command):
    path = tmp_path / "bad.gguf"
    for content in (None, b"GGUFxx"):
        if content:
            path.write_bytes(content)
        assert main([*command.split(), "--pack", str(path)]) == 1
        said = capsys.readouterr().err
        assert said.startswith("strata-bench: ") and said.count("\n") == 1 and "bad.gguf" in said


def test_a_refused_request_does_not_wait_for_done(packs):
    argv = [*engine_command(None), *pack_argument(packs["odd-q8_0"]), "--max-context", "64"]
    with EngineProcess(argv) as engine:
        with pytest.raises(EngineFailed, match="exceeds the context"):
            engine.generate([40, 41], 1000)
        assert engine.generate([40, 41], 2).done.generated == 2


def program(path: Path, body: str) -> str:
    path.write_text(f"#!{sys.executable}\nimport json, sys\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_peers_are_measured_in_turns_and_their_failure_is_told(packs, tmp_path: Path, capsys):
    rates = [{"n_prompt": 8, "n_gen": 0, "avg_ts": 12.5}, {"n_prompt": 0, "n_gen": 3, "avg_ts": 2.5}]
    llama = program(tmp_path / "llama-bench", f"print(json.dumps({rates}))")
    result = {"prompt_and_first_token_seconds": 0.5, "decode_tokens_per_second": 4.0}
    other = program(tmp_path / "flyweight", f"print(json.dumps({result}))")
    out = tmp_path / "r.json"
    argv = ["peers", "--pack", str(packs["odd-q8_0"]), "--llama-bench", llama, "-p", "8", "-n", "3", "-r", "1"]
    assert main([*argv, "--flyweight", other, "--json", str(out)]) == 0
    found = [(r["work"], r["peer"]["name"], r["peer"]["median"]) for r in json.loads(out.read_text())["records"]]
    assert found == [
        ("pp 8", "llama.cpp", 12.5),
        ("pp 8", "flyweight", 16.0),
        ("tg 3", "llama.cpp", 2.5),
        ("tg 3", "flyweight", 4.0),
    ]
    program(tmp_path / "llama-bench", "sys.exit('no such model')")
    assert main(argv) == 1
    assert "no such model" in capsys.readouterr().err
    assert main([*argv[:-1], "1", "--llama-bench", str(tmp_path / "nothing")]) == 1
    assert "does not start" in capsys.readouterr().err

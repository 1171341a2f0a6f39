"""The bench tools against the real engine and the real server."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path

import pytest

from strata.bench.__main__ import main
from strata.bench.engine import Case, plan, random_ids
from strata.bench.engine_process import EngineFailed, EngineProcess, engine_command, pack_argument


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
    work = ["-p", "16", "-n", "4", "-d", "0", "8", "--prompt-at", "40", "-r", "2"]
    argv = ["engine", "--pack", str(packs["odd-q8_0"]), *work, "--target", "P4=pp 16", "--json", str(out)]
    assert main(argv) == 0
    figures = json.loads(out.read_text())
    assert [r["work"] for r in figures["records"]] == ["pp 16", "tg 4", "tg 4 @ 8", "pp 16 @ 40", "start to READY"]
    assert all(r["median"] > 0 for r in figures["records"])
    assert figures["records"][0]["target"] == "P4" and figures["records"][0]["runs"] == 2
    assert figures["pack"]["name"] == "odd-q8_0.gguf"


def test_a_pack_that_is_none_ends_the_bench_with_the_engines_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"no GGUF at all")
    assert main(["engine", "--pack", str(bad)]) == 1
    assert "bad.gguf" in capsys.readouterr().err


def test_a_refused_request_does_not_wait_for_done(packs):
    argv = [*engine_command(None), *pack_argument(packs["odd-q8_0"]), "--max-context", "64"]
    with EngineProcess(argv) as engine:
        with pytest.raises(EngineFailed, match="exceeds the context"):
            engine.generate([40, 41], 1000)
        assert engine.generate([40, 41], 2).done.generated == 2


def test_peers_are_measured_in_turns_and_their_failure_is_told(packs, tmp_path: Path, capsys):
    peer = tmp_path / "llama-bench"
    peer.write_text(f"#!{sys.executable}\nimport json\nprint(json.dumps([{{'avg_ts': 12.5}}]))\n")
    peer.chmod(peer.stat().st_mode | stat.S_IXUSR)
    out = tmp_path / "r.json"
    argv = ["peers", "--pack", str(packs["odd-q8_0"]), "--llama-bench", str(peer), "-p", "8", "-n", "3", "-r", "1"]
    assert main([*argv, "--json", str(out)]) == 0
    assert [r["peer"]["median"] for r in json.loads(out.read_text())["records"]] == [12.5, 12.5]
    peer.write_text(f"#!{sys.executable}\nimport sys\nsys.exit('no such model')\n")
    assert main(argv) == 1
    assert "no such model" in capsys.readouterr().err

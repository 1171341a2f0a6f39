"""The tools that test a whole engine and a whole server: the real ones pass, and what is wrong is noticed."""

from __future__ import annotations

import json
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from strata.bench.__main__ import main
from strata.bench.checks import Findings, Prompts, gaps
from strata.bench.http_client import Answer, user
from strata.bench.read_join_soak import Seen, quarters
from strata.bench.slot_engine import SlotEngine
from strata.bench.slot_model import Request
from strata.protocol.lines import SamplingKeys

ENGINE = "--threads 1 --verify-accounts"

# Stands between a tool and the engine; EDIT is an expression that makes a line of the engine into another one.
PROXY = """#!{python}
import subprocess, sys
engine = subprocess.Popen([sys.executable, "-m", "strata.engine", *sys.argv[1:]], stdout=subprocess.PIPE)
n = 0
for line in engine.stdout:
    n += line.startswith(b"BT ")
    sys.stdout.buffer.write({edit})
    sys.stdout.flush()
sys.exit(engine.wait())
"""


@pytest.fixture(params=["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def on_device(request: pytest.FixtureRequest) -> list[str]:
    return ["--device", request.param]


@pytest.fixture
def wrong_engine(tmp_path: Path) -> Callable[[str], str]:
    """wrong_engine(edit) -> a program that is the engine but for one edit of its lines; n: tokens of slots so far."""

    def write(edit: str) -> str:
        path = tmp_path / "wrong-engine"
        path.write_text(PROXY.format(python=sys.executable, edit=edit))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return str(path)

    return write


def checks_of(path: Path) -> dict[str, bool]:
    return {check["name"]: check["ok"] for check in json.loads(path.read_text())["checks"]}


def records_of(path: Path) -> dict[str, dict[str, Any]]:
    return {record["work"]: record for record in json.loads(path.read_text())["records"]}


@pytest.mark.parametrize("n", [65, pytest.param(150, marks=pytest.mark.soak)])
def test_eight_slots_of_some_pages_of_tokens_say_what_each_prompt_says_alone(packs, tmp_path, on_device, n):
    out = tmp_path / "r.json"
    argv = ["batch-test", "--pack", str(packs["odd-q8_0"]), "--batch", "8", "--max-new", str(n), f"--extra={ENGINE}"]
    assert main([*argv, *on_device, "--json", str(out)]) == 0
    checks = checks_of(out)
    for keys in ("greedy", "seeded"):
        for name in ("all at once", "staggered", "promoted from solo", "beside and after a cancelled slot"):
            assert checks[f"{keys}, {name}"]
    assert checks["mixed keys"]
    record = records_of(out)["8 slots, greedy, all decoding"]
    assert record["target"] == "P3" and record["median"] > 0


def test_batch_test_notices_one_wrong_token_of_a_slot(packs, tmp_path, wrong_engine):
    out = tmp_path / "r.json"
    exe = wrong_engine(r"line if n != 20 or line[:2] != b'BT' else b'BT %s 7\n' % line.split()[1]")
    argv = [
        "batch-test",
        "--pack",
        str(packs["odd-q8_0"]),
        "--exe",
        exe,
        "--batch",
        "2",
        "--max-new",
        "24",
        "--keys",
        "",
    ]
    assert main([*argv, f"--extra={ENGINE}", "--json", str(out)]) == 1
    assert [ok for name, ok in checks_of(out).items() if "all at once" in name] == [False]


def test_batch_test_tells_a_token_too_many(packs, tmp_path, wrong_engine, capsys):
    exe = wrong_engine(r"line if n != 5 else line + b'BT 1 7\n'")
    argv = ["batch-test", "--pack", str(packs["odd-q8_0"]), "--exe", exe, "--batch", "2", "--max-new", "24"]
    assert main([*argv, f"--extra={ENGINE}"]) == 1
    assert "had its last token" in capsys.readouterr().err


def test_fewer_slots_than_asked_for_end_the_test_with_both_numbers(packs, wrong_engine, capsys):
    exe = wrong_engine(r"line.replace(b'batch_slots=3', b'batch_slots=2')")
    assert main(["batch-test", "--pack", str(packs["odd-q8_0"]), "--exe", exe, "--batch", "3"]) == 1
    assert "3 slots were asked for, the engine runs 2" in capsys.readouterr().err


def test_long_prompts_beside_slots_giving_way_and_next_turns(packs, tmp_path, on_device):
    out = tmp_path / "r.json"
    stream = "3000" if "cuda" in on_device else "200"  # a card is through with 200 before they are stopped
    argv = ["interleave-test", "--pack", str(packs["odd-q8_0"]), "--long", "300", "--chunk", "32", "--stream", stream]
    argv += ["--max-new", "16", "--keys", "temperature=0.9 seed=5", f"--extra={ENGINE}"]
    assert main([*argv, *on_device, "--json", str(out)]) == 0
    checks = checks_of(out)
    assert checks["gives way: it goes on from there"] and checks["solo gives way: the long prompt"]
    assert checks["next turn: turn checkpoint"] and checks["returns: both legs together"]
    assert records_of(out)["longest gap of 2 slots while 300 tokens are read"]["median"] > 0


def test_a_conversation_is_the_same_from_wherever_it_was_kept(packs, tmp_path, on_device):
    out = tmp_path / "r.json"
    argv = ["parking-test", "--pack", str(packs["odd-q8_0"]), "--first", "150", "--max-new", "8", "--turns", "3"]
    argv += ["--only", "slot", "checkpoint", "ram", "disk"]
    assert main([*argv, *on_device, f"--extra={ENGINE} --prefill 32", "--json", str(out)]) == 0
    checks = checks_of(out)
    for where in ("slot", "checkpoint", "RAM", "disk"):
        assert checks[f"{where}, turn 3: reused"] and checks[f"{where}, turn 3: the state in every bit"]


@pytest.mark.soak  # seven engines; what each does with such a file is in tests/engine/test_parking_process.py
def test_a_conversation_of_a_damaged_file_is_read_again(packs, tmp_path, on_device):
    out = tmp_path / "r.json"
    argv = ["parking-test", "--pack", str(packs["odd-q8_0"]), "--first", "150", "--max-new", "8", "--only", "damaged"]
    assert main([*argv, *on_device, f"--extra={ENGINE} --prefill 32", "--json", str(out)]) == 0
    assert checks_of(out)["damaged, a byte changed at 50%: tokens reused"]


def test_parking_test_notices_that_nothing_was_kept(packs, tmp_path):
    out = tmp_path / "r.json"
    argv = ["parking-test", "--pack", str(packs["odd-q8_0"]), "--first", "40", "--turns", "2", "--max-new", "4"]
    argv += ["--only", "slot", "ram"]
    nothing = "--conversation-cache-mib 0 --conversation-cache-disk-mib 0"
    assert main([*argv, f"--extra={ENGINE} {nothing}", "--json", str(out)]) == 1
    checks = checks_of(out)
    assert not checks["RAM, turn 2: reused"] and checks["RAM, turn 2"] and checks["slot, turn 2: reused"]


def test_clients_that_go_away_leave_nothing_to_the_next_request(packs, tmp_path):
    out = tmp_path / "r.json"
    argv = ["early-close-test", "--pack", str(packs["odd-q8_0"]), "--slots", "3", "--rounds", "3", "--long", "120"]
    argv += ["--max-tokens", "12", f"--extra={ENGINE} --prefill 32 --max-context 4096", "--json", str(out)]
    assert main(argv) == 0
    assert checks_of(out)["no slot is left busy"]


def test_reads_that_join_a_busy_server(packs, tmp_path):
    out = tmp_path / "r.json"
    argv = ["read-join", "two_joiners", "followup", "read_alone", "question", "http", "soak"]
    argv += ["--pack", str(packs["odd-q8_0"]), "--slots", "4", f"--extra={ENGINE} --prefill 64", "--json", str(out)]
    argv += ["--long", "1500", "--apart", "0.2", "--streams", "2", "--stream-tokens", "600", "--held", "800"]
    argv += ["--read", "2000", "--delay", "0.1", "--http-tokens", "48", "--clients", "8", "--seconds", "2"]
    assert main([*argv, "--soak-long", "300", "--soak-tokens", "12"]) == 0
    records = records_of(out)
    assert records["http: 4 streams against the engine alone"]["target"] == "P12"
    assert records["soak: longest gap of an answer"]["runs"] > 0


def test_a_server_that_does_not_start_is_told_with_its_reason(tmp_path, capsys):
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"no GGUF at all")
    assert main(["read-join", "read_alone", "--pack", str(bad)]) == 1
    assert "bad.gguf" in capsys.readouterr().err


def test_a_soak_notices_a_text_that_is_not_its_prompts_own():
    seen = Seen()
    seen.compare(user("a"), Answer(pieces=["one", " two"], whole=True))
    seen.compare(user("a"), Answer(pieces=["one"]))
    seen.compare(user("b"), Answer(pieces=["three"]))
    assert (seen.differed, seen.compared) == ([], 1)
    seen.compare(user("a"), Answer(pieces=["one tree"]))
    assert len(seen.differed) == 1


def test_memory_that_grows_shows_between_the_second_and_the_last_quarter():
    assert quarters([1.0, 1, 1, 5, 5, 5, 5, 5, 5, 9, 9, 9]) == (5, 9)


def test_a_difference_names_the_first_token_and_the_length_counts_too():
    findings = Findings()
    findings.same("a", [1, 2, 3], [1, 2, 3])
    findings.same("b", [1, 5, 3], [1, 2, 3])
    findings.same("c", [1, 2], [1, 2, 3])
    findings.begins("d", [1, 2], [1, 2, 3])
    findings.near("e", 5, 4, 6)
    findings.near("f", 5, 4)
    assert [check.ok for check in findings.checks] == [True, False, False, True, True, False]
    assert "token 1" in findings.checks[1].detail and "token 2" in findings.checks[2].detail


def test_a_gap_that_reaches_into_the_read_counts_whole():
    r = Request((1,), 9, SamplingKeys(), 0, token_s=[0.0, 1.0, 4.0, 4.5, 9.0])
    assert gaps(r, 2.0, 4.2) == [3.0, 0.5]


def test_only_turns_begin_with_the_turn_token():
    prompts = Prompts(1024, seed=1)
    assert 7 not in prompts.plain(3000, 1)
    assert prompts.turn(4, 2)[0] == 7 and prompts.turn(4, 2).count(7) == 1 and len(prompts.turn(1, 1)) == 1


def test_a_wait_for_what_cannot_come_any_more_ends(packs):
    argv = [sys.executable, "-m", "strata.engine", "--serve", "--pack", str(packs["odd-q8_0"]), "--threads", "1"]
    with SlotEngine(argv) as engine:
        r = engine.alone([5, 6], 2)
        with pytest.raises(Exception, match="has not come"):
            engine.until_tokens(Request((1,), 2, SamplingKeys(), None), 1)
        assert len(r.tokens) == 2 and r.finish == "length"


@pytest.mark.soak
def test_a_hundred_clients_over_eight_slots_for_ten_minutes(packs, tmp_path):
    out = tmp_path / "r.json"
    cache = "--conversation-cache-mib 64 --conversation-cache-min-free-mib 0"
    argv = ["read-join", "soak", "--pack", str(packs["odd-q8_0"]), "--slots", "8", "--clients", "100"]
    argv += ["--seconds", "600", "--soak-long", "1000", "--soak-tokens", "24", "--json", str(out)]
    assert main([*argv, f"--extra={ENGINE} --prefill 64 {cache}"]) == 0
    checks = checks_of(out)
    for name in ("no request failed", "every text is its prompt's own", "no slot is left busy"):
        assert checks[f"soak: {name}"]
    assert checks["soak: memory of the server is flat"] and checks["soak: memory of the engine is flat"]

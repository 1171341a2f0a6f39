"""The report of the tests on a card: a failure is one, and a run without tests is none."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from strata.bench.gpu_tests import KERNELS, REST, Part, Ran, lacking, log_of, main, parts, sampled
from strata.bench.outcomes import LINES, TAIL, Outcome, checks, failures, held, log_text
from strata.bench.pytest_runs import Ended, Stop, run_beside
from strata.bench.report import Check, Report


@pytest.fixture(autouse=True)
def without_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is installed beside pytest takes four fifths of each start of it, and none of these tests needs it."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


@pytest.fixture
def found() -> list[Outcome]:
    whole = "a\nb\n/home/someone/strata/tests/x.py:3: AssertionError"
    return [
        Outcome("tests/kernels/cuda/test_a.py", "one", "passed", seconds=1.25),
        Outcome("tests/kernels/cuda/test_a.py", "two", "failed", "two: 3 bits differ", whole, 0.5),
        Outcome("tests/kernels/cuda/test_b.py", "one", "skipped", "one: no card"),
        Outcome("tests/engine/test_c.py", "collection", "failed", "collection: no module", "no module"),
    ]


def ran_as(part: Part, code: int, found: list[Outcome], seconds: float, said: str = "") -> Ran:
    return Ran(part, [Ended(code, found, said)], seconds)


def test_a_failed_test_fails_the_check_of_its_file_and_says_why(found):
    broken, first, second = checks(found, " alone")
    assert (first.ok, first.name) == (False, "tests/kernels/cuda/test_a.py alone")
    assert first.detail == "1 failed, 1 passed; two: 3 bits differ"
    assert second.ok and second.detail == "1 skipped; one: no card"
    assert not broken.ok and broken.name == "tests/engine/test_c.py alone"


def test_a_part_is_named_by_what_its_tests_are_of(found):
    """Kernels that are asked for by the folder above theirs were called engine, server and tools."""
    assert held(found) == "engine, kernels" and held(found[:3]) == "kernels"
    (part,) = parts(["tests/kernels"], workers=1, sanitize=False)
    assert part.paths == ("tests/kernels",) and part.marks == "gpu"
    assert ran_as(part, 0, found[:2], 2.0).record.work == "kernels: 2 tests"
    alone = ran_as(Part(REST, how=" alone on the card"), 0, found[3:], 1.0)
    assert alone.record.work == "engine alone on the card: 1 tests"
    assert ran_as(part, 2, [], 1.0).checks[0].name == "tests/kernels: exit code"


def test_a_log_has_a_line_a_file_and_the_end_of_each_failure_and_no_folder_of_the_machine(found):
    ran = [ran_as(Part((KERNELS,)), 1, found[:3], 2.0)]
    report = Report(tool="gpu_tests", records=[], flags={"workers": 4, "only": []}, machine={"gpu": "card"}, date="now")
    assert log_of(report, ran).splitlines() == [
        "gpu_tests, now: card",
        "workers 4",
        "",
        "FAILED tests/kernels/cuda/test_a.py::two",
        "    a",
        "    b",
        "    x.py:3: AssertionError",
        "",
        "kernels: 1 failed, 1 passed, 1 skipped in 2.0 s, exit code 1",
        "  tests/kernels/cuda/test_a.py      1.75 s  1 failed, 1 passed",
        "  tests/kernels/cuda/test_b.py      0.00 s  1 skipped",
    ]


def test_a_log_is_short_however_much_fails():
    many = [Outcome("tests/a/test_b.py", str(n), "failed", whole="word\n" * 99) for n in range(LINES)]
    said = failures(many)
    assert len(said) == LINES * (1 + TAIL)
    lines = log_text(["head"], said).splitlines()
    assert len(lines) == LINES and lines[-1] == f"and {1 + len(said) - (LINES - 1)} lines more"
    assert log_text(["head"], said[: LINES - 1]).splitlines() == ["head", *said[: LINES - 1]]


def test_tests_that_take_a_whole_card_are_not_run_beside_others():
    kernels, rest, alone = parts((), workers=4, sanitize=False)
    assert (
        kernels.paths == (KERNELS,)
        and kernels.words == rest.words == ("-n", "4", "--dist", "loadgroup")
        and not alone.words
    )
    assert rest.paths == alone.paths == REST and "not whole_card" in rest.marks and "not" not in alone.marks
    assert not any(part.may_be_empty for part in (kernels, rest, alone))
    (only,) = parts([f"{KERNELS}/test_norm.py"], workers=1, sanitize=False)
    assert only.paths == (f"{KERNELS}/test_norm.py",) and not only.words and only.may_be_empty


def test_a_run_without_tests_is_no_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "test_nothing.py").write_text("")
    monkeypatch.chdir(tmp_path)
    assert main(["--only", "test_nothing.py", "--workers", "1", "--json", str(tmp_path / "r.json")]) == 1
    assert '"ok": false' in (tmp_path / "r.json").read_text().replace(":false", ": false")


def test_what_pytest_found_is_in_the_report_and_in_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  gpu\n  whole_card\n")
    marked = "import pytest\npytestmark = pytest.mark.gpu\n"
    (tmp_path / "test_some.py").write_text(f"{marked}def test_a(): pass\ndef test_b(): assert 1 == 2\n")
    monkeypatch.chdir(tmp_path)
    files = ["--json", "r.json", "--log", "out/r.log"]
    assert main(["--only", "test_some.py", "--workers", "1", *files]) == 1
    report, log = json.loads((tmp_path / "r.json").read_text()), (tmp_path / "out" / "r.log").read_text()
    assert [record["work"] for record in report["records"]] == ["test_some.py: 2 tests"], "no part without tests"
    assert "FAILED test_some.py::test_b" in log and "E   assert 1 == 2" in log and str(tmp_path) not in log
    assert "test_some.py: 1 failed, 1 passed in " in log


def test_a_sample_has_sampled_every_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    for name, n in (("a", 5), ("b", 1)):
        tests = "".join(f"@pytest.mark.gpu\ndef test_{i}(): pass\n" for i in range(n))
        (tmp_path / f"test_{name}.py").write_text(f"import pytest\n{tests}def test_host(): pass\n")
    monkeypatch.chdir(tmp_path)
    assert sampled(["."], 3) == ["test_a.py::test_0", "test_a.py::test_3", "test_b.py::test_0"]
    with pytest.raises(LookupError, match=r"not found: .*test_c.py"):
        sampled(["test_c.py"])


ENDS = """import pytest
@pytest.fixture
def behind():
    yield
    raise RuntimeError("behind")
def test_passes(): pass
def test_fails(): assert 1 == 2
def test_fails_behind(behind): pass
def test_is_left_out(): pytest.skip("no card")
"""
TESTS = """import os, signal, time
import pytest
pytestmark = pytest.mark.gpu
def test_a(): pass
def test_b(): pass
@pytest.mark.parametrize("n", range(3))
def test_c(n): END
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """folder(end): two tests that pass, and three that end so."""

    def made(end: str) -> Path:
        (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  gpu\n  whole_card\n")
        (tmp_path / "test_some.py").write_text(TESTS.replace("END", end))
        monkeypatch.chdir(tmp_path)
        return tmp_path

    return made


def test_shares_of_the_tests_run_each_in_a_process_of_its_own_and_none_is_left_out(folder):
    folder("assert os.environ['PORT']")
    part = Part(tuple(sampled(["."])), under=("env", "PORT={port}"), processes=3, how=" under env")
    with Stop() as stop:
        ran = part.run(stop)
    assert [len(each.found) for each in ran.ended] == [2, 2, 1] and ran.well and not ran.unexplained
    assert sorted(outcome.name for outcome in ran.found) == ["test_a", "test_b", "test_c[0]", "test_c[1]", "test_c[2]"]


CHECKER = """#!/bin/sh
port=none
while [ "${1#*python}" = "$1" ]; do [ "$1" = --port ] && port=$2; shift; done
echo "========= COMPUTE-SANITIZER"; echo $port >> ports.txt
exec "$@"
"""


def test_each_process_under_a_checker_has_ports_of_its_own(folder, monkeypatch):
    """One checker for all of them ended by a signal: it had ten ports for fifteen processes."""
    path = folder("pass")
    (path / "compute-sanitizer").write_text(CHECKER)
    (path / "compute-sanitizer").chmod(0o755)
    monkeypatch.setenv("PATH", str(path), prepend=os.pathsep)
    assert main(["--sanitize", "--workers", "3", "--only", "test_some.py", "--json", "r.json"]) == 0
    assert sorted((path / "ports.txt").read_text().split()) == ["49152", "49168", "49184"]
    report = json.loads((path / "r.json").read_text())
    assert [record["work"] for record in report["records"]] == ["test_some.py under memcheck: 5 tests"]


def test_a_sample_of_nothing_says_what_pytest_said(folder, monkeypatch, capsys):
    path = folder("pass")
    monkeypatch.setenv("PATH", str(path), prepend=os.pathsep)
    (path / "compute-sanitizer").write_text(CHECKER)
    (path / "compute-sanitizer").chmod(0o755)
    assert main(["--sanitize", "--only", "test_some.py::test_gone", "--log", "r.log"]) == 2
    assert "test_gone" in capsys.readouterr().err and "test_gone" in (path / "r.log").read_text()


def test_a_process_that_breaks_down_is_named_with_what_it_said_and_the_tests_before_it_stay(folder, capfd):
    """A checker that died before the first test left a report that only said -11."""
    path = folder("print('was here', flush=True); os.kill(os.getpid(), signal.SIGSEGV)")
    words = ["--only", "test_some.py", "--workers", "1", "--log", "r.log", "--json", "r.json"]
    assert main(words) == 1
    log = (path / "r.log").read_text()
    for said in (log, capfd.readouterr().err):
        assert "exit code -11" in said and "Fatal Python error: Segmentation fault" in said
    assert "test_some.py: 2 passed in " in log and "exit code -11 (SIGSEGV)" in log


def test_a_run_that_is_stopped_reports_the_tests_that_were_over(folder):
    path = folder("time.sleep(600)")
    words = ["--only", "test_some.py", "--workers", "1", "--log", "r.log", "--json", "r.json", "--seconds", "3"]
    assert main(words) == 1
    assert "test_some.py: 2 passed in " in (path / "r.log").read_text()
    report = json.loads((path / "r.json").read_text())
    assert any("stopped: 3 s are over" in check["detail"] and not check["ok"] for check in report["checks"])


def test_a_signal_ends_what_was_started_and_leaves_the_report(folder):
    """A run that was killed at its limit left nothing at all."""
    path = folder("open('begun', 'w').write(str(os.getpid())); time.sleep(600)")
    words = ["--only", "test_some.py", "--workers", "1", "--log", "r.log"]
    process = subprocess.Popen([sys.executable, "-m", "strata.bench.gpu_tests", *words])
    while not (path / "begun").exists() or not (path / "begun").read_text():
        assert process.poll() is None
        time.sleep(0.05)
    for _ in range(2):  # as `timeout` sends it: to the process, and to its group
        process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 1
    assert "2 passed" in (path / "r.log").read_text() and "stopped: SIGTERM" in (path / "r.log").read_text()
    with pytest.raises(ProcessLookupError):
        os.kill(int((path / "begun").read_text()), 0)


def test_a_list_of_many_tests_is_not_spelt_out_in_the_report():
    names = tuple(f"{KERNELS}/test_a.py::test[card-{i}]" for i in range(300))
    ran = ran_as(Part(names, how=" under memcheck", of=" of covering.txt"), -11, [], 8.0)
    assert ran.record.work == f"{KERNELS} under memcheck: 0 tests of covering.txt"
    assert ran.checks == [Check(f"{KERNELS} under memcheck: exit code", False, "-11 (SIGSEGV)")]


def test_what_a_checker_said_of_memory_is_kept_where_all_tests_passed(found):
    said = "========= COMPUTE-SANITIZER\n========= Invalid __global__ read\n" + ".\n" * 99 + "2 passed\n"
    ran = ran_as(Part((KERNELS,)), 9, found[:1], 1.0, said)
    assert ran.unexplained[1:3] == ["    ========= COMPUTE-SANITIZER", "    ========= Invalid __global__ read"]
    assert ran.unexplained[-1] == "    2 passed" and len(ran.unexplained) < 30


def test_outcomes_of_every_end_of_a_test_are_written_at_once_also_from_workers(tmp_path, monkeypatch):
    (tmp_path / "test_ends.py").write_text(ENDS)
    (tmp_path / "test_broken.py").write_text("import no_such_module")
    monkeypatch.chdir(tmp_path)
    for n in ("0", "2"):
        with Stop() as stop:
            (ended,) = run_beside([((), ("-p", "xdist", "-n", n, ".", "--continue-on-collection-errors"))], stop)
        assert sorted((each.file, each.name, each.kind, each.text) for each in ended.found) == [
            (
                "test_broken.py",
                "collection",
                "failed",
                "collection: E   ModuleNotFoundError: No module named 'no_such_module'",
            ),
            ("test_ends.py", "test_fails", "failed", "test_fails: assert 1 == 2"),
            ("test_ends.py", "test_fails_behind", "failed", "test_fails_behind: RuntimeError: behind"),
            ("test_ends.py", "test_is_left_out", "skipped", "test_is_left_out: Skipped: no card"),
            ("test_ends.py", "test_passes", "passed", ""),
        ]


def test_what_tests_want_is_looked_for_before_the_first_of_them_runs(tmp_path, monkeypatch, capsys):
    """Tests of the engine ran for minutes on a card beside a Python that had no engine's program."""
    assert not lacking()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python3"))
    assert lacking() == ["strata-engine"]
    log = tmp_path / "log"
    assert main(["--only", "tests/engine", "--log", str(log)]) == 2
    for said in (capsys.readouterr().err, log.read_text()):
        assert "not installed: strata-engine, which tests/engine want" in said and "pip install -e" in said
    (part,) = parts(["tests/kernels"], workers=1, sanitize=False)
    assert part.paths == ("tests/kernels",)

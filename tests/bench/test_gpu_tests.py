"""The report of the tests on a card: a failure is one, and a run without tests is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from strata.bench.gpu_tests import KERNELS, REST, Part, Ran, log_of, main, parts, sampled
from strata.bench.outcomes import LINES, TAIL, Outcome, checks, failures, held, log_text, outcomes
from strata.bench.report import Report

JUNIT = """<testsuites><testsuite>
<testcase classname="tests.kernels.cuda.test_a" name="one" time="1.25"/>
<testcase classname="tests.kernels.cuda.test_a" name="two" time="0.5"><failure message="3 bits differ">a
b
/home/someone/strata/tests/x.py:3: AssertionError</failure></testcase>
<testcase classname="tests.kernels.cuda.test_b" name="one"><skipped message="no card"/></testcase>
<testcase classname="" name="tests.engine.test_c"><error message="collection failure">no module</error></testcase>
</testsuite></testsuites>"""


@pytest.fixture
def found(tmp_path: Path) -> list[Outcome]:
    junit = tmp_path / "junit.xml"
    junit.write_text(JUNIT)
    return list(outcomes(junit))


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
    assert Ran(part, 0, found[:2], 2.0).record.work == "kernels: 2 tests"
    assert (
        Ran(Part(REST, how=" alone on the card"), 0, found[3:], 1.0).record.work == "engine alone on the card: 1 tests"
    )
    assert Ran(part, 2, [], 1.0).checks[0].name == "tests/kernels: exit code"


def test_a_log_has_a_line_a_file_and_the_end_of_each_failure_and_no_folder_of_the_machine(found):
    ran = [Ran(Part((KERNELS,)), 1, found[:3], 2.0)]
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

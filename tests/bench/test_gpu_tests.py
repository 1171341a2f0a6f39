"""The report of the tests on a card: a failure is one, and a run without tests is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from strata.bench.gpu_tests import KERNELS, REST, checks, main, outcomes, parts, sampled

JUNIT = """<testsuites><testsuite>
<testcase classname="tests.kernels.cuda.test_a" name="one"/>
<testcase classname="tests.kernels.cuda.test_a" name="two"><failure message="3 bits differ">more</failure></testcase>
<testcase classname="tests.kernels.cuda.test_b" name="one"><skipped message="no card"/></testcase>
</testsuite></testsuites>"""


def test_a_failed_test_fails_the_check_of_its_file_and_says_why(tmp_path: Path):
    log = tmp_path / "junit.xml"
    log.write_text(JUNIT)
    first, second = checks("kernels", list(outcomes(log)))
    assert (first.ok, first.name) == (False, "kernels: tests/kernels/cuda/test_a.py")
    assert first.detail == "1 failed, 1 passed; two: 3 bits differ"
    assert second.ok and second.detail == "1 skipped; one: no card"


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


def test_a_sample_has_sampled_every_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    for name, n in (("a", 5), ("b", 1)):
        tests = "".join(f"@pytest.mark.gpu\ndef test_{i}(): pass\n" for i in range(n))
        (tmp_path / f"test_{name}.py").write_text(f"import pytest\n{tests}def test_host(): pass\n")
    monkeypatch.chdir(tmp_path)
    assert sampled(["."], 3) == ["test_a.py::test_0", "test_a.py::test_3", "test_b.py::test_0"]

"""The tool that compares texts with drafts and without: the real engine passes, another text is noticed."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path

import pytest

from strata.bench.__main__ import main
from strata.bench.checks import Findings
from strata.bench.draft_test import Run, note_slots

PROXY = """#!{python}
import subprocess, sys
engine = subprocess.Popen([sys.executable, "-m", "strata.engine", *sys.argv[1:]], stdout=subprocess.PIPE)
wrong = "--spec" in sys.argv
for n, line in enumerate(engine.stdout):
    if wrong and line.startswith(b"T "):
        line, wrong = b"T 5\\n", False
    sys.stdout.buffer.write(line)
    sys.stdout.flush()
sys.exit(engine.wait())
"""


def drafted(packs, tmp_path: Path, code: int, *more: str) -> tuple[list[str], dict[str, bool]]:
    """draft-test of a prompt of two tasks: what it measured, and its checks. Each of its runs starts two engines."""
    out = tmp_path / "out.json"
    line = ["draft-test", "--pack", str(packs["tiny-q8_0"]), "-n", "1", "--tasks", "copy", "arithmetic"]
    line += ["--longest", "160", "--max-new", "12", "--batch", "2", "--extra=--threads 1 --verify-accounts"]
    line += [f"--drafts=--mtp {packs['mtp-tiny-q8_0']} --spec 3", "--json", str(out), *more]
    assert main(line) == code
    report = json.loads(out.read_text())
    return [r["work"] for r in report["records"]], {check["name"]: check["ok"] for check in report["checks"]}


def names(*places: str) -> list[str]:
    return [f"{how}, {where}: the texts without drafts" for how in ("greedy", "sampled") for where in places]


def test_the_texts_of_the_real_engine_are_equal(packs, tmp_path):
    works, checks = drafted(packs, tmp_path, 0, "--repeats", "2")
    assert {f"{how}, 2 slots, speed against none" for how in ("greedy", "sampled")} <= set(works)
    assert list(checks) == names("alone", "2 slots") and all(checks.values())


def test_a_text_that_drafts_have_changed_is_noticed_and_slots_are_not_run_when_answers_alone_are_wanted(
    packs, tmp_path
):
    path = tmp_path / "wrong-engine"
    path.write_text(PROXY.format(python=sys.executable))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    works, checks = drafted(packs, tmp_path, 1, "--repeats", "1", "--only", "alone", "--exe", str(path))
    assert list(checks) == names("alone") and not any(checks.values())
    assert not any("2 slots" in work for work in works)


def test_answers_alone_are_not_run_when_slots_are_wanted(packs, tmp_path):
    works, checks = drafted(packs, tmp_path, 0, "--repeats", "1", "--only", "slots")
    assert list(checks) == names("2 slots") and all(checks.values())
    assert works and all("2 slots" in work for work in works)


def of_times(*seconds: float) -> Run:
    return Run([], "a card", list(seconds))


@pytest.mark.parametrize(("seconds", "ok"), [((1.5, 0.9, 1.0), True), ((0.9, 1.5, 1.6), False)])
def test_slots_have_a_floor_and_every_time_is_told(seconds, ok):
    findings = Findings()
    note_slots(findings, "2 slots", of_times(*seconds), of_times(1.0, 1.0, 1.0), 0.97)
    (check,) = findings.checks
    (speed,) = [record for record in findings.records if record.work == "2 slots, speed against none"]
    assert check.ok is ok and speed.runs == 3
    assert (speed.min, speed.max) == (1 / max(seconds), 1 / min(seconds))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--batch", "1"], "2 to 8 slots"),
        (["--batch", "0", "--only", "slots"], "wants some"),
        (["--repeats", "0"], "1 or more"),
    ],
)
def test_options_that_would_come_to_nothing_are_refused(packs, capsys, options, said):
    assert main(["draft-test", "--pack", str(packs["tiny-f32"]), *options]) == 2
    assert said in capsys.readouterr().out

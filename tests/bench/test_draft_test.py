"""The tool that compares texts with drafts and without: the real engine passes, another text is noticed."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path

import pytest

from strata.bench.__main__ import main

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


def run(packs, tmp_path: Path, exe: str | None = None) -> None:
    out = tmp_path / "out.json"
    line = ["draft-test", "--pack", str(packs["tiny-f32"]), "-n", "1", "--tasks", "copy", "arithmetic"]
    line += [
        "--repeats",
        "1" if exe else "2",
        "--longest",
        "160",
        "--max-new",
        "12",
        "--batch",
        "2",
        "--extra=--threads 1 --verify-accounts",
    ]
    line += [f"--drafts=--mtp {packs['mtp-tiny-q8_0']} --spec 3", "--json", str(out)]
    line += ["--exe", exe] if exe else []
    assert main(line) == (1 if exe else 0)
    works = [record["work"] for record in json.loads(out.read_text())["records"]]
    assert {f"{how}, 2 slots, speed against none" for how in ("greedy", "sampled")} <= set(works)
    checks = {check["name"]: check["ok"] for check in json.loads(out.read_text())["checks"]}
    assert list(checks) == [
        f"{how}, {where}: the texts without drafts" for how in ("greedy", "sampled") for where in ("alone", "2 slots")
    ]
    assert all(checks.values()) is not bool(exe)


def test_the_texts_of_the_real_engine_are_equal(packs, tmp_path):
    run(packs, tmp_path)


def test_a_text_that_drafts_have_changed_is_noticed(packs, tmp_path):
    path = tmp_path / "wrong-engine"
    path.write_text(PROXY.format(python=sys.executable))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    run(packs, tmp_path, str(path))


def test_slots_alone_are_run_without_answers_one_by_one_and_the_other_way_round(packs, tmp_path):
    for only, wanted in (("slots", ["2 slots"]), ("alone", ["alone"])):
        out = tmp_path / f"{only}.json"
        line = ["draft-test", "--pack", str(packs["tiny-f32"]), "-n", "1", "--tasks", "copy", "--repeats", "1"]
        line += ["--longest", "160", "--max-new", "6", "--batch", "2", "--only", only, "--extra=--threads 1"]
        line += [f"--drafts=--mtp {packs['mtp-tiny-q8_0']} --spec 3", "--json", str(out)]
        assert main(line) == 0
        report = json.loads(out.read_text())
        assert [check["name"].split(", ")[1].split(":")[0] for check in report["checks"]] == wanted * 2
        assert any("2 slots" in record["work"] for record in report["records"]) == (only == "slots")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--batch", "1"], "2 to 8 slots"),
        (["--batch", "0", "--only", "slots"], "wants some"),
        (["--only", "slots", "--floor", "0.97"], "wants no --floor"),
    ],
)
def test_options_that_would_come_to_nothing_are_refused(packs, capsys, options, said):
    assert main(["draft-test", "--pack", str(packs["tiny-f32"]), *options]) == 2
    assert said in capsys.readouterr().out

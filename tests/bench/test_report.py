"""Figures of the bench tools: summaries, percentiles, the JSON and the page made from it."""

from __future__ import annotations

import io
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from strata.bench.performance_page import MARK, head, page
from strata.bench.report import Check, Record, Report, Summary, finish, pack_facts, percentile, show

FLOATS = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50)


@given(FLOATS, st.floats(0, 1))
def test_percentile_never_leaves_the_values(values, share):
    assert min(values) <= percentile(values, share) <= max(values)


@given(FLOATS)
def test_percentile_ends_are_least_and_largest(values):
    assert percentile(values, 0) == min(values)
    assert percentile(values, 1) == max(values)


def test_percentile_interpolates_between_neighbours():
    assert percentile([30.0, 10.0, 20.0], 0.25) == 15.0


def test_summary_of_nothing_is_an_error_not_a_zero():
    with pytest.raises(ValueError, match="no runs"):
        Summary.of([])


def report(**changes) -> Report:
    record = Record.of("tg 64", "tok/s", [30.0, 10.0, 20.0], target="P17")
    record.peer = {"name": "llama.cpp", "median": 40.0, "min": 39.0, "max": 41.0, "runs": 3}
    fields = {"tool": "strata-bench peers", "records": [record], "flags": {"threads": 2}, "date": "2026-01-02T03:04:05"}
    return Report(**(fields | changes))


def test_report_survives_its_file_and_leaves_no_temporary(tmp_path: Path):
    path = tmp_path / "results" / "r.json"
    report().write(path)
    assert msgspec.json.decode(path.read_bytes(), type=Report).records[0].median == 20.0
    assert [p.name for p in path.parent.iterdir()] == ["r.json"]


def test_flags_and_checks_name_files_without_the_folders_of_a_machine(tmp_path: Path):
    flags = {"extra": ["--mtp", "/home/me/draft.gguf", "--spec", "4"], "words": "--mtp /home/me/draft.gguf", "n": 3}
    check = Check("c", False, "main(['--pack', '/tmp/some-1/odd.gguf']): 3 tokens/s of tests/bench, 1/2")
    Report(tool="t", records=[], flags=flags, checks=[check]).write(tmp_path / "r.json")
    kept = msgspec.json.decode((tmp_path / "r.json").read_bytes())
    assert kept["flags"] == {"extra": ["--mtp", "draft.gguf", "--spec", "4"], "words": "--mtp draft.gguf", "n": 3}
    assert kept["checks"][0]["detail"] == "main(['--pack', 'odd.gguf']): 3 tokens/s of tests/bench, 1/2"


def test_machine_facts_name_no_host_and_no_path():
    facts = msgspec.json.encode(report().machine).decode()
    assert "cores" in facts
    assert "/" not in facts.replace("model name", "")


def test_table_shows_the_ratio_to_the_peer():
    out = io.StringIO()
    show(report(), Console(file=out, width=200))
    assert "0.50" in out.getvalue()


def test_page_holds_every_figure_of_the_files_newest_first(tmp_path: Path):
    report(date="2026-01-01T00:00:00", tool="older").write(tmp_path / "a.json")
    report(date="2026-02-01T00:00:00", tool="newer").write(tmp_path / "b.json")
    text = page(f"# Title\n\n{MARK}\n", tmp_path)
    assert text.index("newer") < text.index("older")
    assert "quality" not in text
    report(tool="strata-bench quality").write(tmp_path / "c.json")
    assert page(f"# Title\n\n{MARK}\n", tmp_path) == text
    assert "### strata-bench quality" in page(f"{MARK}\n", tmp_path, "quality")
    assert "| P17 | tg 64 | 20.00 | 10.00 | 30.00 | tok/s | 3 | llama.cpp 40.0 (39.0..41.0) | 0.50 |" in text


def test_pack_facts_change_with_the_header(tmp_path: Path):
    a, b = tmp_path / "a.gguf", tmp_path / "b.gguf"
    a.write_bytes(b"GGUF" + bytes(100))
    b.write_bytes(b"GGUF" + bytes(99) + b"\x01")
    assert pack_facts(a)["bytes"] == 104
    assert pack_facts(a)["head_sha256"] != pack_facts(b)["head_sha256"]


def test_a_check_that_fails_is_in_the_exit_code_the_output_and_the_file(tmp_path: Path, capsys):
    checks = [Check("it fits", True, "3 of 3"), Check("it [holds]", False, "2 of 3")]
    checked = report(records=[], checks=checks)
    path = tmp_path / "r.json"
    assert finish(checked, path, Console()) == 1
    assert "FAILED it [holds]: 2 of 3" in capsys.readouterr().out
    assert msgspec.json.decode(path.read_bytes(), type=Report).checks == checks
    assert "1 of 2 checks hold" in "\n".join(head("r.json", checked))
    assert finish(report(records=[], checks=checks[:1]), None, Console()) == 0

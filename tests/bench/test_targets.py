"""The table of targets: what is wanted beside the newest figure with the tag, and no target without one."""

from __future__ import annotations

from pathlib import Path

import pytest

from strata.bench.performance_page import AIMS, MARK, page
from strata.bench.report import Record, Report
from strata.bench.targets import TARGETS, lines

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"


def report(date: str, *records: Record) -> Report:
    return Report(tool="t", records=list(records), flags={}, date=date, machine={"cpu": "c", "cores": 1, "vector": []})


def rows(*reports: tuple[str, Report]) -> dict[str, list[str]]:
    """Cells of the rows, by target and work."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines(reports)[2:]]
    return {f"{row[0]} {row[1]}": row for row in cells}


def test_a_target_takes_the_newest_figure_with_its_tag_and_not_another_work_of_the_tag():
    old = report("2026-01-01", Record.of("tg 128", "tok/s", [400.0], "P1"))
    new = report(
        "2026-01-02", Record.of("tg 512", "tok/s", [500.0], "P1"), Record.of("tg 128", "tok/s", [1, 175], "P1")
    )
    found = rows(("new.json", new), ("old.json", old))["P1 decode, one stream"]
    assert found[2:] == ["at least 350", "88", "1", "175", "tok/s", "2", "25.1 %", "`new.json`"]


def test_a_limit_is_reached_by_less_and_a_ratio_is_that_to_the_figure_beside_it():
    start = Record.of("start to READY", "s", [50.0, 80.0, 90.0], "P13")
    alias = Record.of("pp 29854", "tok/s", [180.0], "P11")
    alias.peer = {"name": "without", "median": 100.0}
    found = rows(("a.json", report("2026-01-01", start, alias)))
    assert found["P13 start to READY"][2:9] == ["at most 60", "80", "50", "90", "s", "3", "75 %"]
    assert next(row for name, row in found.items() if name.startswith("P11"))[3:9] == ["1.8"] * 3 + [
        "x without", "1", "reached",
    ]  # fmt: skip


def test_what_is_missed_by_little_is_not_all_of_it():
    found = rows(("a.json", report("2026-01-01", Record.of("pp 8192", "tok/s", [9999.9], "P4"))))
    assert found["P4 prompt of 8,192"][8] == "99.9 %"


def test_a_target_without_a_figure_says_so_in_a_whole_row():
    found = lines([])
    assert len({line.count("|") for line in found}) == 1
    assert len(found) == 2 + len(TARGETS) and all("not measured" in line for line in found[2:])


@pytest.mark.parametrize("name", sorted({target.name for target in TARGETS}))
def test_each_target_has_a_figure_among_the_results_that_are_published(name: str):
    table, _, _ = page(f"{AIMS}\n\n## Figures\n{MARK}", RESULTS).partition("## Figures")
    found = [line for line in table.splitlines() if line.startswith(f"| {name} |")]
    assert found and not any("not measured" in line for line in found)

"""Targets and peers given on the command line: which figures they belong to, and that none is passed over."""

from __future__ import annotations

import argparse

import pytest

from strata.bench import marks
from strata.bench.performance_page import row
from strata.bench.report import Record, Report

WORKS = ("tg 8", "tg 8 @ 64", "tg 8: host work", "start to READY", "tg 8, 25% in VRAM, --pcie-frac auto")


def marked(*argv: str) -> Report:
    parser = argparse.ArgumentParser(exit_on_error=False)
    marks.add_arguments(parser)
    report = Report(tool="t", records=[Record.of(work, "tok/s", [2.0]) for work in WORKS], flags={})
    return marks.marked(report, parser.parse_args(argv))


@pytest.mark.parametrize(
    ("work", "found"),
    [
        ("tg 8", WORKS[:1]),  # the whole name, not all that begin so
        ("tg 8 @ 64", WORKS[1:2]),
        ("start", WORKS[3:4]),
        ("tg 8, 25%*", WORKS[4:]),
        ("*in VRAM*", WORKS[4:]),
        ("tg*", (*WORKS[:3], *WORKS[4:])),
    ],
)
def test_a_target_belongs_to_the_figures_of_its_work_and_no_others(work, found):
    report = marked("--target", f"P1={work}")
    assert tuple(record.work for record in report.records if record.target) == found
    assert {record.target for record in report.records} <= {"", "P1"} and not report.checks


def test_targets_may_be_given_together_and_one_by_one():
    report = marked("--target", "P1=tg 8", "P2=tg 8 @ 64", "--target", "P13=start")
    assert [record.target for record in report.records] == ["P1", "P2", "", "P13", ""]


def test_a_peer_stands_beside_its_target_or_work_and_says_where_it_is_from():
    given = ["--target", "P1=tg 8", "--peer", "P1=4", "tg 8, 25%*=0.5", "--peer-source", "their page"]
    report = marked(*given)
    peers = {record.work: record.peer for record in report.records if record.peer}
    assert peers == {
        WORKS[0]: {"name": "llama.cpp", "median": 4.0, "source": "their page"},
        WORKS[4]: {"name": "llama.cpp", "median": 0.5, "source": "their page"},
    }
    assert row(report.records[0]).endswith("| tok/s | 1 | llama.cpp 4.0 (their page) | 0.50 |")


@pytest.mark.parametrize("argv", [["--target", "P1=pp 8"], ["--peer", "P9=3"], ["--peer", "pp*=3"]])
def test_a_name_that_no_figure_has_is_a_failed_check(argv):
    (check,) = marked(*argv).checks
    assert not check.ok and check.name.startswith(" ".join(argv))


def test_a_peer_of_the_same_run_is_not_replaced_by_a_given_one():
    record = Record.of("tg 8", "tok/s", [2.0])
    record.peer = {"name": "llama.cpp", "median": 3.0, "min": 2.9, "max": 3.1, "runs": 3}
    args = argparse.Namespace(target=[], peer=[marks.peer("tg 8=9")], peer_name="x", peer_source="")
    report = marks.marked(Report(tool="t", records=[record], flags={}), args)
    assert report.records[0].peer == record.peer and not report.checks[0].ok


@pytest.mark.parametrize(
    "argv", ["--target P1", "--target =tg", "--peer P1", "--peer P1=fast", "--peer P1=0", "--peer =3"]
)
def test_what_is_no_mark_is_refused_before_anything_is_measured(argv):
    with pytest.raises(argparse.ArgumentError, match="is no"):
        marked(*argv.split())

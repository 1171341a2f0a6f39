"""The table of a pass taken apart: its rows add up to the whole, and nothing is laid to the wrong product."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.bench.kernel_profile import GAPS, IN_TURN, OVERLAPPING, Incomplete, Span, grouped, in_turn, middle, table
from strata.bench.kernel_profile import taken as of_spans
from strata.bench.performance_page import table as of_page
from strata.bench.report import Limit, Report

LABELLED = [("row", "row a"), ("down", "down"), ("row", "row b")]


def spans(shift: float = 0.0) -> list[Span]:
    at = [("row", 0, 10), ("down", 12, 15), ("row", 20, 21), ("Memset (Device)", 21, 22)]
    return [Span(name, shift + begin, shift + end) for name, begin, end in at]


def test_launches_of_one_kernel_are_told_apart_by_their_order():
    run = of_spans(LABELLED, spans()[::-1])
    assert run.us == {"row a": 10, "down": 3, "row b": 1, "Memset (Device)": 1}
    assert run.whole == 22 and run.gaps == 7 and run.overlap == 0


@pytest.mark.parametrize(("found", "what"), [(spans()[:2], "not recorded"), ([], "all"), (spans() * 2, "more often")])
def test_a_launch_that_the_recorder_lost_is_no_time_of_another(found, what):
    with pytest.raises(Incomplete, match=what):
        of_spans(LABELLED if found else [], found)


def test_kernels_that_ran_beside_each_other_are_noticed():
    run = of_spans([("a", "a"), ("b", "b")], [Span("a", 0, 10), Span("b", 6, 12)])
    assert run.overlap == 4 and "4.0 us" in in_turn([run]) and not in_turn([of_spans(LABELLED, spans())])


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=20))
def test_rows_of_kernels_and_gaps_add_up_to_the_whole(steps):
    at, found = 0, []
    for name, gap, us in steps:
        found.append(Span(name, at + gap, at + gap + us))
        at += gap + us
    run = of_spans([(name, name) for name, _, _ in steps], found)
    records = {r.work: r.median for r in table("p", [run], {}, [1.0])}
    whole = records.pop(f"p: {IN_TURN}")
    records.pop(f"p: {OVERLAPPING}")
    assert sum(records.values()) == pytest.approx(whole) and records[f"p: {GAPS}"] >= 0


def test_the_rows_are_those_of_one_run_and_the_page_says_their_share_of_the_limit():
    slower = [Span(s.name, s.begin * 2, s.end * 2) for s in spans()]
    runs = [of_spans(LABELLED, found) for found in (slower, spans(), spans(100))]
    limits = {"row a": Limit(launches=1, bytes=5e6, macs=2e9, us=5.0), "down": Limit(launches=1)}
    records = table("window of 1", runs, limits, [18.0, 19.0, 20.0])
    first = records[0]
    assert (first.work, first.median, first.min, first.max) == ("window of 1: row a", 10, 10, 20)
    assert middle(runs).whole == 22 and records[-2].limit.launches == 4 and records[-2].limit.us == 5.0
    lines = of_page(Report(tool="t", records=records, flags={}))
    assert "| row a | 1 | 10.0 | 5.0 | 2.0 | 5.0 | 50 |" in lines
    assert "| down | 1 | 3.0 |  |  |  |  |" in lines
    assert f"| {GAPS} |  | 7.0 |  |  |  |  |" in lines
    assert f"| {OVERLAPPING} | 4 | 19.0 | 5.0 | 2.0 | 5.0 | 26 |" in lines


def test_labels_are_grouped_with_all_their_launches():
    assert grouped(["b", "a", "b"]) == {"a": [1], "b": [0, 2]}

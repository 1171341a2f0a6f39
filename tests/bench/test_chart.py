"""Charts: that every value, name and unit is there, and the same figures are the same file."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.bench.chart import Chart, ChartError, Level, Line, Point, draw, figure

POINTS = [Point(0, 37, 35, 40), Point(100, 250, 249.5, 251)]
SWEEP = Chart("pack <x>\nH200", "share, %", "tokens per second", [Line("a & b", POINTS)], [Level("a peer", 101.6)])


def test_a_chart_names_axes_lines_and_levels():
    (axes,) = figure(SWEEP).axes
    assert (axes.get_title(), axes.get_xlabel(), axes.get_ylabel()) == ("pack <x>\nH200", "share, %", SWEEP.up)
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a & b"]
    assert [text.get_text() for text in axes.texts] == ["a peer: 101.6"]
    assert [list(line.get_ydata()) for line in axes.lines if line.get_linestyle() == "--"] == [[101.6, 101.6]]


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 500), st.floats(0, 50)), min_size=1, max_size=6))
def test_every_point_and_its_spread_lie_inside_of_the_axes(values):
    points = [Point(x, y, max(0.0, y - spread), y + spread) for x, y, spread in values]
    (axes,) = figure(Chart("t", "x", "y", [Line("a", points), Line("none", [])])).axes
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    assert all(left <= p.x <= right and bottom <= p.low and p.high <= top for p in points)
    assert list(axes.lines[0].get_ydata()) == [p.y for p in points]


@pytest.mark.parametrize("kind", [".png", ".svg"])
def test_the_same_figures_are_the_same_file(tmp_path, kind):
    paths = [tmp_path / f"{name}{kind}" for name in ("one", "two")]
    for path in paths:
        draw(SWEEP, path)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert sorted(tmp_path.iterdir()) == paths


def test_another_kind_of_file_is_refused(tmp_path):
    with pytest.raises(ChartError, match=r"one of \.png, \.svg"):
        draw(SWEEP, tmp_path / "x.pdf")

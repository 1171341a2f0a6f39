"""A chart of measured lines as PNG or SVG: points with their spread, and other figures as level lines.

    draw(Chart(title, across, up, lines, levels), Path("tiers.png"))

Errors   ChartError in one line: another kind of file, or matplotlib (the extra `chart`) is not installed
Cost     a second; the same chart is the same file in every byte, with the same version of matplotlib
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METADATA: Final[dict[str, dict[str, None]]] = {".png": {"Software": None}, ".svg": {"Date": None, "Creator": None}}
"""Kinds of files, and what they would say of the machine and the hour."""
SIZE: Final = (8.0, 5.0)
"""Inches."""
DPI: Final = 120
COLOURS: Final = ("#2563eb", "#d97706", "#059669", "#7c3aed", "#dc2626")
INK, GRID = "#4b5563", "#e5e7eb"
STYLE: Final[Any] = {"svg.hashsalt": "strata", "font.family": "DejaVu Sans", "font.size": 10}


class ChartError(ValueError):
    """No such chart can be drawn here."""


@dataclass(frozen=True, slots=True)
class Point:
    """y: the median of runs between the least and the largest, `low` and `high`."""

    x: float
    y: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Line:
    """points: by x, none of them below 0."""

    name: str
    points: Sequence[Point]


@dataclass(frozen=True, slots=True)
class Level:
    """A figure that others reached, at any x."""

    name: str
    y: float


@dataclass(frozen=True, slots=True)
class Chart:
    """title: what was measured, and below it where and when · across, up: names of the axes, with units."""

    title: str
    across: str
    up: str
    lines: Sequence[Line]
    levels: Sequence[Level] = ()


def check(path: Path) -> None:
    """Raises ChartError where `draw` would: before something is measured for it."""
    if path.suffix not in METADATA:
        raise ChartError(f"{path}: a chart is one of {', '.join(METADATA)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ChartError(f"{path}: needs matplotlib: pip install 'strata[chart]', or draw it elsewhere from --json")


def draw(chart: Chart, path: Path) -> None:
    """Writes it, whole or not at all. Raises ChartError."""
    check(path)
    import matplotlib

    temporary = path.with_name(f".{path.stem}.tmp{path.suffix}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        figure(chart).savefig(temporary, dpi=DPI, metadata=METADATA[path.suffix])
    temporary.replace(path)


def figure(chart: Chart) -> Figure:
    """Of its own: nothing of matplotlib's global state is used but the style."""
    from matplotlib.figure import Figure

    made = Figure(figsize=SIZE, layout="constrained")
    axes = made.add_subplot()
    for i, line in enumerate(chart.lines):
        x, y = [point.x for point in line.points], [point.y for point in line.points]
        spread = ([point.y - point.low for point in line.points], [point.high - point.y for point in line.points])
        axes.errorbar(
            x, y, yerr=spread, label=line.name, color=COLOURS[i % len(COLOURS)], marker="o", markersize=4, capsize=3
        )
    for level in chart.levels:
        axes.axhline(level.y, color=INK, linestyle="--", linewidth=1)
        place = (0.01, level.y)  # rates rise to the right
        axes.annotate(
            f"{level.name}: {level.y:g}", place, (0, 3), xycoords=axes.get_yaxis_transform(),
            textcoords="offset points", ha="left", va="bottom", color=INK, fontsize=8,
        )  # fmt: skip
    axes.set(title=chart.title, xlabel=chart.across, ylabel=chart.up, ylim=(0, None))
    axes.grid(color=GRID)
    axes.set_axisbelow(True)
    if chart.lines:
        axes.legend(loc="upper left", fontsize=9)
    return made

"""A line chart as SVG, which browsers and GitHub draw: no library, no font of its own.

Units    pixels; both axes begin at 0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10
from typing import Final

WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 40, 48
COLOURS: Final = ("#2563eb", "#d97706", "#059669", "#7c3aed", "#dc2626")
INK, GRID = "#1f2937", "#d1d5db"


@dataclass(frozen=True, slots=True)
class Line:
    """points: (x, y), none of them below 0, by x."""

    name: str
    points: Sequence[tuple[float, float]]


def ticks(most: float, about: int = 6) -> list[float]:
    """Round numbers from 0 to at least `most`."""
    if most <= 0:
        return [0.0, 1.0]
    size = 10.0 ** floor(log10(most / about))
    step = next(size * factor for factor in (1, 2, 5, 10) if most / (size * factor) <= about)
    return [step * i for i in range(ceil(most / step) + 1)]


def chart(lines: Sequence[Line], title: str, below: str) -> str:
    """Lines with a point at each value and their names on top."""
    points = [point for line in lines for point in line.points]
    across, up = (ticks(max((point[i] for point in points), default=1.0)) for i in range(2))

    def at(x: float, y: float) -> tuple[str, str]:
        wide, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
        return f"{LEFT + wide * x / across[-1]:.1f}", f"{HEIGHT - BOTTOM - high * y / up[-1]:.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        _text(LEFT, 16, title, "start"),
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, below, "middle"),
    ]
    for y in up:
        (left, height), (right, _) = at(0, y), at(across[-1], y)
        parts.append(f'<line x1="{left}" y1="{height}" x2="{right}" y2="{height}" stroke="{GRID}"/>')
        parts.append(_text(LEFT - 8, float(height) + 4, f"{y:g}", "end"))
    for x in across:
        parts.append(_text(float(at(x, 0)[0]), HEIGHT - BOTTOM + 18, f"{x:g}", "middle"))
    for i, line in enumerate(lines):
        colour, places = COLOURS[i % len(COLOURS)], [at(*point) for point in line.points]
        joined = " ".join(f"{x},{y}" for x, y in places)
        parts.append(f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x}" cy="{y}" r="3.5" fill="{colour}"/>' for x, y in places]
        parts.append(_text(LEFT + 170 * i, 34, line.name, "start", colour))
    return "\n".join([*parts, "</svg>", ""])


def _text(x: float, y: float, text: str, anchor: str, colour: str = INK) -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'

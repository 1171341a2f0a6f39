"""Other cuts of a window's products, measured inside the window: what a launch leaves for its neighbours counts, too.

    python -m strata.bench.window_ways_cuda --pack model.gguf [--rows 1] [--shared 100] [--seconds 60] [--json FILE]

For each share of the first cache as shared memory, in percent: the window as it is, then product by product other ways
to cut it (RowTuning; by product_window.cu), each kept when the whole window gets faster by it; then launches that ask
for so much shared memory that a multiprocessor has one block of them. That no way changes a bit is for
window_products_cuda to say: here nothing is computed twice, the launches of a window are only written down.

Cost     --seconds a share and number of rows, and as much for the compiler once
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any
from unittest import mock

from rich.console import Console

from strata.bench.report import Record, Report, pack_facts, show
from strata.bench.window_launches import Launch, Launches, microseconds
from strata.bench.windows_cuda import CHECKED_DEPTH, Decode, launches_of
from strata.engine.device.cuda import CudaDevice
from strata.engine.flags import WINDOW_ROWS
from strata.engine.model.resident import Resident
from strata.engine.pack import open_pack
from strata.kernels.cuda import card, plans, precompile, row_plans
from strata.kernels.cuda.compile import collecting
from strata.kernels.cuda.kernel import WINDOW_SHARED
from strata.kernels.cuda.plans import RowTuning
from strata.kernels.formats import BY_NAME

FEW = 8
"""Launches of a product in a window below which it is left alone, unless it is large."""
LARGE = 64 << 20
GAIN = 0.999
"""A way is kept that takes less than this share of the window's time."""

Key = tuple[Any, ...]
"""Of a product: type, mode, rows of its matrices, columns, experts of a row."""

STAGES = (2, 4, 5)
_TILES = (8, 1), (7, 1), (6, 1), (4, 1), (12, 2), (12, 1), (16, 1), (20, 1), (10, 2), (8, 2), (6, 2), (8, 3)
TILE_WAYS = tuple(RowTuning(tiled=True, warps=warps, depth=depth) for warps, depth in _TILES)
ROW_WAYS = tuple(
    RowTuning(tiled=False, lanes=lanes, warps=warps, depth=depth, terms_room=room << 10)
    for lanes in (1, 2)
    for warps, depth in ((12, 1), (16, 1), (20, 1), (24, 1), (16, 2), (24, 2))
    for room in (24, 32, 48, 64)
)


@dataclass(frozen=True, slots=True)
class Way:
    """How one product is cut: by product_row.cu so, or by product_window.cu, with so many stages if not 0."""

    row: RowTuning = row_plans.UNTUNED
    together: bool = False
    stages: int = 0

    @property
    def name(self) -> str:
        said = [f"{f.name} {v}" for f in fields(self.row) if (v := getattr(self.row, f.name)) is not None]
        stages = f", {self.stages} stages" if self.stages else ""
        return f"product_window{stages}" if self.together else ", ".join(said)


@dataclass(slots=True)
class Ways:
    """The way of each product that has one, the labels of launches that lie apart."""

    chosen: dict[Key, Way] = field(default_factory=dict)
    apart: frozenset[str] = frozenset()
    seen: Counter[Key] = field(default_factory=Counter)
    sizes: dict[Key, int] = field(default_factory=dict)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Plans are made so."""
        plan, together, window_plan = row_plans.row_plan, plans.together, plans.window_plan
        asked = [0]

        def own_together(n_bytes: int, n: int, tuning: plans.Tuning = plans.UNTUNED) -> bool:
            asked[0] = n_bytes
            ways = [way for key, way in self.chosen.items() if self.sizes.get(key) == n_bytes]
            return any(way.together for way in ways) if ways else together(n_bytes, n, tuning)

        def own_plan(
            card: Any, kind: Any, mode: str, rows: Any, cols: int, n: int = 1, used: int = 0, wide: bool = False,
            tuning: RowTuning = row_plans.UNTUNED,
        ) -> Any:  # fmt: skip
            if tuning != row_plans.UNTUNED:  # in another's launch
                return plan(card, kind, mode, rows, cols, n, used, wide, tuning)
            key = (kind.name, mode, rows, cols, used)
            self.seen[key] += 1
            if mode == plans.DENSE:
                self.sizes.setdefault(key, asked[0])
            way = self.chosen.get(key)
            return plan(card, kind, mode, rows, cols, n, used, wide, tuning if way is None else way.row)

        def own_window_plan(
            card: Any, kind: Any, rows: Any, cols: int, n: int, tuning: plans.Tuning = plans.UNTUNED
        ) -> Any:
            key = (kind.name, plans.DENSE, rows, cols, 0)
            self.seen[key] += 1
            self.sizes.setdefault(key, asked[0])
            way = self.chosen.get(key)
            if way is not None and way.stages:
                tuning = replace(tuning, stages=way.stages)
            return window_plan(card, kind, rows, cols, n, tuning)

        with (
            mock.patch.object(row_plans, "row_plan", own_plan),
            mock.patch.object(plans, "together", own_together),
            mock.patch.object(plans, "window_plan", own_window_plan),
        ):
            yield

    def but(self, key: Key, way: Way) -> Ways:
        return Ways({**self.chosen, key: way}, self.apart, Counter(), dict(self.sizes))


class Window:
    """A window of some sequences whose launches are written down again and again."""

    def __init__(self, resident: Resident, n: int) -> None:
        self.resident, self.n = resident, n
        self.decode = Decode(resident, n, CHECKED_DEPTH)
        self.real = launches_of(resident, self.decode)

    def compute(self) -> Any:
        return self.resident.windows.compute(self.decode.ticket.layout)

    def launches(self, ways: Ways, percent: int) -> Launches:
        with ways.in_use():
            found = Launches.planned(self.compute, self.real)
        found.change(lambda each: apart(each) if each.label in ways.apart else each)
        found.prefer_shared(percent)
        return found

    def us(self, ways: Ways, percent: int) -> float:
        return microseconds(self.resident.device.driver, self.launches(ways, percent))

    def compile(self, ways: list[Ways]) -> int:
        """The kernels of all ways, by several processes."""
        with collecting() as jobs:
            for each in ways:
                with each.in_use():
                    self.compute()
        return precompile.compile_missing(jobs, card.card().arch)


def products(window: Window) -> Ways:
    """The window as it is, its products counted."""
    ways = Ways()
    window.launches(ways, WINDOW_SHARED)
    return ways


def large_or_many(ways: Ways) -> list[Key]:
    """Products worth a try, those of most launches first."""
    keys = [key for key, count in ways.seen.items() if count >= FEW or ways.sizes.get(key, 0) >= LARGE]
    return sorted(keys, key=lambda key: -ways.seen[key])


def ways_of(key: Key, n: int) -> list[Way]:
    """Ways that fit, each different from the one that it has and from the others."""
    name, mode, rows, cols, used = key
    kind, dense = BY_NAME[name], mode == plans.DENSE
    if dense and plans.together(sum(rows) * kind.row_bytes(cols), n):
        return [Way(together=True, stages=stages) for stages in STAGES]
    seen = {row_plans.row_plan(card.card(), kind, mode, rows, cols, n, used)}
    found = [Way(together=True)] if dense else []
    for row in (*((RowTuning(tiled=False), *TILE_WAYS) if used else ()), *ROW_WAYS):
        try:
            plan = row_plans.row_plan(card.card(), kind, mode, rows, cols, n, used, tuning=row)
        except ValueError:  # does not fit
            continue
        if plan not in seen:
            seen.add(plan)
            found.append(Way(row))
    return found


def climb(
    window: Window, base: Ways, percent: int, until: float, say: Callable[[str, float], None]
) -> tuple[Ways, float]:
    """Product by product the best way, while there is time."""
    best, us = Ways(sizes=dict(base.sizes)), window.us(base, percent)
    say("as it is", us)
    for key in large_or_many(base):
        begun = us
        for way in ways_of(key, window.n):
            if time.monotonic() > until:
                return best, us
            other = best.but(key, way)
            took = window.us(other, percent)
            say(f"{' '.join(map(str, key))}: {way.name}", took - begun)
            if took < us * GAIN:
                best, us = other, took
        say(f"{' '.join(map(str, key))}: best {best.chosen[key].name if key in best.chosen else 'as it is'}", us)
    for label in dict.fromkeys(each.label for each in window.launches(best, percent) if alone(each)):
        other = replace(best, apart=best.apart | {label})
        took = window.us(other, percent)
        say(f"{label}: apart", took - us)
        if took < us * GAIN:
            best, us = other, took
    return best, us


def apart(launch: Launch) -> Launch:
    """A launch of which a multiprocessor takes one block."""
    return replace(launch, shared=card.card().apart(launch.shared, math.prod(launch.grid)))


def alone(launch: Launch) -> bool:
    """Whether that could matter."""
    return math.prod(launch.grid) > FEW and apart(launch).shared > launch.shared


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pack", type=Path, required=True)
    parser.add_argument("--rows", type=int, nargs="*", default=[1], help="sequences of a window (1)")
    parser.add_argument("--shared", type=int, nargs="*", default=[WINDOW_SHARED], help="percent of the first cache")
    parser.add_argument("--seconds", type=float, default=60, help="of each (60)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    args = parser.parse_args(argv)
    console, records = Console(), []
    if not 1 <= min(args.rows) <= max(args.rows) <= WINDOW_ROWS:
        console.print(f"--rows: 1 to {WINDOW_ROWS}")
        return 2
    device = CudaDevice()
    resident = Resident(
        open_pack(args.pack), device, max_context=CHECKED_DEPTH + 64, n_slots=max(args.rows), chunks=[512]
    )
    for n in args.rows:
        window = Window(resident, n)
        base = products(window)
        tried = [Ways(sizes=dict(base.sizes)).but(key, way) for key in large_or_many(base) for way in ways_of(key, n)]
        begun = time.monotonic()
        count = window.compile(tried)
        console.print(f"{count} kernels compiled in {time.monotonic() - begun:.0f} s")
        for percent in args.shared:

            def say(what: str, us: float, percent: int = percent, n: int = n) -> None:
                records.append(Record.of(f"window of {n}, {percent} %, {what}", "us", [us]))

            best, us = climb(window, base, percent, time.monotonic() + args.seconds, say)
            for key, way in best.chosen.items():
                say(f"kept: {' '.join(map(str, key))}: {way.name}", us)
            for label in sorted(best.apart):
                say(f"kept: {label}: apart", us)
            say("with all that", us)
            window.launches(Ways(), WINDOW_SHARED)
    flags = {"card": device.name, "seconds": args.seconds}
    report = Report(tool="window_ways_cuda", records=records, flags=flags, pack=pack_facts(args.pack))
    show(report, console)
    if args.json:
        report.write(args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())

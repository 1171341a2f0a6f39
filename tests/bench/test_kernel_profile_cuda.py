"""The profile of a pass without a card: what the recorder loses is recorded again, and said when it stays lost."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import pytest
from rich.console import Console

from strata.bench import ceilings, roofline, window_launches
from strata.bench import kernel_profile_cuda as tool
from strata.bench.ceilings import Ceilings
from strata.bench.kernel_limits import Pass
from strata.bench.kernel_profile import Incomplete, Span
from strata.bench.performance_page import page
from strata.bench.report import Record, Report
from strata.bench.window_launches import ADVANCES, Launch, Launches, _Picks
from strata.engine.device.cuda import CudaDevice
from strata.engine.model.resident import Resident
from strata.engine.pack import open_pack
from strata.kernels.cuda.arguments import WINDOW, enter_matrices, fill
from tests.engine.device import emulated_card as cards

CEILINGS = Ceilings(gb_s=1000.0, steps={16: 100.0, 32: 200.0}, floats=10.0)


@pytest.fixture
def pack(packs):
    return open_pack(packs["odd-q8_0"])


@pytest.fixture
def case(pack):
    struct = fill(WINDOW, n=1, cols=pack.spec.hidden)
    enter_matrices(struct, [(0, None, pack.spec.vocab)], 1)
    x = np.zeros((1, pack.spec.wide), np.float32)
    arguments = {"product_window": (struct,), "hyper_add": (x, x[0, :4], x[0, 4:]), ADVANCES: (x,)}
    launches = [Launch(SimpleNamespace(name=name), (1,), (1,), more, 0) for name, more in arguments.items()]
    return tool.Case("w", Launches(launches, _Picks()), lambda: None, Pass.window(1, 9), [15.0], 2)


def recorder(*runs):
    left = list(runs)
    return lambda _work: left.pop(0)


WHOLE = [Span("product_window", 0.0, 10.0), Span("hyper_add", 12.0, 16.0)]


def test_a_recording_that_lacks_a_launch_is_made_again(case, pack, monkeypatch):
    monkeypatch.setattr(tool, "recorded", recorder(WHOLE[:1], WHOLE, [], [], WHOLE))
    records, check = tool.profiled(case, pack, CEILINGS, Console(quiet=True))
    assert check.ok
    assert [(r.work, r.median) for r in records[1:4]] == [
        ("w: hyper_add", 4.0),
        ("w: gaps between kernels", 2.0),
        ("w: all, launches in turn", 16.0),
    ]
    head = pack["output.weight"].data.nbytes
    assert records[0].limit.bytes > head and records[0].limit.us == pytest.approx(records[0].limit.bytes / 1e6)
    assert records[-1].median == 15.0


def test_launches_that_stay_lost_or_overlap_are_said(case, pack, monkeypatch):
    monkeypatch.setattr(tool, "recorded", recorder(*[WHOLE[:1]] * tool.TRIES))
    with pytest.raises(Incomplete, match="hyper_add"):
        tool.profiled(case, pack, CEILINGS, Console(quiet=True))
    beside = [WHOLE[0], Span("hyper_add", 8.0, 16.0)]
    monkeypatch.setattr(tool, "recorded", recorder(beside, beside))
    assert not tool.profiled(case, pack, CEILINGS, Console(quiet=True))[1].ok


def test_the_page_shows_what_the_tools_write_kernel_by_kernel_and_limit_by_limit(case, pack, packs, tmp_path, capsys):
    """The profile, the rooflines from its ceilings beside what another tool measured, and the page of both."""
    results, file = tmp_path / "results", packs["odd-q8_0"]
    runs = [[Span(s.name, s.begin * f, s.end * f) for s in WHOLE] for f in (1.0, 2.0)]
    with mock.patch.object(tool, "recorded", recorder(*runs)):
        found, check = tool.profiled(case, pack, CEILINGS, Console(quiet=True))
    tool._report(file, [*ceilings.records(CEILINGS), *found], [check], {"card": "c"}).write(results / "profile.json")
    measured = tmp_path / "engine.json"
    Report(tool="e", records=[Record.of("tg 128", "tok/s", [7.0, 8.0, 9.0], "P1")], flags={}).write(measured)
    more = ["--measured", str(measured), "--json", str(results / "roofline.json")]
    assert roofline.main(["--pack", str(file), "--ceilings", str(results / "profile.json"), *more]) == 0
    lines = page("<!-- figures -->", results).splitlines()
    assert "| w | launches | us | MB | GMAC | limit, us | % of its limit |" in lines
    (added,) = (line for line in lines if line.startswith("| hyper_add |"))
    limit = next(r.limit for r in found if r.work == "w: hyper_add")
    assert added.startswith("| hyper_add | 1 | 4.0 | ") and added.endswith(f" | {100 * limit.us / 4:.0f} |")
    assert "|  | ceiling: memory, reading | 1000.00 | 1000.00 | 1000.00 | GB/s | 1 |  |  |" in lines
    (first,) = (line for line in lines if line.startswith("| P1 | limit of decode, one stream"))
    assert "| measured 8.0 (7.0..9.0) |" in first and "tok/s" in first
    assert sum(" | limit of " in line for line in lines) == len(roofline.AIMS)


def test_without_a_recorder_or_a_pack_nothing_is_measured(packs, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tool.ceilings, "measured", lambda _console: pytest.fail("measured"))
    monkeypatch.setattr(tool, "RECORDER", "no_such_recorder")
    assert tool.main(["--pack", str(packs["odd-q8_0"])]) == 2 and "no_such_recorder" in capsys.readouterr().out
    monkeypatch.setattr(tool, "RECORDER", "json")
    assert tool.main(["--pack", str(tmp_path / "none.gguf")]) == 2 and "none.gguf" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        tool.main(["--pack", "x.gguf", "--prompt", "-1"])


class Noted:
    """A kernel of the emulated card as the profile wants one: it runs at once or is captured; what ran is noted."""

    ran: ClassVar[list[str]] = []

    def __init__(self, kernel: Any, name: str, driver: Any) -> None:
        self.kernel, self.name, self.driver, self.overlapping = kernel, name, driver, True

    def __call__(self, grid: Any, block: Any, args: tuple[Any, ...], shared_mem: int = 0) -> None:
        self.driver.add(lambda: self.ran.append(self.name))
        self.kernel(grid, block, args, shared_mem=shared_mem)
        if self.driver._captured is None:
            self.driver.synchronize()


def noted_spans(driver: Any) -> Callable[[Callable[[], None]], list[Span]]:
    """The recorder: every kernel takes as long as its name is."""

    def recorded(work: Callable[[], None]) -> list[Span]:
        Noted.ran.clear()
        work()
        driver.synchronize()
        ends = np.cumsum([len(name) + 1 for name in Noted.ran])
        return [Span(name, end - len(name), end) for name, end in zip(Noted.ran, ends.tolist(), strict=True)]

    return recorded


@pytest.mark.soak  # the emulated card
def test_every_case_of_a_model_is_recorded_whole_and_every_row_but_the_gaps_has_a_limit(
    emulated_card, pack, monkeypatch
):
    windows = ((1, 20), (2, 20), (1, 40))
    monkeypatch.setattr(tool, "WINDOWS", windows)
    monkeypatch.setattr(tool, "microseconds", lambda _driver, _launches: 9.0)
    monkeypatch.setattr(tool, "timed", lambda work: work() or 7.0)
    monkeypatch.setattr(tool, "CHECKED_DEPTH", 20)
    monkeypatch.setattr(window_launches, "Kernel", Noted)
    with emulated_card.plugged_in() as card, ExitStack() as patched:
        driver = card.driver()
        resident = Resident(pack, CudaDevice(driver=driver), max_context=72, n_slots=2, chunks=[24])
        load = cache(lambda source, name, **more: Noted(card.load_kernel(source, name, **more), name, driver))
        for module in cards.LOADING:
            patched.enter_context(mock.patch.object(module, "load_kernel", load))
        monkeypatch.setattr(tool, "recorded", noted_spans(driver))
        works = []
        for case in tool.cases(resident, 72, 24):
            records, check = tool.profiled(case, pack, CEILINGS, Console(quiet=True))
            assert check.ok, check.detail
            *kernels, gaps, whole, together = records
            assert sum(r.median for r in (*kernels, gaps)) == pytest.approx(whole.median)
            assert together.median == (7.0 if case.work.startswith("prompt") else 9.0)
            assert not [r.work for r in kernels if not r.limit.us] and len(kernels) > 10
            works.append(case.work)
        assert works == ["window of 1", "window of 2", "window of 1 @ 40", "prompt of 24"]

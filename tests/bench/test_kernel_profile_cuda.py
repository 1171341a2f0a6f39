"""The profile of a pass without a card: what the recorder loses is recorded again, and said when it stays lost."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from strata.bench import kernel_profile_cuda as tool
from strata.bench.ceilings import Ceilings
from strata.bench.kernel_limits import Pass
from strata.bench.kernel_profile import Incomplete, Span
from strata.bench.window_launches import ADVANCES, Launch, Launches, _Picks
from strata.engine.pack import open_pack
from strata.kernels.cuda.arguments import WINDOW, enter_matrices, fill

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

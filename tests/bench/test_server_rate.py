"""server-rate: a real server in front of the clock says what the clock said, and what is wrong is noticed."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest

from strata.bench.__main__ import main
from strata.bench.engine_process import EngineFailed
from strata.bench.paced_engine import STAMPS, STEP_US, Pace, PacedRunner, stamp_at
from strata.bench.server_rate import Stream
from strata.engine.schedule.ports import Row
from strata.kernels.ops import Sampling

DEMO = Path(__file__).parents[2] / "demo/strata-demo-q4_0.gguf"


def test_streams_through_a_real_server_get_every_token_of_the_clock(tmp_path):
    out = tmp_path / "r.json"
    argv = ["server-rate", "--pack", str(DEMO), "--streams", "1", "3", "--window-us", "4000"]
    assert main([*argv, "--seconds", "0.4", "--repeat", "1", "--json", str(out)]) == 0
    records = {record["work"]: record for record in json.loads(out.read_text())["records"]}
    for n in (1, 3):
        assert 0 < records[f"{n} streams, a window every 4000 us: delivered, of what the clock gives"]["median"] < 1.1
        assert records[f"{n} streams, a window every 4000 us: under way, p50"]["median"] > 0


def test_a_time_too_short_for_a_rate_is_refused_before_anything_is_started(capsys):
    argv = ["server-rate", "--pack", "none.gguf", "--window-us", "8000", "1600", "--seconds", "0.05"]
    assert main(argv) == 2
    assert "--seconds: at least 10 windows, 0.08" in capsys.readouterr().out


def test_a_text_that_the_engine_has_not_said_is_noticed():
    stream = Stream({b"one": 1})
    stream.take(b'data: {"content":"one"}\n\ndata: {"content":"t')
    assert len(stream.times) == 1
    with pytest.raises(EngineFailed, match="two"):
        stream.take(b'wo"}\n')


def test_the_way_of_a_token_is_counted_across_the_turn_of_the_stamps():
    stream = Stream({b"old": (stamp_at(time.monotonic()) - 40) % STAMPS})
    stream.take(b'data: {"content":"old"}\n')
    assert 40 <= stream.under_way[0] / (STEP_US * 1e-6) < STAMPS


class Hands:
    """A clock that goes on when somebody sleeps."""

    def __init__(self) -> None:
        self.at = 7.0

    def now(self) -> float:
        return self.at

    def sleep(self, seconds: float) -> None:
        self.at += seconds


def test_a_window_that_was_started_ahead_begins_when_the_one_before_it_ends():
    clock = Hands()
    runner = PacedRunner(2, Pace(0.05, 0.0, 0.0), range(STAMPS), clock.now, clock.sleep)
    rows = [Row(1, np.arange(1, dtype=np.int32), Sampling(), 0)]
    begun = clock.now()
    runner.window(rows, True)
    clock.sleep(0.03)  # the host is busy while the device goes on
    runner.window(rows, False)
    assert clock.now() - begun < 0.125
    clock.sleep(0.03)  # nothing was started: the device waits
    runner.window(rows, False)
    assert clock.now() - begun >= 0.18 - 1e-9

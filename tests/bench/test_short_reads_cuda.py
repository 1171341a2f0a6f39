"""The bench of short reads, on a card without hardware: every way is timed, and a way with other bits is named."""

from __future__ import annotations

import numpy as np
import pytest
from rich.console import Console

from strata.bench import short_reads_cuda
from strata.bench.short_reads_cuda import Reads, host_profile, measure
from strata.engine.cuda_runner import CudaRunner
from strata.engine.options import Options


@pytest.fixture(scope="module")
def reads(emulated_card, trunk):
    options = Options(pack="", device="cuda", max_context=96, prefill=24, short_read=0, batch=2)
    with emulated_card.plugged_in() as card:
        runner = CudaRunner(trunk, options, None, card.driver())
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(short_reads_cuda, "LENGTHS", (18,))
            patched.setattr(short_reads_cuda, "RUNS", 1)
            yield Reads(runner, 30)


def test_windows_and_all_ways_of_a_pass_are_compared_and_timed(reads):
    records, wrong = measure(reads, [18], Console())
    assert wrong == []
    names = [record.work.partition(": ")[2] for record in records]
    assert names == ["windows", "pass", "host", *short_reads_cuda.TILES]
    assert all(record.min > 0 and record.work.startswith("18 tokens behind 30: ") for record in records)


def test_a_way_with_other_bits_is_named(reads, monkeypatch):
    real = reads.windows

    def other(n: int):
        ms, queued, logits = real(n)
        return ms, queued, (np.frombuffer(logits, np.uint32) ^ 1).tobytes()

    monkeypatch.setattr(reads, "windows", other)
    monkeypatch.setattr(short_reads_cuda, "TILES", {})
    assert measure(reads, [18], Console())[1] == ["pass of 18 behind 30"]


def test_a_profile_of_the_host_names_its_functions(reads):
    assert "arguments.py" in host_profile(reads, 18)

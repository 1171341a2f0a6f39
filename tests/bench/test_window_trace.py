"""A traced window's records in order: the launch of each block, clocks that stand apart, steps that add up."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.bench.window_trace import ENTRY, SM, WORDS, Clocks, launch_times, set_clocks, summary

SMS, RATE = 6, 1.98


def window(rng, n_launches):
    """Launches of two kernels in turn, the second with a block on every multiprocessor: (records, what the clocks are
    apart, kernels, blocks, the true end of each launch in ns)."""
    apart = rng.uniform(0, 1e6, SMS)
    rows, kernels, blocks, ends = [], [], [], []
    end = 1e6
    for i in range(n_launches):
        kernel, sms = (1, rng.choice(SMS, 3, replace=False)) if i % 2 == 0 else (2, np.arange(SMS))
        done = []
        for block, sm in enumerate(sms):
            waits, ready = end - rng.uniform(100, 900), end + 300
            done.append(ready + rng.uniform(500, 2500))
            row = np.zeros(WORDS)
            row[1], row[2], row[3], row[1 + ENTRY] = waits, ready, done[-1], waits - 50
            row[1:] = np.where(row[1:] > 0, (row[1:] - apart[sm]) * RATE, 0)
            head = np.uint64(kernel << 48 | int(sm) << 32 | block)
            rows.append(np.concatenate([[head], row[1:].astype(np.uint64)]).astype(np.uint64))
        end = max(done)
        kernels.append(kernel), blocks.append(len(sms)), ends.append(end)
    return np.array(rows), apart, kernels, blocks, np.array(ends)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), error=st.floats(0, 3000))
def test_steps_add_up_although_clocks_are_apart_and_records_come_in_any_order(seed, error):
    rng = np.random.default_rng(seed)
    records, apart, kernels, blocks, ends = window(rng, 12)
    clocks = Clocks(RATE, apart + rng.uniform(-error, error, SMS))
    records = records[rng.permutation(len(records))]
    times = set_clocks(records, clocks.nanoseconds(records), kernels, blocks)
    launches = launch_times(records, times, kernels, blocks)
    assert [len(each) for each in launches] == blocks
    rows = summary(launches, [f"k{k} some" for k in kernels], {"k1": ("done",), "k2": ("done",)})
    assert sum(row.us * row.launches for row in rows) == pytest.approx((ends[-1] - ends[0]) / 1e3, abs=0.02)
    for row in rows:
        of = {name: (middle, last) for name, middle, last in row.marks}
        assert of["need not wait"] == pytest.approx((0.3, 0.3), abs=0.02)
        assert of["done"][1] == pytest.approx(row.us, abs=0.02)
        assert [name for name, *_ in row.marks] == ["comes", "waits", "need not wait", "done"]


def test_clocks_are_read_from_the_moments_when_the_common_time_moves():
    apart, samples = np.array([5_000.0, 0.0, 70_000.0]), np.zeros((4, 8, 2), np.uint64)
    for sm in (0, 2):
        ns = 1_000_000 + 1_024 * np.arange(8)
        samples[sm, :, 0], samples[sm, :, 1] = ((ns - apart[sm]) * RATE).astype(np.uint64), ns
    clocks = Clocks.of(samples)
    assert clocks.rate == pytest.approx(RATE, rel=1e-4)
    record = np.zeros((1, WORDS), np.uint64)
    record[0, 0], record[0, 1] = np.uint64(1 << 48 | 2 << 32), np.uint64((1_003_000 - apart[2]) * RATE)
    times = clocks.nanoseconds(record)
    assert times[0, 0] == pytest.approx(1_003_000, abs=40) and times[0, SM] == 2 and times[0, 1] == 0


def test_a_kernel_with_records_missing_is_named():
    records, apart, kernels, blocks, _ = window(np.random.default_rng(1), 4)
    times = Clocks(RATE, apart).nanoseconds(records)
    with pytest.raises(ValueError, match="kernel 2: 11 records of 12 blocks"):
        launch_times(records[:-1], times[:-1], kernels, blocks)


def test_a_window_without_a_kernel_on_every_multiprocessor_is_refused():
    records, apart, kernels, blocks, _ = window(np.random.default_rng(1), 1)
    with pytest.raises(ValueError, match="no kernel of the window has a block on each of the"):
        set_clocks(records, Clocks(RATE, apart).nanoseconds(records), kernels, blocks)

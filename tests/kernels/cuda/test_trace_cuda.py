"""Records of a kernel's blocks (trace.cuh), on a card: one of each block, with times that follow each other."""

from __future__ import annotations

import numpy as np
import pytest

from strata.kernels.cuda import card
from strata.kernels.cuda.launch import F32, I32, I64, launch

BLOCKS = 40


def test_clocks_are_read_when_the_time_that_all_share_moves_on(target):
    n = 2 if target.emulated else card.card().multiprocessors
    samples = target.put(np.zeros((n, 6, 2), np.uint64))
    launch("trace_clocks.cu", "trace_clocks", (n,), (32,), samples, I32(6), shared=0 if target.emulated else 200 << 10)
    found = target.host(samples)
    seen = found[found[:, 0, 1] > 0].astype(np.int64)
    assert len(seen) and (np.diff(seen[..., 1]) > 0).all() and (np.diff(seen[..., 0]) > 0).all()


@pytest.mark.gpu
def test_every_block_leaves_a_record_of_when_it_waited_and_where():
    import cupy

    from strata.bench.window_trace import READY, SM, launch_times
    from strata.bench.window_trace_cuda import Traced, clocks

    trace, gates = Traced(), cupy.ones(256 * BLOCKS, np.float32)
    with cupy.cuda.Stream(non_blocking=True) as stream, trace.in_use():
        for _ in range(2):
            launch(
                "hyper.cu", "hyper_gate", (BLOCKS,), (256,),
                gates, I64(gates.size), None, None, I64(0), F32(1), PER_THREAD=2, STREAMS=4,
            )  # fmt: skip
        stream.synchronize()
        records = trace.records()
    times = clocks().nanoseconds(records)
    (number,) = [number for (source, _), number in trace.numbers.items() if source == "hyper.cu"]
    both = launch_times(records, times, [number, number], [BLOCKS, BLOCKS])
    numbers = (records[:, 0] & np.uint64(0xFFFFFFFF)).tolist()
    assert sorted(numbers) == sorted([*range(BLOCKS)] * 2)
    for each in both:
        assert (each[:, 0] > 0).all() and (each[:, READY] >= each[:, 0]).all()
        assert (each[:, READY] - each[:, 0] < 1e6).all(), "a millisecond of waiting"
        assert (each[:, SM] < card.card().multiprocessors).all()

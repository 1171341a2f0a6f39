"""The workspace's bookkeeping: on host memory, no card needed."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.kernels.cuda.workspace import ALIGNMENT, OutOfWorkspace, Workspace

SIZES = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 300)), max_size=12)


def workspace(n_bytes: int) -> Workspace:
    return Workspace(np.zeros(n_bytes, np.uint8))


def address(array: np.ndarray) -> int:
    return int(array.ctypes.data)


@given(SIZES)
def test_arrays_of_one_time_never_overlap_and_begin_aligned(shapes):
    space = workspace(12 * 8192)
    arrays = [space.array(shape) for shape in shapes]
    base = address(space._memory)
    spans = sorted((address(a) - base, address(a) - base + a.nbytes) for a in arrays if a.size)
    assert all(begin % ALIGNMENT == 0 for begin, _ in spans)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))


@given(SIZES)
def test_the_same_calls_give_the_same_addresses_so_that_a_graph_can_be_replayed(shapes):
    space = workspace(12 * 8192)
    mark = space.mark()
    runs = []
    for _ in range(2):
        runs.append([address(space.array(shape)) for shape in shapes])
        space.release(mark)
    assert runs[0] == runs[1]


@given(SIZES)
def test_releasing_a_mark_gives_back_all_since_and_nothing_before(shapes):
    space = workspace(1 << 20)
    kept = space.array((7,))
    kept[:] = 3
    used = space.used
    with space.scratch():
        for shape in shapes:
            space.array(shape)[...] = 9
    assert space.used == used and space.used + space.free == space.capacity
    assert (kept == 3).all()


def test_the_peak_is_what_a_workspace_for_the_same_calls_must_hold():
    space = workspace(1 << 16)
    with space.scratch():
        space.array((1000,))
        with space.scratch():
            space.array((2000,), np.float64)
    exact = workspace(space.peak)
    exact.array((1000,))
    exact.array((2000,), np.float64)
    assert exact.free == 0


def test_a_request_that_does_not_fit_says_what_was_wanted_and_free_and_takes_nothing():
    space = workspace(4096)
    space.array((256,))
    with pytest.raises(OutOfWorkspace, match=r"float32 \(800,\) takes 3328 bytes of workspace, 3072 of 4096 are free"):
        space.array((800,))
    assert space.free == 3072
    assert space.array((768,)).shape == (768,)


def test_scratch_is_given_back_when_an_operation_fails_inside():
    space = workspace(4096)
    with pytest.raises(OutOfWorkspace), space.scratch():
        space.array((512,))
        space.array((4096,))
    assert space.free == 4096


def test_what_another_way_does_without_is_given_back_and_no_part_of_what_is_needed():
    space = workspace(4096)
    with space.scratch():
        space.array((64,))
        with space.spare():
            space.array((512,))
            assert space.used == 256 + 2048
        assert (space.used, space.peak) == (256, 256)
        space.array((128,))
    assert (space.used, space.peak) == (0, 768)


def test_a_mark_above_what_is_handed_out_is_refused():
    space = workspace(4096)
    mark = (space.array((256,)), space.mark())[1]
    space.release(0)
    with pytest.raises(ValueError, match="mark 1024 is not in use: 0 bytes"):
        space.release(mark)


def test_what_captured_work_had_taken_is_in_use_again_when_it_runs_again():
    space = workspace(4096)
    space.array((512,))
    mark = space.mark()
    space.release(0)
    space.resume(mark)
    assert (space.used, space.free) == (2048, 2048)
    with pytest.raises(ValueError, match="mark 4097 is outside of 4096 bytes"):
        space.resume(4097)


def test_an_upload_is_a_copy():
    space, host = workspace(4096), np.arange(5)
    array = space.upload(host)
    host[:] = 0
    np.testing.assert_array_equal(array, np.arange(5))


def test_memory_of_another_kind_is_refused():
    with pytest.raises(ValueError, match=r"flat uint8 array, got float32 \(4,\)"):
        Workspace(np.zeros(4, np.float32))

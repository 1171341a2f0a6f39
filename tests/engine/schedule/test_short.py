"""Short reads: which pieces of a prompt go through windows, and how they are cut."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from strata.engine.schedule.short import NO_SHORT, ReadTimes, ShortReads

MS = st.floats(0.1, 500, allow_nan=False)


@given(left=st.integers(1, 10**6), chunk=st.integers(1, 8192))
def test_without_short_reads_a_chunk_is_as_long_as_it_may_be(left, chunk):
    assert NO_SHORT.unit(left, chunk) == min(left, chunk)


@given(left=st.integers(1, 300), chunk=st.integers(1, 64), most=st.integers(0, 80), rows=st.integers(1, 16))
def test_a_unit_is_never_longer_than_a_window_where_a_piece_is_short_nor_than_a_chunk(left, chunk, most, rows):
    unit = ShortReads(most, rows).unit(left, chunk)
    assert unit == min(left, chunk, rows) if left <= most else unit == min(left, chunk)


def test_windows_are_taken_as_long_as_they_are_quicker_and_no_further_than_asked():
    times = ReadTimes(one=4.0, full=8.0, rows=8, passes=[(16, 50.0), (64, 60.0)])
    assert times.windows(8) == 8.0 and times.windows(9) == 12.0 and times.windows(16) == 16.0
    assert times.a_pass(40) == 55.0 and times.a_pass(9) == 50.0
    assert times.short(64) == ShortReads(56, 8), "7 windows take 56 ms, another one is no gain"
    assert times.short(32) == ShortReads(32, 8)
    assert times.short(3) == ShortReads(3, 8), "one window is quicker than any pass"


def test_a_card_whose_passes_are_quick_reads_no_more_than_one_window_goes_through():
    assert ReadTimes(4.0, 8.0, 8, [(16, 5.0), (64, 9.0)]).short(64) == ShortReads(8, 8)


@given(one=MS, more=MS, rows=st.integers(1, 16), most=st.integers(1, 64), times=st.tuples(MS, MS))
def test_every_piece_that_goes_through_windows_is_one_window_or_quicker_so(one, more, rows, most, times):
    found = ReadTimes(one, one + more, rows, [(16, min(times)), (64, max(times))])
    short = found.short(most)
    assert min(most, rows) <= short.most <= most
    assert all(found.windows(n) < found.a_pass(n) for n in range(rows + 1, short.most + 1))

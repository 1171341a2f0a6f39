"""Rows, and what a forward pass refuses before it computes anything."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.engine.device.host import HostDevice, Memory
from strata.engine.model import MAX_ROWS, Model, Rows
from strata.engine.model.rows import RUN_GRID, cuts, part_of
from strata.engine.state.pages import OutOfPages
from strata.engine.state.slots import StateTooLarge
from strata.kernels.cuda.plans import WINDOW_ROWS


def test_rows_are_the_parts_one_after_another():
    rows = Rows.of([(2, 10, [5, 6]), (0, 0, np.array([7])), (1, 3, (8, 9))])
    assert rows.tokens.tolist() == [5, 6, 7, 8, 9]
    assert rows.positions.tolist() == [10, 11, 0, 3, 4]
    assert rows.slots.tolist() == [2, 2, 0, 1, 1]
    assert rows.segments.tolist() == [[2, 0, 2], [0, 2, 3], [1, 3, 5]]
    assert all(a.dtype == np.int32 and a.flags.c_contiguous for a in (rows.tokens, rows.positions, rows.slots))
    assert rows.segments.dtype == np.int32 and rows.segments.flags.c_contiguous


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], f"takes 1 to {MAX_ROWS} rows, got 0"),
        ([(0, 0, np.zeros(MAX_ROWS + 1, np.int32))], f"takes 1 to {MAX_ROWS} rows, got {MAX_ROWS + 1}; cut"),
        ([(0, 0, [1]), (1, 0, [])], "slot 1: 0 tokens at position 0"),
        ([(0, -1, [1])], "slot 0: 1 tokens at position -1"),
        ([(-1, 0, [1])], "slot -1"),
        ([(3, 0, [1]), (3, 1, [2])], "one part in a forward pass"),
    ],
)
def test_rows_that_cannot_be_are_refused(parts, message):
    with pytest.raises(ValueError, match=message):
        Rows.of(parts)


@pytest.mark.parametrize(
    ("parts", "want", "message"),
    [
        ([(0, 3, [1])], [0], "slot 0 holds 4 tokens, its next row cannot be at 3"),
        ([(0, 5, [1])], [0], "slot 0 holds 4 tokens"),
        ([(2, 0, [1])], [0], "slots must be in 0 to 1, got 2"),
        ([(0, 4, [1024])], [0], "token ids must be in 0 to 1023, got 1024"),
        ([(0, 4, [5, -1])], [0], "token ids must be in 0 to 1023, got -1"),
        ([(0, 4, [1])], [1], "wanted rows must be in 0 to 0, got 1"),
        ([(0, 4, [1])], [-1], "wanted rows must be in 0 to 0, got -1"),
    ],
)
def test_a_refused_forward_leaves_the_state_alone(sequences, parts, want, message):
    sequence = sequences("odd-q2_0", "reference", n_slots=2)
    sequence.feed([1, 2, 3, 4])
    before = sequence.state.digest(0)
    with pytest.raises(ValueError, match=message):
        sequence.model.forward(Rows.of(parts), sequence.state, want)
    assert sequence.state.digest(0) == before
    sequence.state.check()


def test_a_sequence_ends_at_its_context(pack_of):
    model = Model(pack_of("odd-q2_0"), HostDevice("reference", 1), 70)
    state = model.new_state(1)
    model.forward(Rows.of([(0, 0, np.arange(70))]), state)
    before = state.digest(0)
    with pytest.raises(OutOfPages, match="71 tokens do not fit the context of 70"):
        model.forward(Rows.of([(0, 70, [1])]), state)
    assert state.digest(0) == before


@pytest.mark.parametrize("want", [None, []])
def test_no_wanted_rows_give_no_logits_and_advance_the_state(sequences, want):
    sequence = sequences("odd-q2_0", "reference")
    logits = sequence.model.forward(Rows.of([(0, 0, [1, 2, 3])]), sequence.state, want)
    assert logits.shape == (0, 1024) and logits.dtype == np.float32
    assert sequence.state.length(0) == 3


@pytest.mark.parametrize("context", [0, 1 << 20])
def test_a_context_that_the_model_cannot_hold_is_refused(pack_of, context):
    with pytest.raises(ValueError, match="max_context must be in 1 to 4096 for this model"):
        Model(pack_of("odd-q2_0"), HostDevice("reference", 1), context)


def test_a_state_larger_than_free_memory_is_refused_before_it_is_allocated(pack_of, monkeypatch):
    device = HostDevice("reference", 1)
    monkeypatch.setattr(device, "memory", lambda: Memory(total=1 << 20, free=1 << 20))
    with pytest.raises(StateTooLarge, match="2 slots of 4096 tokens"):
        Model(pack_of("odd-q2_0"), device, 4096).new_state(2)


def test_more_experts_a_token_than_the_kernels_take_are_refused(pack_of, altered):
    pack = pack_of("odd-q2_0")
    with pytest.raises(ValueError, match="uses 65 experts a token, at most 64"):
        Model(altered(pack, spec=replace(pack.spec, experts_used=65)), HostDevice("reference", 1), 64)


@given(n=st.integers(1, MAX_ROWS), most=st.integers(2, 40))
def test_runs_cover_the_rows_in_order_and_none_is_as_short_as_a_window(n, most):
    most *= RUN_GRID
    edges = cuts(n, most)
    lengths = [end - begin for begin, end in pairwise(edges)]
    assert edges[0] == 0 and edges[-1] == n and max(lengths) <= most
    assert cuts(n, 0) == [0, n]
    if n > most:
        assert min(lengths) > WINDOW_ROWS and all(edge % RUN_GRID == 0 for edge in edges[:-1])


@given(st.lists(st.integers(1, 90), min_size=1, max_size=5), st.lists(st.integers(1, 300), max_size=4))
def test_runs_go_on_with_a_sequence_where_the_run_before_has_left_it(lengths, edges):
    """States are rows that a pass reads and rows that it writes: a token of a sequence finds its predecessor's."""
    begins = [0, *accumulate(lengths)]
    names = [2 * i | 1 << 16 for i in range(len(lengths))]  # reads row 2 i, writes row 2 i + 1
    segments = np.array([names, begins[:-1], begins[1:]], np.int32).T.copy()
    state = {row: 0 for i in range(len(lengths)) for row in (2 * i, 2 * i + 1)}
    for begin, end in pairwise(sorted({0, begins[-1], *(edge for edge in edges if edge < begins[-1])})):
        part = part_of(segments, begin, end)
        assert part.dtype == np.int32 and part.flags.c_contiguous
        assert part[0, 1] == 0 and part[-1, 2] == end - begin and (part[1:, 1] == part[:-1, 2]).all()
        for name, first, last in part.tolist():
            row = name & 0xFFFF
            state[row ^ name >> 16] = state[row] + last - first
    assert [state[2 * i + 1] for i in range(len(lengths))] == lengths
    assert not any(state[2 * i] for i in range(len(lengths))), "what was there before is still there"

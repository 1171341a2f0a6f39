"""Rows, and what a forward pass refuses before it computes anything."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from strata.engine.device.host import HostDevice, Memory
from strata.engine.model import MAX_ROWS, Model, Rows
from strata.engine.state.pages import OutOfPages
from strata.engine.state.slots import StateTooLarge


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

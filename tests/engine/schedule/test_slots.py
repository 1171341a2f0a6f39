"""Slots as state machines: the order of finishes, what a slot holds, who may be admitted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.engine.schedule.slots import Slots, finish_of
from strata.engine.schedule.solo import Request
from strata.kernels.ops import Sampling
from strata.protocol.lines import SlotDone, SlotToken

END = 3


def request(n_prompt: int = 4, max_new: int = 6) -> Request:
    return Request(np.arange(10, 10 + n_prompt).astype(np.int32), max_new, Sampling())


def slots(n: int = 3, max_context: int = 64, now: list[float] | None = None) -> Slots:
    clock = now if now is not None else [0.0]
    return Slots(n, end_ids={END}, max_context=max_context, clock=lambda: clock[0])


@pytest.mark.parametrize(
    ("token", "n_left", "next_position", "finish"),
    [
        (END, 5, 10, "stop"),
        (END, 0, 10, "stop"),
        (END, 0, 63, "stop"),
        (9, 0, 10, "length"),
        (9, 5, 62, None),
        (9, 5, 63, "length"),
        (9, 1, 10, None),
    ],
)
def test_an_end_token_comes_before_the_length_and_the_length_before_the_context(token, n_left, next_position, finish):
    assert finish_of(token, {END}, n_left, next_position, max_context=64) == finish


def test_a_slot_counts_the_token_of_its_admission_and_ends_with_the_last_one_it_may_say():
    now = [100.0]
    table = slots(now=now)
    table.admit(1, request(max_new=3), 7)
    now[0] = 130.0
    assert table.decided(1, 8) == [SlotToken(1, 8)]
    now[0] = 142.5
    assert table.decided(1, 9) == [SlotToken(1, 9), SlotDone(1, 3, "length", 42.5)]
    assert table.is_free(1) and not table.any


def test_a_stopped_slot_has_said_nothing_more_and_the_others_go_on():
    table = slots()
    for slot in (2, 0):
        table.admit(slot, request(), 7)
    assert table.stop(2) == SlotDone(2, 1, "cancel", 0.0)
    assert [one.slot for one in table.decoding] == [0]
    assert table.decided(0, 8) == [SlotToken(0, 8)]


def test_what_is_there_and_does_not_decode_is_free():
    table = slots(2)
    table.admit(0, request(), 7)
    assert [table.is_free(slot) for slot in (-1, 0, 1, 2)] == [False, False, True, False]
    for slot in (-1, 0, 2):
        with pytest.raises(RuntimeError, match="is not free"):
            table.admit(slot, request(), 7)


@settings(max_examples=200, deadline=None)
@given(
    n_prompt=st.integers(1, 40),
    max_new=st.integers(2, 20),
    tokens=st.lists(st.integers(0, 9), min_size=20, max_size=20),
)
def test_a_slot_holds_the_prompt_and_all_it_has_said_but_the_last(n_prompt, max_new, tokens):
    table = slots(1, max_context=70)
    asked = request(n_prompt, max_new)
    table.admit(0, asked, 42)
    (one,) = table.decoding
    said = [42]
    for token in tokens:
        events = table.decided(0, token)
        said.append(token)
        assert one.held.tolist() == asked.prompt.tolist() + said[:-1]
        assert one.tokens.tolist() == asked.prompt.tolist() + said
        if table.is_free(0):
            end = events[-1]
            assert end.generated == len(said)
            assert end.finish == ("stop" if token == END else "length")
            break
    assert table.is_free(0) and len(said) <= max_new

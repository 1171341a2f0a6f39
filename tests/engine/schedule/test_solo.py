"""One request as a state machine: what is read when, why it ends, what its DONE says."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from strata.engine.schedule.solo import Decode, Read, Request, Solo
from strata.kernels.ops import Sampling
from strata.protocol.lines import Progress, Reused

END = 3


def request(prompt: list[int], max_new: int = 6, **how: object) -> Request:
    return Request(np.array(prompt, np.int32), max_new, Sampling(**how))


def test_an_end_token_as_the_last_allowed_one_is_stop_and_not_length(fake_clock):
    solo = Solo(request([5], 1), reused=0, chunk=8, end_ids={END}, clock=fake_clock)
    solo.read(solo.next_unit(False))
    solo.decided(END)
    assert solo.done().finish == "stop"


def test_a_stop_after_the_last_token_is_not_cancel(fake_clock):
    solo = Solo(request([5], 1), reused=0, chunk=8, end_ids={END}, clock=fake_clock)
    solo.read(solo.next_unit(False))
    solo.decided(9)
    assert solo.next_unit(stop=True) is None
    assert solo.done().finish == "length"


def test_a_stop_during_the_last_chunk_comes_after_the_first_token(fake_clock):
    solo = Solo(request([5, 6], 4), reused=0, chunk=8, end_ids={END}, clock=fake_clock)
    unit = solo.next_unit(False)
    assert unit == Read(0, 2, last=True)
    assert solo.read(unit)[-1] == Reused(0)
    solo.decided(9)
    assert solo.next_unit(stop=True) is None
    done = solo.done()
    assert (done.generated, done.finish, done.prompt_read) == (1, "cancel", 2)


def test_times_and_rates_are_those_of_the_clock(fake_clock):
    solo = Solo(request([5] * 10, 3), reused=2, chunk=4, end_ids={END}, clock=fake_clock)
    fake_clock.now += 100.0
    assert solo.read(solo.next_unit(False)) == [Progress(6, 10, 100.0, 40.0)]
    fake_clock.now += 300.0
    assert solo.read(solo.next_unit(False)) == [Progress(10, 10, 400.0, 20.0), Reused(2)]
    fake_clock.now += 5.0
    solo.decided(9)
    assert solo.next_unit(False) == Decode(10)
    solo.fed()
    fake_clock.now += 7.0
    solo.decided(END)
    done = solo.done()
    assert (done.prompt_ms, done.decode_ms, done.reused, done.prompt_read) == (400.0, 12.0, 2, 8)


def test_the_penalties_look_at_prompt_and_output_and_no_further_than_asked(fake_clock):
    asked = Request(np.array([5, 6, 7], np.int32), 3, Sampling(), penalty_last_n=2)
    solo = Solo(asked, reused=0, chunk=8, end_ids={END}, clock=fake_clock)
    solo.read(solo.next_unit(False))
    assert solo.recent.tolist() == [6, 7]
    solo.decided(9)
    assert solo.recent.tolist() == [7, 9]
    none = Solo(request([5, 6], 3), reused=0, chunk=8, end_ids={END}, clock=fake_clock)
    assert none.recent.tolist() == []


def test_a_read_ends_where_a_checkpoint_is_taken_and_takes_no_more_than_it_may(fake_clock):
    solo = Solo(request([5] * 20, 3), reused=1, chunk=8, end_ids=(), clock=fake_clock, cuts=(3, 9))
    ends = []
    for most in (None, 4, None, 2, None, None):
        unit = solo.next_unit(False, most)
        solo.read(unit)
        ends.append(unit.end)
    assert ends == [3, 7, 9, 11, 19, 20]


@pytest.fixture
def fake_clock() -> Callable[[], float]:
    class Clock:
        now = 1000.0

        def __call__(self) -> float:
            return self.now

    return Clock()

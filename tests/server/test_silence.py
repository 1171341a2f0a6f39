"""The silence timer: a slow read is no silence, a stopped engine is."""

from __future__ import annotations

from strata.protocol.lines import Done, Err, Progress, Resume, Reused, SessionWait, Token
from strata.server.silence import SilenceClock


def test_nothing_is_silent_while_no_request_is_open():
    clock = SilenceClock(10)
    assert clock.deadline is None
    clock.sent(100, now=5.0)
    assert clock.deadline == 5 + 10 + 100 / 50
    clock.heard(Done(1, 100, 1.0, 1.0, "stop"), now=6.0)
    assert clock.deadline is None
    clock.sent(100, now=7.0)
    clock.heard(Err("bad request: ids"), now=8.0)
    assert clock.deadline is None


def test_a_long_first_chunk_gets_more_time_up_to_a_bound():
    clock = SilenceClock(10)
    clock.sent(1_000_000, now=0.0)
    assert clock.deadline == 10 + 32768 / 50
    clock.heard(Resume(0), now=3.0)
    assert clock.deadline == 3 + 10 + 32768 / 50


def test_between_chunks_three_of_them_fit_at_the_measured_rate():
    clock = SilenceClock(10)
    clock.sent(9000, now=0.0)
    clock.heard(Resume(1000), now=0.0)
    clock.heard(Progress(3000, 9000, 1.0, 100.0), now=20.0)
    assert clock.deadline == 20 + 3 * 2000 / 100
    clock.heard(Progress(3100, 9000, 1.0, 1000.0), now=30.0)
    assert clock.deadline == 30 + 10
    clock.heard(Progress(3200, 9000, 1.0, 0.0), now=40.0)
    assert clock.deadline == 40 + 10


def test_tokens_get_the_plain_limit_and_a_session_step_its_own():
    clock = SilenceClock(10)
    clock.sent(9000, now=0.0)
    clock.heard(Reused(0), now=1.0)
    clock.heard(Token(5), now=2.0)
    assert clock.deadline == 12
    clock.heard(SessionWait("write", 100), now=3.0)
    assert clock.deadline == 3 + 100 + 10


def test_a_limit_of_zero_waits_for_ever():
    clock = SilenceClock(0)
    clock.sent(100, now=0.0)
    assert clock.deadline is None

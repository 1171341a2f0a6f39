"""The silence timer: a slow read is no silence, a stopped engine is."""

from __future__ import annotations

from array import array

from strata.protocol.lines import (
    Admitted,
    BGen,
    BStop,
    Done,
    Err,
    Gen,
    Progress,
    Resume,
    Reused,
    SessionWait,
    SlotDone,
    SlotToken,
    Token,
)
from strata.server.silence import SilenceClock


def gen(n: int) -> Gen:
    return Gen(5, array("i", [1]) * n)


def bgen(slot: int, n: int) -> BGen:
    return BGen(slot, 5, array("i", [1]) * n)


def admit(clock: SilenceClock, slot: int, now: float) -> None:
    clock.sent(bgen(slot, 100), now)
    for line in (Resume(0), Reused(0), Token(5), Done(1, 100, 1.0, 1.0, "length"), Admitted(slot, True)):
        clock.heard(line, now)


def test_nothing_is_silent_while_no_request_is_open():
    clock = SilenceClock(10)
    assert clock.deadline is None
    clock.sent(gen(100), now=5.0)
    assert clock.deadline == 5 + 10 + 100 / 50
    clock.heard(Done(1, 100, 1.0, 1.0, "stop"), now=6.0)
    assert clock.deadline is None
    clock.sent(gen(100), now=7.0)
    clock.heard(Err("bad request: ids"), now=8.0)
    assert clock.deadline is None


def test_a_long_first_chunk_gets_more_time_up_to_a_bound():
    clock = SilenceClock(10)
    clock.sent(gen(1_000_000), now=0.0)
    assert clock.deadline == 10 + 32768 / 50
    clock.heard(Resume(0), now=3.0)
    assert clock.deadline == 3 + 10 + 32768 / 50


def test_between_chunks_three_of_them_fit_at_the_measured_rate():
    clock = SilenceClock(10)
    clock.sent(gen(9000), now=0.0)
    clock.heard(Resume(1000), now=0.0)
    clock.heard(Progress(3000, 9000, 1.0, 100.0), now=20.0)
    assert clock.deadline == 20 + 3 * 2000 / 100
    clock.heard(Progress(3100, 9000, 1.0, 1000.0), now=30.0)
    assert clock.deadline == 30 + 10
    clock.heard(Progress(3200, 9000, 1.0, 0.0), now=40.0)
    assert clock.deadline == 40 + 10


def test_tokens_get_the_plain_limit_and_a_session_step_its_own():
    clock = SilenceClock(10)
    clock.sent(gen(9000), now=0.0)
    clock.heard(Reused(0), now=1.0)
    clock.heard(Token(5), now=2.0)
    assert clock.deadline == 12
    clock.heard(SessionWait("write", 100), now=3.0)
    assert clock.deadline == 3 + 100 + 10


def test_a_limit_of_zero_waits_for_ever():
    clock = SilenceClock(0)
    clock.sent(gen(100), now=0.0)
    assert clock.deadline is None


def test_a_slot_keeps_the_clock_running_after_its_admission_until_it_ends():
    clock = SilenceClock(10)
    admit(clock, 0, now=1.0)
    admit(clock, 3, now=2.0)
    assert clock.deadline == 12
    clock.heard(SlotToken(3, 7), now=5.0)
    clock.heard(SlotDone(3, 2, "stop", 1.0), now=6.0)
    assert clock.deadline == 16
    clock.heard(SlotDone(0, 2, "stop", 1.0), now=7.0)
    assert clock.deadline is None


def test_tokens_of_other_slots_do_not_cut_the_time_that_a_long_chunk_may_take():
    clock = SilenceClock(10)
    admit(clock, 0, now=0.0)
    clock.sent(bgen(1, 9000), now=1.0)
    clock.heard(Resume(0), now=1.0)
    clock.heard(Progress(2000, 9000, 1.0, 50.0), now=41.0)
    clock.heard(SlotToken(0, 7), now=42.0)
    assert clock.deadline == 42 + 3 * 2000 / 50
    clock.heard(SlotDone(0, 2, "length", 1.0), now=43.0)
    assert clock.deadline == 43 + 3 * 2000 / 50


def test_an_admission_that_ends_in_its_read_leaves_nothing_open():
    clock = SilenceClock(10)
    clock.sent(bgen(1, 100), now=1.0)
    clock.heard(Done(0, 100, 1.0, 1.0, "cancel"), now=2.0)
    clock.heard(Admitted(1, False), now=2.0)
    assert clock.deadline is None


def test_a_slot_that_never_ends_is_not_hidden_by_the_others():
    clock = SilenceClock(10, slot_stop_s=600)
    admit(clock, 0, now=0.0)
    admit(clock, 1, now=0.0)
    clock.sent(BStop(1), now=5.0)
    for now in range(6, 700):
        clock.heard(SlotToken(0, 7), now=float(now))
        assert (clock.complaint(float(now)) is None) == (now <= 605)
    assert "slot 1" in clock.complaint(606.0)
    clock.heard(SlotDone(1, 4, "cancel", 1.0), now=700.0)
    assert clock.complaint(701.0) is None


def test_a_slot_that_ended_by_itself_is_not_waited_for():
    clock = SilenceClock(10)
    admit(clock, 0, now=0.0)
    clock.heard(SlotDone(0, 4, "stop", 1.0), now=1.0)
    clock.sent(BStop(0), now=2.0)
    assert clock.complaint(10_000.0) is None

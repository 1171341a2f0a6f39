"""What a prompt lays into the head: it fits, the first part never lies there, chunk and ring are in balance, and it is
only done where it gains."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.engine.device.arena import MIB
from strata.engine.memory.loan import GAIN, LoanPlan, LoanRoom, plan_loan, steps


class Price:
    """Parts of so many bytes a row."""

    def __init__(self, whole: int, work: int) -> None:
        self._each = whole, work

    def parts(self, n: int) -> tuple[int, int]:
        whole, work = self._each
        return whole * n, work * n

    def __call__(self, n: int) -> int:
        return sum(self.parts(n))


KIB = 1 << 10
PRICE = Price(52 * KIB, 128 * KIB)
EXPERT, LAYERS = 2_329_600, 48
STEP = 2 * EXPERT
EVERY = 24_576 * EXPERT
"""Bytes of all experts of the full-size model."""


def room(own: int, head: int = 417, most: int = 8192, ring: int = 75, stays: int = 512, beside: int = 0) -> LoanRoom:
    """Amounts in MiB."""
    alone, largest = 142 * MIB, 1024 * STEP
    given = own * MIB, head * MIB, most, ring * MIB, STEP, max(largest, ring * MIB), alone
    return LoanRoom(*given, EVERY, LAYERS, 1024, stays, beside * MIB)


def check(plan: LoanPlan, given: LoanRoom) -> None:
    """Pieces are in order behind each other and inside of what they lie in, and large enough for the chunk."""
    whole, work = PRICE.parts(plan.chunk)
    wanted = (whole + given.beside, work, given.ring)
    pieces = (plan.whole, plan.work, plan.ring)
    for piece, size in zip(pieces, wanted, strict=True):
        assert piece.begin % 256 == 0 and piece.n_bytes >= size
        assert piece.end <= (given.head if piece.in_head else plan.own_bytes)
    for held in (True, False):
        mine = sorted((p.begin, p.end) for p in pieces if p.in_head == held)
        assert all(before[1] <= after[0] for before, after in pairwise(mine))
    assert not plan.whole.in_head, "logits are made of it when the head is back"
    assert plan.own_bytes <= given.own and plan.own_bytes >= PRICE(plan.stays) + given.beside
    assert (plan.ring.n_bytes - given.ring) % given.ring_step == 0
    assert max(plan.plain, plan.stays + 1) <= plan.chunk <= given.most and 0 < plan.stays <= given.stays
    assert plan.lent_bytes > 0
    if plan.plain:
        assert seconds(plan, given) < GAIN * given.seconds(plan.plain, given.ring_alone)


def seconds(plan: LoanPlan | None, given: LoanRoom) -> float:
    return float("inf") if plan is None else given.seconds(plan.chunk, plan.ring.n_bytes)


@given(
    st.integers(0, 4000),
    st.integers(0, 900),
    st.integers(8, 8192),
    st.integers(1, 300),
    st.integers(8, 1023),
    st.integers(0, 90),
)
def test_a_plan_fits_and_gains_and_a_larger_head_is_no_worse(own, head, most, ring, stays, beside):
    given_room = room(own, head, most, ring, stays, beside)
    plan = plan_loan(given_room, PRICE)
    if plan is not None:
        check(plan, given_room)
        roomy = room(own, head + 50, most, ring, stays, beside)
        assert seconds(plan_loan(roomy, PRICE), roomy) <= seconds(plan, given_room)


def test_a_tight_card_reads_in_chunks_of_twice_the_length_with_a_larger_ring():
    given_room = room(500)
    plan = plan_loan(given_room, PRICE)
    assert plan is not None and plan.chunk >= 1.5 * plan.plain >= 1024
    assert plan.lent_bytes >= 300 * MIB and plan.ring.n_bytes > given_room.ring_alone
    assert seconds(plan, given_room) < 0.6 * given_room.seconds(plan.plain, given_room.ring_alone)


def test_the_longest_chunk_does_not_starve_the_ring():
    """With a ring of the least size mixers would be waited for; the ring alone would leave a short chunk."""
    given_room = room(700)
    plan = plan_loan(given_room, PRICE)
    assert plan is not None
    longest = max(c for c in steps(8192) if PRICE(c) + given_room.ring <= given_room.own + given_room.head)
    assert plan.chunk < longest
    assert seconds(plan, given_room) < given_room.seconds(longest, given_room.ring)
    assert plan.ring.n_bytes >= 300 * MIB and plan.chunk >= 3072


@pytest.mark.parametrize(
    ("chunk", "ring", "took"),
    [
        (1024, 64 * EXPERT, 1.19),
        (2048, 64 * EXPERT, 1.22),
        (2816, 32 * EXPERT, 1.82),
        (3840, 186 * EXPERT, 1.26),
        (8192, 1024 * EXPERT, 1.056),
    ],
)
def test_the_estimate_says_what_an_h200_took_within_a_tenth(chunk, ring, took):
    assert 0.9 * took < chunk * room(0).seconds(chunk, ring) < 1.1 * took


@given(st.integers(1, 8192), st.integers(1, 600), st.integers(0, 600))
def test_a_larger_ring_is_never_estimated_slower(chunk, ring, more):
    given_room = room(0)
    assert given_room.seconds(chunk, (ring + more) * STEP) <= given_room.seconds(chunk, ring * STEP)


def test_experts_that_all_lie_in_vram_leave_computing_alone():
    some = replace(room(0), missing=0)
    assert some.seconds(64, STEP) == some.seconds(4096, STEP) < room(0).seconds(4096, STEP)


def test_a_chunk_that_reads_in_place_is_slower_than_one_that_streams():
    assert room(0).seconds(1023, 32 * STEP) > 1.5 * room(0).seconds(1024, 32 * STEP)


def test_the_head_adds_nothing_where_the_longest_chunk_fits_without_it():
    roomy = replace(room(8000), ring_alone=1024 * STEP)
    assert plan_loan(roomy, PRICE) is None


def test_a_card_without_room_for_a_short_read_keeps_its_head():
    assert plan_loan(room(1), PRICE) is None


def test_the_ring_takes_what_is_left_up_to_what_it_can_use():
    given_room = replace(room(620, most=1024), ring_most=90 * MIB)
    plan = plan_loan(given_room, PRICE)
    assert plan is None or plan.ring.n_bytes <= 90 * MIB
    plan = plan_loan(room(250, most=1024), PRICE)
    assert plan is not None and plan.ring.n_bytes + STEP > (417 * MIB if plan.ring.in_head else 0)


@given(st.integers(8, 9000))
def test_chunks_are_tried_longest_first_and_once(most):
    tried = list(steps(most))
    assert tried[0] == most and tried == sorted(set(tried), reverse=True) and min(tried) >= 8

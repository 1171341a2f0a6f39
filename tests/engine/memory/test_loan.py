"""What a prompt lays into the head: it fits, the first part never lies there, and it is only done where it gains."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from strata.engine.device.arena import MIB
from strata.engine.memory.loan import LoanPlan, LoanRoom, plan_loan, steps


class Price:
    """Parts of so many bytes a row."""

    def __init__(self, whole: int, mixers: int, experts: int) -> None:
        self._each = whole, mixers, experts

    def parts(self, n: int) -> tuple[int, int, int]:
        whole, mixers, experts = self._each
        return whole * n, mixers * n, experts * n

    def __call__(self, n: int) -> int:
        return sum(self.parts(n))


KIB = 1 << 10
PRICE = Price(50 * KIB, 190 * KIB, 130 * KIB)
STEP = 4 * MIB


def room(own: int, head: int = 417, most: int = 8192, ring: int = 140, stays: int = 512, beside: int = 0) -> LoanRoom:
    """Amounts in MiB."""
    return LoanRoom(own * MIB, head * MIB, most, ring * MIB, STEP, 1000 * MIB, ring * MIB, stays, beside * MIB)


def check(plan: LoanPlan, given: LoanRoom) -> None:
    """Pieces are in order behind each other and inside of what they lie in, and large enough for the chunk."""
    whole, mixers, experts = PRICE.parts(plan.chunk)
    wanted = (whole + given.beside, mixers, experts, given.ring)
    pieces = (plan.whole, plan.mixers, plan.experts, plan.ring)
    for piece, size in zip(pieces, wanted, strict=True):
        assert piece.begin % 256 == 0 and piece.end - piece.begin >= size
        assert piece.end <= (given.head if piece.in_head else plan.own_bytes)
    for held in (True, False):
        mine = sorted((p.begin, p.end) for p in pieces if p.in_head == held)
        assert all(before[1] <= after[0] for before, after in pairwise(mine))
    assert not plan.whole.in_head, "logits are made of it when the head is back"
    assert plan.own_bytes <= given.own and plan.own_bytes >= PRICE(plan.stays) + given.beside
    assert (plan.ring.end - plan.ring.begin - given.ring) % given.ring_step == 0
    assert plan.plain < plan.chunk <= given.most and 0 < plan.stays <= min(given.stays, plan.chunk)
    assert plan.lent_bytes > 0


@given(
    st.integers(0, 4000),
    st.integers(0, 900),
    st.integers(8, 8192),
    st.integers(0, 300),
    st.integers(8, 1023),
    st.integers(0, 90),
)
def test_a_plan_fits_and_gains_and_none_is_missed(own, head, most, ring, stays, beside):
    given_room = room(own, head, most, ring, stays, beside)
    plan = plan_loan(given_room, PRICE)
    if plan is not None:
        check(plan, given_room)
    roomy = plan_loan(room(own, head + 50, most, ring, stays, beside), PRICE)
    assert plan is None or (roomy is not None and roomy.chunk >= plan.chunk), "a larger head is no worse"


def test_a_tight_card_reads_in_chunks_of_more_than_twice_the_length():
    plan = plan_loan(room(500), PRICE)
    assert plan is not None and plan.chunk >= 2 * plan.plain >= 1024
    assert plan.lent_bytes >= 300 * MIB


def test_the_head_adds_nothing_where_the_longest_chunk_fits_without_it():
    assert plan_loan(room(3500), PRICE) is None
    assert plan_loan(room(500, most=768), PRICE) is None, "nor where the prompt path asks for no more"


def test_a_card_without_room_for_a_short_read_keeps_its_head():
    assert plan_loan(room(2), PRICE) is None


def test_the_ring_takes_what_is_left_up_to_what_it_can_use():
    plan = plan_loan(LoanRoom(620 * MIB, 417 * MIB, 1024, 40 * MIB, STEP, 90 * MIB, 40 * MIB), Price(1, 1, 600 * KIB))
    assert plan is not None
    assert plan.ring.end - plan.ring.begin in range(86 * MIB, 90 * MIB + 1)


@given(st.integers(8, 9000))
def test_chunks_are_tried_longest_first_and_once(most):
    tried = list(steps(most))
    assert tried[0] == most and tried == sorted(set(tried), reverse=True) and min(tried) >= 8

"""Parking: the rules of admission, and that nothing which changed is ever continued."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from strata.engine.state import parking as parking_module
from strata.engine.state.checkpoints import Checkpoint
from strata.engine.state.pages import AccountsError
from strata.engine.state.parked import Parked, capture, marks_of
from strata.engine.state.parking import Found, Parking, ParkingRules
from strata.kernels.ops import PAGE

CONTEXT = 4 * PAGE
PLENTY = 1 << 40
RULES = ParkingRules(budget=1 << 30, most=4, min_free=1 << 20)


def words(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 200, n).astype(np.int32)


def put(s, tokens, slot: int = 0) -> np.ndarray:
    """The slot holds just these tokens."""
    s.state.reset(slot)
    s.write(slot, tokens)
    return tokens


def bodies(parked: Parked) -> list[np.ndarray]:
    """Every array that a parked conversation consists of, as bytes."""
    blocks = [mark.block for mark in parked.marks]
    return [parked.tokens.view(np.uint8), parked.image.pages, parked.image.block, *blocks]


def with_marks(s) -> tuple[Parked, list[bytes]]:
    """A parked conversation of 150 tokens with checkpoints at 60 and 100, and the state bytes at all three."""
    tokens, seen, held = words(150), [], {}
    s.write(0, tokens[:60])
    for place, (position, kind) in enumerate(((60, "root"), (100, "turn")), s.state.n_slots):
        s.write(0, tokens[s.state.length(0) : position])
        s.state.copy(0, place)
        seen.append(s.state.state_bytes(0))
        held[place] = Checkpoint(tokens[:position].copy(), kind, place)
    s.write(0, tokens[100:])
    return capture(s.state, 0, tokens, held), [*seen, s.state.state_bytes(0)]


def test_a_parked_conversation_comes_back_whole_or_from_a_checkpoint(new_state):
    s = new_state(2, CONTEXT, n_checkpoints=2)
    parked, seen = with_marks(s)
    assert parked.is_intact and parked.positions == (60, 100, 150)
    for length, state in zip(parked.positions, seen, strict=True):
        put(s, words(70, 8), 1)
        parked.restore(s.state, 1, length)
        assert s.state.state_bytes(1) == state
    s.state.check()


def test_any_byte_that_changes_is_noticed(new_state):
    s = new_state(1, CONTEXT, n_checkpoints=2)
    parked, _ = with_marks(s)
    rng = np.random.default_rng(4)
    for body in bodies(parked):
        places = {0, len(body) - 1, *rng.integers(0, len(body), 40).tolist()}
        for at in places:
            for flip in (1, 0x80, 0xFF):
                body[at] ^= flip
                assert not parked.is_intact, at
                body[at] ^= flip
    assert parked.is_intact


def test_a_damaged_conversation_is_dropped_and_counted_never_continued(new_state):
    s = new_state(1, CONTEXT)
    parking = Parking(RULES, lambda: PLENTY)
    tokens = put(s, words(90))
    parking.park(s.state, 0, tokens, {})
    prompt = np.r_[tokens, 5].astype(np.int32)
    found = parking.find(prompt, 0)
    found.where.image.pages[77] ^= 2
    assert parking.fetch(found) is None
    assert parking.find(prompt, 0) is None
    assert parking.counts.damaged == 1 and parking.counts.hits == 0 and parking.n_parked == 0


def test_what_is_found_is_the_longest_beginning_that_leaves_a_token_to_read(new_state):
    s = new_state(1, CONTEXT, n_checkpoints=2)
    parked, _ = with_marks(s)
    parking = Parking(RULES, lambda: PLENTY, _parked=[parked])

    def found(prompt, than: int = 0) -> int:
        hit = parking.find(np.asarray(prompt, np.int32), than)
        return hit.length if hit else 0

    tokens = parked.tokens
    assert found(np.r_[tokens, 1]) == 150
    assert found(tokens) == 100, "a token is left to read"
    assert found(np.r_[tokens[:120], 201, 202]) == 100
    assert found(tokens[:100]) == 60
    assert found(np.r_[tokens[:59], 201, tokens[60:]]) == 0
    assert found(np.r_[tokens, 1], 149) == 150
    assert found(np.r_[tokens, 1], 150) == 0, "what is there already is not fetched"


def test_a_match_below_the_least_share_of_the_prompt_is_none(new_state):
    s = new_state(1, CONTEXT)
    tokens = put(s, words(100))
    parking = Parking(ParkingRules(1 << 30, similarity=0.5), lambda: PLENTY)
    parking.park(s.state, 0, tokens, {})
    assert parking.find(np.r_[tokens, words(100, 1)], 0).length == 100
    assert parking.find(np.r_[tokens, words(101, 1)], 0) is None


def test_what_is_too_short_or_larger_than_the_budget_is_not_parked_and_drops_nothing(new_state):
    s = new_state(1, CONTEXT)
    one = s.state.image_bytes(PAGE) + 4 * PAGE
    parking = Parking(ParkingRules(one, min_tokens=20), lambda: PLENTY)
    parking.park(s.state, 0, put(s, words(PAGE)), {})
    parking.park(s.state, 0, put(s, words(19, 1)), {})
    parking.park(s.state, 0, put(s, words(PAGE + 1, 2)), {})
    assert parking.n_parked == 1 and parking.n_bytes == one
    assert parking.counts.skipped == 1 and parking.counts.dropped == 0


def test_the_least_recently_used_goes_when_there_are_too_many(new_state):
    s = new_state(1, CONTEXT)
    parking = Parking(ParkingRules(1 << 30, most=3), lambda: PLENTY)
    prompts = [np.r_[words(20, i), 7].astype(np.int32) for i in range(4)]
    for prompt in prompts[:3]:
        parking.park(s.state, 0, put(s, prompt[:-1]), {})
    parking.fetch(parking.find(prompts[0], 0))
    parking.park(s.state, 0, put(s, prompts[3][:-1]), {})
    assert [parking.find(prompt, 0) is not None for prompt in prompts] == [True, False, True, True]
    parking.park(s.state, 0, put(s, prompts[0][:-1]), {})
    assert parking.counts.captured == 4, "what is parked already is not captured again"
    parking.check()


def test_a_longer_conversation_takes_the_place_of_its_beginning(new_state):
    s = new_state(1, CONTEXT)
    parking = Parking(ParkingRules(1 << 30, most=2), lambda: PLENTY)
    tokens = words(120)
    parking.park(s.state, 0, put(s, words(30, 1)), {})
    parking.park(s.state, 0, put(s, tokens[:70]), {})
    parking.park(s.state, 0, put(s, tokens), {})
    assert parking.n_parked == 2 and parking.counts.dropped == 0
    assert parking.find(np.r_[tokens[:70], 255], 0) is None


def test_ram_that_must_stay_free_costs_parked_ones_and_then_the_new_one(new_state):
    s = new_state(1, CONTEXT)
    free = [PLENTY]
    parking = Parking(RULES, lambda: free[0])
    for i in range(3):
        parking.park(s.state, 0, put(s, words(30, i)), {})
    free[0] = 5
    parking.park(s.state, 0, put(s, words(30, 9)), {})
    assert parking.n_parked == 0 and parking.counts.dropped == 3 and parking.counts.skipped == 1


def test_what_was_captured_is_dropped_again_when_ram_turns_out_short(new_state):
    s = new_state(1, CONTEXT)
    free = iter([PLENTY, PLENTY, 5, 5])
    parking = Parking(RULES, lambda: next(free))
    parking.park(s.state, 0, put(s, words(30)), {})
    assert parking.n_parked == 0 and parking.counts.captured == parking.counts.dropped == 1


def test_a_failing_allocation_is_a_log_line(new_state, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "strata.engine")

    def no_memory(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(parking_module, "capture", no_memory)
    s = new_state(1, CONTEXT)
    parking = Parking(RULES, lambda: PLENTY)
    parking.park(s.state, 0, put(s, words(30)), {})
    assert parking.counts.skipped == 1 and parking.n_parked == 0
    assert "not parked: 30 tokens, there are no 0 MiB of RAM" in caplog.text


def test_what_is_about_to_be_continued_is_not_dropped_for_what_it_replaces(new_state):
    s = new_state(1, CONTEXT)
    parking = Parking(ParkingRules(1 << 30, most=1), lambda: PLENTY)
    parking.park(s.state, 0, put(s, words(30)), {})
    found: Found = parking.find(np.r_[words(30), 1].astype(np.int32), 0)
    parking.park(s.state, 0, put(s, words(40, 1)), {}, spared=found.where)
    assert parking.n_parked == 1 and parking.find(np.r_[words(30), 1].astype(np.int32), 0) is not None


def test_the_check_sees_more_than_the_budget(new_state):
    s = new_state(1, CONTEXT)
    parking = Parking(RULES, lambda: PLENTY)
    parking.park(s.state, 0, put(s, words(30)), {})
    parking.check()
    parking.rules = ParkingRules(10)
    with pytest.raises(AccountsError, match="1 conversations of"):
        parking.check()


def test_the_last_turn_and_the_last_root_or_pin_are_kept_with_a_conversation():
    tokens = words(100)

    def at(n: int, kind: str, of: np.ndarray = tokens) -> Checkpoint:
        return Checkpoint(of[:n].copy(), kind, 0)

    held = {
        5: at(90, "periodic"),
        6: at(80, "turn"),
        7: at(40, "turn"),
        8: at(30, "root"),
        9: at(20, "pin"),
        10: at(95, "turn", words(100, 1)),
        11: at(100, "turn"),
    }
    assert list(marks_of(held, tokens)) == [8, 6]

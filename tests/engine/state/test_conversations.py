"""Conversations: the longest prefix is continued, what is dropped is the right thing, no accounts are lost."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from strata.engine.state.checkpoints import CacheRules
from strata.engine.state.conversations import Conversations
from strata.engine.state.pages import AccountsError
from strata.engine.state.slots import StatePool
from strata.kernels.ops import PAGE

TURN = 7
CONTEXT = 6 * PAGE


class Engine:
    """What a schedule does, with a state that remembers the sequence it was fed: `history` holds a hash of it."""

    def __init__(self, spec, n_slots: int = 2, rules: CacheRules | None = None, n_checkpoints: int = 4, **pool) -> None:
        self.state = StatePool(spec, 1 + n_slots, CONTEXT, n_checkpoints=n_checkpoints, **pool)
        rules = CacheRules(4, every=0, root=0) if rules is None else rules
        self.held = Conversations(self.state, n_slots, rules, None, TURN, verify=True)
        self.reused = 0

    def write(self, slot: int, tokens) -> None:
        """What a forward pass does: state that depends on every token before it."""
        self.state.reserve(slot, len(tokens))
        for token in np.asarray(tokens).tolist():
            n, row = self.state.length(slot), self.state.recurrent.row(slot)
            hashed = self.state.recurrent.gdn[0].state[row].reshape(-1)
            hashed[0] = (31 * hashed[0] + token + 1) % 65521
            page = self.state.pages.tables[slot, n // PAGE]
            for array in self.state.pages.arrays:
                array[page].reshape(PAGE, -1)[n % PAGE, :] = hashed[0]
            self.state.advance(slot, 1)

    def read(self, prompt, pin: int = 0, keep: bool = True, until: int | None = None) -> int:
        """Read a prompt in the solo path, or its first `until` tokens. -> tokens reused."""
        prompt = np.asarray(prompt, np.int32)
        self.reused = begin = self.held.resume(prompt)
        end = len(prompt) if until is None else until
        for position in self.held.stops(prompt, begin, pin, keep):
            if position <= end:
                self.write(0, prompt[begin:position])
                begin = position
                self.held.reached(prompt, position)
        self.write(0, prompt[begin:end])
        self.matches(0, prompt[:end])
        return self.reused

    def matches(self, slot: int, tokens) -> None:
        """The slot's state is that of the tokens read cold."""
        fresh = Engine.__new__(Engine)
        fresh.state = StatePool(self.spec, 1, CONTEXT)
        fresh.write(0, tokens)
        assert self.state.length(slot) == len(tokens)
        assert self.state.state_bytes(slot) == fresh.state.state_bytes(0)


@pytest.fixture
def engine(spec):
    Engine.spec = spec
    return lambda *args, **kwargs: Engine(spec, *args, **kwargs)


def words(n: int, seed: int = 0) -> np.ndarray:
    """Tokens without a turn boundary."""
    return np.random.default_rng(seed).integers(10, 60, n).astype(np.int32)


def turns(*lengths: int, seed: int = 0) -> np.ndarray:
    """A prompt of turns: each begins with the turn token."""
    return np.concatenate([np.r_[TURN, words(n - 1, seed + i)] for i, n in enumerate(lengths)]).astype(np.int32)


def test_a_live_session_is_continued_only_by_a_prompt_that_begins_with_all_of_it(engine):
    e = engine()
    prompt = words(100)
    assert e.read(prompt) == 0
    e.held.ended(prompt)
    assert e.read(np.r_[prompt, 11]) == 100
    e.held.ended(np.r_[prompt, 11].astype(np.int32))
    assert e.read(prompt) == 0, "a token must be left to read"
    e.held.ended(None)
    assert e.read(np.r_[prompt, 12]) == 0, "an ended(None) leaves nothing"


def test_without_a_prompt_cache_nothing_is_reused(engine):
    e = engine(rules=CacheRules(0))
    prompt = turns(90, 60)
    assert e.held.stops(prompt, 0) == ()
    e.read(prompt)
    e.held.admit(1, prompt)
    e.held.release(1, prompt)
    assert e.held.status(1) == "EMPTY" and not len(e.held.live)
    assert e.read(np.r_[prompt, 11]) == 0


def test_a_client_that_drops_the_reasoning_continues_from_the_turn_checkpoint(engine):
    e = engine()
    prompt = turns(80, 30, 20)
    e.read(prompt)
    answer = words(40, 9)
    e.write(0, answer)
    e.held.ended(np.r_[prompt, answer])
    assert e.read(np.r_[prompt[:110], TURN, words(50, 5)]) == 110
    e.held.ended(None)
    assert e.read(np.r_[prompt[:110], TURN, words(9, 6)]) == 110, "a checkpoint serves more than once"


def test_an_idle_slot_is_continued_and_what_another_slot_decodes_is_not(engine):
    e = engine()
    one, two = words(150), words(70, 1)
    for slot, prompt in ((1, one), (2, two)):
        e.read(prompt)
        e.held.admit(slot, prompt)
        e.matches(slot, prompt)
    e.write(1, words(5, 3))
    e.held.release(1, np.r_[one, words(5, 3)])
    e.held.ended(None)
    assert e.read(np.r_[two, 11]) == 0
    e.held.ended(None)
    assert e.read(np.r_[one, words(5, 3), 11]) == 155
    e.held.ended(None)
    assert e.held.status(1) == "CACHED" and e.held.status(2) == "DECODING"
    e.matches(1, np.r_[one, words(5, 3)])


def test_a_read_that_gave_way_goes_on_where_it_was(engine):
    e = engine()
    prompt = words(200)
    e.read(prompt, until=130)
    e.held.give_way(2, prompt, 130)
    assert e.held.status(2) == "PARTIAL" and not len(e.held.live)
    e.read(words(60, 2))
    e.held.admit(1, words(60, 2))
    assert e.read(prompt) == 130
    e.held.admit(2, prompt)
    e.matches(2, prompt)


def test_a_decoding_slot_cannot_be_overwritten(engine):
    e = engine()
    prompt = words(20)
    e.read(prompt)
    e.held.admit(1, prompt)
    e.read(words(30, 1))
    with pytest.raises(AccountsError, match="slot 1 is DECODING"):
        e.held.admit(1, words(30, 1))
    with pytest.raises(AccountsError, match="slot 2 is EMPTY, not DECODING"):
        e.held.release(2, None)
    with pytest.raises(AccountsError, match="already works"):
        e.held.resume(prompt)


def test_stops_are_root_pin_turn_and_periodic(engine):
    e = engine(rules=CacheRules(4, every=100, root=50))
    prompt = turns(40, 30, 60, 80, 40)  # boundaries 0, 40, 70, 130, 210; 250 tokens
    assert e.held.stops(prompt, 0) == (70, 100, 200, 210)
    assert e.held.stops(prompt, 0, pin=33) == (33, 70, 100, 200, 210)
    assert e.held.stops(prompt, 70, pin=33) == (100, 200, 210), "what is behind the read is not read again"
    assert e.held.stops(prompt, 0, pin=249) == (70, 100, 200, 210), "a pin leaves two tokens to read"
    assert e.held.stops(prompt, 0, pin=33, keep=False) == (70,), "ckpt=0 takes the root only"
    assert e.held.stops(prompt, 210) == ()
    few = engine(rules=CacheRules(2, every=0, root=0))
    assert few.held.stops(prompt, 0, pin=33) == (210,), "a pin needs three checkpoints"


def test_root_and_pin_outlive_turns(engine):
    e = engine(rules=CacheRules(4, every=0, root=50))
    system = turns(60, seed=70)
    pinned = np.r_[system, TURN, words(29, 8)]
    for i in range(8):
        prompt = np.r_[pinned, turns(20, 9, seed=10 * i)]
        begin = (0, 90)[i > 0]
        assert e.read(prompt, pin=90) == begin
        e.held.ended(None)
    assert e.held.n_checkpoints == 4
    assert e.read(np.r_[system, TURN, words(10, 99)]) == 60, "the root is the first boundary at or after 50"


def test_a_pin_makes_the_checkpoint_that_is_there_already_stay(engine):
    e = engine(rules=CacheRules(3, every=0, root=0), n_checkpoints=3)
    first = turns(60, 30, seed=70)
    e.read(first)
    e.held.ended(None)
    again = np.r_[first[:60], turns(20, 9, seed=5)]
    assert e.read(again, pin=60) == 60
    e.held.ended(None)
    for i in range(5):
        e.read(turns(30, 20, seed=100 + 10 * i))
        e.held.ended(None)
    assert e.read(np.r_[first[:60], words(9, 9)]) == 60


def test_a_pin_that_cannot_be_is_said(engine, caplog):
    caplog.set_level(logging.INFO, "strata.engine")
    e = engine(rules=CacheRules(2, every=0, root=0))
    e.read(words(50), pin=20)
    assert "pin=20 of 50 tokens is ignored" in caplog.text


def test_with_one_place_the_newest_checkpoint_is_kept(engine):
    e = engine(rules=CacheRules(1, every=0, root=50), n_checkpoints=1)
    a, b = turns(60, 30, seed=3), turns(70, 30, seed=6)
    e.read(a)
    e.held.ended(None)
    e.read(b)
    e.held.ended(None)
    assert e.read(np.r_[a[:60], TURN, 11]) == 0
    e.held.ended(None)
    assert e.held.n_checkpoints == 1


def test_short_pages_cost_checkpoints_and_idle_slots_but_never_a_running_request(engine):
    e = engine(n_pages=10)
    first = turns(3 * PAGE, 10)
    e.read(first)
    e.held.admit(1, first)
    e.held.release(1, first)
    second = turns(2 * PAGE, 10, seed=5)
    e.read(second)
    assert e.held.n_checkpoints == 2
    e.held.admit(2, second)
    e.write(2, words(3 * PAGE, 3))
    e.held.check()
    assert e.held.n_checkpoints < 2
    long = words(4 * PAGE, 17)
    e.read(long)
    e.matches(2, np.r_[second, words(3 * PAGE, 3)])
    assert e.held.status(1) == "EMPTY" and e.held.status(2) == "DECODING"
    e.held.check()


def test_a_pool_of_the_planned_size_lets_every_slot_grow_whatever_is_kept(engine):
    e = engine(rules=CacheRules(4, every=PAGE - 1, root=0))
    whole = CONTEXT - 1
    for slot in (1, 2):
        prompt = words(whole, slot)
        e.read(prompt)
        e.held.admit(slot, prompt)
    e.held.ended(None)
    e.read(words(whole, 3))
    assert e.held.n_checkpoints > 0
    for slot, seed in ((1, 1), (2, 2)):
        e.write(slot, [9])
        e.matches(slot, np.r_[words(whole, seed), 9])


@pytest.mark.parametrize("damage", ["length", "pages", "turn"])
def test_the_check_sees_a_slot_that_is_not_what_it_should_be(engine, damage):
    e = engine()
    prompt = turns(70, 30)
    e.read(prompt)
    e.held.admit(1, prompt)
    e.held.release(1, prompt)
    match damage:
        case "length":
            e.write(1, [5])
        case "pages":
            e.state.reserve(2, 10)
        case "turn":
            e.held._checkpoints.clear()
    with pytest.raises(AccountsError):
        e.held.check()

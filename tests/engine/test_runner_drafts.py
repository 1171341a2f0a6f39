"""Verify windows of a runner: drafts, right or wrong, change neither a token nor a byte of the state."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strata.engine.options import Options
from strata.engine.pack import open_draft, open_pack
from strata.engine.runner import ModelRunner
from strata.engine.schedule.ports import Row
from strata.kernels.ops import Sampling

CONTEXT = 96
OPTIONS = Options(pack="", max_context=CONTEXT, spec=4, batch=3)
GREEDY = Sampling()
DRAWN = Sampling(temperature=1.0, top_k=40, seed=9)
PENALISED = Sampling(temperature=0.9, seed=12, penalty_repeat=1.4, penalty_present=0.5)
HOWS = (GREEDY, DRAWN, PENALISED)
LENGTH = 24


@pytest.fixture(scope="module")
def runner(packs):
    return ModelRunner(open_pack(packs["odd-q8_0"]), OPTIONS)


@pytest.fixture(scope="module")
def drafting(packs):
    """With a draft layer that follows every slot."""
    trunk = open_pack(packs["tiny-f32"])
    options = msgspec.structs.replace(OPTIONS, batch_mtp=True, mtp_window=64)
    return ModelRunner(trunk, options, open_draft(trunk, packs["mtp-tiny-q8_0"]))


@pytest.fixture(autouse=True)
def empty(runner, drafting):
    yield
    for each in (runner, drafting):
        for slot in range(each.state.n_slots):
            each.state.reset(slot)
        each.state.check()


def prompt(n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 900, n).astype(np.int32)


def begin(runner, slot: int, tokens: np.ndarray, how: Sampling) -> list[int]:
    runner.state.reset(slot)
    logits = runner.feed(slot, 0, tokens, True)
    return [*tokens.tolist(), runner.sample(logits, tokens, how, len(tokens))]


def row(slot: int, tokens: list[int], how: Sampling, drafts=()) -> Row:
    return Row(slot, np.array(tokens, np.int32), how, CONTEXT, tuple(drafts))


def plain(runner, slot: int, tokens: np.ndarray, how: Sampling, n: int = LENGTH) -> list[int]:
    """Prompt and n tokens, a window each; the slot holds all but the last."""
    got = begin(runner, slot, tokens, how)
    while len(got) < len(tokens) + n:
        got += runner.window([row(slot, got, how)], False)
    return got


def drafts_of(right: list[int], n: int, wrong_at: int) -> list[int]:
    """n drafts of which the one at `wrong_at` is wrong."""
    return [token ^ 1 if i == wrong_at else token for i, token in enumerate(right[:n])]


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_rejected_drafts_leave_no_trace_in_the_state(runner, data):
    how, ids = data.draw(st.sampled_from(HOWS)), prompt(data.draw(st.integers(1, 20)), 3)
    whole = plain(runner, 1, ids, how)
    tokens = begin(runner, 0, ids, how)
    while len(tokens) < len(whole):
        most = min(7, len(whole) - len(tokens) - 1)
        n = data.draw(st.integers(0, most))
        drafts = drafts_of(whole[len(tokens) :], n, data.draw(st.integers(0, most)))
        (said,) = runner.verify([row(0, tokens, how, drafts)])
        assert len(said) == 1 + next((i for i, d in enumerate(drafts) if d != whole[len(tokens) + i]), n)
        tokens += said
        if data.draw(st.booleans()) and len(tokens) < len(whole):
            tokens += runner.window([row(0, tokens, how)], False)
    assert tokens == whole
    assert runner.state.state_bytes(0) == runner.state.state_bytes(1)


def test_slots_of_one_verify_window_keep_what_each_of_them_says(runner):
    asked = [(slot, prompt(5 + slot, slot), how) for slot, how in zip((1, 2, 3), HOWS, strict=True)]
    wholes = []
    for slot, ids, how in asked:
        wholes.append(plain(runner, 0, ids, how))
        runner.state.copy(0, slot)
    states = [runner.state.state_bytes(slot) for slot, _, _ in asked]
    for slot, _, _ in asked:
        runner.state.reset(slot)
    tokens = {slot: begin(runner, slot, ids, how) for slot, ids, how in asked}
    turn = 0
    while any(len(tokens[slot]) < len(whole) for (slot, _, _), whole in zip(asked, wholes, strict=True)):
        turn += 1
        rows = []
        for (slot, _, how), whole in zip(asked, wholes, strict=True):
            left = whole[len(tokens[slot]) :]
            if left:
                rows.append(row(slot, tokens[slot], how, drafts_of(left, min(2, len(left) - 1), (turn + slot) % 3)))
        for one, said in zip(rows, runner.verify(rows), strict=True):
            tokens[one.slot] += said
    assert [tokens[slot] for slot, _, _ in asked] == wholes
    assert [runner.state.state_bytes(slot) for slot, _, _ in asked] == states


@pytest.mark.parametrize("how", HOWS, ids=["greedy", "drawn", "penalised"])
def test_text_with_the_draft_layer_is_the_text_without(drafting, how):
    ids = prompt(9, 5)
    whole = plain(drafting, 1, ids, how, 60)
    tokens, offered, kept = begin(drafting, 0, ids, how), 0, 0
    while len(tokens) < len(whole):
        proposed = drafting.propose(row(0, tokens, how), min(3, len(whole) - len(tokens) - 1), 0.0)
        (said,) = drafting.verify([row(0, tokens, how, proposed)])
        offered, kept = offered + len(proposed), kept + len(said) - 1
        tokens += said
    assert tokens == whole
    assert drafting.state.state_bytes(0) == drafting.state.state_bytes(1)
    assert offered > 60


def test_a_draft_vocabulary_bounds_the_drafts_and_not_the_text(packs, drafting):
    trunk = open_pack(packs["tiny-f32"])
    names = np.arange(3, trunk.spec.vocab, 5, dtype=np.int32)
    few = ModelRunner(trunk, OPTIONS, replace(open_draft(trunk, packs["mtp-tiny-q8_0"]), names=names))
    ids = prompt(9, 5)
    whole = plain(drafting, 1, ids, GREEDY, 30)
    tokens, seen = begin(few, 0, ids, GREEDY), set()
    while len(tokens) < len(whole):
        drafts = few.propose(row(0, tokens, GREEDY), min(3, len(whole) - len(tokens) - 1), 0.0)
        seen |= set(drafts)
        tokens += few.verify([row(0, tokens, GREEDY, drafts)])[0]
    assert tokens == whole
    assert len(seen) > 5 and all(token % 5 == 3 for token in seen)


def test_a_proposal_is_not_carried_into_another_conversation(drafting):
    tokens = begin(drafting, 0, prompt(6, 1), GREEDY)
    (said,) = drafting.verify([row(0, tokens, GREEDY)])
    tokens += said
    assert len(drafting.propose(row(0, tokens, GREEDY), 3, 0.0)) == 3
    assert len(drafting.propose(row(0, tokens, GREEDY), 3, 1.1)) == 1, "an unlikely proposal ends the chain"
    assert drafting.propose(row(0, [*tokens, 4], GREEDY), 3, 0.0) == [], "it is for another position"
    other = begin(drafting, 0, prompt(len(tokens) - 1, 2), GREEDY)
    assert len(other) == len(tokens)
    assert drafting.propose(row(0, other, GREEDY), 3, 0.0) == []


def test_drafts_of_a_slot_do_not_depend_on_what_it_held_before(drafting):
    def drafts() -> list[list[int]]:
        tokens, found = begin(drafting, 0, prompt(7, 8), GREEDY), []
        for _ in range(6):
            tokens += drafting.verify([row(0, tokens, GREEDY, drafting.propose(row(0, tokens, GREEDY), 2, 0.0))])[0]
            found.append(drafting.propose(row(0, tokens, GREEDY), 2, 0.0))
        return found

    first = drafts()
    plain(drafting, 0, prompt(70, 9), GREEDY, 4)
    assert drafts() == first


def test_the_draft_layer_goes_with_a_conversation_into_its_slot(drafting):
    tokens = begin(drafting, 0, prompt(20, 8), GREEDY)
    drafting.state.copy(0, 2)
    found = []
    for slot in (0, 2):
        tokens_of = list(tokens)
        for _ in range(4):
            tokens_of += drafting.verify([row(slot, tokens_of, GREEDY)])[0]
        found.append(drafting.propose(row(slot, tokens_of, GREEDY), 3, 0.0))
    assert found[0] == found[1]
    assert drafting.drafter.book.state.digest(0) == drafting.drafter.book.state.digest(2)


def test_a_draft_layer_that_is_full_begins_again(drafting):
    tokens = begin(drafting, 0, prompt(60, 8), GREEDY)
    for _ in range(12):
        proposed = drafting.propose(row(0, tokens, GREEDY), 3, 0.0)
        tokens += drafting.verify([row(0, tokens, GREEDY, proposed)])[0]
        assert drafting.drafter.book.state.length(0) <= 64
    drafting.drafter.book.state.check()
    assert drafting.propose(row(0, tokens, GREEDY), 3, 0.0)

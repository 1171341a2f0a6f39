"""Drafts on a card: the tokens and the state of plain windows and of the host, whatever is proposed."""

from __future__ import annotations

from itertools import count

import msgspec
import numpy as np
import pytest

from strata.engine.cuda_runner import CudaRunner
from strata.engine.options import Options
from strata.engine.runner import ModelRunner
from strata.engine.schedule.live import Path
from strata.engine.schedule.ports import DraftRules, Row, Rules
from strata.engine.schedule.solo import Request
from strata.engine.state.checkpoints import CacheRules
from strata.engine.state.conversations import Conversations
from strata.kernels.ops import Sampling
from strata.protocol.lines import SlotToken

CONTEXT, CHUNK = 80, 18
REHEARSES = False
OPTIONS = Options(pack="", max_context=CONTEXT, prefill=CHUNK, short_read=17, spec=4, batch=2, mtp="", batch_mtp=True)
GREEDY = Sampling()
DRAWN = Sampling(temperature=1.0, top_k=40, seed=9)
PENALISED = Sampling(temperature=0.9, seed=12, penalty_repeat=1.4, penalty_present=0.5)


@pytest.fixture(scope="module")
def runner(any_card, trunk, draft):
    made = CudaRunner(trunk, msgspec.structs.replace(OPTIONS, device="cuda"), draft, any_card())
    made.warm()
    return made


@pytest.fixture(scope="module")
def host(trunk, draft):
    return ModelRunner(trunk, OPTIONS, draft)


def prompt(n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 900, n).astype(np.int32)


def begin(runner, slot: int, tokens: np.ndarray, how: Sampling) -> list[int]:
    runner.state.reset(slot)
    logits = None
    for at in range(0, len(tokens), CHUNK):
        logits = runner.feed(slot, at, tokens[at : at + CHUNK], at + CHUNK >= len(tokens))
    return [*tokens.tolist(), runner.sample(logits, tokens, how, len(tokens))]


def row(slot: int, tokens: list[int], how: Sampling, drafts=()) -> Row:
    return Row(slot, np.array(tokens, np.int32), how, CONTEXT, tuple(drafts))


def plain(runner, slot: int, tokens: np.ndarray, how: Sampling, n: int) -> list[int]:
    got = begin(runner, slot, tokens, how)
    while len(got) < len(tokens) + n:
        got += runner.window([row(slot, got, how)], len(got) + 1 < len(tokens) + n)
    return got


@pytest.mark.parametrize("how", [GREEDY, PENALISED], ids=["greedy", "penalised"])
def test_rejected_drafts_leave_no_trace_in_the_state_of_a_card(runner, host, how):
    ids, n = prompt(26, 3), 14
    whole = plain(host, 0, ids, how, n)
    assert plain(runner, 1, ids, how, n) == whole
    assert runner.state.state_bytes(1) == host.state.state_bytes(0)
    tokens, turn = begin(runner, 0, ids, how), 0
    while len(tokens) < len(whole):
        turn += 1
        right = whole[len(tokens) :][: min(turn % 4, len(whole) - len(tokens) - 1)]
        drafts = [token + (i == turn % 3) for i, token in enumerate(right)]
        (said,) = runner.verify([row(0, tokens, how, drafts)])
        tokens += said
        if turn % 3 == 0 and len(tokens) < len(whole):
            tokens += runner.window([row(0, tokens, how)], False)
    assert tokens == whole
    assert runner.state.state_bytes(0) == host.state.state_bytes(0)
    runner.state.check()
    assert "windows with drafts" in runner.costs and runner.cost.replayed > 0


def test_slots_of_one_verify_window_keep_what_each_of_them_says(runner, host):
    asked = [(1, prompt(5, 1), GREEDY), (2, prompt(21, 2), DRAWN)]
    wholes = [plain(host, slot, ids, how, 8) for slot, ids, how in asked]
    tokens = {slot: begin(runner, slot, ids, how) for slot, ids, how in asked}
    turn = 0
    while any(len(tokens[slot]) < len(whole) for (slot, _, _), whole in zip(asked, wholes, strict=True)):
        turn += 1
        rows = []
        for (slot, _, how), whole in zip(asked, wholes, strict=True):
            left = whole[len(tokens[slot]) :]
            if left:
                drafts = [t + (i == (turn + slot) % 3) for i, t in enumerate(left[: min(2, len(left) - 1)])]
                rows.append(row(slot, tokens[slot], how, drafts))
        for one, said in zip(rows, runner.verify(rows), strict=True):
            tokens[one.slot] += said
    assert [tokens[slot] for slot, _, _ in asked] == wholes
    for slot, _, _ in asked:
        assert runner.state.state_bytes(slot) == host.state.state_bytes(slot)


def in_slots(runner, drafts: DraftRules, asked: list[Request]) -> dict[int, list[int]]:
    """What requests say in slots, all at once. By this clock windows with drafts pay."""
    for slot in range(runner.state.n_slots + runner.state.n_checkpoints):
        runner.state.drop(slot)
    sessions = Conversations(runner.state, runner.n_slots, CacheRules(0), None, 10**6, verify=True)
    rules = Rules(
        chunk=CHUNK, max_context=CONTEXT, end_ids=(), n_slots=runner.n_slots, verify=True, drafts=drafts
    )  # fmt: skip
    ticks = count()
    path, events = Path(runner, sessions, rules, lambda: float(next(ticks))), []
    for slot, request in enumerate(asked):
        events += path.admit(slot, request)
        while path.busy:
            events += path.step()
    while path.decoding:
        events += path.step()
    return {i: [e.id for e in events if isinstance(e, SlotToken) and e.slot == i] for i in range(len(asked))}


def test_slots_with_drafts_capture_nothing_that_the_start_has_not(runner):
    """A capture takes as long as hundreds of windows. Each slot has a draft or none, and keeps it or takes it back,
    below the budget of the indexer and beyond it."""
    windows, cost = runner._windows, runner.cost
    graphs, replays, verified, replayed = windows.n_graphs, len(windows._replays), cost.verified, cost.replayed
    asked = [Request(prompt(9 + i, 20 + i), n, how) for i, (n, how) in enumerate(((40, GREEDY), (33, DRAWN)))]
    assert in_slots(runner, DraftRules(4, 0.0, 0, True), asked) == in_slots(runner, DraftRules(), asked)
    assert cost.verified - verified > 10 and cost.replayed - replayed > 10
    assert (windows.n_graphs, len(windows._replays)) == (graphs, replays)


def test_proposals_are_those_of_the_host(runner, host):
    found = []
    for each in (host, runner):
        tokens, proposed = begin(each, 0, prompt(30, 5), GREEDY), []
        for _ in range(4):
            drafts = each.propose(row(0, tokens, GREEDY), 3, 0.0)
            proposed.append(drafts)
            tokens += each.verify([row(0, tokens, GREEDY, drafts)])[0]
        found.append((tokens, proposed, each.drafter.book.state.digest(0)))
    assert found[0] == found[1]
    assert [len(drafts) for drafts in found[0][1]] == [0, 3, 3, 3]
    assert all(token % 7 for drafts in found[0][1] for token in drafts), "a draft from outside of its vocabulary"


def test_an_unlikely_proposal_ends_the_chain(runner):
    tokens = begin(runner, 0, prompt(9, 6), GREEDY)
    tokens += runner.verify([row(0, tokens, GREEDY)])[0]
    assert len(runner.propose(row(0, tokens, GREEDY), 3, 1.1)) == 1
    drafts = runner.propose(row(0, tokens, GREEDY), 3, 0.0)
    assert len(drafts) == 3
    assert runner.propose(row(0, tokens, GREEDY), 3, 1e-9) == drafts, "waiting for each step gives other drafts"
    assert runner.propose(row(0, [*tokens, 1], GREEDY), 3, 0.0) == []


def test_the_draft_layer_goes_with_a_conversation_into_its_slot(runner):
    tokens = begin(runner, 0, prompt(30, 8), GREEDY)
    runner.state.copy(0, 2)
    found = []
    for slot in (0, 2):
        own = list(tokens)
        for _ in range(2):
            own += runner.verify([row(slot, own, GREEDY)])[0]
        found.append((own, runner.propose(row(slot, own, GREEDY), 3, 0.0), runner.drafter.book.state.digest(slot)))
    assert found[0] == found[1]


def test_short_reads_are_timed_at_the_start_and_use_what_was_captured_there(runner, host):
    """Their rows are also those that the draft layer sees."""
    assert 8 <= runner.short.most <= 17 and runner.short.rows == 8
    graphs, tokens = runner._windows.n_graphs, prompt(23, 9)
    for each in (host, runner):
        each.state.reset(0)
        for at in range(0, len(tokens), 8):
            logits = each.feed(0, at, tokens[at : at + 8], at + 8 >= len(tokens))
        first = each.sample(logits, tokens, GREEDY, len(tokens))
        own = [*tokens.tolist(), first]
        own += each.verify([row(0, own, GREEDY)])[0]
        said = own, each.propose(row(0, own, GREEDY), 3, 0.0), each.drafter.book.state.length(0)
        if each is host:
            want = said
    assert said == want
    assert said[2] == 7 + 7 + 6 + 1, "of each window all rows but the last, and the token that was fed"
    assert runner._windows.n_graphs == graphs

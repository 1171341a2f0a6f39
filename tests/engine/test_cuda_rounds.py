"""Rounds on a card, which feed themselves: tokens and state of plain windows, whatever is drafted and dropped."""

from __future__ import annotations

from dataclasses import replace
from itertools import count, cycle

import msgspec
import numpy as np
import pytest

from strata.engine.cuda_runner import CudaRunner
from strata.engine.draft.accept import before_end
from strata.engine.memory.profile import Profile, write_profile
from strata.engine.options import Options
from strata.engine.pack import Pack
from strata.engine.schedule import rounds as schedule_rounds
from strata.engine.schedule.live import Path
from strata.engine.schedule.ports import DraftRules, Row, Rules
from strata.engine.schedule.solo import Request
from strata.engine.state.checkpoints import CacheRules
from strata.engine.state.conversations import Conversations
from strata.kernels.formats import Weight
from strata.kernels.ops import PAGE, Sampling
from strata.protocol.lines import SlotToken, Token

CONTEXT, CHUNK, SAID, END = 100, 18, np.array([5, 40, 77, 300], np.int32), 300
REHEARSES = False
OPTIONS = Options(
    pack="",
    max_context=CONTEXT,
    prefill=CHUNK,
    short_read=0,
    spec=4,
    batch=2,
    mtp="",
    device="cuda",
    eos_ids=(END,),
    batch_mtp=True,
)
SELDOM = 1
GREEDY = Sampling()
DRAWN = Sampling(temperature=1.0, top_k=2, seed=33)


class Few(Pack):
    """A pack that says few words: drafts of these are often right."""

    def __init__(self, whole: Pack) -> None:
        self.__dict__ |= whole.__dict__
        self._whole = whole

    def array(self, name: str) -> np.ndarray:
        return self._whole.array(name)

    def weight(self, name: str) -> Weight:
        found = self._whole.weight(name)
        if name != "output.weight":
            return found
        data = np.zeros_like(found.data)
        data[SAID] = found.data[SAID]
        return Weight(found.type, found.shape, data)


@pytest.fixture(scope="module")
def runner(any_card, trunk, draft) -> CudaRunner:
    made = CudaRunner(Few(trunk), OPTIONS, replace(draft, names=np.sort(SAID)), any_card())
    made.warm()
    return made


def prompt(n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 900, n).astype(np.int32)


def begin(runner, tokens: np.ndarray, how: Sampling, slot: int = 0) -> list[int]:
    runner.state.reset(slot)
    logits = None
    for at in range(0, len(tokens), CHUNK):
        logits = runner.feed(slot, at, tokens[at : at + CHUNK], at + CHUNK >= len(tokens))
    return [*tokens.tolist(), runner.sample(logits, tokens, how, len(tokens))]


def row(tokens: list[int], how: Sampling, drafts=(), slot: int = 0) -> Row:
    return Row(slot, np.array(tokens, np.int32), how, CONTEXT, tuple(drafts))


def page_before(n: int) -> np.ndarray:
    """A prompt that ends so many tokens before a page does."""
    return prompt(PAGE - n, n)


def rounds(runner, tokens: list[int], how: Sampling, n: int, after, slot: int = 0) -> list[tuple[int, list[int]]]:
    """Rounds until there are n tokens: of each its drafts, and what it said. after: drafts of the next one in turn."""
    said = []
    while len(tokens) < n:
        wanted = next(after)
        given = runner.propose(row(tokens, how, slot=slot), wanted or 1, 0.0) if not said else ()
        one = runner.round(row(tokens, how, before_end(given, {END}), slot), wanted)
        tokens += one.tokens
        said.append((one.drafts, one.tokens))
        if one.ahead is None and wanted == 0:
            tokens += runner.window([row(tokens, how, slot=slot)], True, rounds=2)
    return said


def plain(runner, tokens: np.ndarray, how: Sampling, n: int, slot: int = 1) -> tuple[list[int], list[bytes]]:
    """Prompt and n tokens, a window each; the state after each of them."""
    got, states = begin(runner, tokens, how, slot), []
    while len(got) < len(tokens) + n:
        states.append(runner.state.state_bytes(slot))
        got += runner.window([row(got, how, slot=slot)], False)
    return got, [*states, runner.state.state_bytes(slot)]


@pytest.mark.parametrize(
    ("how", "after"),
    [
        pytest.param(GREEDY, 1, marks=pytest.mark.soak),
        pytest.param(DRAWN, 2, marks=pytest.mark.soak),
        pytest.param(GREEDY, 3, marks=pytest.mark.soak),
        (DRAWN, 3),
    ],
)
def test_rounds_say_what_windows_say_and_leave_their_state_while_the_next_one_runs(runner, how, after):
    ids, n = page_before(9), 18
    whole, states = plain(runner, ids, how, n)
    tokens, kept, right = begin(runner, ids, how), set(), whole[len(ids) + 1 :][:after]
    assert END not in right, "take another prompt"
    while len(tokens) <= len(ids) + n - 4:
        one = runner.round(row(tokens, how, () if kept else right), after)
        assert one.ahead == after
        tokens += one.tokens
        kept.add((one.drafts, len(one.tokens)))
        assert tokens == whole[: len(tokens)]
        assert END not in one.tokens[:-1], "a token stays behind the end of a text"
        held = len(tokens) - 1 - len(ids)
        assert runner.state.length(0) == len(tokens) - 1
        assert runner.state.state_bytes(0) == states[held], f"the state of {held} tokens behind the prompt"
    assert {n for n, _ in kept} == {after} and {(after, 1), (after, 1 + after)} <= kept
    runner.state.check()
    runner.drafter.book.state.check()


def test_rounds_of_changing_lengths_and_windows_between_them_say_the_same(runner):
    how = DRAWN
    ids, n = prompt(30, 3), 28
    whole, states = plain(runner, ids, how, n)
    tokens = begin(runner, ids, how)
    before = runner.cost.dropped
    said = rounds(runner, tokens, how, len(whole) - 4, cycle([1, 1, 3, 3, 2, 1, 0, 2, 2, None, 1, 3, 0]))
    assert tokens == whole[: len(tokens)]
    assert runner.state.state_bytes(0) == states[len(tokens) - 1 - len(ids)]
    assert {drafts for drafts, _ in said} == {0, 1, 2, 3}
    assert runner.cost.dropped == before, "what was started ahead was not what came"


def test_a_round_that_nobody_wanted_leaves_no_trace(runner):
    how = GREEDY
    ids, n = prompt(40, 4), 16
    whole, states = plain(runner, ids, how, n)
    tokens, turn, before = begin(runner, ids, how), 0, runner.cost.dropped
    while len(tokens) < len(whole) - 4:
        tokens += runner.round(row(tokens, how), 2).tokens
        assert len(runner.propose(row(tokens, how), 2, 0.0)) == 2, "what a round has drafted is not known behind it"
        turn += 1
        if turn % 3 == 0:
            tokens += runner.window([row(tokens, how)], False)
        elif turn % 3 == 1:
            drafts = before_end(runner.propose(row(tokens, how), 2, 0.0), {END})
            tokens += runner.verify([row(tokens, how, drafts)])[0]
        else:
            runner.feed(1, runner.state.length(1), prompt(3, turn), True)
        assert tokens == whole[: len(tokens)]
        assert runner.state.state_bytes(0) == states[len(tokens) - 1 - len(ids)]
    assert runner.cost.dropped - before == turn


@pytest.mark.parametrize("most", [pytest.param(1, marks=pytest.mark.soak), 3])
def test_rounds_draft_and_keep_what_verify_windows_do(runner, most):
    found = []
    for slot in (1, 0):
        tokens, said = begin(runner, prompt(22, 6), GREEDY, slot), []
        tokens += runner.window([row(tokens, GREEDY, slot=slot)], False)  # behind a prompt rounds have a draft more
        if slot:
            drafts: tuple[int, ...] = ()
            while len(said) < 8:
                tokens += runner.verify([row(tokens, GREEDY, drafts, slot)])[0]
                proposed = runner.propose(row(tokens, GREEDY, slot=slot), most, 0.0)
                said.append((list(tokens), proposed))
                drafts = before_end(proposed, {END})
        else:
            while len(said) < 8:
                tokens += runner.round(row(tokens, GREEDY), most).tokens
                said.append((list(tokens), runner.propose(row(tokens, GREEDY), most, 0.0)))
        found.append((said, runner.drafter.book.state.digest(slot)))
    assert found[0] == found[1]


def test_the_first_round_behind_a_prompt_has_a_draft_that_its_last_token_gives(runner):
    """The layer's memory is that of a prompt which holds the first token too; behind anything else there is none."""
    ids, drafter = prompt(CHUNK - 4, 5), runner.drafter
    whole, states = plain(runner, ids, GREEDY, 3)
    tokens = begin(runner, ids, GREEDY)
    assert drafter.begins(0) and not drafter.begins(1)
    drafter.begin(0, tokens[-1])
    begun = drafter.book.state.digest(0)
    begin(runner, np.array(tokens), GREEDY, 1)
    assert drafter.book.state.digest(1) == begun and not drafter.begins(0)

    tokens = begin(runner, ids, GREEDY)
    one = runner.round(row(tokens, GREEDY), 1)
    tokens += one.tokens
    assert one.drafts == 1 and tokens == whole[: len(tokens)]
    assert runner.state.state_bytes(0) == states[len(one.tokens)]

    tokens = begin(runner, ids, GREEDY)
    tokens += runner.window([row(tokens, GREEDY)], False)
    assert runner.round(row(tokens, GREEDY), 1).drafts == 0


def test_rounds_end_where_the_context_does(runner):
    ids = prompt(CONTEXT - 12, 10)
    whole, states = plain(runner, ids, GREEDY, 11)
    tokens = begin(runner, ids, GREEDY)
    while len(tokens) + 4 <= CONTEXT:
        one = runner.round(row(tokens, GREEDY), 3)
        tokens += one.tokens
    assert one.ahead is None
    while len(tokens) < len(whole):
        tokens += runner.window([row(tokens, GREEDY)], len(tokens) + 1 < len(whole))
    assert tokens == whole and runner.state.state_bytes(0) == states[-1]


def test_rounds_of_a_sequence_that_is_drawn_in_another_way_begin_again(runner):
    ids = prompt(25, 8)
    whole, _ = plain(runner, ids, GREEDY, 8)
    tokens = begin(runner, ids, GREEDY)
    tokens += runner.round(row(tokens, GREEDY), 1).tokens
    other = list(tokens) + runner.round(row(tokens, DRAWN), 1).tokens
    assert len(other) > len(tokens)
    assert tokens == whole[: len(tokens)]
    assert runner.rounds(row(tokens, GREEDY)) == 3
    assert runner.rounds(row(tokens, Sampling(temperature=1.0, penalty_repeat=1.2))) == 0


@pytest.fixture
def seldom_ends(runner):
    """Another token ends texts, which is said seldom."""
    ends = runner._windows.rounds._ends.view(np.uint8)
    runner._device.upload(ends, np.array([SELDOM], np.int32).view(np.uint8))
    yield
    runner._device.upload(ends, np.array([END], np.int32).view(np.uint8))


def path_of(runner, drafts: DraftRules) -> Path:
    """A schedule on the runner with fresh books, and a clock by which rounds pay."""
    for slot in range(runner.state.n_slots + runner.state.n_checkpoints):
        runner.state.drop(slot)
    sessions = Conversations(runner.state, runner.n_slots, CacheRules(1, every=0, root=0), None, 10**6, verify=True)
    rules = Rules(
        chunk=CHUNK,
        max_context=CONTEXT,
        end_ids=(SELDOM,),
        n_slots=runner.n_slots,
        verify=True,
        drafts=drafts,
    )
    ticks = count()
    return Path(runner, sessions, rules, clock=lambda: float(next(ticks)))


def answered(path: Path, request: Request, stop_after: int = 0) -> tuple[list[int], str]:
    events = path.start(request)
    while path.busy:
        n = sum(isinstance(event, Token) for event in events)
        events += path.step(bool(stop_after) and n >= stop_after)
    return [event.id for event in events if isinstance(event, Token)], events[-1].finish


def test_requests_with_rounds_end_as_those_without_and_leave_the_same_conversation(runner, seldom_ends):
    """By length, at an end token, by a STOP, continued, and with slots that go on behind them."""
    asked = [(Request(prompt(20 + n, n), n, how), 0) for n, how in ((1, GREEDY), (2, DRAWN), (9, GREEDY), (16, DRAWN))]
    asked += [(Request(prompt(9, 3), 60, GREEDY), 9), (Request(prompt(9, 3), 8, GREEDY), 0)]
    found = []
    for drafts in (DraftRules(), DraftRules(4)):
        path, before, texts = path_of(runner, drafts), runner.cost.rounds, []
        beside = path.admit(1, Request(prompt(7, 5), 12, GREEDY))
        while path.busy:
            beside += path.step()
        for request, stop_after in asked:
            tokens, finish = answered(path, request, stop_after)
            texts.append((tokens[: stop_after or None], finish, stop_after or runner.state.digest(0)))
            assert runner.state.length(0) == len(request.prompt) + len(tokens) - 1
        following = np.concatenate([asked[-1][0].prompt, texts[-1][0], prompt(5, 8)]).astype(np.int32)
        texts.append((*answered(path, Request(following, 10, GREEDY)), runner.state.digest(0)))
        while path.decoding:
            beside += path.step()
        texts.append(([event.id for event in beside if isinstance(event, SlotToken)], beside[-1].finish))
        found.append(texts)
        assert (runner.cost.rounds > before) == (drafts.spec > 1)
    assert found[0] == found[1]
    assert {text[1] for text in found[0]} >= {"length", "stop", "cancel"}


def test_words_of_the_text_come_instead_of_rounds_and_the_next_ones_while_these_are_told(
    runner, seldom_ends, monkeypatch
):
    """Three tokens that agree are enough here, so most words are wrong; some windows that were started are dropped."""
    monkeypatch.setattr(schedule_rounds, "LONGEST", 3)
    part = prompt(6, 11)
    asked = [(Request(np.tile(part, 3), 16, GREEDY), 0), (Request(np.tile(part, 3), 16, DRAWN), 9)]
    asked += [(Request(np.tile(part, 3), 16, DRAWN), 0)]
    found = []
    for drafts in (DraftRules(), DraftRules(4, 0.0, 3)):
        path, verified, texts = path_of(runner, drafts), runner.cost.verified, []
        for request, stop_after in asked:
            tokens, finish = answered(path, request, stop_after)
            texts.append((tokens[: stop_after or None], finish, stop_after or runner.state.digest(0)))
        found.append(texts)
        assert (runner.cost.verified > verified) == (drafts.spec > 1)
    assert found[0] == found[1]


def test_a_verify_window_that_was_started_is_that_of_the_same_row_alone(runner):
    known, _ = plain(runner, prompt(25, 2), GREEDY, 6)
    tokens = begin(runner, prompt(25, 2), GREEDY)
    right = tuple(known[len(tokens) : len(tokens) + 2])
    dropped = runner.cost.dropped
    runner.verify_ahead(row(tokens, GREEDY, right))
    (said,) = runner.verify([row(tokens, GREEDY, right)])
    assert said == known[len(tokens) : len(tokens) + 3] and runner.cost.dropped == dropped
    tokens += said
    state = runner.state.digest(0)
    runner.verify_ahead(row(tokens, GREEDY, (1, 2)))
    assert runner.state.digest(0) == state, "it leaves no trace before it is asked for"
    (said,) = runner.verify([row(tokens, GREEDY)])
    assert said == known[len(tokens) : len(tokens) + 1] and runner.cost.dropped == dropped + 1


def test_logits_that_are_not_finite_end_a_round_with_an_error(runner):
    tokens = begin(runner, prompt(25, 9), GREEDY)
    tokens += runner.round(row(tokens, GREEDY), 1).tokens
    state = runner.state.recurrent
    runner._forget()
    for layer in state.gdn:
        runner._device.fill(layer.state[state.row(0)], np.nan)
    with pytest.raises(RuntimeError, match=r"slot 0 before .* are not finite"):
        for _ in range(3):
            runner.round(row(tokens, GREEDY), 1)
    assert "rounds" in runner.costs


@pytest.mark.soak  # the emulated card takes a minute for it
def test_rounds_find_experts_that_lie_in_ram_and_those_that_change_places(any_card, trunk, draft, tmp_path):
    layers, experts = trunk.spec.layers, trunk.spec.experts
    pairs = tuple(divmod(int(n), experts) for n in np.random.default_rng(3).permutation(layers * experts))
    cache, profile = layers * experts // 2, tmp_path / "order.strp"
    write_profile(profile, Profile(layers, experts, cache, pairs))
    options = msgspec.structs.replace(
        OPTIONS,
        batch=0,
        batch_mtp=False,
        expert_cache=cache,
        expert_profile=str(profile),
        adapt_every=4,
        adapt_swaps=2,
        adapt_min_gain=1.5,
    )
    runner = CudaRunner(Few(trunk), options, replace(draft, names=np.sort(SAID)), any_card())
    runner.warm()
    ids = prompt(30, 3)
    whole, states = plain(runner, ids, DRAWN, 40, slot=0)
    before, tokens = runner.solo_hits(), begin(runner, ids, DRAWN)
    while len(tokens) < len(whole) - 4:
        tokens += runner.round(row(tokens, DRAWN), 2).tokens
        assert tokens == whole[: len(tokens)]
        assert runner.state.state_bytes(0) == states[len(tokens) - 1 - len(ids)]
    assert runner.solo_hits().hits > before.hits

"""Schedules with drafts say what schedules without them say, whatever is proposed and however long windows take."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strata.engine.draft.accept import before_end, n_kept
from strata.engine.draft.reach import LOOK
from strata.engine.schedule import drafting
from strata.engine.schedule.ports import DraftRules, Round, Row
from strata.engine.schedule.solo import Request
from strata.kernels.ops import Sampling
from strata.protocol.lines import Done, Token

FAST = 1.0
GREEDY = Sampling()


class Clock:
    """Milliseconds that only work lets pass."""

    def __init__(self) -> None:
        self.ms = 0.0

    def __call__(self) -> float:
        return self.ms


@pytest.fixture
def rounding_model(drafting_model):
    """rounding_model(clock, most=3, stall=..): the same with rounds of up to so many drafts, which find their own.

    stall: milliseconds that a window or round takes longer which has not been started ahead
    begins: the first round behind a prompt has a draft already
    Counts what was started for nothing, and what waited for the host.
    """

    class RoundingModel(drafting_model):
        def __init__(self, clock, most=3, stall=0.5, begins=False, **given):
            super().__init__(clock, **given)
            self.most, self.stall, self.begins = most, stall, begins
            self.read = -1  # tokens behind the last read
            self.started: tuple[int, int] | None = None  # drafts, -1: a window; and drafts that it leaves
            self.verifying: tuple[list[int], tuple[int, ...]] | None = None  # a text and drafts that are verified
            self.dropped = self.waited = 0
            self.lengths: list[int] = []

        def begin(self, wants_round: bool) -> tuple[int, int] | None:
            started = self.started
            if started is not None and (started[0] >= 0) == wants_round:
                self.started = None
                return started
            self.drop()
            self.waited += 1
            self.clock.ms += self.stall
            return None

        def window(self, rows, again, rounds=0):
            self.begin(False)
            if again:
                self.started = (0, self.leaves(0, rounds)) if rounds else (-1, 0)
            return super().window(rows, again)

        def feed(self, *given):
            if given[2].size > 1:  # a prompt
                self.drop()
                self.read = given[1] + given[2].size
            return super().feed(*given)

        def verify_ahead(self, row):
            assert row.tokens[:-1].tolist() == self.state.tokens[row.slot]
            self.drop()
            self.verifying = row.tokens.tolist(), row.drafts

        def verify(self, rows):
            wanted = [(row.tokens.tolist(), row.drafts) for row in rows]
            if self.verifying is not None and wanted == [self.verifying]:
                self.verifying = None
            else:
                self.begin(True)
            return super().verify(rows)

        def drop(self):
            """What was started is not asked for."""
            self.dropped += (self.started is not None) + (self.verifying is not None)
            self.started = self.verifying = None

        def leaves(self, fed: int, after: int) -> int:
            return after if after == max(1, fed) else self.most

        def rounds(self, row: Row) -> int:
            return self.most if row.how.penalty_repeat == 1 else 0

        def round(self, row: Row, after: int | None) -> Round:
            started = self.begin(True)
            n = len(row.drafts)
            if not n and self.begins and self.read == row.position and not started:
                n = 1
                self.clock.ms += 0.2
            fed, leaves = started or (n, self.leaves(n, after or max(1, n)))
            drafts = row.drafts if row.drafts and not started else tuple(self.propose(row, fed, 0.0))
            assert len(drafts) == fed <= self.most
            if after is not None:
                following = min(after, leaves)
                self.started = (following, self.leaves(following, after)) if after else (-1, 0)
            self.clock.ms += FAST + self.row_ms * (1 + fed) + 0.05 * leaves
            self.windows.append([row.slot])
            self.lengths.append(fed)
            held, tokens, ids = self.state.tokens[row.slot], row.tokens.tolist(), []
            assert held == tokens[:-1]
            for draft in (*drafts, None):
                ids.append(self.says(row, tokens))
                tokens.append(draft)
            n = n_kept(drafts, ids)
            n = next((i + 1 for i in range(n) if ids[i] in self.end), n)
            held += [int(row.tokens[-1]), *ids[: n - 1]]
            ahead = self.started[0] if self.started and self.started[0] >= 0 else None
            return Round(ids[:n], fed, ahead)

    return RoundingModel


def run_solo(path, request: Request) -> tuple[list[int], Done]:
    events = path.start(request)
    while path.busy:
        events += path.step()
    return [event.id for event in events if isinstance(event, Token)], events[-1]


def request(n: int = 5, max_new: int = 40, how: Sampling = GREEDY, seed: int = 1, last_n: int = 0) -> Request:
    return Request(np.random.default_rng(seed).integers(4, 60, n).astype(np.int32), max_new, how, last_n)


HOWS = st.sampled_from([Sampling(), Sampling(temperature=0.5, seed=4), Sampling(temperature=0.5, penalty_repeat=1.5)])


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    hits=st.lists(st.booleans(), min_size=1, max_size=5),
    spec=st.integers(2, 8),
    suffix=st.integers(0, 7),
    layer=st.booleans(),
    how=HOWS,
    max_new=st.integers(1, 60),
    row_ms=st.floats(0.0, 2.0),
)
def test_text_with_drafts_is_the_text_without(
    schedule, drafting_model, hits, spec, suffix, layer, how, max_new, row_ms
):
    asked = [request(4 + i, max_new, how, i, last_n=8) for i in range(3)]
    texts = []
    for rules in (DraftRules(), DraftRules(spec, 0.0, suffix)):
        clock = Clock()
        model = drafting_model(clock, tuple(hits), layer, row_ms)
        path = schedule(model, clock=clock, max_context=96, drafts=rules)
        texts.append([run_solo(path, each)[0] for each in asked])
        held = model.state.tokens[0]
    assert texts[0] == texts[1]
    assert held == [*asked[-1].prompt.tolist(), *texts[1][-1]][:-1]


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    hits=st.lists(st.booleans(), min_size=1, max_size=5),
    spec=st.integers(2, 8),
    most=st.integers(1, 7),
    suffix=st.integers(0, 7),
    how=HOWS,
    max_new=st.lists(st.integers(1, 60), min_size=3, max_size=3),
    row_ms=st.floats(0.0, 2.0),
    begins=st.booleans(),
)
def test_text_with_rounds_is_the_text_without_and_the_state_holds_no_more(
    schedule, rounding_model, hits, spec, most, suffix, how, max_new, row_ms, begins
):
    asked = [request(4 + i, n, how, i, last_n=8) for i, n in enumerate(max_new)]
    texts = []
    for rules in (DraftRules(), DraftRules(spec, 0.0, suffix)):
        clock = Clock()
        model = rounding_model(clock, most, hits=tuple(hits), row_ms=row_ms, begins=begins)
        path = schedule(model, clock=clock, max_context=96, drafts=rules)
        texts.append([])
        for each in asked:
            texts[-1].append(run_solo(path, each)[0])
            assert model.state.tokens[0] == [*each.prompt.tolist(), *texts[-1][-1]][:-1]
    assert texts[0] == texts[1]


def rounded(schedule, model, clock, max_new: int, spec: int = 4) -> tuple[list[int], Done]:
    path = schedule(model, clock=clock, max_context=2000, drafts=DraftRules(spec, 0.0, 0), end_ids=())
    return run_solo(path, request(max_new=max_new))


def test_windows_go_over_into_rounds_and_back_without_waiting_for_the_host(schedule, rounding_model):
    clock = Clock()
    model = rounding_model(clock, end=(), row_ms=0.05)
    tokens, done = rounded(schedule, model, clock, 1000)
    assert len(tokens) == 1000 and done.drafts_accepted == done.drafts_offered > 600
    assert model.dropped == 0
    assert model.waited <= 3, "the first window, and what comes near the end"
    assert model.lengths.count(3) > 0.9 * len(model.lengths)


def test_rounds_that_do_not_pay_cost_little_and_drop_one_at_most_a_try(schedule, rounding_model):
    clock = Clock()
    model = rounding_model(clock, hits=(False,), row_ms=0.25, end=())
    tokens, done = rounded(schedule, model, clock, 1900)
    assert len(tokens) == 1900 and 0 < done.drafts_offered < 60
    assert clock.ms < 1.02 * 1900 * FAST
    assert model.dropped <= 1 and model.waited <= 3


def test_only_first_drafts_that_are_right_are_followed_one_at_a_time(schedule, rounding_model):
    """Looks at deeper ones stay rare, and a look has one round with all of them, or two."""

    clock = Clock()

    class OneRight(rounding_model):
        def propose(self, row: Row, most: int, min_p: float) -> list[int]:
            right = self.says(row, row.tokens.tolist())
            return [right, *[(right + 1) % self.vocab] * (most - 1)][:most]

    model = OneRight(clock, row_ms=0.2, end=())
    tokens, _ = rounded(schedule, model, clock, 1500)
    late = model.lengths[100:]
    assert len(tokens) == 1500 and late.count(1) > 0.9 * len(late)
    assert 0 < late.count(3) < 2.5 * len(late) / LOOK
    assert model.waited <= 3 and clock.ms < 0.85 * 1500 * FAST


@pytest.fixture
def answers_ms(schedule, rounding_model):
    """answers_ms(lengths, hits, stall, spec): what answers of so many tokens take, one after another, each of which an
    end token ends. In windows without drafts, a round takes what it does on a card: 1.45 with one, 1.95 with three."""

    class Ending(rounding_model):
        last = 0

        def logits(self, slot: int):
            wanted = np.zeros(self.vocab, np.float32)
            wanted[self.at(len(self.state.tokens[slot]))] = 1
            return wanted

        def says(self, row, tokens):
            return self.at(len(tokens))

        def at(self, n: int) -> int:
            return 3 if n >= self.last else 10 + n * n % 40

    def ms(lengths: list[int], hits: tuple[bool, ...], stall: float, spec: int, begins: bool = False) -> list[float]:
        clock = Clock()
        model = Ending(clock, hits=hits, row_ms=0.2, stall=stall, begins=begins)
        path = schedule(model, clock=clock, max_context=600, drafts=DraftRules(spec, 0.0, 0))
        taken = []
        for i, length in enumerate(lengths):
            asked = request(5, 500, seed=i)
            model.last = 5 + length - 1
            tokens, done = run_solo(path, asked)
            assert len(tokens) == length
            taken.append(done.decode_ms)
        return taken

    return ms


RIGHT = {"none": (False,), "half": (True, False), "four of five": (True, True, False, True, True)}


@pytest.mark.parametrize("stall", [0.5, 2.0])
@pytest.mark.parametrize("right", RIGHT)
@pytest.mark.parametrize("lengths", [[3], [5], [3, 5, 6, 9, 4, 10, 8]], ids=["three", "five", "three to ten"])
def test_short_answers_take_no_longer_than_without_drafts(answers_ms, lengths, right, stall):
    lengths = lengths * (420 // sum(lengths))
    with_drafts, without = (sum(answers_ms(lengths, RIGHT[right], stall, spec)) for spec in (4, 1))
    assert without > 0.97 * with_drafts


@pytest.mark.parametrize("stall", [0.5, 2.0])
def test_short_answers_between_longer_ones_cost_them_nothing(answers_ms, stall):
    """That a request begins with a pause is no fault of its drafts, however slow the host is."""
    lengths = [5, 40, 3, 60, 9, 6, 50] * 8
    with_drafts, without = (np.array(answers_ms(lengths, RIGHT["four of five"], stall, spec)) for spec in (4, 1))
    short = np.array(lengths) < 10
    assert without[short].sum() > 0.97 * with_drafts[short].sum()
    assert without[~short].sum() > 1.3 * with_drafts[~short].sum()


@pytest.fixture
def repeating_model(rounding_model):
    """repeating_model(clock, ..): says fifty tokens twice and then six again and again; verify_ms: what a window from
    the host takes longer."""

    class Repeating(rounding_model):
        def __init__(self, clock, verify_ms=0.0, **given):
            super().__init__(clock, **given)
            self.verify_ms, self.verified = verify_ms, 0

        def logits(self, slot: int):
            return self.of(len(self.state.tokens[slot]))

        def says(self, row, tokens):
            return int(self.of(len(tokens)).argmax())

        def of(self, n):
            wanted = np.zeros(self.vocab, np.float32)
            wanted[n % 50 + 10 if n < 100 else 10 + n % 6] = 1
            return wanted

        def verify(self, rows):
            self.verified += 1
            self.clock.ms += self.verify_ms
            return super().verify(rows)

    return Repeating


def test_a_text_with_long_matches_stays_with_rounds_that_are_quicker(schedule, repeating_model):
    clock = Clock()
    model = repeating_model(clock, verify_ms=3.0, row_ms=0.01, end=())
    path = schedule(model, clock=clock, max_context=900, drafts=DraftRules(4, 0.0, 3), end_ids=())
    tokens, done = run_solo(path, request(max_new=800))
    assert len(tokens) == 800 and done.chain.suffix_accepted > 0, "its own words were tried"
    assert model.verified < 20 and model.waited < 30
    assert clock.ms < 0.5 * 800 * FAST


def test_a_text_with_long_matches_is_verified_from_the_host_and_nothing_is_started_for_nothing(
    schedule, repeating_model
):
    clock = Clock()
    model = repeating_model(clock, row_ms=0.01, end=())
    path = schedule(model, clock=clock, max_context=400, drafts=DraftRules(4, 0.0, 7), end_ids=())
    tokens, done = run_solo(path, request(max_new=300))
    assert tokens == [n % 50 + 10 if n < 100 else 10 + n % 6 for n in range(5, 305)]
    assert done.chain.suffix_accepted > 100
    assert model.dropped == 0
    assert model.waited < 0.3 * model.verified, "as long as the text repeats itself, the next window is started at once"


def test_right_drafts_take_fewer_windows_and_are_counted(schedule, drafting_model):
    clock = Clock()
    model = drafting_model(clock, end=())
    path = schedule(model, clock=clock, max_context=96, drafts=DraftRules(4, 0.0, 0), end_ids=())
    tokens, done = run_solo(path, request(max_new=64))
    # the first comes with the prompt, some windows measure, four of them with one draft, then four tokens at a time
    assert len(tokens) == 64 and len(model.windows) <= 6 + 4 + (58 - 2 * 4) // 4 + 1
    assert done.drafts_offered == done.drafts_accepted >= 40
    assert done.chain is not None and (done.chain.suffix_offered, done.chain.suffix_accepted) == (0, 0)
    assert done.chain.windows == sum(n > 1 for n in model.fed)


def test_a_request_may_have_its_own_bar_for_proposals(schedule, drafting_model):
    clock = Clock()
    model = drafting_model(clock, end=())
    path = schedule(model, clock=clock, max_context=96, drafts=DraftRules(4, 0.5, 0), end_ids=())
    run_solo(path, request(max_new=40))
    assert model.bars == {0.5}
    model.bars.clear()
    run_solo(path, replace(request(max_new=40), spec_min_p=0.9))
    assert model.bars == {0.9}


def test_a_bar_that_comes_to_nothing_in_rounds_is_said_once(schedule, rounding_model, monkeypatch):
    lines: list[str] = []
    monkeypatch.setattr(drafting, "log", lines.append)
    clock = Clock()
    path = schedule(rounding_model(clock, end=()), clock=clock, max_context=96, drafts=DraftRules(4, 0.0, 0))
    run_solo(path, request())
    assert not lines
    for _ in range(2):
        run_solo(path, replace(request(), spec_min_p=0.5))
    assert len(lines) == 1 and "--spec-min-p" in lines[0]


def test_short_answers_whose_first_round_has_a_draft_are_quicker_than_without(answers_ms):
    """Five tokens are four windows, or a round with the draft that the prompt gives and one or two more."""
    lengths = [5] * 80
    with_drafts, without = (sum(answers_ms(lengths, (True,), 0.5, spec, begins=True)) for spec in (4, 1))
    assert without > 1.15 * with_drafts
    with_drafts = sum(answers_ms(lengths, RIGHT["four of five"], 0.5, 4, begins=True))
    assert without > with_drafts


def test_drafts_that_do_not_pay_are_left_out_and_the_log_says_so(schedule, drafting_model, monkeypatch):
    lines: list[str] = []
    monkeypatch.setattr(drafting, "log", lines.append)
    clock = Clock()
    model = drafting_model(clock, hits=(False,), row_ms=0.5, end=())
    path = schedule(model, clock=clock, max_context=400, drafts=DraftRules(4, 0.0, 0), end_ids=())
    tokens, done = run_solo(path, request(max_new=200))
    assert len(tokens) == 200 and done.drafts_accepted == 0
    assert 0 < done.drafts_offered < 30
    assert len(lines) == 1 and "do not pay" in lines[0]


def test_a_text_that_repeats_itself_is_drafted_without_a_layer(schedule, drafting_model):
    clock = Clock()

    class Repeating(drafting_model):
        def logits(self, slot: int):
            return self.of(self.state.tokens[slot])

        def says(self, row, tokens):
            return int(self.of(tokens).argmax())

        def of(self, tokens):
            wanted = np.zeros(self.vocab, np.float32)
            wanted[10 + len(tokens) % 6] = 1
            return wanted

    model = Repeating(clock, layer=False, end=())
    path = schedule(model, clock=clock, max_context=96, drafts=DraftRules(2, 0.0, 5), end_ids=())
    tokens, done = run_solo(path, request(max_new=64))
    assert tokens == [10 + n % 6 for n in range(5, 69)]
    assert done.chain.suffix_accepted == done.drafts_accepted > 40
    assert len(model.windows) < 30


def test_a_text_that_begins_to_repeat_itself_late_is_drafted_all_the_same(schedule, drafting_model):
    clock = Clock()

    class Late(drafting_model):
        def logits(self, slot: int):
            return self.of(len(self.state.tokens[slot]))

        def says(self, row, tokens):
            return int(self.of(len(tokens)).argmax())

        def of(self, n):
            wanted = np.zeros(self.vocab, np.float32)
            wanted[n % 50 + 10 if n < 60 else 10 + n % 6] = 1
            return wanted

    model = Late(clock, layer=False, end=())
    path = schedule(model, clock=clock, max_context=200, drafts=DraftRules(2, 0.0, 5), end_ids=())
    tokens, done = run_solo(path, request(max_new=120))
    assert tokens[:50] == [n % 50 + 10 for n in range(5, 55)]
    assert done.drafts_accepted > 30, "what was quiet for long is never looked at again"


def test_an_end_token_is_never_drafted():
    assert before_end([5, 6, 3, 7], {3}) == (5, 6)
    assert before_end([3], {3}) == ()

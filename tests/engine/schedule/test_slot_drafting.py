"""Slots with drafts say what slots without them say, take turns, and are not slower, whatever windows take."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strata.engine.schedule.ports import DraftRules, Row
from strata.engine.schedule.solo import Request
from strata.kernels.ops import Sampling
from strata.protocol.lines import SlotDone, SlotToken

GREEDY = Sampling()
FOUR_OF_FIVE = (True, True, False, True, True)
"""Proposals that are right."""


class Clock:
    """Milliseconds that only work lets pass."""

    def __init__(self) -> None:
        self.ms = 0.0

    def __call__(self) -> float:
        return self.ms


def request(n: int = 5, max_new: int = 40, how: Sampling = GREEDY, seed: int = 1, last_n: int = 0) -> Request:
    return Request(np.random.default_rng(seed).integers(4, 60, n).astype(np.int32), max_new, how, last_n)


def slots(path, requests) -> tuple[dict[int, list[int]], list[SlotDone]]:
    """All requests in slots at once -> their tokens, and their ends."""
    events = []
    for slot, each in enumerate(requests):
        events += path.admit(slot, each)
        while path.busy:
            events += path.step()
    while path.decoding:
        events += path.step()
    texts: dict[int, list[int]] = {slot: [] for slot in range(len(requests))}
    for event in events:
        if isinstance(event, SlotToken):
            texts[event.slot].append(event.id)
    return texts, [event for event in events if isinstance(event, SlotDone)]


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    n=st.integers(2, 6),
    hits=st.lists(st.booleans(), min_size=1, max_size=5),
    row_ms=st.floats(0.0, 0.6),
    lengths=st.lists(st.integers(2, 40), min_size=6, max_size=6),
)
def test_slots_with_drafts_say_what_they_say_without(schedule, drafting_model, n, hits, row_ms, lengths):
    asked = [request(4 + i, lengths[i], Sampling(temperature=0.5, seed=i), i) for i in range(n)]
    found = []
    for rules in (DraftRules(), DraftRules(2, 0.0, 0, slots=True)):
        clock = Clock()
        model = drafting_model(clock, tuple(hits), True, row_ms, n_slots=n, n_checkpoints=1)
        path = schedule(model, clock=clock, max_context=96, drafts=rules)
        texts, ends = slots(path, asked)
        found.append((texts, sorted((end.slot, end.generated, end.finish) for end in ends)))
    assert found[0] == found[1]


def test_more_slots_than_a_window_has_rows_for_take_turns(schedule, drafting_model):
    clock = Clock()
    model = drafting_model(clock, row_ms=0.0, end=(), n_slots=6, n_checkpoints=1)
    path = schedule(model, clock=clock, max_context=96, drafts=DraftRules(2, 0.0, 0, slots=True), end_ids=())
    _, ends = slots(path, [request(4, 40, seed=i) for i in range(6)])
    verified = [window for window in model.windows if 2 <= len(window) <= 4]
    assert len(verified) > 20
    counts = [sum(slot in window for window in verified) for slot in range(1, 7)]
    assert max(counts) - min(counts) <= 0.3 * max(counts), "a slot waits while others go on"
    assert all(end.drafts_offered and end.drafts_accepted == end.drafts_offered for end in ends)


@pytest.mark.parametrize("ahead", [True, False], ids=["a card", "the host"])
def test_slots_have_drafts_whether_or_not_windows_are_started_ahead(schedule, drafting_model, ahead):
    clock = Clock()
    model = drafting_model(clock, end=(), n_slots=4, n_checkpoints=1)
    rules = DraftRules(2, 0.0, 0, slots=True)
    path = schedule(model, clock=clock, max_context=96, drafts=rules, end_ids=(), ahead=ahead)
    _, ends = slots(path, [request(4, 40, seed=i) for i in range(4)])
    assert all(end.drafts_accepted > 10 for end in ends)


@pytest.fixture
def card_model(drafting_model):
    """card_model(clock, ..): slots on a card. A window that was started ahead runs while the host does other things;
    a draft is there behind a verify window that the slot was in; the first window of a kind takes `capture` longer.

    wrong: pool slots whose drafts are
    ms: what a window without drafts takes · row_ms: what a row of a verify window takes more
    ahead: of each window, whether it was started ahead
    """

    class CardModel(drafting_model):
        def __init__(self, clock, ms=1.0, capture=0.0, wrong=(), **given):
            super().__init__(clock, end=(), n_checkpoints=1, **given)
            self.ms, self.capture, self.wrong = ms, capture, wrong
            self.kinds: set[tuple[int, int]] = set()
            self.behind: dict[int, int] = {}  # of a slot, the tokens behind its last verify window
            self.started: tuple[list[int], float] | None = None  # slots, and when
            self.ahead: list[bool] = []

        def window(self, rows, again, rounds=0):
            slots, now = [row.slot for row in rows], self.clock.ms
            started, self.started = self.started, None
            self.ahead.append(started is not None and started[0] == slots)
            begun = started[1] if started is not None and started[0] == slots else now
            ids = super().window(rows, again)
            self.clock.ms = max(now, begun + self.ms)
            if again:
                self.started = slots, self.clock.ms
            return ids

        def propose(self, row: Row, most: int, min_p: float) -> list[int]:
            found = super().propose(row, most, min_p) if self.behind.get(row.slot) == len(row.tokens) else []
            return [(token + (row.slot in self.wrong)) % self.vocab for token in found]

        def verify(self, rows):
            kind, self.started = (len(rows), sum(1 + len(row.drafts) for row in rows)), None
            if kind not in self.kinds:
                self.kinds.add(kind)
                self.clock.ms += self.capture
            said = super().verify(rows)
            self.clock.ms += self.ms - 1.0
            self.behind |= {row.slot: len(row.tokens) + len(one) for row, one in zip(rows, said, strict=True)}
            return said

    return CardModel


@pytest.fixture
def in_slots(schedule, card_model):
    """in_slots(n, max_new, host, drafts=True, **model) -> the model and the ends of n requests in as many slots, and
    the clock. host: milliseconds of what is done between two windows."""

    def run(n: int, max_new: int, host: float = 0.0, drafts: bool = True, **given):
        clock = Clock()
        model = card_model(clock, n_slots=n, **given)
        rules = DraftRules(2, 0.0, 0, slots=drafts)
        path = schedule(model, clock=clock, max_context=1200, drafts=rules, end_ids=(), verify=False)
        events = []
        for slot in range(n):
            path.admit(slot, request(4, max_new, seed=slot))
            while path.busy:
                path.step()
        while path.decoding:
            events += path.step()
            clock.ms += host
        return model, [event for event in events if isinstance(event, SlotDone)], clock

    return run


def test_slots_go_on_with_drafts_though_the_first_window_of_each_kind_takes_long(in_slots):
    _, ends, _ = in_slots(4, 150, hits=FOUR_OF_FIVE, row_ms=0.02, capture=100.0)
    assert all(end.drafts_accepted > 40 for end in ends)


def test_a_first_window_that_only_finds_drafts_ends_none_of_several_slots(in_slots):
    """Its loss is less than that of a window, however many slots stand still meanwhile."""
    _, ends, clock = in_slots(4, 150, row_ms=0.1)
    assert all(end.drafts_accepted > 50 for end in ends)
    assert clock.ms < 0.95 * in_slots(4, 150, drafts=False)[2].ms


def test_what_the_host_does_between_windows_is_no_fault_of_drafts(in_slots):
    """Without drafts the card works meanwhile, so it costs nothing there; a window with drafts begins behind it."""
    _, ends, clock = in_slots(4, 150, host=0.6, row_ms=0.01)
    assert all(end.drafts_accepted > 50 for end in ends)
    assert clock.ms < 0.95 * in_slots(4, 150, host=0.6, drafts=False)[2].ms


@pytest.mark.parametrize("host", [0.0, 0.6])
@pytest.mark.parametrize("right", range(6))
@pytest.mark.parametrize("row_ms", [0.01, 0.1, 0.3])
def test_slots_are_not_slower_than_without_drafts(in_slots, row_ms, right, host):
    """Of five proposals, one after another over the slots, so many are right."""
    hits = tuple(i < right for i in range(5))
    with_drafts, without = (in_slots(4, 600, host, on, hits=hits, row_ms=row_ms)[2].ms for on in (True, False))
    assert without > 0.97 * with_drafts


def test_windows_of_slots_whose_drafts_are_off_are_started_ahead(in_slots):
    model, ends, _ = in_slots(4, 600, hits=(False,), row_ms=0.1)
    offered = sum(end.drafts_offered for end in ends)
    assert 0 < offered < 60
    tries = 3
    assert len(model.windows) - sum(model.ahead) < tries * 16 + 8, "windows that have waited for the host"


def test_a_request_whose_drafts_are_wrong_has_none_while_those_beside_it_go_on(in_slots):
    """As soon as windows with more and with fewer drafts were measured."""
    _, ends, _ = in_slots(4, 600, row_ms=0.05, wrong={2})
    offered = {end.slot: end.drafts_offered for end in ends}
    assert all(offered[slot] > 250 for slot in (0, 2, 3)) and offered[1] < 0.6 * offered[0]
    _, ends, _ = in_slots(4, 600, row_ms=0.0, wrong={2})
    assert all(end.drafts_offered > 250 for end in ends), "a row that costs nothing is left out"


def test_slots_that_fill_a_window_have_no_drafts(in_slots):
    """A window with drafts could give no more tokens than there are slots."""
    model, ends, _ = in_slots(8, 60)
    assert not any(end.drafts_offered for end in ends)
    assert len(model.windows) - sum(model.ahead) <= 8 + 1, "windows that have waited for the host"


def test_slots_without_drafts_say_nothing_of_them(schedule, scripted):
    _, ends = slots(schedule(scripted(n_slots=2, n_checkpoints=1)), [request(4, 6), request(5, 6)])
    assert [end.drafts_offered for end in ends] == [None, None]

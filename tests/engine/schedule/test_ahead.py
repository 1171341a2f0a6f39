"""Windows that are started before the one before them is known: what was started counts, and nothing is for nothing."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from strata.engine.schedule.solo import Request
from strata.kernels.ops import Sampling
from strata.protocol.lines import Admitted, SlotDone, SlotToken


def request(prompt: list[int], max_new: int) -> Request:
    return Request(np.array(prompt, np.int32), max_new, Sampling())


@pytest.fixture
def noted(scripted):
    """A scripted model that notes its units, W: a window behind which one is started ahead, w: another, R: a read; and
    holds the n-th unit until the test opens it."""

    class Noted(scripted):
        def __init__(self, **how: object) -> None:
            super().__init__(**how)
            self.units, self.held_at = "", -1
            self.reached, self.opened = threading.Event(), threading.Event()

        def window(self, rows, again):
            self._hold("W" if again else "w")
            self._in_window = True
            try:
                return super().window(rows, again)
            finally:
                self._in_window = False

        def feed(self, slot, begin, tokens, want_logits):
            if not getattr(self, "_in_window", False):
                self._hold("R")
            return super().feed(slot, begin, tokens, want_logits)

        def _hold(self, unit: str) -> None:
            if len(self.units) == self.held_at:
                self.reached.set()
                assert self.opened.wait(timeout=60)
            self.units += unit

    return Noted


def admit(path, slot: int, asked: Request) -> None:
    path.admit(slot, asked)
    while path.busy:
        path.step()


def test_a_window_is_started_behind_an_admission_that_lets_the_next_one_in(noted, schedule):
    model = noted(n_slots=2)
    path = schedule(model, end_ids=())
    admit(path, 0, request([5, 6], 20))
    path.step()
    admit(path, 1, request([7, 8], 20))
    for _ in range(3):
        path.step()
    assert model.units == "RwRwWW"


def test_a_window_is_started_while_a_line_waits_for_it_to_end(noted, schedule):
    model = noted(n_slots=1)
    path = schedule(model, end_ids=())
    admit(path, 0, request([5, 6], 20))
    for waits in (False, False, True):
        path.step(waits=waits)
    assert model.units == "RwWw" and not path.ahead


def test_a_line_that_comes_meanwhile_throws_a_window_away_that_was_started(loop, noted):
    model = noted(n_slots=2)
    model.held_at = 4
    engine = loop(model, chunk=8, end_ids=())
    engine.send("BGEN 0 20 5,6,7")
    assert model.reached.wait(timeout=60)
    engine.send("BGEN 1 20 8,9")
    while not engine.inbox.waits:
        engine.inbox._thread.join(timeout=0.001)
    model.opened.set()
    outputs = engine.until(Admitted) + engine.until(Admitted)
    assert model.units.startswith("RwWWWwR")
    assert sum(isinstance(output, SlotToken) for output in outputs) == 5
    assert engine.until(SlotDone)[-1].generated == 20


def test_a_line_waits_for_another_window_where_none_was_started(loop, noted):
    model = noted(n_slots=2)
    model.held_at = 4
    engine = loop(model, chunk=8, end_ids=(), ahead=False)
    engine.send("BGEN 0 20 5,6,7")
    assert model.reached.wait(timeout=60)
    engine.send("BGEN 1 20 8,9")
    while not engine.inbox.waits:
        engine.inbox._thread.join(timeout=0.001)
    model.opened.set()
    engine.until(Admitted)
    engine.until(Admitted)
    assert model.units.startswith("RwwwwR")


def test_a_window_of_slots_that_have_ended_counts_as_started(noted, schedule):
    model = noted(n_slots=2)
    path = schedule(model, end_ids=())
    admit(path, 0, request([5, 6], 20))
    admit(path, 1, request([7, 8], 20))
    path.step()
    path.step()
    assert path.ahead
    path.stop_slot(1)
    assert not path.ahead
    path.step()
    assert path.ahead
    admit(path, 1, request([9, 8], 20))
    assert not path.ahead

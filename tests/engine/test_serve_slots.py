"""The serve loop with slots over a scripted model: lines in order between units, refusals, every way to end."""

from __future__ import annotations

import threading

import pytest

from strata.engine.serve import Leaving
from strata.protocol.lines import (
    Admitted,
    Done,
    Err,
    Info,
    Output,
    Progress,
    Resume,
    Reused,
    SlotDone,
    SlotToken,
    Token,
    Yielded,
)


def kinds(outputs: list[Output]) -> list[type]:
    return [type(output) for output in outputs]


def said(outputs: list[Output], slot: int) -> list[int]:
    return [output.id for output in outputs if isinstance(output, SlotToken) and output.slot == slot]


class Gate:
    """Holds the model before a unit until the test opens it: the chunk of the solo path that begins at `chunk`, or the
    window of the slots that is the n-th."""

    def __init__(self, model: object, *, chunk: int = -1, window: int = -1) -> None:
        self._reached, self._open = threading.Event(), threading.Event()
        feed, run = model.feed, model.window

        def gated_feed(slot, begin, tokens, want_logits):
            if slot == 0 and begin == chunk:
                self._hold()
            return feed(slot, begin, tokens, want_logits)

        def gated_window(rows, again):
            if len(model.windows) == window:
                self._hold()
            return run(rows, again)

        model.feed, model.window = gated_feed, gated_window

    def _hold(self) -> None:
        self._reached.set()
        assert self._open.wait(timeout=60)

    def pass_with(self, engine: object, *lines: str, signal: str = "") -> None:
        """Send lines, or a signal, while the model is held, and open when the engine has them all."""
        assert self._reached.wait(timeout=60)
        if signal:
            engine.inbox.leave(signal)
        number = engine.inbox._number
        engine.send(*lines)
        while engine.inbox._number < number + len(lines):
            engine.inbox._thread.join(timeout=0.001)  # it does not end; the time is what counts
        self._open.set()


@pytest.mark.parametrize(
    ("line", "prefix"),
    [
        ("BGEN 2 10 5,6", "BGEN: no such free slot (--batch 2) or a bad max_new"),
        ("BGEN 0 0 5,6", "BGEN: no such free slot (--batch 2) or a bad max_new"),
        ("BGEN 0 -5 5,6", "BGEN: no such free slot (--batch 2) or a bad max_new"),
        ("BGEN 1 3 5,6", "BGEN: no such free slot (--batch 2) or a bad max_new"),
        ("BGEN 0 3 5,99", "a token id is outside the vocabulary"),
        ("BGEN 0 54 5,6,7", "prompt (3 tokens) + max_new (54) exceeds the context (64)"),
        ("BGEN x 3 5", "bad request: slot"),
        ("BGEN 0 3 temperature=hot 5", "bad request: temperature"),
        ("BGENI 0 3 file 5", "this engine was started without --vision"),
        ("HELLO", "expected: "),
    ],
)
def test_a_refused_line_beside_a_slot_gets_one_err_and_the_slot_goes_on(loop, scripted, line, prefix):
    model = scripted(n_slots=2)
    engine, gate = loop(model, chunk=8, end_ids=()), Gate(model, window=3)
    engine.send("BGEN 1 50 5,6,7")
    engine.until(Admitted)
    gate.pass_with(engine, line)
    outputs = engine.until(Err)
    assert set(kinds(outputs)) <= {SlotToken, Err}
    assert outputs[-1].text.startswith(prefix)
    rest = engine.until(SlotDone)
    assert len(said(outputs + rest, 1)) == 49 == rest[-1].generated - 1


def test_an_admission_at_the_boundary_of_the_context_is_taken(loop, scripted):
    engine = loop(scripted(n_slots=2), chunk=8, end_ids=())
    engine.send("BGEN 0 53 5,6,7")
    assert engine.until(SlotDone)[-1].finish == "length"


def test_two_slots_say_what_their_prompts_say_alone(loop, scripted):
    lines = ("GEN 20 5,6,7", "GEN 20 temperature=2 seed=9 10,11,12,13,14,15")
    engine = loop(scripted(), chunk=4, reuse=False, end_ids=())
    wanted = [[output.id for output in engine.ask(line) if isinstance(output, Token)] for line in lines]
    slots = loop(scripted(n_slots=2), chunk=4, end_ids=())
    slots.send(*(line.replace("GEN", f"BGEN {slot}", 1) for slot, line in enumerate(lines)))
    outputs = slots.until(SlotDone) + slots.until(SlotDone)
    firsts = [output.id for output in outputs if isinstance(output, Token)]
    assert [[firsts[slot], *said(outputs, slot)] for slot in range(2)] == wanted


def test_commands_about_slots_are_taken_between_chunks_and_other_lines_wait_for_the_read(loop, scripted):
    model = scripted(n_slots=3)
    engine, gate = loop(model, chunk=4, short_read=0, end_ids=()), Gate(model, chunk=4)
    engine.send("BGEN 0 50 5,6", "BGEN 1 5 10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29")
    gate.pass_with(engine, "BSTOP 0", "BYIELD 2", "BYIELD 1", "HELLO")
    outputs = engine.until(Err)
    assert next(o for o in outputs if isinstance(o, SlotDone)).finish == "cancel"
    ends = [type(o) for o in outputs if isinstance(o, (SlotDone, Yielded, Done, Admitted, Err))]
    assert ends == [Done, Admitted, SlotDone, Yielded, Done, Admitted, Err]
    assert next(o for o in outputs if isinstance(o, Yielded)) == Yielded(1, 8)
    assert outputs[-2] == Admitted(1, False)


def test_a_bstop_behind_a_line_that_has_to_wait_waits_with_it(loop, scripted):
    model = scripted(n_slots=2)
    engine, gate = loop(model, chunk=4, end_ids=()), Gate(model, chunk=4)
    engine.send("BGEN 0 50 5,6", "BGEN 1 5 10,11,12,13,14,15,16,17")
    gate.pass_with(engine, "HELLO", "BSTOP 0")
    outputs = engine.until(SlotDone)
    order = [type(o) for o in outputs if isinstance(o, (Admitted, Err, SlotDone))]
    assert order == [Admitted, Admitted, Err, SlotDone]


def test_a_byield_that_comes_when_nothing_is_read_is_dropped_and_not_kept_for_the_next_read(loop, scripted):
    engine = loop(scripted(n_slots=2), chunk=2, short_read=0)
    engine.send("BYIELD 0", "BGEN 0 5 10,11,12,13,14,15,16,17,18")
    assert engine.until(Admitted)[-1].goes_on


def test_a_stop_for_an_admission_and_one_that_comes_too_late(loop, scripted):
    model = scripted(n_slots=2)
    engine, gate = loop(model, chunk=4, end_ids=()), Gate(model, chunk=4)
    engine.send("BGEN 0 40 10,11,12,13,14,15,16,17,18,19")
    gate.pass_with(engine, "STOP")
    outputs = engine.until(Admitted)
    assert (outputs[-2].finish, outputs[-2].generated, outputs[-1].goes_on) == ("cancel", 0, False)
    engine.send("BGEN 0 9 5,6,7", "BSTOP 1")
    assert engine.until(Admitted)[-1].goes_on
    engine.send("STOP")
    assert engine.until(SlotDone)[-1].finish == "length"


def test_end_of_input_lets_the_read_and_all_slots_finish(loop, scripted):
    engine = loop(scripted(n_slots=2), chunk=4, end_ids=())
    engine.send("BGEN 0 20 5,6,7", "BGEN 1 30 10,11,12,13,14,15", "GEN 4 9,9,9")
    engine.close_input()
    outputs = engine.rest()
    assert [o.generated for o in outputs if isinstance(o, SlotDone)] == [20, 30]
    assert [o.finish for o in outputs if isinstance(o, Done)] == ["length"] * 3
    engine.join()
    assert engine.error is None


def test_quit_drops_slots_without_their_bdone(loop, scripted):
    model = scripted(n_slots=2)
    engine, gate = loop(model, chunk=4, end_ids=()), Gate(model, window=2)
    engine.send("BGEN 0 50 5,6,7")
    gate.pass_with(engine, "QUIT", "HELLO")
    assert kinds(engine.rest()) == [Resume, Progress, Reused, Token, Done, Admitted, *[SlotToken] * 4]
    engine.join()
    assert engine.error is None


def test_a_signal_while_slots_decode_ends_the_engine_with_a_reason(loop, scripted):
    model = scripted(n_slots=2)
    engine, gate = loop(model, chunk=4, end_ids=()), Gate(model, window=2)
    engine.send("BGEN 0 55 5")
    engine.until(Admitted)
    gate.pass_with(engine, signal="SIGTERM")
    engine.rest()
    engine.join()
    assert isinstance(engine.error, Leaving) and "SIGTERM" in str(engine.error)


def test_a_failing_window_is_not_answered_with_a_bdone(loop, scripted):
    class Failing(scripted):
        def window(self, rows: object, again: bool) -> None:
            raise FloatingPointError("the numbers went away")

    engine = loop(Failing(n_slots=2))
    engine.send("BGEN 0 9 5,6")
    assert SlotDone not in kinds(engine.rest())
    engine.join()
    assert isinstance(engine.error, FloatingPointError)


def test_a_counter_that_changed_is_told_behind_badm_and_bdone(loop, scripted):
    model, figures = scripted(n_slots=2), {"hits": 0}
    engine = loop(model, figures=lambda: dict(figures))

    def hit() -> None:
        figures["hits"] += 1

    model.before_feed = hit
    engine.send("BGEN 0 2 5,6,7,8,9")
    got = kinds(engine.until(SlotDone))
    assert got == [Resume, Progress, Progress, Reused, Token, Done, Admitted, Info, SlotToken, SlotDone]
    assert engine.next() == Info({"hits": 3}), "two chunks and a window"


def test_the_totals_count_slots(loop, scripted):
    engine = loop(scripted(n_slots=2), end_ids=())
    engine.send("BGEN 0 6 5,6,7")
    engine.until(SlotDone)
    engine.close_input()
    engine.rest()
    engine.join()
    totals = engine.server.totals
    assert (totals.requests, totals.generated, totals.in_slots) == (1, 1, 5)
    assert "5 more in slots" in str(totals)

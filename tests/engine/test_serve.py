"""The serve loop over a scripted model: every command's answer, refusals, STOP, the end of input, a failing model."""

from __future__ import annotations

import re
import threading
import time

import pytest

from strata.engine.serve import Leaving
from strata.protocol.lines import Done, Err, Info, Progress, Ready, Resume, Reused, SamplingKeys, SessionError, Token


def kinds(outputs: list[object]) -> list[type]:
    return [type(output) for output in outputs]


def test_a_cold_request_writes_resume_progress_reused_tokens_done(loop):
    outputs = loop(chunk=4).ask("GEN 3 5,6,7,8,9,10")
    assert kinds(outputs) == [Resume, Progress, Progress, Reused, Token, Token, Token, Done]
    assert [o.position for o in outputs if isinstance(o, Progress)] == [4, 6]
    assert outputs[-1].finish == "length"


def test_a_continued_request_reads_only_what_is_new(loop):
    engine = loop()
    said = [str(o.id) for o in engine.ask("GEN 3 5,6,7,8,9") if isinstance(o, Token)]
    outputs = engine.ask(f"GEN 2 5,6,7,8,9,{','.join(said)},11")
    assert outputs[0] == Resume(7)
    assert [o.position for o in outputs if isinstance(o, Progress)] == [9]
    assert next(o for o in outputs if isinstance(o, Reused)) == Reused(7)


@pytest.mark.parametrize(
    ("line", "prefix"),
    [
        ("HELLO", "expected: GEN <max_new> <ids>"),
        ("GEN", "bad request: max_new"),
        ("GEN 0 5", "bad request: max_new"),
        ("GEN x 5", "bad request: max_new"),
        ("GEN 10", "bad request: ids"),
        ("GEN 10 5,x", "bad request: ids"),
        ("GEN 10 -1", "bad request: ids"),
        ("GEN 10 2147483648", "bad request: ids"),
        ("GEN 10 temperature=hot 5", "bad request: temperature"),
        ("GEN 10 64", "a token id is outside the vocabulary"),
        ("GEN 60 5,6,7", "prompt (3 tokens) + max_new (60) exceeds the context (64)"),
        ("GENI 10 pictures.bin 5,6", "this engine was started without --vision"),
        ("BGENI 0 10 pictures.bin 5,6", "this engine was started without --vision"),
        ("BGEN 0 10 5,6", "BGEN: no such free slot (--batch 0) or a bad max_new"),
        ("BGEN 0 0 5,6", "BGEN: no such free slot (--batch 0) or a bad max_new"),
        ("VRAM", "VRAM needs --vram-elastic"),
        ("VRAM 700", "VRAM needs --vram-elastic"),
        ("VRAM lots", "VRAM: "),
        ("STOP now", "bad request: STOP"),
    ],
)
def test_a_refused_line_gets_one_err_no_done_and_the_next_command_works(loop, line, prefix):
    engine = loop()
    assert engine.ask(line)[0].text.startswith(prefix)
    assert kinds(engine.ask("GEN 1 5")) == [Resume, Progress, Reused, Token, Done]


def test_a_request_that_is_refused_does_not_begin(loop):
    begun = []
    engine = loop(before=lambda: begun.append(1))
    engine.ask("GEN 10 64")
    assert not begun
    engine.ask("GEN 1 5")
    assert begun == [1]


EXTREMES = ("1e308", "-1e308", "1e-308", "5e-324", "1e6", "-1e6", "1e-6", "1e7", "0", "-1")


@pytest.mark.parametrize("name", SamplingKeys.__struct_fields__)
@pytest.mark.filterwarnings("error")
def test_no_value_of_a_sampling_key_kills_the_engine(loop, name):
    engine = loop(reuse=False)
    for value in EXTREMES:
        for temperature in ("1", "1e-308", "1e-100", "1e100", "1e308"):
            keys = f"temperature={temperature} penalty_last_n=64 penalty_repeat=1e6 penalty_freq=1e6 {name}={value}"
            end = engine.ask(f"GEN 3 {keys} 5,5,6")[-1]
            assert isinstance(end, Done) or re.match(rf"bad request: ({name}|temperature): wants", end.text), keys


def test_session_files_are_refused_with_the_class_that_the_protocol_names(loop):
    engine = loop()
    for line in ("SAVE a file with blanks", "RESTORE x"):
        engine.send(line)
        answer = engine.next()
        assert isinstance(answer, SessionError)
        assert (answer.kind, answer.published) == ("invalid", False)


def test_commands_about_slots_are_dropped_without_a_line(loop):
    engine = loop()
    engine.send("BSTOP 0", "BYIELD 3", "", "  ", "STOP")
    assert engine.ask("GEN 1 5")[0] == Resume(0)


def test_the_context_rule_holds_to_the_token(loop):
    engine = loop(max_context=64)
    assert engine.ask("GEN 53 5,6,7")[-1].prompt == 3
    assert isinstance(engine.ask("GEN 54 5,6,7")[-1], Err)


def test_a_stale_stop_does_not_cancel_the_next_request(loop):
    engine = loop()
    engine.ask("GEN 1 5")
    engine.send("STOP")
    assert engine.ask("GEN 4 5,6")[-1].finish == "length"


class Gate:
    """Holds the model before its n-th forward until the test opens it."""

    def __init__(self, model: object, at: int) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        self.calls, self.at = 0, at
        model.before_feed = self

    def __call__(self) -> None:
        self.calls += 1
        if self.calls == self.at:
            self.reached.set()
            assert self.open.wait(timeout=60)


def wait_for_stop(engine: object) -> None:
    """Until the reader thread has seen a STOP; the model is held meanwhile."""
    tick, end = threading.Event(), time.monotonic() + 60
    while not engine.inbox.stop_asked():
        assert time.monotonic() < end, "the STOP was not seen"
        tick.wait(0.001)


def test_a_stop_while_reading_ends_at_the_chunk_boundary_without_a_token(loop, scripted):
    model = scripted()
    engine, gate = loop(model, chunk=2), Gate(model, at=2)
    engine.send("GEN 5 5,6,7,8,9,10,11")
    assert gate.reached.wait(timeout=60)
    engine.send("STOP")
    wait_for_stop(engine)
    gate.open.set()
    outputs = engine.until(Done)
    assert kinds(outputs) == [Resume, Progress, Progress, Done]
    done = outputs[-1]
    assert (done.generated, done.finish, done.prompt_read, done.prompt) == (0, "cancel", 4, 7)


def test_a_stop_while_decoding_ends_behind_the_token_in_flight(loop, scripted):
    model = scripted()
    engine, gate = loop(model, chunk=8), Gate(model, at=3)
    engine.send("GEN 40 5,6,7")
    assert gate.reached.wait(timeout=60)
    engine.send("STOP")
    wait_for_stop(engine)
    gate.open.set()
    outputs = engine.until(Done)
    assert (outputs[-1].generated, outputs[-1].finish) == (3, "cancel")
    assert kinds(outputs)[-4:] == [Token, Token, Token, Done]


def test_lines_behind_a_running_request_are_answered_in_order_when_it_is_over(loop, scripted):
    model = scripted()
    engine, gate = loop(model), Gate(model, at=1)
    engine.send("GEN 1 5", "HELLO", "GEN 1 6", "GEN 1 x", "GEN 1 7")
    assert gate.reached.wait(timeout=60)
    gate.open.set()
    engine.close_input()
    ends = [o for o in engine.rest() if isinstance(o, (Done, Err))]
    assert kinds(ends) == [Done, Err, Done, Err, Done]
    engine.join()
    assert engine.error is None


def test_end_of_input_lets_the_running_request_finish(loop, scripted):
    model = scripted()
    engine, gate = loop(model), Gate(model, at=2)
    engine.send("GEN 5 5,6")
    assert gate.reached.wait(timeout=60)
    engine.close_input()
    gate.open.set()
    assert engine.rest()[-1].finish in ("length", "stop")
    engine.join()
    assert engine.error is None


def test_quit_leaves_what_stands_behind_it_unanswered(loop):
    engine = loop()
    engine.send("GEN 1 5", "QUIT", "HELLO")
    assert kinds(engine.rest())[-1] is Done
    engine.join()
    assert engine.error is None


def test_a_signal_during_a_request_ends_it_with_a_reason(loop, scripted):
    model = scripted()
    engine, gate = loop(model), Gate(model, at=2)
    engine.send("GEN 9 5,6")
    assert gate.reached.wait(timeout=60)
    engine.inbox.leave("SIGTERM")
    gate.open.set()
    engine.join()
    assert isinstance(engine.error, Leaving)
    assert "SIGTERM" in str(engine.error)


def test_a_failing_model_is_not_answered_with_a_done(loop, scripted):
    class Failing(scripted):
        def feed(self, slot: int, begin: int, tokens: object, want_logits: bool) -> None:
            raise FloatingPointError("the numbers went away")

    engine = loop(Failing())
    engine.send("GEN 9 5,6")
    assert kinds(engine.rest()) == [Resume]
    engine.join()
    assert isinstance(engine.error, FloatingPointError)


def test_a_seed_of_zero_is_not_the_same_draw_twice(loop):
    engine = loop(reuse=False)
    line = "GEN 12 temperature=50 top_k=64 seed=0 5,6"
    texts = {tuple(o.id for o in engine.ask(line) if isinstance(o, Token)) for _ in range(4)}
    assert len(texts) > 1


def test_the_same_seed_is_the_same_text_and_another_seed_another(loop):
    engine = loop(reuse=False)

    def text(seed: int) -> list[int]:
        return [o.id for o in engine.ask(f"GEN 12 temperature=50 top_k=64 seed={seed} 5,6") if isinstance(o, Token)]

    assert text(7) == text(7) != text(8)


def test_a_later_request_ignores_the_sampling_keys_of_the_one_before(loop):
    engine = loop(reuse=False)
    line = "GEN 8 5,6,7"
    before = [o for o in engine.ask(line) if isinstance(o, Token)]
    engine.ask("GEN 8 temperature=9 penalty_last_n=64 penalty_repeat=9 penalty_freq=50 seed=3 5,6,7")
    assert [o for o in engine.ask(line) if isinstance(o, Token)] == before


def test_a_counter_that_changed_is_told_once_and_never_inside_a_request(loop, scripted):
    model, figures = scripted(), {"cache_hits": 0, "cache_parked": 2}
    engine = loop(model, figures=lambda: dict(figures))
    engine.server.greet(Info({"engine": "7", "vocab": 64}))
    assert engine.next() == Info({"engine": "7", "vocab": 64, **figures})
    assert isinstance(engine.next(), Ready)
    model.before_feed = lambda: figures.update(cache_hits=1)
    engine.send("GEN 3 5,6,7,8,9", "GEN 1 5", "HELLO", "GEN 1 6")
    assert kinds(engine.until(Err)) == [
        *(Resume, Progress, Progress, Reused, Token, Token, Token, Done, Info),
        *(Resume, Progress, Reused, Token, Done, Err),
    ]
    assert Info not in kinds(engine.until(Done))
    figures.update(cache_hits=5, cache_parked=1)
    model.before_feed = lambda: None
    engine.ask("GEN 1 7")
    assert engine.next() == Info({"cache_hits": 5, "cache_parked": 1})


def test_the_totals_count_what_was_done(loop):
    engine = loop()
    engine.ask("GEN 2 5,6,7")
    engine.ask("HELLO")
    engine.close_input()
    engine.rest()
    engine.join()
    totals = engine.server.totals
    assert (totals.requests, totals.refused, totals.prompt_read) == (1, 1, 3)

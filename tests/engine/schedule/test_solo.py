"""One request as a state machine, and the session that it leaves, over a model whose text depends on every token."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.engine.schedule.live import SoloPath
from strata.engine.schedule.solo import Decode, Read, Request, Solo
from strata.kernels.ops import Sampling
from strata.protocol.lines import Done, Output, Progress, Resume, Reused, Token

END = 3
LETTER = {Resume: "R", Progress: "P", Reused: "U", Token: "T", Done: "D"}
NEVER = 10**9


def request(prompt: list[int], max_new: int = 6, **how: object) -> Request:
    return Request(np.array(prompt, np.int32), max_new, Sampling(**how))


def path_of(model: object, chunk: int = 4, reuse: bool = True) -> SoloPath:
    return SoloPath(model, chunk=chunk, reuse=reuse, end_ids={END}, routed=5, verify=True)


def run(path: SoloPath, asked: Request, stop_after: int = NEVER) -> list[Output]:
    """All events; STOP is seen from the boundary behind `stop_after` units on."""
    events = path.start(asked)
    units = 0
    while path.busy:
        events += path.step(units >= stop_after)
        units += 1
    return events


def tokens_of(events: list[Output]) -> list[int]:
    return [event.id for event in events if isinstance(event, Token)]


def letters(events: list[Output]) -> str:
    return "".join(LETTER[type(event)] for event in events)


PROMPTS = st.lists(st.integers(4, 63), min_size=1, max_size=30)


@settings(max_examples=200, deadline=None)
@given(prompt=PROMPTS, max_new=st.integers(1, 12), chunk=st.integers(1, 40), stop=st.integers(0, 20) | st.just(NEVER))
def test_events_come_in_the_order_of_the_protocol_wherever_a_stop_falls(scripted, prompt, max_new, chunk, stop):
    events = run(path_of(scripted(), chunk), request(prompt, max_new), stop)
    done = events[-1]
    assert re.fullmatch(r"RP*(UT+)?D", letters(events))
    assert done.generated == len(tokens_of(events)) <= max_new
    assert done.prompt == len(prompt)
    read = [event.position for event in events if isinstance(event, Progress)]
    assert read == [min(i * chunk, len(prompt)) for i in range(1, len(read) + 1)]
    assert done.prompt_read == (read[-1] if read else 0)
    assert done.lookups == done.ram_blobs == 5 * max(0, done.generated - 1)
    if done.finish == "cancel":
        assert stop < NEVER
    elif done.finish == "stop":
        assert tokens_of(events)[-1] == END
    else:
        assert done.generated == max_new and END not in tokens_of(events)


@settings(max_examples=100, deadline=None)
@given(
    prompt=PROMPTS, chunk=st.integers(1, 40), seed=st.integers(1, 2**64 - 1), temperature=st.sampled_from([0.0, 1.0])
)
def test_the_chunk_size_does_not_change_the_text(scripted, prompt, chunk, seed, temperature):
    asked = request(prompt, 8, temperature=temperature, seed=seed)
    assert tokens_of(run(path_of(scripted(), chunk), asked)) == tokens_of(run(path_of(scripted(), 1000), asked))


@settings(max_examples=100, deadline=None)
@given(turns=st.lists(PROMPTS, min_size=2, max_size=4), stop=st.integers(0, 12), chunk=st.integers(1, 9))
def test_a_continued_conversation_gives_the_tokens_of_one_that_is_read_again(scripted, turns, stop, chunk):
    warm, cold = path_of(scripted(), chunk), path_of(scripted(), chunk, reuse=False)
    history: list[int] = []
    for number, turn in enumerate(turns):
        asked = request(history + turn, 6)
        stop_after = stop if number == 0 else NEVER
        held = warm.n_session
        got, again = run(warm, asked, stop_after), run(cold, asked, stop_after)
        assert (got[0], again[0]) == (Resume(held), Resume(0))
        assert tokens_of(got) == tokens_of(again)
        assert warm.n_session == (len(asked.prompt) + len(tokens_of(got)) - 1 if tokens_of(got) else 0)
        history = history + turn + tokens_of(got)


def test_a_session_holds_the_prompt_and_all_tokens_but_the_last(scripted):
    path = path_of(scripted())
    first = run(path, request([9, 8, 7], 5))
    said = tokens_of(first)
    assert path.n_session == 3 + len(said) - 1
    second = run(path, request([9, 8, 7, *said, 11], 5))
    assert second[0] == Resume(3 + len(said) - 1)
    assert second[-1].prompt_read == 2


def test_a_prompt_that_the_session_already_holds_whole_is_read_again(scripted):
    path = path_of(scripted())
    run(path, request([9, 8, 7], 1))
    assert path.n_session == 3
    again = run(path, request([9, 8, 7], 1))
    assert again[0] == Resume(0)


def test_a_prompt_that_differs_in_its_last_held_token_is_read_from_its_start(scripted):
    path = path_of(scripted())
    said = tokens_of(run(path, request([9, 8, 7], 5)))
    other = request([9, 8, 7, *said[:-2], said[-2] ^ 1, 20, 21], 3)
    got = run(path, other)
    assert got[0] == Resume(0)
    assert tokens_of(got) == tokens_of(run(path_of(scripted()), other))


def test_a_cancelled_read_leaves_no_session(scripted):
    path = path_of(scripted(), chunk=2)
    run(path, request([9, 8, 7, 6, 5], 5), stop_after=1)
    assert path.n_session == 0
    assert run(path, request([9, 8, 7, 6, 5, 4], 2))[0] == Resume(0)


def test_a_cancelled_read_forgets_the_session_before_it(scripted):
    path = path_of(scripted(), chunk=2)
    said = tokens_of(run(path, request([9, 8, 7], 3)))
    run(path, request([20, 21, 22, 23], 5), stop_after=1)
    assert run(path, request([9, 8, 7, *said, 4], 2))[0] == Resume(0)


def test_a_cancelled_decode_leaves_a_session_that_continues(scripted):
    path = path_of(scripted(), chunk=8)
    events = run(path, request([9, 8, 7, 6, 5], 12), stop_after=3)
    assert events[-1].finish == "cancel"
    said = tokens_of(events)
    assert len(said) == 3
    assert run(path, request([9, 8, 7, 6, 5, *said], 2))[0] == Resume(5 + len(said) - 1)


def test_a_request_without_checkpoints_is_not_continued(scripted):
    path = path_of(scripted())
    asked = Request(np.array([9, 8, 7], np.int32), 3, Sampling(), keep=False)
    said = tokens_of(run(path, asked))
    assert path.n_session == 0
    assert run(path, request([9, 8, 7, *said, 4], 2))[0] == Resume(0)


def test_without_a_prompt_cache_nothing_is_reused(scripted):
    path = path_of(scripted(), reuse=False)
    said = tokens_of(run(path, request([9, 8, 7], 3)))
    assert run(path, request([9, 8, 7, *said, 4], 2))[0] == Resume(0)


def test_an_end_token_as_the_last_allowed_one_is_stop_and_not_length(fake_clock):
    solo = Solo(request([5], 1), reused=0, chunk=8, end_ids={END}, clock=fake_clock)
    solo.read(solo.next_unit(False))
    solo.decided(END)
    assert solo.done().finish == "stop"


def test_a_stop_after_the_last_token_is_not_cancel(fake_clock):
    solo = Solo(request([5], 1), reused=0, chunk=8, end_ids={END}, clock=fake_clock)
    solo.read(solo.next_unit(False))
    solo.decided(9)
    assert solo.next_unit(stop=True) is None
    assert solo.done().finish == "length"


def test_a_stop_during_the_last_chunk_comes_after_the_first_token(fake_clock):
    solo = Solo(request([5, 6], 4), reused=0, chunk=8, end_ids={END}, clock=fake_clock)
    unit = solo.next_unit(False)
    assert unit == Read(0, 2, last=True)
    assert solo.read(unit)[-1] == Reused(0)
    solo.decided(9)
    assert solo.next_unit(stop=True) is None
    done = solo.done()
    assert (done.generated, done.finish, done.prompt_read) == (1, "cancel", 2)


def test_times_and_rates_are_those_of_the_clock(fake_clock):
    solo = Solo(request([5] * 10, 3), reused=2, chunk=4, end_ids={END}, clock=fake_clock)
    fake_clock.now += 100.0
    assert solo.read(solo.next_unit(False)) == [Progress(6, 10, 100.0, 40.0)]
    fake_clock.now += 300.0
    assert solo.read(solo.next_unit(False)) == [Progress(10, 10, 400.0, 20.0), Reused(2)]
    fake_clock.now += 5.0
    solo.decided(9)
    assert solo.next_unit(False) == Decode(10)
    solo.fed()
    fake_clock.now += 7.0
    solo.decided(END)
    done = solo.done()
    assert (done.prompt_ms, done.decode_ms, done.reused, done.prompt_read) == (400.0, 12.0, 2, 8)


def test_the_penalties_look_at_prompt_and_output_and_no_further_than_asked(fake_clock):
    asked = Request(np.array([5, 6, 7], np.int32), 3, Sampling(), penalty_last_n=2)
    solo = Solo(asked, reused=0, chunk=8, end_ids={END}, clock=fake_clock)
    solo.read(solo.next_unit(False))
    assert solo.recent.tolist() == [6, 7]
    solo.decided(9)
    assert solo.recent.tolist() == [7, 9]
    none = Solo(request([5, 6], 3), reused=0, chunk=8, end_ids={END}, clock=fake_clock)
    assert none.recent.tolist() == []


def test_a_step_without_a_request_is_a_fault_and_not_a_silence(scripted):
    with pytest.raises(RuntimeError, match="a step without a request"):
        path_of(scripted()).step(False)


@pytest.fixture
def fake_clock() -> Callable[[], float]:
    class Clock:
        now = 1000.0

        def __call__(self) -> float:
            return self.now

    return Clock()

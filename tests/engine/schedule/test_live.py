"""Requests through the real schedule with its books, over a model whose text depends on every token: sessions, slots,
reads beside slots, give-ways.
"""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.engine.schedule.live import Path
from strata.engine.schedule.short import ShortReads
from strata.engine.schedule.solo import Request
from strata.kernels.ops import Sampling
from strata.protocol.lines import Done, Output, Progress, Resume, Reused, Token

END = 3
LETTER = {Resume: "R", Progress: "P", Reused: "U", Token: "T", Done: "D"}
NEVER = 10**9


def request(prompt: list[int], max_new: int = 6, **how: object) -> Request:
    return Request(np.array(prompt, np.int32), max_new, Sampling(**how))


def run(path: Path, asked: Request, stop_after: int = NEVER) -> list[Output]:
    """All events; STOP is seen from the boundary behind `stop_after` units on."""
    events = path.start(asked)
    units = 0
    while path.busy:
        events += path.step(units >= stop_after)
        units += 1
    return events


def tokens_of(events: list[Output]) -> list[int]:
    return [event.id for event in events if isinstance(event, Token)]


def n_live(path: Path) -> int:
    """Tokens of the live session."""
    return len(path._sessions.live)


def letters(events: list[Output]) -> str:
    return "".join(LETTER[type(event)] for event in events)


PROMPTS = st.lists(st.integers(4, 63), min_size=1, max_size=30)


@settings(max_examples=200, deadline=None)
@given(prompt=PROMPTS, max_new=st.integers(1, 12), chunk=st.integers(1, 40), stop=st.integers(0, 20) | st.just(NEVER))
def test_events_come_in_the_order_of_the_protocol_wherever_a_stop_falls(
    scripted, schedule, prompt, max_new, chunk, stop
):
    events = run(schedule(scripted(), chunk=chunk), request(prompt, max_new), stop)
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
    prompt=PROMPTS, chunk=st.integers(1, 40), most=st.integers(0, 30), rows=st.integers(1, 9), pin=st.integers(0, 30)
)
def test_short_pieces_are_read_a_few_tokens_at_a_time_and_the_text_stays(
    scripted, schedule, prompt, chunk, most, rows, pin
):
    """The pieces are those between the places where a read must stop: here a pin."""
    asked = replace(request(prompt, 6, temperature=1.0, seed=5), pin=pin or None)
    whole = run(schedule(scripted(n_checkpoints=3), chunk=chunk, turn_token=64), asked)
    model = scripted(n_checkpoints=3)
    events = run(schedule(model, chunk=chunk, turn_token=64, short=ShortReads(most, rows)), asked)
    assert tokens_of(events) == tokens_of(whole)
    assert whole[-1].prompt_read == events[-1].prompt_read
    reads = [(begin, n) for _, begin, n in model.calls if begin < len(prompt)]
    edges = [pin, len(prompt)] if 0 < pin < len(prompt) - 1 else [len(prompt)]
    assert set(edges) <= {begin + n for begin, n in reads}
    for begin, n in reads:
        left = min(edge for edge in edges if edge > begin) - begin
        assert n == min(left, chunk, rows if left <= most else chunk)


@settings(max_examples=100, deadline=None)
@given(
    prompt=PROMPTS, chunk=st.integers(1, 40), seed=st.integers(1, 2**64 - 1), temperature=st.sampled_from([0.0, 1.0])
)
def test_the_chunk_size_does_not_change_the_text(scripted, schedule, prompt, chunk, seed, temperature):
    asked = request(prompt, 8, temperature=temperature, seed=seed)
    cut, whole = (schedule(scripted(), chunk=most) for most in (chunk, 1000))
    assert tokens_of(run(cut, asked)) == tokens_of(run(whole, asked))


@settings(max_examples=100, deadline=None)
@given(turns=st.lists(PROMPTS, min_size=2, max_size=4), stop=st.integers(0, 12), chunk=st.integers(1, 9))
def test_a_continued_conversation_gives_the_tokens_of_one_that_is_read_again(scripted, schedule, turns, stop, chunk):
    warm, cold = schedule(scripted(), chunk=chunk), schedule(scripted(), chunk=chunk, reuse=False)
    history: list[int] = []
    for number, turn in enumerate(turns):
        asked = request(history + turn, 6)
        stop_after = stop if number == 0 else NEVER
        held = n_live(warm)
        got, again = run(warm, asked, stop_after), run(cold, asked, stop_after)
        assert (got[0], again[0]) == (Resume(held), Resume(0))
        assert tokens_of(got) == tokens_of(again)
        assert n_live(warm) == (len(asked.prompt) + len(tokens_of(got)) - 1 if tokens_of(got) else 0)
        history = history + turn + tokens_of(got)


def test_a_session_holds_the_prompt_and_all_tokens_but_the_last(scripted, schedule):
    path = schedule(scripted())
    first = run(path, request([9, 8, 7], 5))
    said = tokens_of(first)
    assert n_live(path) == 3 + len(said) - 1
    second = run(path, request([9, 8, 7, *said, 11], 5))
    assert second[0] == Resume(3 + len(said) - 1)
    assert second[-1].prompt_read == 2


def test_a_prompt_that_the_session_already_holds_whole_is_read_again(scripted, schedule):
    path = schedule(scripted())
    run(path, request([9, 8, 7], 1))
    assert n_live(path) == 3
    again = run(path, request([9, 8, 7], 1))
    assert again[0] == Resume(0)


def test_a_prompt_that_differs_in_its_last_held_token_is_read_from_its_start(scripted, schedule):
    path = schedule(scripted())
    said = tokens_of(run(path, request([9, 8, 7], 5)))
    other = request([9, 8, 7, *said[:-2], said[-2] ^ 1, 20, 21], 3)
    got = run(path, other)
    assert got[0] == Resume(0)
    assert tokens_of(got) == tokens_of(run(schedule(scripted()), other))


def test_a_cancelled_read_leaves_no_session(scripted, schedule):
    path = schedule(scripted(), chunk=2)
    run(path, request([9, 8, 7, 6, 5], 5), stop_after=1)
    assert n_live(path) == 0
    assert run(path, request([9, 8, 7, 6, 5, 4], 2))[0] == Resume(0)


def test_a_cancelled_read_forgets_the_session_before_it(scripted, schedule):
    path = schedule(scripted(), chunk=2)
    said = tokens_of(run(path, request([9, 8, 7], 3)))
    run(path, request([20, 21, 22, 23], 5), stop_after=1)
    assert run(path, request([9, 8, 7, *said, 4], 2))[0] == Resume(0)


def test_a_cancelled_decode_leaves_a_session_that_continues(scripted, schedule):
    path = schedule(scripted(), chunk=8)
    events = run(path, request([9, 8, 7, 6, 5], 12), stop_after=3)
    assert events[-1].finish == "cancel"
    said = tokens_of(events)
    assert len(said) == 3
    assert run(path, request([9, 8, 7, 6, 5, *said], 2))[0] == Resume(5 + len(said) - 1)


def test_a_request_without_checkpoints_is_not_continued(scripted, schedule):
    path = schedule(scripted())
    asked = Request(np.array([9, 8, 7], np.int32), 3, Sampling(), keep=False)
    said = tokens_of(run(path, asked))
    assert n_live(path) == 0
    assert run(path, request([9, 8, 7, *said, 4], 2))[0] == Resume(0)


def test_without_a_prompt_cache_nothing_is_reused(scripted, schedule):
    path = schedule(scripted(), reuse=False)
    said = tokens_of(run(path, request([9, 8, 7], 3)))
    assert run(path, request([9, 8, 7, *said, 4], 2))[0] == Resume(0)

"""Right answers pass, and each way to be wrong is noticed."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.bench.demo_pack.data.mixture import SCORED, draw_task
from strata.bench.demo_pack.data.sample import Call, Json, Number, Text, Value, Wants
from strata.bench.demo_pack.judge import Answer, answer_of, fault, fits, is_valid_call
from strata.bench.demo_pack.rendering import Renderer


@pytest.mark.parametrize("task", SCORED)
def test_what_is_learned_is_judged_right_when_it_comes_out_of_an_engine(task: str) -> None:
    """The ids after the prompt, as an engine would send them, through the server's parser."""
    renderer = Renderer()
    for seed in range(40):
        sample = draw_task(Random(seed), task, "test", 200)
        prompt = renderer.prompt(sample)
        tokens = renderer.render(sample).ids[len(prompt.ids) :]
        answer = answer_of(renderer.vocabulary, prompt, tokens, "stop")
        assert sample.wants is not None
        assert fault(sample.wants, answer) == "", sample
        assert fault(sample.wants, answer_of(renderer.vocabulary, prompt, tokens[:-1], "length")) != ""
        if isinstance(sample.wants, Call):
            assert is_valid_call(sample.tools, answer)


@pytest.mark.parametrize(
    ("wants", "right", "wrong"),
    [
        (Number(391), "17 * 23 = 391.", "17 * 23 = 3910"),
        (Number(-4), "The result is -4.", "The result is 4."),
        (Number(12), "34 / 2 is 12", "12 and 13"),
        (Number(3), "3", "three"),
        (Text("a b"), " a b\n", "a  b"),
        (Value("412"), "Room 412.", "Room 4123."),
        (Value("12"), "It is 12.", "It is 12.5"),
        (Value("Oslo"), "in Oslo", "in Osloo"),
        (Value("A1", ("B2",)), "A1", "A1 or B2"),
        (Json({"a": 1, "b": True}), '{"b": true, "a": 1}', '{"b": true, "a": 2}'),
        (Json([1]), "[1]", "Here: [1]"),
    ],
)
def test_an_answer_is_judged_by_what_it_says(wants: Wants, right: str, wrong: str) -> None:
    assert fault(wants, Answer(right)) == ""
    assert fault(wants, Answer(wrong)) != ""
    assert fault(wants, Answer(right, finish="length")) != ""
    assert fault(wants, Answer(right, calls=(("f", "{}"),))) != ""


@pytest.mark.parametrize(
    "calls",
    [
        (),
        (("g", '{"a": 1}'),),
        (("f", '{"a": 2}'),),
        (("f", '{"a": "1"}'),),
        (("f", '{"a": 1, "b": 2}'),),
        (("f", '{"a": 1'),),
        (("f", '{"a": 1}'), ("f", '{"a": 1}')),
    ],
)
def test_a_wrong_call_is_noticed(calls: tuple[tuple[str, str], ...]) -> None:
    wants = Call("f", {"a": 1})
    assert fault(wants, Answer("", (("f", '{"a": 1}'),), "tool_calls")) == ""
    assert fault(wants, Answer("", calls, "tool_calls")) != ""


SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "s": {"enum": ["x"]}, "l": {"type": "array", "items": {"type": "string"}}},
    "required": ["n"],
}


@pytest.mark.parametrize("value", [{"n": 1}, {"n": 1, "s": "x", "l": []}, {"n": 1, "l": ["a"]}])
def test_what_fits_a_schema_fits(value: object) -> None:
    assert fits(SCHEMA, value)


@pytest.mark.parametrize(
    "value", [{}, {"n": True}, {"n": 1.5}, {"n": 1, "s": "y"}, {"n": 1, "l": [1]}, {"n": 1, "o": 1}, []]
)
def test_what_does_not_fit_a_schema_does_not(value: object) -> None:
    assert not fits(SCHEMA, value)


@given(st.text(), st.lists(st.tuples(st.text(), st.text()), max_size=2))
def test_nothing_that_a_model_writes_stops_the_judge(text: str, calls: list[tuple[str, str]]) -> None:
    for wants in (Number(1), Text("a"), Value("a"), Json(None), Call("f", {})):
        assert isinstance(fault(wants, Answer(text, tuple(calls))), str)
    assert is_valid_call([], Answer(text, tuple(calls))) is False

"""Generators: right answers, the same from the same seed, nothing held out is learned from."""

from __future__ import annotations

import json
import re
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.bench.demo_pack.data import arithmetic, tools
from strata.bench.demo_pack.data.mixture import GENERATORS, SCORED, TASKS, draw, draw_task
from strata.bench.demo_pack.data.sample import HELD_OUT_PERCENT, Call, Sample, split_of
from strata.bench.demo_pack.judge import Answer, fault, fits
from strata.bench.demo_pack.rendering import Renderer

EQUATION = re.compile(r"(?<![\w.])((?:-?\d+ [-+*/] )+-?\d+) = (-?\d+)(?! [*])\b")


def said(message: dict[str, Any]) -> Answer:
    calls = tuple(
        (c["function"]["name"], json.dumps(c["function"]["arguments"])) for c in message.get("tool_calls", ())
    )
    return Answer(message["content"], calls)


@pytest.mark.parametrize("task", SCORED)
def test_the_answer_to_learn_is_the_answer_that_is_wanted(task: str) -> None:
    for seed in range(150):
        sample = draw_task(Random(seed), task, "test" if seed % 2 else "train", 150)
        assert sample.wants is not None
        assert fault(sample.wants, said(sample.messages[-1])) == "", sample


@pytest.mark.parametrize("task", TASKS)
def test_a_sample_is_a_function_of_its_seed(task: str) -> None:
    for seed in range(20):
        assert GENERATORS[task](Random(seed), 300) == GENERATORS[task](Random(seed), 300)


@pytest.mark.parametrize("task", TASKS)
def test_every_kind_is_held_out_in_part(task: str) -> None:
    splits = {split_of(GENERATORS[task](Random(seed), 150).key) for seed in range(400)}
    assert splits == {"train", "test"}


def test_no_held_out_problem_is_drawn_for_training() -> None:
    for seed in range(300):
        assert split_of(draw(Random(seed), "train", 200).key) == "train"
        assert split_of(draw(Random(seed), "test", 200).key) == "test"


def test_a_problem_of_two_numbers_is_held_out_in_every_wording() -> None:
    seen: dict[frozenset[int], str] = {}
    for seed in range(6000):
        sample = arithmetic.arithmetic(Random(seed), 0)
        op, a, b = sample.key.split()
        if op in ("add", "mul"):
            pair = frozenset((int(a), int(b), {"add": -1, "mul": -2}[op]))
            assert seen.setdefault(pair, split_of(sample.key)) == split_of(sample.key)
            assert split_of(arithmetic.key_of(op, int(b), int(a))) == split_of(sample.key)
    share = 100 * sum(split_of(f"mul {a} {b}") == "test" for a in range(10, 100) for b in range(a, 100)) / (90 * 91 / 2)
    assert abs(share - HELD_OUT_PERCENT) < 2


@given(st.sampled_from(["add", "sub", "mul"]), st.integers(0, 999), st.integers(0, 99))
def test_every_step_that_is_written_out_is_right(op: str, a: int, b: int) -> None:
    if op == "mul" and a % 2:
        a, b = b, a
    steps = arithmetic.steps_of(op, a, b)
    equations = EQUATION.findall(steps)
    assert equations and equations[-1][1] == str(arithmetic.result_of(op, a, b))
    for left, right in equations:
        assert eval(left) == int(right), steps


@given(st.integers(2, 20), st.integers(1, 200))
def test_every_quotient_comes_out_without_a_rest(b: int, quotient: int) -> None:
    steps = arithmetic.quotient_steps(b * quotient, b)
    digits = re.findall(r"^\d+: (\d) \* .* = (\d+)(?:, left \d+)?$", steps, re.MULTILINE)
    assert int("".join(d for d, _ in digits)) == quotient and digits[-1][1] == "0"
    for left, right in EQUATION.findall(steps):
        assert "/" in left or eval(left) == int(right), steps


@pytest.mark.parametrize("task", ["arithmetic", "larger"])
def test_the_size_of_the_numbers_is_that_of_the_task(task: str) -> None:
    for seed in range(500):
        op, a, b = GENERATORS[task](Random(seed), 0).key.split()
        sizes = (int(a) // int(b), int(b)) if op == "div" else (int(a), int(b))
        assert (max(sizes) > 99) is (task == "larger")


def test_calls_fit_the_schema_that_is_shown() -> None:
    for seed in range(400):
        sample = tools.tool_call(Random(seed), 0)
        assert isinstance(sample.wants, Call)
        shown = {tool["function"]["name"]: tool["function"]["parameters"] for tool in sample.tools}
        assert len(shown) == len(sample.tools)
        assert fits(shown[sample.wants.name], sample.wants.arguments), sample
        question = sample.messages[0]["content"]
        for value in sample.wants.arguments.values():
            for item in value if isinstance(value, list) else [value]:
                assert isinstance(item, bool) or str(item) in question, sample


@pytest.mark.parametrize(("task", "size"), [(t, n) for t in ("lookup", "needle") for n in (200, 1000, 4000)])
def test_a_conversation_is_about_as_long_as_it_was_wished(task: str, size: int) -> None:
    renderer = Renderer()
    lengths = [len(renderer.render(draw_task(Random(seed), task, "train", size)).ids) for seed in range(12)]
    assert size * 0.4 < sum(lengths) / 12 < size * 1.1 + 130, lengths
    assert max(lengths) < size * 1.5 + 200, lengths


def test_the_key_of_a_list_names_its_question() -> None:
    samples: list[Sample] = [draw_task(Random(seed), "lookup", "train", 150) for seed in range(50)]
    assert len({sample.key for sample in samples}) == 50

"""What is trained on is what the server sends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from random import Random

import jinja2
import pytest

from strata.bench.demo_pack.data.mixture import TASKS, draw, draw_task
from strata.bench.demo_pack.data.sample import Sample, assistant, user
from strata.bench.demo_pack.rendering import Renderer
from strata.bench.demo_pack.tokenizer import chat_template
from strata.server.chat.messages import hide_old_reasoning, normal_messages


def samples() -> Iterator[Sample]:
    yield from (draw_task(Random(i), task, "train", 200) for i, task in enumerate(TASKS * 4))
    yield from (draw(Random(i), "train", 300) for i in range(150))


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer()


def test_the_prompt_of_a_request_is_where_its_answer_begins_in_training(renderer: Renderer) -> None:
    """Slow path: the server's prompt for each answer, one by one."""
    for sample in samples():
        ids, mask = renderer.render(sample)
        last_user = max(i for i, message in enumerate(sample.messages) if message["role"] == "user")
        for i in range(last_user + 1, len(sample.messages)):
            if sample.messages[i]["role"] != "assistant":
                continue
            prompt = renderer.prompt(sample, i).ids
            assert ids[: len(prompt)] == prompt, sample
            assert not mask[len(prompt) - 1] and mask[len(prompt)], sample
        assert mask[-1] and ids[-1] == renderer.vocabulary.special["<|im_end|>"]


def test_only_what_an_assistant_writes_is_learned(renderer: Renderer) -> None:
    for sample in samples():
        ids, mask = renderer.render(sample)
        learned = renderer.vocabulary.decode(token for token, is_target in zip(ids, mask, strict=True) if is_target)
        last_user = max(i for i, message in enumerate(sample.messages) if message["role"] == "user")
        wanted = []
        for i, message in enumerate(sample.messages):
            if message["role"] != "assistant" or (i < last_user and "reasoning_content" in message):
                continue
            wanted.append(f"{message['reasoning_content']}\n</think>\n\n" if "reasoning_content" in message else "")
            wanted.append(message["content"])
            for call in message.get("tool_calls", ()):
                wanted.append(f"<tool_call>\n<function={call['function']['name']}>\n")
                for name, value in call["function"]["arguments"].items():
                    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
                    wanted.append(f"<parameter={name}>\n{text}\n</parameter>\n")
                wanted.append("</function>\n</tool_call>")
        assert learned == "".join(wanted), sample


def test_hidden_reasoning_of_an_earlier_turn_is_not_learned_as_silence(renderer: Renderer) -> None:
    messages = [user("2 + 2"), assistant("4", "two and two"), user("3 + 3"), assistant("6", "three and three")]
    ids, mask = renderer.render(Sample("arithmetic", "", messages))
    learned = [token for token, is_target in zip(ids, mask, strict=True) if is_target]
    assert renderer.vocabulary.decode(learned) == "three and three\n</think>\n\n6"


def test_an_answer_that_does_not_fit_its_thinking_is_refused(renderer: Renderer) -> None:
    with pytest.raises(ValueError, match="goes with thinking"):
        renderer.render(Sample("talk", "k", [user("a"), assistant("b")], thinking=True))
    with pytest.raises(ValueError, match="begins with white space"):
        renderer.render(Sample("talk", "k", [user("a"), assistant("b", "\nwell")], thinking=True))


def test_another_renderer_writes_the_same_prompt(renderer: Renderer) -> None:
    """One that neither trims blocks nor drops the line break that ends a file."""
    plain = jinja2.Environment(keep_trailing_newline=True)
    plain.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    template = plain.from_string(chat_template())
    for sample in samples():
        messages = hide_old_reasoning(normal_messages(sample.messages[:-1]))
        text = template.render(
            messages=messages, tools=sample.tools or None, add_generation_prompt=True, enable_thinking=sample.thinking
        )
        assert text == renderer.prompt(sample).text

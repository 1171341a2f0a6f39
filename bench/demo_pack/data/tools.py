"""Tools, requests for one of them, its call, and the answer from its result.

A tool's description, the names of its arguments and their order change from sample to sample, and beside it stand up to
three other tools, so that the schema has to be read.
"""

from __future__ import annotations

import json
from random import Random
from typing import Any

from strata.bench.demo_pack.data.about import about
from strata.bench.demo_pack.data.arithmetic import arithmetic
from strata.bench.demo_pack.data.sample import Call, Sample, Value, assistant, user
from strata.bench.demo_pack.data.small_talk import greeting
from strata.bench.demo_pack.data.tool_kinds import KINDS, Parameter, ToolKind, made_kind

THINK = (
    "The tool {t} can do this. {a}.", "I can use {t} for that. {a}.", "This needs {t}. {a}.", "I call {t}. {a}.",
)  # fmt: skip


def _schema(parameter: Parameter, name: str) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": parameter.type}
    if parameter.type == "array":
        schema["items"] = {"type": "string"}
    if parameter.enum:
        schema["enum"] = list(parameter.enum)
    if parameter.about:
        schema["description"] = parameter.about
    return schema


class Shape:
    """One tool as a sample shows it: its names, and its JSON schema."""

    def __init__(self, rng: Random, kind: ToolKind) -> None:
        self.kind = kind
        self.name = rng.choice(kind.names)
        self.argument_names = {key: rng.choice(parameter.names) for key, parameter in kind.parameters.items()}
        keys = list(kind.parameters)
        if rng.random() < 0.3:
            rng.shuffle(keys)
        self.keys = keys
        described = rng.random() < 0.6
        properties = {}
        for key in keys:
            schema = _schema(kind.parameters[key], self.argument_names[key])
            if not described:
                schema.pop("description", None)
            properties[self.argument_names[key]] = schema
        function: dict[str, Any] = {"name": self.name}
        if rng.random() < 0.85:
            function["description"] = rng.choice(kind.about)
        function["parameters"] = {
            "type": "object", "properties": properties,
            "required": [self.argument_names[key] for key in keys if not kind.parameters[key].optional],
        }  # fmt: skip
        if not function["parameters"]["required"]:
            del function["parameters"]["required"]
        self.tool = {"type": "function", "function": function}

    def arguments(self, values: dict[str, Any]) -> dict[str, Any]:
        return {self.argument_names[key]: values[key] for key in self.keys if key in values}


def _shown(rng: Random, wanted: Shape | None) -> list[dict[str, Any]]:
    """The tools of a request in any order, the wanted one among them."""
    n = rng.choice((0, 0, 1, 2, 3)) if wanted else rng.choice((1, 1, 2, 3))
    others = [kind for kind in KINDS if (kind is not wanted.kind if wanted else not kind.calculates)]
    shapes = [Shape(rng, kind) for kind in rng.sample(others, n)]
    shapes = [shape for shape in shapes if wanted is None or shape.name != wanted.name]
    tools = [shape.tool for shape in shapes] + ([wanted.tool] if wanted else [])
    rng.shuffle(tools)
    return tools


def _named(arguments: dict[str, Any]) -> str:
    said = ", ".join(
        f"{key} is {value if isinstance(value, str) else json.dumps(value)}" for key, value in arguments.items()
    )
    return said or "It needs no arguments"


def call_message(name: str, arguments: dict[str, Any], reasoning: str | None) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return assistant("", reasoning) | {"tool_calls": [call]}


def tool_call(rng: Random, size: int) -> Sample:
    """A request that one tool fits; the answer is its call. Task "tools"."""
    kind = made_kind(rng) if rng.random() < 0.3 else rng.choice(KINDS)
    shape = Shape(rng, kind)
    question, values = kind.ask(rng)
    arguments = shape.arguments(values)
    thinking = rng.random() < 0.7
    reasoning = rng.choice(THINK).format(t=shape.name, a=_named(arguments)) if thinking else None
    messages = [user(question), call_message(shape.name, arguments, reasoning)]
    key = f"tools {shape.name} {question}"
    return Sample("tools", key, messages, Call(shape.name, arguments), _shown(rng, shape), thinking)


def tool_result(rng: Random, size: int) -> Sample:
    """The call, its result, and what is said of it. Task "results"."""
    kind = rng.choice([kind for kind in KINDS if kind.answer is not None])
    assert kind.answer is not None
    shape = Shape(rng, kind)
    question, values = kind.ask(rng)
    arguments = shape.arguments(values)
    result, answer, value = kind.answer(rng, values)
    thinking = rng.random() < 0.7
    reasoning = rng.choice(THINK).format(t=shape.name, a=_named(arguments)) if thinking else None
    messages = [
        user(question),
        call_message(shape.name, arguments, reasoning),
        {"role": "tool", "content": json.dumps(result, ensure_ascii=False) if not isinstance(result, str) else result},
        assistant(answer, "The tool has answered. I say what it found." if thinking else None),
    ]
    key = f"results {shape.name} {question} {result}"
    return Sample("results", key, messages, Value(value), _shown(rng, shape), thinking)


def tool_unused(rng: Random, size: int) -> Sample:
    """Tools are there, and the request needs none of them. Task "no_tool"."""
    other = rng.choice((greeting, greeting, about, arithmetic))(rng, size)
    *before, last = other.messages
    if "reasoning_content" in last:
        last = last | {"reasoning_content": "No tool is needed here. " + last["reasoning_content"]}
    return Sample("no_tool", f"no_tool {other.key}", [*before, last], None, _shown(rng, None), other.thinking)

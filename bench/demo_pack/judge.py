"""Whether an answer is right: an exact comparison of what it says with what its sample wants. Pure.

Errors   an answer that is wrong gets a reason, "" is right; nothing raises for what a model may write
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from strata.bench.demo_pack.data.sample import Call, Json, Number, Text, Value, Wants
from strata.server.chat.events import Content, EngineReason, Event, ToolArgs, ToolStart
from strata.server.chat.output import OutputParser
from strata.server.chat.template import Prompt
from strata.server.chat.vocabulary import Vocabulary

_NUMBER = re.compile(r"(?<![\w.])-?\d+")


class Answer(msgspec.Struct, frozen=True):
    """An answer as a client gets it. calls: (name, arguments as JSON text)."""

    content: str
    calls: tuple[tuple[str, str], ...] = ()
    finish: str = "stop"


def answer_of(vocabulary: Vocabulary, prompt: Prompt, tokens: Sequence[int], finish: EngineReason) -> Answer:
    """Through the server's output parser."""
    parser = OutputParser(
        vocabulary,
        tools=prompt.tools,
        starts_in_reasoning=prompt.starts_in_reasoning,
        forced_prefix=prompt.forced_prefix,
        repeat_stop_tokens=0,
    )
    events: list[Event] = [event for token in tokens for event in parser.push(token)]
    events += parser.finish(finish)
    names = [event.name for event in events if isinstance(event, ToolStart)]
    texts = [""] * len(names)
    for event in events:
        if isinstance(event, ToolArgs):
            texts[event.index] += event.piece
    content = "".join(event.text for event in events if isinstance(event, Content))
    assert parser.finished is not None
    return Answer(content, tuple(zip(names, texts, strict=True)), parser.finished.reason)


def fault(wants: Wants, answer: Answer) -> str:
    """Why the answer is wrong; "" when it is right."""
    if answer.finish not in ("stop", "tool_calls"):
        return f"did not end ({answer.finish})"
    if isinstance(wants, Call):
        return _call_fault(wants, answer)
    if answer.calls:
        return f"called {answer.calls[0][0]}"
    text = answer.content.strip()
    if isinstance(wants, Number):
        numbers = _NUMBER.findall(text.replace("−", "-"))
        return _same(int(numbers[-1]) if numbers else None, wants.value)
    if isinstance(wants, Text):
        return _same(text, wants.text.strip())
    if isinstance(wants, Json):
        return _same(_json(text), wants.value)
    return _value_fault(wants, text)


def _same(got: Any, wanted: Any) -> str:
    return "" if type(got) is type(wanted) and got == wanted else f"said {got!r}, wanted {wanted!r}"


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        return f"no JSON: {error}"


def _value_fault(wants: Value, text: str) -> str:
    if not _names(text, wants.value):
        return f"said {text!r}, wanted {wants.value!r}"
    wrong = next((other for other in wants.others if _names(text, other)), None)
    return f"also said {wrong!r}" if wrong is not None else ""


def _names(text: str, value: str) -> bool:
    """Whether the value stands in the text as a whole: 12 is not in 412, nor in 12.5."""
    return re.search(rf"(?<![\w-]){re.escape(value)}(?![\w-]|[.:]\d)", text) is not None


def _call_fault(wants: Call, answer: Answer) -> str:
    if len(answer.calls) != 1:
        return f"{len(answer.calls)} calls, said {answer.content.strip()!r}"
    name, text = answer.calls[0]
    return _same(name, wants.name) or _same(_json(text), wants.arguments)


_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "array": (list,),
    "object": (dict,), "null": (type(None),),
}  # fmt: skip


def fits(schema: Mapping[str, Any], value: Any) -> bool:
    """Whether a value fits a schema of the kind that tools have: type, enum, properties, required, items."""
    kind = schema.get("type")
    if kind is not None and (not isinstance(value, _TYPES[kind]) or (isinstance(value, bool) and kind != "boolean")):
        return False
    if "enum" in schema and value not in schema["enum"]:
        return False
    if isinstance(value, list):
        return all(fits(schema.get("items", {}), item) for item in value)
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        has_all = all(key in value for key in schema.get("required", ()))
        return has_all and all(key in properties and fits(properties[key], item) for key, item in value.items())
    return True


def is_valid_call(tools: Sequence[Mapping[str, Any]], answer: Answer) -> bool:
    """Whether every call of the answer, and there is one, is of a tool that was shown and fits its schema."""
    schemas = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in tools}
    return bool(answer.calls) and all(
        name in schemas and fits(schemas[name], _json(text)) for name, text in answer.calls
    )

"""Calls that are malformed, hostile, or typed by odd schemas."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strata.server.chat.events import Content, Event, ToolArgs, ToolEnd, ToolStart
from strata.server.chat.json_scanner import MAX_DEPTH, JsonFault, JsonScanner
from strata.server.chat.output import ContentParser, joined
from strata.server.chat.schema_types import ToolTypes


def read(text: str, schema: Any = None, *, by: int = 1) -> list[Event]:
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    parser = ContentParser(tools=tools, stop=[], forced_prefix="", new_id=lambda: "id")
    for at in range(0, len(text), by):
        parser.push(text[at : at + by])
    parser.finish()
    return joined(parser.events)


def xml(value: str) -> str:
    return f"<tool_call>\n<function=f>\n<parameter=p>\n{value}\n</parameter>\n</function>\n</tool_call>"


COLOUR = {"$defs": {"C": {"enum": ["red", "12"]}}, "properties": {"p": {"$ref": "#/$defs/C"}}}
LOOP = {"$defs": {"C": {"$ref": "#/$defs/C"}}, "properties": {"p": {"$ref": "#/$defs/C"}}}


@pytest.mark.parametrize(
    ("value", "schema", "expected"),
    [
        ("12", {"type": "string"}, "12"),
        ("12", {"type": "integer"}, 12),
        ("12", None, 12),
        ("12", {"anyOf": [{"type": "string"}, {"type": "null"}]}, "12"),
        ("null", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ("nullify", {"type": ["string", "null"]}, "nullify"),
        ("nul", {"type": ["null", "string"]}, "nul"),
        ("", {"type": ["null", "string"]}, ""),
        ("null", {"type": "string"}, "null"),
        ("null", {"type": "integer"}, None),
        ("12", {"type": ["string", "integer"]}, 12),
        ("12", {"type": ["string", "number"]}, 12),
        ("true", {"type": ["string", "integer"]}, "true"),
        ('"12"', {"type": ["string", "integer"]}, '"12"'),
        ('"12"', {"type": "integer"}, "12"),
        ("12", {"const": "12"}, "12"),
        ("12", {"oneOf": [{"enum": [1, 12]}, {"enum": ["a"]}]}, 12),
        ("12", {"allOf": [{"type": "string"}]}, "12"),
        (' {"a": [1, {"b": null}]} ', {"type": "object"}, {"a": [1, {"b": None}]}),
        ("{'a': 1}", {"type": "object"}, "{'a': 1}"),
        ("True", {"type": "boolean"}, "True"),
        ("NaN", {"type": "number"}, "NaN"),
        ("-Infinity", {"type": "number"}, "-Infinity"),
        ("1e400", {"type": "string"}, "1e400"),
        ("[" * 5000, {"type": "array"}, "[" * 5000),
        ("9" * 5000, {"type": "integer"}, "9" * 5000),
        ("", {"type": "integer"}, ""),
        ("a\n\n</parameter>\n", {"type": "string"}, "a\n\n</parameter>\n"),
        ("</parameter></parameter>", {"type": "string"}, "</parameter></parameter>"),
        ('"\\\x01\u2028é🙂', {"type": "string"}, '"\\\x01\u2028é🙂'),
    ],
)
def test_a_value_has_another_type_than_the_schema_says(value: str, schema: Any, expected: Any) -> None:
    for by in (1, 3, 1000):
        events = read(xml(value), {"properties": {"p": schema}}, by=by)
        assert [type(event) for event in events] == [ToolStart, ToolArgs, ToolEnd]
        assert repr(json.loads(events[1].piece)) == repr({"p": expected})  # type: ignore[union-attr]


def test_a_reference_in_a_schema_is_not_followed_or_followed_for_ever() -> None:
    assert read(xml("12"), COLOUR)[1] == ToolArgs(0, '{"p": "12"}')
    assert read(xml("12"), LOOP)[1] == ToolArgs(0, '{"p": 12}')
    wide = {"anyOf": [{"$ref": "#/$defs/C"}] * 3}
    assert read(xml("12"), {"$defs": {"C": wide}, "properties": {"p": wide}})[1] == ToolArgs(0, '{"p": 12}')


@pytest.mark.parametrize(
    "schema", [None, 3, [], {"properties": 3}, {"properties": {"p": 3}}, {"properties": {"p": {"type": 3}}}]
)
def test_a_nonsensical_schema_breaks_the_parser(schema: Any) -> None:
    assert read(xml("12"), schema)[1] == ToolArgs(0, '{"p": 12}')
    nested = {"properties": {"p": {"anyOf": 3, "enum": "x", "$ref": "elsewhere#/x"}}}
    assert ToolTypes([{"function": {"name": "f", "parameters": nested}}]).types("f", "p") == frozenset()


START = ToolStart(0, "id", "f")


@pytest.mark.parametrize(
    ("text", "events"),
    [
        # not a call: content
        ("<tool_call>", [Content("<tool_call>")]),
        ("<tool_call> is a tag", [Content("<tool_call> is a tag")]),
        ("<tool_call>\n<function=\n>", [Content("<tool_call>\n<function=\n>")]),
        ("<tool_call><function=>", [Content("<tool_call><function=>")]),
        ("<tool_call><function=" + "f" * 257 + ">x", [Content("<tool_call><function=" + "f" * 257 + ">x")]),
        ("<tool_call>" + " " * 1025 + "<function=f>", [Content("<tool_call>" + " " * 1025 + "<function=f>")]),
        ("<tool_call>{}</tool_call>", [Content("<tool_call>{}</tool_call>")]),
        ('<tool_call>{"name": 3}', [Content('<tool_call>{"name": 3}')]),
        ('<tool_call>{"name": ""}', [Content('<tool_call>{"name": ""}')]),
        ('<tool_call>{"a" 1}', [Content('<tool_call>{"a" 1}')]),
        ('<tool_call>{"a": "' + "x" * 1100, [Content('<tool_call>{"a": "' + "x" * 1100)]),
        ("<tool_call><tool_call><function=f></function></tool_call>", [Content("<tool_call>"), START, "{}", 0]),
        ('<tool_call>{"x<tool_call><function=f></function></tool_call>', None),
        # odd, but clear
        ("<tool_call><function=f></function></tool_call>", [START, "{}", 0]),
        ("<tool_call><function=f>\njunk\n</function></tool_call>", [START, "{}", 0]),
        ("<tool_call><function=f></tool_call>x", [START, "{}", 0, Content("x")]),
        ("<tool_call><function=f></function>x", [START, "{}", 0, Content("x")]),
        ("<tool_call><function=f></function></tool_call>\n\n x", [START, "{}", 0, Content("x")]),
        (
            "<tool_call><function=f></function><function=g><parameter=p>1</parameter></function></tool_call>",
            [START, "{}", 0, ToolStart(1, "id", "g"), ToolArgs(1, '{"p": 1}'), ToolEnd(1)],
        ),
        ("<tool_call><function=f></function><function=\n", [START, "{}", 0, Content("<function=\n")]),
        ('<tool_call>{"name": "f"}</tool_call>', [START, "{}", 0]),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', [START, "{}", 0]),
        (
            '<tool_call>{"name": "f", "arguments": {"a": "{"}, "arguments": {"b": 1}}</tool_call>',
            [START, '{"a": "{"}', 0],
        ),
        ('<tool_call>{"name": "f", "arguments": {"s": "a\nb\t"}}</tool_call>', [START, '{"s": "a\\nb\\t"}', 0]),
        ('<tool_call>{"name": "f", "parameters": "{}"} x', [START, "{}", 0, Content("x")]),
        # malformed after the start: never whole
        ("<tool_call><function=f><parameter=\n>1</parameter></function></tool_call>x", [START, Content("x")]),
        ("<tool_call><function=f><parameter=>1</parameter>", [START]),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>x', [START, Content("x")]),
        ('<tool_call>{"name": "f", "arguments": "no"}</tool_call>', [START]),
        ('<tool_call>{"name": "f", "arguments": "NaN"}</tool_call>', [START]),
        ('<tool_call>{"name": "f", "arguments": {"a": 01}}</tool_call>x', [START, '{"a": 01', Content("x")]),
        ('<tool_call>{"name": "f", "arguments": {"a": tru}}</tool_call>', [START, '{"a": tru']),
        ('<tool_call>{"name": "f", "arguments": {"a": "\\x"}}', [START, '{"a": "\\']),
        ('<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 300, None),
    ],
)
def test_a_malformed_call_is_delivered_as_whole_or_swallows_the_answer(text: str, events: Any) -> None:
    results = [read(text, by=by) for by in (1, 2, 7, 10_000)]
    assert all(result == results[0] for result in results)
    if events is not None:
        forms = {str: lambda piece: ToolArgs(0, piece), int: ToolEnd}
        assert results[0] == [forms.get(type(event), lambda same: same)(event) for event in events]


@pytest.mark.parametrize(
    "piece",
    [
        "<tool_call>",
        "<tool_call>{",
        '<tool_call>{"a":"',
        "<tool_call><function=f></function>",
        "</parameter>",
        "\n",
        "<",
    ],
)
@pytest.mark.parametrize("start", ["", "<tool_call><function=f><parameter=p>", "<tool_call><function=f></function>"])
def test_hostile_output_costs_more_than_its_length(piece: str, start: str) -> None:
    begun = time.process_time()
    read(start + piece * (100_000 // len(piece)), by=5)
    assert time.process_time() - begun < 3


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
JSON_LETTERS = st.text(alphabet='{}[]",:\\u0123eE+-.tfnrualse \n', max_size=12)


def scanned(text: str) -> tuple[str, bool]:
    """What the scanner makes of a text, and whether it is one whole value. An end mark ends a bare number."""
    scanner = JsonScanner()
    out = "".join(map(scanner.push, text))
    scanner.push(" ")
    return out, scanner.done


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(value=VALUES, at=st.integers(0, 40), insert=JSON_LETTERS, remove=st.integers(0, 3))
def test_text_is_taken_for_json_that_is_none_or_the_other_way_round(
    value: Any, at: int, insert: str, remove: int
) -> None:
    text = json.dumps(value)
    text = text[:at] + insert + text[at + remove :]
    try:
        json.loads(text, parse_constant=lambda word: 1 / 0, strict=False)
        valid = True
    except (ValueError, ZeroDivisionError):
        valid = False
    try:
        out, accepted = scanned(text)
    except JsonFault:
        out, accepted = "", False
    assert accepted == valid
    if accepted:
        assert repr(json.loads(out)) == repr(json.loads(text, strict=False))


def test_nesting_has_no_bound() -> None:
    assert scanned("[" * MAX_DEPTH + "]" * MAX_DEPTH)[1]
    with pytest.raises(JsonFault, match="nested deeper"):
        scanned("[" * (MAX_DEPTH + 1))

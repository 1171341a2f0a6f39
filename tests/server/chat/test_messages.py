"""What clients send is checked before a template sees it, and refused with the place of the fault."""

from __future__ import annotations

from typing import Any

import pytest

from strata.server.chat.errors import TemplateError
from strata.server.chat.messages import forced_tool, normal_messages, normal_tools

USER = {"role": "user", "content": "q"}


def call(**function: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": function}]}


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "messages: a list with at least one message"),
        ("hello", "messages: a list"),
        ({"role": "user"}, "messages: a list"),
        (["hello"], "messages[0]: an object"),
        ([USER, {"content": "x"}], "messages[1].role: 'None' is unknown; known: system, developer, user"),
        ([{"role": "critic", "content": "x"}], "messages[0].role: 'critic' is unknown"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role: \"['user']\" is unknown"),
        ([{"role": "user"}], "messages[0].content: a string or a list of parts"),
        ([{"role": "user", "content": None}], "messages[0].content: a string or a list of parts"),
        ([{"role": "assistant", "content": None}], "messages[0].content"),
        ([{"role": "tool", "tool_call_id": "1", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 7}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0]: a part of type 'text'"),
        ([{"role": "user", "content": [{"type": "audio"}]}], "messages[0].content[0]: a part of type 'text' with"),
        ([{"role": "user", "content": ["a", 1]}], "messages[0].content[1]"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "reads no pictures"),
        ([{"role": "user", "content": ""}], "messages: every message is empty"),
        ([{**USER, "role": "assistant", "tool_calls": "x"}], "messages[0].tool_calls: a list"),
        ([{**USER, "role": "assistant", "tool_calls": ["x"]}], "messages[0].tool_calls[0].function: an object"),
        ([call(arguments="{}")], "messages[0].tool_calls[0].function: an object with a name"),
        ([call(name="f", arguments="{")], "messages[0].tool_calls[0].function.arguments: not JSON"),
        ([call(name="f", arguments="[1]")], "messages[0].tool_calls[0].function.arguments: a JSON object"),
        ([call(name="f", arguments="[" * 100_000)], "messages[0].tool_calls[0].function.arguments: not JSON"),
        ([call(name="f", arguments=3)], "messages[0].tool_calls[0].function.arguments: a JSON object"),
    ],
)
def test_a_malformed_message_reaches_the_template(messages: Any, reason: str) -> None:
    with pytest.raises(TemplateError) as raised:
        normal_messages(messages)
    assert reason in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_template_gets_other_shapes_than_it_knows() -> None:
    turns = normal_messages(
        [
            {"role": "developer", "content": "S", "name": "boss"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, "b", {"type": "text", "text": "c"}], "x": 1},
            {**call(name="f", arguments='{"a": 1}'), "refusal": None},
            {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "r"}]},
            {"role": "system", "content": "late"},
            {"role": "assistant", "content": None, "reasoning_content": "why"},
            call(name="f", arguments={"b": 2}),
            call(name="f"),
        ]
    )
    f = {"id": "1", "type": "function"}
    assert turns == [
        {"role": "system", "content": "S", "name": "boss"},
        {"role": "user", "content": "abc"},
        {"role": "assistant", "content": "", "tool_calls": [{**f, "function": {"name": "f", "arguments": {"a": 1}}}]},
        {"role": "tool", "content": "r", "tool_call_id": "1"},
        {"role": "user", "content": "late"},
        {"role": "assistant", "content": "", "reasoning_content": "why"},
        {"role": "assistant", "content": "", "tool_calls": [{**f, "function": {"name": "f", "arguments": {"b": 2}}}]},
        {"role": "assistant", "content": "", "tool_calls": [{**f, "function": {"name": "f", "arguments": {}}}]},
    ]


def test_empty_turns_are_dropped_with_the_results_of_tools() -> None:
    empty = {"role": "user", "content": ""}
    result = {"role": "tool", "tool_call_id": "1", "content": ""}
    nothing = {"role": "assistant", "content": ""}
    assert normal_messages([empty, USER, nothing, result, call(name="f")]) == [
        USER,
        result,
        *normal_messages([call(name="f")]),
    ]
    assert normal_messages([empty, USER], keep_empty_turns=True) == [empty, USER]


@pytest.mark.parametrize(
    ("tools", "reason"),
    [
        ("f", "tools: a list"),
        (["f"], "tools[0]: an object"),
        ([{"type": "function"}], "tools[0]: an object with type 'function'"),
        ([{"type": "search", "function": {"name": "f"}}], "tools[0]: an object with type 'function'"),
        ([{"function": {}}], "tools[0].function.name"),
        ([{"function": {"name": "f"}}, {"function": {"name": ""}}], "tools[1].function.name"),
        ([{"function": {"name": "f>\n"}}], "tools[0].function.name"),
        ([{"function": {"name": "f" * 257}}], "tools[0].function.name: 1 to 256 characters"),
    ],
)
def test_a_tool_that_no_call_can_name_is_shown(tools: Any, reason: str) -> None:
    with pytest.raises(TemplateError) as raised:
        normal_tools(tools)
    assert reason in str(raised.value)


def test_an_impossible_tool_choice_is_ignored() -> None:
    assert forced_tool(None, []) is forced_tool("auto", ["f"]) is forced_tool("none", ["f"]) is None
    assert forced_tool("required", ["f"]) == forced_tool("any", ["f"]) == ""
    assert forced_tool({"type": "function", "function": {"name": "f"}}, ["f"]) == "f"
    for choice, reason in (
        ("required", "needs tools"),
        ("maybe", "'auto', 'none', 'required'"),
        ({"type": "function"}, "'auto', 'none', 'required'"),
        ({"function": {"name": "g"}}, "'g' is not among the tools"),
        (7, "'auto', 'none', 'required'"),
    ):
        with pytest.raises(TemplateError) as raised:
            forced_tool(choice, ["f"] if reason.startswith("'g") else [])  # type: ignore[arg-type]
        assert reason in str(raised.value)

"""Messages and tools as clients send them (OpenAI's shape), checked and brought into the one form templates get.

Input    a list of JSON objects; nothing about them is trusted
Output   role system (first message only) | user | assistant | tool; content always a string; tool calls with their
         arguments as objects; reasoning only where a template may show it
Errors   TemplateError with the place, as in "messages[3].content[0]: ..."
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from strata.server.chat.errors import TemplateError

Json = Mapping[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
PICTURES = ("image_url", "image", "input_image")


def normal_messages(messages: Sequence[Json], *, keep_empty_turns: bool = False) -> list[dict[str, Any]]:
    """The messages in template form. Raises TemplateError."""
    if not _is_list(messages) or not messages:
        raise TemplateError("messages: a list with at least one message is needed")
    turns: list[dict[str, Any]] = []
    for i, message in enumerate(messages):
        turn = _turn(message, f"messages[{i}]", first=i == 0)
        if keep_empty_turns or turn["role"] == "tool" or any(turn[key] for key in _SAYS if key in turn):
            turns.append(turn)
    if not turns:
        raise TemplateError("messages: every message is empty")
    return turns


_SAYS = ("content", "tool_calls", "reasoning_content")


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _turn(message: Any, place: str, *, first: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise TemplateError(f"{place}: an object is needed")
    role = message.get("role")
    if role not in ROLES:
        raise TemplateError(f"{place}.role: {str(role)[:40]!r} is unknown; known: {', '.join(ROLES)}")
    if role in ("system", "developer"):
        role = "system" if first else "user"
    turn: dict[str, Any] = {"role": role}
    if role == "assistant":
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        if isinstance(reasoning, str) and reasoning:
            turn["reasoning_content"] = reasoning
        calls = _tool_calls(message.get("tool_calls"), f"{place}.tool_calls")
        if calls:
            turn["tool_calls"] = calls
    for key in ("name", "tool_call_id"):
        if isinstance(message.get(key), str):
            turn[key] = message[key]
    may_be_null = "tool_calls" in turn or "reasoning_content" in turn
    turn["content"] = _content(message.get("content"), f"{place}.content", may_be_null=may_be_null)
    return turn


def _content(content: Any, place: str, *, may_be_null: bool) -> str:
    if isinstance(content, str):
        return content
    if content is None and may_be_null:
        return ""
    if not _is_list(content):
        raise TemplateError(f"{place}: a string or a list of parts is needed")
    return "".join(_part(part, f"{place}[{i}]") for i, part in enumerate(content))


def _part(part: Any, place: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        text: str = part["text"]
        return text
    if kind in PICTURES:
        raise TemplateError(f"{place}: this server reads no pictures; send text parts only")
    raise TemplateError(f"{place}: a part of type 'text' with a text is needed, not {str(kind)[:40]!r}")


def _tool_calls(calls: Any, place: str) -> list[dict[str, Any]]:
    if calls is None:
        return []
    if not _is_list(calls):
        raise TemplateError(f"{place}: a list is needed")
    return [_tool_call(call, f"{place}[{i}]") for i, call in enumerate(calls)]


def _tool_call(call: Any, place: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise TemplateError(f"{place}.function: an object with a name is needed")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            raise TemplateError(f"{place}.function.arguments: not JSON: {error}") from error
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        raise TemplateError(f"{place}.function.arguments: a JSON object is needed")
    normal = {"type": "function", "function": {"name": function["name"], "arguments": dict(arguments)}}
    return {"id": call["id"], **normal} if isinstance(call.get("id"), str) else normal


def hide_old_reasoning(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without the reasoning of assistant turns before the last user turn; a tool loop keeps its own."""
    last_user = max((i for i, turn in enumerate(turns) if turn["role"] == "user"), default=-1)
    return [
        {key: value for key, value in turn.items() if key != "reasoning_content"} if i < last_user else turn
        for i, turn in enumerate(turns)
    ]


def normal_tools(tools: Sequence[Json] | None) -> list[dict[str, Any]]:
    """The tools, each `{"type": "function", "function": {"name": ..., ...}}`. Raises TemplateError."""
    if tools is None:
        return []
    if not _is_list(tools):
        raise TemplateError("tools: a list is needed")
    normal = []
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or tool.get("type", "function") != "function":
            raise TemplateError(f"tools[{i}]: an object with type 'function' and a function is needed")
        name = function.get("name")
        if not isinstance(name, str) or not is_tool_name(name):
            raise TemplateError(
                f"tools[{i}].function.name: 1 to {MAX_NAME} characters without spaces, quotes, < or > are needed"
            )
        normal.append({"type": "function", "function": dict(function)})
    return normal


MAX_NAME = 256


def is_tool_name(name: str) -> bool:
    """Whether the call format can carry the name."""
    return 0 < len(name) <= MAX_NAME and not any(letter.isspace() or letter in "<>\"'" for letter in name)


def forced_tool(tool_choice: str | Json | None, names: Sequence[str]) -> str | None:
    """None: the model is free. "": it must call some tool. Else the name of the tool it must call.

    `tool_choice`: None, "auto", "none", "required" ("any"), or {"type": "function", "function": {"name": ..}}.
    """
    if tool_choice in (None, "auto", "none"):
        return None
    if tool_choice in ("required", "any"):
        if not names:
            raise TemplateError(f"tool_choice: {tool_choice!r} needs tools")
        return ""
    function = tool_choice.get("function") if isinstance(tool_choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise TemplateError("tool_choice: 'auto', 'none', 'required' or a named function is needed")
    if name not in names:
        raise TemplateError(f"tool_choice: the function {name[:80]!r} is not among the tools")
    return name

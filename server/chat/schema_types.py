"""Which JSON types a tool's schema allows for a parameter, for reading values that were written as plain text.

Understands type (a name or a list), anyOf, oneOf, allOf, enum, const and references into the same schema. Everything
else says nothing. Bounded by MAX_DEPTH, whatever the references do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

MAX_DEPTH = 8


class ToolTypes:
    """types(tool, parameter) of the tools of one request; empty when the schema says nothing."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._schemas: dict[str, Any] = {}
        for tool in tools:
            function = tool["function"]
            self._schemas[function["name"]] = function.get("parameters")

    def types(self, tool: str, parameter: str) -> frozenset[str]:
        root = self._schemas.get(tool)
        schema: Any = root
        for key in ("properties", parameter):
            schema = schema.get(key) if isinstance(schema, Mapping) else None
        return frozenset(_types(schema, root, MAX_DEPTH))


def _types(schema: Any, root: Any, depth: int) -> set[str]:
    if not isinstance(schema, Mapping) or depth == 0:
        return set()
    named = schema.get("type")
    if isinstance(named, str):
        return {named}
    if isinstance(named, list):
        return {name for name in named if isinstance(name, str)}
    if isinstance(schema.get("$ref"), str):
        return _types(_referred(schema["$ref"], root), root, depth - 1)
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    if values:
        return {type_name(value) for value in values}
    found: set[str] = set()
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(key), list):
            for option in schema[key]:
                found |= _types(option, root, depth - 1)
    return found


def _referred(reference: str, root: Any) -> Any:
    """The schema at a reference such as "#/$defs/Colour"."""
    head, *path = reference.split("/")
    schema = root if head == "#" else None
    for key in path:
        schema = schema.get(key) if isinstance(schema, Mapping) else None
    return schema


def type_name(value: Any) -> str:
    """The JSON type of a parsed value; whole numbers are integers."""
    if value is None:
        return "null"
    for kind, name in ((bool, "boolean"), (str, "string"), (int, "integer"), (float, "number"), (list, "array")):
        if isinstance(value, kind):
            return name
    return "object"

"""Reads one <tool_call> block of the output and streams its calls.

Forms     <function=NAME> <parameter=P> VALUE </parameter> ... </function>   and   {"name": NAME, "arguments": {...}}
Events    ToolStart when the name is complete; ToolArgs pieces whose concatenation is one JSON object; ToolEnd at
          </tool_call>. A block that is cut off leaves its arguments unclosed and gets no ToolEnd
Values    in the first form: one line break removed on each side, then by the tool's schema: text for strings, else
          JSON, else text. </parameter> ends a value only before <parameter= or </function>, so values may contain it
No call   text after <tool_call> that is neither form is given back (`rejected`), to be sent as content
Errors    none: a call that turns out malformed after its start is dropped up to </tool_call> and never ends
"""

from __future__ import annotations

import json
from collections.abc import Callable

from strata.server.chat.events import Event, ToolArgs, ToolEnd, ToolStart
from strata.server.chat.json_scanner import JsonFault, JsonScanner
from strata.server.chat.messages import MAX_NAME
from strata.server.chat.schema_types import ToolTypes, type_name
from strata.server.chat.stream import Finder

CALL, CALL_END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
SPACE = " \t\r\n"
MAX_OPENING = 1024  # characters in which a call must have said its name


def _may_become(text: str, *words: str) -> bool:
    """Whether `text` is the beginning of one of the words, but not yet the whole of it."""
    return any(len(text) < len(word) and word.startswith(text) for word in words)


class Call:
    """The events of one call, for both forms."""

    def __init__(self, events: list[Event], index: int, new_id: Callable[[], str]) -> None:
        self._events = events
        self._index = index
        self._new_id = new_id
        self._last = "{}"  # what is missing from the arguments so far
        self.name: str | None = None

    def start(self, name: str) -> None:
        self.name = name
        self._events.append(ToolStart(self._index, self._new_id(), name))

    def arguments(self, piece: str) -> None:
        """A piece of the arguments object without its closing brace."""
        self._last = "}"
        if piece:
            self._events.append(ToolArgs(self._index, piece))

    def end(self) -> None:
        self._events.append(ToolArgs(self._index, self._last))
        self._events.append(ToolEnd(self._index))


class ToolBlock:
    """push(text) -> None while the block goes on, else the text after it. `events` is for the owner to empty."""

    def __init__(self, types: ToolTypes, first_index: int, new_id: Callable[[], str]) -> None:
        self.events: list[Event] = []
        self.rejected = False
        self.n_started = 0
        self.n_ended = 0
        self._types = types
        self._first_index = first_index
        self._new_id = new_id
        self._held = ""
        self._reader: _XmlReader | _JsonReader
        self._call: Call
        self._skip = Finder([CALL_END])
        self._step: Callable[[str], str | None] | None = self._opening

    def push(self, text: str) -> str | None:
        rest: str | None = text
        while rest is not None and self._step is not None:
            rest = self._step(rest)
        return rest

    def finish(self) -> str:
        """The output ends inside the block: what was held back, when no call began."""
        self.rejected = self.n_started == 0
        if self._step == self._opening or (self._step == self._read and self._call.name is None):
            return self._held
        return ""

    def _opening(self, text: str) -> str | None:
        self._held += text
        body = self._held.lstrip(SPACE)
        if len(self._held) - len(body) > MAX_OPENING:
            return self._reject()
        if not body or _may_become(body, FUNCTION):
            return None
        self._call = Call(self.events, self._first_index + self.n_started, self._new_id)
        if body[0] == "{":
            self._reader = _JsonReader(self._call)
            self._held = self._held[: -len(body)]
            self._step = self._read
            return body
        if not body.startswith(FUNCTION):
            return self._reject()
        name, closed, rest = body[len(FUNCTION) :].partition(">")
        if len(name) > MAX_NAME or "\n" in name or (closed and not name):
            return self._reject()
        if not closed:
            return None
        self._call.start(name)
        self.n_started += 1
        self._reader = _XmlReader(self._call, lambda parameter: self._types.types(name, parameter))
        self._held = ""
        self._step = self._read
        return rest

    def _reject(self) -> str:
        self._step = None
        self.rejected = self.n_started == 0
        return self._held

    def _read(self, text: str) -> str | None:
        named = self._call.name is not None
        if not named:
            self._held += text
        rest = self._reader.push(text)
        if not named and self._call.name is not None:
            self.n_started += 1
            self._held = ""
        if rest is None:
            return None
        if not self._reader.broken:
            self._held = ""
            self._step = self._after
        elif self._call.name is None:
            return self._reject()
        else:
            self._step = self._broken
        return rest

    def _after(self, text: str) -> str | None:
        """The call is complete; what follows decides where the block ends."""
        self._held = body = (self._held + text).lstrip(SPACE)
        if not body or _may_become(body, CALL_END, FUNCTION):
            return None
        self._call.end()
        self.n_ended += 1
        self._held = ""
        if body.startswith(FUNCTION):
            self._step = self._opening
            return body
        self._step = None
        return body.removeprefix(CALL_END)

    def _broken(self, text: str) -> str | None:
        found = self._skip.push(text)
        if found.word is None:
            return None
        self._step = None
        return found.rest


class _XmlReader:
    """From after <function=NAME> to after </function>."""

    def __init__(self, call: Call, types: Callable[[str], frozenset[str]]) -> None:
        self.broken = False
        self._call = call
        self._types = types
        self._n_values = 0
        self._held = ""
        self._between_words = Finder([PARAMETER, FUNCTION_END, CALL_END])
        self._value_end = Finder(["\n" + PARAMETER_END, PARAMETER_END])
        self._end_word = ""
        self._value: _Value
        self._at_first = False
        self._step: Callable[[str], str | None] | None = self._between

    def push(self, text: str) -> str | None:
        rest: str | None = text
        while rest is not None and self._step is not None:
            rest = self._step(rest)
        return rest

    def _between(self, text: str) -> str | None:
        found = self._between_words.push(text)
        if found.word is None:
            return None
        if found.word == PARAMETER:
            self._held = ""
            self._step = self._name
            return found.rest
        self._step = None
        return found.rest if found.word == FUNCTION_END else CALL_END + found.rest

    def _name(self, text: str) -> str | None:
        self._held += text
        name, closed, rest = self._held.partition(">")
        if len(name) > MAX_NAME or "\n" in name or (closed and not name):
            self.broken = True
            self._step = None
            return self._held
        if not closed:
            return None
        self._call.arguments(("{" if self._n_values == 0 else ", ") + json.dumps(name, ensure_ascii=False) + ": ")
        self._n_values += 1
        self._value = _Value(self._call, self._types(name))
        self._at_first = True
        self._step = self._in_value
        return rest

    def _in_value(self, text: str) -> str | None:
        if self._at_first and text:
            self._at_first = False
            text = text.removeprefix("\n")
        found = self._value_end.push(text)
        self._value.add(found.before)
        if found.word is None:
            return None
        self._end_word = found.word
        self._held = ""
        self._step = self._ending
        return found.rest

    def _ending(self, text: str) -> str | None:
        self._held += text
        body = self._held.lstrip(SPACE)
        if not body or _may_become(body, PARAMETER, FUNCTION_END):
            return None
        for word, step in ((PARAMETER, self._name), (FUNCTION_END, None)):
            if body.startswith(word):
                self._value.end()
                self._held = ""
                self._step = step
                return body[len(word) :]
        self._value.add(self._end_word)
        self._step = self._in_value
        return self._held


class _Value:
    """One value: streamed as a JSON string where the schema says string, else kept until it is complete."""

    def __init__(self, call: Call, types: frozenset[str]) -> None:
        self._call = call
        self._types = types
        self._streams = types == {"string"}
        self._kept: list[str] = []
        self._maybe_null = types == {"string", "null"}
        if self._streams:
            self._call.arguments('"')

    def add(self, text: str) -> None:
        if not text:
            return
        if self._streams:
            self._call.arguments(_escaped(text))
            return
        self._kept.append(text)
        if self._maybe_null and not "null".startswith("".join(self._kept)):
            self._streams = True
            self._call.arguments('"' + _escaped("".join(self._kept)))

    def end(self) -> None:
        self._call.arguments('"' if self._streams else self._as_json("".join(self._kept)))

    def _as_json(self, text: str) -> str:
        """`text` itself where it is JSON that the schema does not call a string, else a JSON string of it."""
        try:
            value = json.loads(text, parse_constant=_no_constant)
        except (ValueError, RecursionError):
            return f'"{_escaped(text)}"'
        name = type_name(value)
        others = self._types - {"string"}
        if "string" in self._types and name not in others and not (name == "integer" and "number" in others):
            return f'"{_escaped(text)}"'
        return text.strip(SPACE)


def _no_constant(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


class _JsonReader:
    """One object with a name and arguments. Arguments that come after the name are streamed as the model writes them.

    The last brace of the arguments is left to `Call.end`, so that a block that is cut off has none.
    """

    def __init__(self, call: Call) -> None:
        self.broken = False
        self._call = call
        self._scanner = JsonScanner()
        self._n_letters = 0
        self._text: list[str] = []  # the key or value at the top level that is being read
        self._key = ""
        self._kept: str | None = None  # arguments that came before the name
        self._has_arguments = False
        self._streams = False

    def push(self, text: str) -> str | None:
        for i, letter in enumerate(text):
            if self._scanner.done:
                return text[i:]
            try:
                self._letter(letter)
            except JsonFault:
                self.broken = True
                return text[i:]
        return "" if self._scanner.done else None

    def _letter(self, letter: str) -> None:
        scanner = self._scanner
        depth, wants = scanner.depth, scanner.wants
        out = scanner.push(letter)
        self._n_letters += 1
        if self._call.name is None and self._n_letters > MAX_OPENING:
            raise JsonFault("no name")
        if self._streams:
            self._streams = scanner.depth > 1
            self._call.arguments(out if self._streams else "")
        elif depth < scanner.depth == 2 and letter == "{" and self._is_arguments and self._call.name is not None:
            self._streams = self._has_arguments = True
            self._call.arguments(out)
        elif scanner.done or (scanner.depth == 1 and scanner.wants == "key" != wants):
            self._member(self._key, self._taken())
            if scanner.done and self._call.name is None:
                raise JsonFault("no name")
        elif depth == 1 and scanner.wants == "colon":
            if wants != "colon":
                self._text.append(out)
                self._key = json.loads(self._taken())
        elif depth and not (depth == 1 and wants == "colon"):
            self._text.append(out)

    @property
    def _is_arguments(self) -> bool:
        return self._key in ("arguments", "parameters") and not self._has_arguments

    def _taken(self) -> str:
        text = "".join(self._text)
        self._text = []
        return text

    def _member(self, key: str, text: str) -> None:
        """A member of the object is complete, its value as JSON text."""
        if key == "name" and self._call.name is None:
            name = json.loads(text)
            if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
                raise JsonFault("a name is a string")
            self._call.start(name)
            if self._kept is not None:
                self._whole_arguments(self._kept)
        elif self._is_arguments:
            if self._call.name is None:
                self._kept = text
            else:
                self._whole_arguments(text)

    def _whole_arguments(self, text: str) -> None:
        """Arguments that were not streamed: before the name, or an object that is written inside a string."""
        self._has_arguments = True
        try:
            value = json.loads(text)
            if isinstance(value, str):
                text = value
                value = json.loads(text, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise JsonFault("arguments that are no JSON") from error
        if isinstance(value, dict):
            self._call.arguments(text.strip(SPACE)[:-1])
        elif value is not None:
            raise JsonFault("arguments are an object")

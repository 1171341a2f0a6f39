"""The events of an answer: the same for every cut into tokens, and the same as reading the whole text at once."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from strata.server.chat.errors import RequestError
from strata.server.chat.events import (
    Content,
    Event,
    Finish,
    Looped,
    Reasoning,
    Stopped,
    ToolArgs,
    ToolEnd,
    ToolStart,
)
from strata.server.chat.output import ContentParser, OutputParser, RepeatDetector, joined, new_call_id
from strata.server.chat.reasoning import ReasoningSplit
from strata.server.chat.vocabulary import Vocabulary

PROPERTIES = {"s": {"type": "string"}, "n": {"type": "integer"}, "o": {"type": ["string", "null"]}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"properties": PROPERTIES}}}]
Cut = Callable[[str, int], list[int]]


def parsed(vocabulary: Vocabulary, ids: Sequence[int], end: Any = "stop", **options: Any) -> tuple[list[Event], Finish]:
    parser = OutputParser(vocabulary, **{"tools": TOOLS, "new_id": lambda: "id", "repeat_stop_tokens": 0, **options})
    events = [event for token in ids for event in parser.push(token)] + parser.finish(end)
    assert parser.finished is not None
    return joined(events), parser.finished


# ---------------------------------------------------------------- a second parser, over the whole text

SPACE = r"[ \t\r\n]"
OPENING = re.compile(rf"{SPACE}*<function=([^>\n]{{1,256}})>")
VALUE_END = re.compile(rf"\n?</parameter>(?={SPACE}*(?:<parameter=|</function>))")
NEXT_PART = re.compile(r"<parameter=|</function>|(?=</tool_call>)")


def escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def held_back(text: str) -> int:
    """How many characters at the end of an open value may still be the end of it."""
    for at in range(len(text)):
        end = text[at:]
        for word in ("\n</parameter>", "</parameter>"):
            body = end[len(word) :].lstrip(" \t\r\n")
            if word.startswith(end) or (
                end.startswith(word) and any(next_word.startswith(body) for next_word in ("<parameter=", "</function>"))
            ):
                return len(end)
    return 0


def value_json(parameter: str, text: str) -> str:
    if parameter == "f.s" or (parameter == "f.o" and text != "null"):
        return f'"{escaped(text)}"'
    try:
        json.loads(text, parse_constant=lambda word: 1 / 0)
    except (ValueError, ZeroDivisionError):
        return f'"{escaped(text)}"'
    return text.strip(" \t\r\n")


class Reference:
    """Reads the whole text with regular expressions. The JSON form of calls is not its business."""

    def __init__(self, stop: list[str]) -> None:
        self.stop = stop
        self.events: list[Event] = []
        self.n_calls = 0
        self.all_whole = True

    def answer(self, text: str) -> Finish:
        while True:
            words = [*self.stop, "<tool_call>"]
            hits = [(text.find(word), len(word), word) for word in words if word in text]
            if not hits:
                self.events.append(Content(text))
                return Finish("tool_calls" if self.n_calls and self.all_whole else "stop")
            at, _, word = min(hits)
            self.events.append(Content(text[:at]))
            if word in self.stop:
                self.events.append(Stopped(word))
                return Finish("stop_string", word)
            rest = text[at + len(word) :]
            opening = OPENING.match(rest)
            if opening is None:
                self.events.append(Content(word))
                text = rest
            else:
                text = self.block(rest, opening)

    def block(self, rest: str, opening: re.Match[str] | None) -> str:
        """The calls of one block; returns the content after it."""
        while opening is not None:
            index = self.n_calls
            self.n_calls += 1
            self.events.append(ToolStart(index, "id", opening[1]))
            arguments, after, whole = self.arguments(opening[1], rest[opening.end() :])
            self.events.append(ToolArgs(index, arguments))
            following = after.lstrip(" \t\r\n")
            undecided = any(word != following and word.startswith(following) for word in ("</tool_call>", "<function="))
            if not whole or undecided:
                self.all_whole = False
                return after.partition("</tool_call>")[2] if "</tool_call>" in after else ""
            self.events += [ToolArgs(index, "}" if arguments else "{}"), ToolEnd(index)]
            if following.startswith("</tool_call>"):
                return following.removeprefix("</tool_call>").lstrip(" \t\r\n")
            if not following.startswith("<function="):
                return following
            opening = OPENING.match(following)
            if opening is None:
                return following
            rest = following
        return rest

    def arguments(self, tool: str, text: str) -> tuple[str, str, bool]:
        """(what of the arguments is certain, without the closing brace; the text after </function>; whole)"""
        out = ""
        while True:
            part = NEXT_PART.search(text)
            if part is None:
                return out, "", False
            text = text[part.end() :]
            if part[0] != "<parameter=":
                return out, text, True
            name = re.match(r"([^>\n]{1,256})>\n?", text)
            if name is None:
                return out, text, False
            out += (", " if out else "{") + json.dumps(name[1], ensure_ascii=False) + ": "
            text = text[name.end() :]
            end = VALUE_END.search(text)
            if end is not None:
                out += value_json(f"{tool}.{name[1]}", text[: end.start()])
                text = text[end.end() :]
                continue
            text = text[: len(text) - held_back(text)]
            if tool == "f" and (name[1] == "s" or (name[1] == "o" and not "null".startswith(text))):
                out += '"' + escaped(text)
            return out, "", False


def reference(text: str, *, thinks: bool, stop: list[str]) -> tuple[list[Event], Finish]:
    lead = re.match(r"\n{0,2}<think>\n*", text)
    reasoning = ""
    if thinks or lead:
        reasoning, closed, text = text[lead.end() if lead and not thinks else 0 :].partition("</think>")
        text = text.lstrip("\n")
        if not closed:
            return [Reasoning(reasoning)] if reasoning else [], Finish("stop")
    reader = Reference(stop)
    finish = reader.answer(text)
    events = [event for event in reader.events if event not in (Content(""),) and getattr(event, "piece", "x")]
    return joined([Reasoning(reasoning), *events] if reasoning else events), finish


# ---------------------------------------------------------------- answers to read

PIECES = ["<tool_call>", "</tool_call>", "<function=f>", "<function=", "</function>", "<parameter=s>", "<parameter=n>"]
PIECES += ["<parameter=o>", "<parameter=", "</parameter>", "\n", "\n\n", " ", "x", ">", "12", "null", "</think>", "<"]
PIECES += [
    "<think>",
    "é🙂",
    '"',
    "\\",
    "\x01",
    "STOP",
    "TOP",
    "</",
    "[1]",
    "<tool_call>\n<function=f>\n<parameter=s>\n",
]
NOISE = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)
VALUE = st.lists(st.sampled_from(PIECES[9:]), max_size=4).map("".join)


@st.composite
def xml_call(draw: st.DrawFn) -> str:
    parameters = draw(st.lists(st.tuples(st.sampled_from("snoz"), VALUE), max_size=3))
    body = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in parameters)
    return f"<tool_call>\n<function={draw(st.sampled_from(['f', 'other']))}>\n{body}</function>\n</tool_call>"


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(st.text(max_size=4), JSON_VALUES, max_size=3)
ANSWERS = st.lists(st.one_of(NOISE, xml_call(), st.just("\n")), max_size=4).map("".join)


@st.composite
def json_call(draw: st.DrawFn) -> tuple[str, str, dict[str, Any]]:
    """A call in JSON form: its text, its name, its arguments."""
    name, arguments = draw(st.text(min_size=1, max_size=6)), draw(ARGUMENTS)
    separators = draw(st.sampled_from([None, (",", ":"), (" ,\n", " : ")]))
    ascii_only = draw(st.booleans())
    members: list[tuple[str, Any]] = [("name", name), ("arguments", arguments)]
    if draw(st.booleans()):
        members[1] = ("arguments", json.dumps(arguments))
    members.insert(draw(st.integers(0, 2)), ("x", draw(JSON_VALUES)))
    if draw(st.booleans()):
        members.reverse()
    text = json.dumps(dict(members), separators=separators, ensure_ascii=ascii_only)
    return f"<tool_call>\n{text}\n</tool_call>", name, arguments


STOPS = st.lists(st.sampled_from(["STOP", "TOP", "x", "\n\n", "12<", "</"]), max_size=2, unique=True)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(text=ANSWERS, stop=STOPS, thinks=st.booleans(), seed=st.integers(0, 2**32))
def test_a_whole_text_reading_gives_other_events(
    vocabulary: Vocabulary, cut: Cut, text: str, stop: list[str], thinks: bool, seed: int
) -> None:
    events, finish = parsed(vocabulary, cut(text, seed), stop=stop, starts_in_reasoning=thinks)
    expected, ending = reference(text, thinks=thinks, stop=stop)
    assert events == expected
    assert finish == ending


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    parts=st.lists(st.one_of(NOISE, xml_call(), json_call().map(lambda call: call[0])), max_size=3),
    end=st.integers(0, 60),
    stop=STOPS,
    thinks=st.booleans(),
    seeds=st.tuples(st.integers(0, 2**32), st.integers(0, 2**32)),
)
def test_the_cut_into_tokens_changes_the_events(
    vocabulary: Vocabulary, cut: Cut, parts: list[str], end: int, stop: list[str], thinks: bool, seeds: tuple[int, int]
) -> None:
    text = "".join(parts)[: -end or None]
    options = {"stop": stop, "starts_in_reasoning": thinks}
    results = [parsed(vocabulary, cut(text, seed), **options) for seed in seeds]
    split = ReasoningSplit(starts_in_reasoning=thinks)
    answer = ContentParser(tools=TOOLS, stop=stop, forced_prefix="", new_id=lambda: "id")
    whole: list[Event] = []
    for reasoning, said in (split.push(text), split.finish()):
        whole.append(Reasoning(reasoning))
        answer.push(said)
    answer.finish()
    whole = [event for event in joined([*whole, *answer.events]) if event != Reasoning("")]
    assert results[0] == results[1]
    assert results[0][0] == whole


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    calls=st.lists(json_call(), min_size=1, max_size=3), gap=st.sampled_from(["", "\n", " \n\n"]), seed=st.integers()
)
def test_a_call_in_json_form_loses_its_arguments(
    vocabulary: Vocabulary, cut: Cut, calls: list[tuple[str, str, dict[str, Any]]], gap: str, seed: int
) -> None:
    events, finish = parsed(vocabulary, cut("Hm. " + gap.join(text for text, _, _ in calls) + gap, seed))
    assert events[0] == Content("Hm. ")
    assert [type(event) for event in events[1:]] == [ToolStart, ToolArgs, ToolEnd] * len(calls)
    for i, (_, name, arguments) in enumerate(calls):
        start, args, end = events[1 + 3 * i : 4 + 3 * i]
        assert start == ToolStart(i, "id", name)
        assert isinstance(args, ToolArgs) and args.index == i
        assert repr(json.loads(args.piece)) == repr(arguments)
        assert end == ToolEnd(i)
    assert finish == Finish("tool_calls")


XML_VALUES = "<parameter=s>\na\n</parameter>\n<parameter=n>\n[1]\n</parameter>\n"
XML_CALL = f"<tool_call>\n<function=f>\n{XML_VALUES}</function>\n</tool_call>"
JSON_CALL = '<tool_call>\n{"name": "f", "arguments": {"s": "a", "n": [1]}}\n</tool_call>'


@pytest.mark.parametrize("call", [XML_CALL, JSON_CALL])
@pytest.mark.parametrize("end", ["stop", "length", "cancel"])
def test_a_call_that_was_cut_off_is_delivered_as_whole(vocabulary: Vocabulary, cut: Cut, call: str, end: str) -> None:
    for at in range(len(call)):
        events, finish = parsed(vocabulary, cut(call[:at], at), end)
        assert finish == Finish(end)  # type: ignore[arg-type]
        assert not any(isinstance(event, ToolEnd) for event in events)
        for args in events:
            if isinstance(args, ToolArgs):
                with pytest.raises(ValueError):
                    json.loads(args.piece)
    events, finish = parsed(vocabulary, cut(call, 0), end)
    assert events == [ToolStart(0, "id", "f"), ToolArgs(0, '{"s": "a", "n": [1]}'), ToolEnd(0)]
    assert finish == Finish("tool_calls" if end == "stop" else end)  # type: ignore[arg-type]


def test_the_name_or_the_arguments_wait_for_the_end_of_the_call(vocabulary: Vocabulary, cut: Cut) -> None:
    xml = (
        "<tool_call>\n<function=f>",
        "\n<parameter=s>",
        "\nab",
        "c\nd\n</para",
        "x</parameter>\n<parameter=n>",
        "\n12",
    )
    xml_args = ("", '{"s": "', "ab", "c\\nd", '\\n</parax", "n": ', "")
    obj = ('<tool_call>\n{"name": "f",', ' "arguments": {', '"s": "a', '\\n", "n": [1', "]}", "}\n")
    obj_args = ("", "{", '"s": "a', '\\n", "n": [1', "]", "")
    for pieces, arguments in ((xml, xml_args), (obj, obj_args)):
        parser = OutputParser(vocabulary, tools=TOOLS, new_id=lambda: "id")
        for i, (piece, expected) in enumerate(zip(pieces, arguments, strict=True)):
            events = joined([event for token in cut(piece, 0) for event in parser.push(token)])
            assert events == ([ToolStart(0, "id", "f")] if i == 0 else [ToolArgs(0, expected)] if expected else [])


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet="ab<|im_end|>\n", max_size=20), seed=st.integers())
def test_more_content_is_held_back_than_may_begin_a_marker(
    vocabulary: Vocabulary, cut: Cut, text: str, seed: int
) -> None:
    parser = OutputParser(vocabulary, tools=TOOLS)
    sent = "".join(event.text for token in cut("x" + text, seed) for event in parser.push(token))  # type: ignore[union-attr]
    assert ("x" + text).removeprefix(sent) in ("", "<")


def test_tool_calls_are_made_for_a_client_that_sent_no_tools(vocabulary: Vocabulary) -> None:
    events, finish = parsed(vocabulary, vocabulary.encode(XML_CALL), tools=[])
    assert events == [Content(XML_CALL)]
    assert finish == Finish("stop")


def test_stop_strings_match_in_reasoning_or_in_a_call(vocabulary: Vocabulary) -> None:
    text = "a STOP</think>\n\nb" + XML_CALL.replace("\na\n", "\nSTOP\n") + "\n c STOP d"
    events, finish = parsed(vocabulary, vocabulary.encode(text), stop="STOP", starts_in_reasoning=True)
    assert events == [
        Reasoning("a STOP"),
        Content("b"),
        ToolStart(0, "id", "f"),
        ToolArgs(0, '{"s": "STOP", "n": [1]}'),
        ToolEnd(0),
        Content("c "),
        Stopped("STOP"),
    ]
    assert finish == Finish("stop_string", "STOP")


def test_the_marker_of_a_call_is_not_taken_as_a_stop_string(vocabulary: Vocabulary) -> None:
    events, finish = parsed(vocabulary, vocabulary.encode("a" + XML_CALL), stop=["<tool_call>"])
    assert (events, finish) == ([Content("a"), Stopped("<tool_call>")], Finish("stop_string", "<tool_call>"))


def test_something_is_delivered_after_a_stop_string(vocabulary: Vocabulary) -> None:
    parser = OutputParser(vocabulary, stop=["b"])
    assert parser.push(vocabulary.encode("b")[0]) == [Stopped("b")]
    assert parser.ended
    assert parser.push(vocabulary.encode("c")[0]) == []
    assert parser.finish("cancel") == []
    assert parser.finished == Finish("stop_string", "b")


def test_a_stop_string_that_is_still_open_at_the_end_is_lost(vocabulary: Vocabulary) -> None:
    events, finish = parsed(vocabulary, vocabulary.encode_plain("abc"), "length", stop=["abcd", "bc"], tools=[])
    assert events == [Content("a"), Stopped("bc")]
    assert finish == Finish("stop_string", "bc")
    events, finish = parsed(vocabulary, vocabulary.encode_plain("abc"), "length", stop=["abcd"], tools=[])
    assert (events, finish) == ([Content("abc")], Finish("length"))


@pytest.mark.parametrize("form", ["token", "text"])
def test_thinking_ends_only_at_one_form_of_the_marker(vocabulary: Vocabulary, form: str) -> None:
    close = vocabulary.encode("</think>") if form == "token" else vocabulary.encode_plain("</think>")
    ids = [*vocabulary.encode_plain("hm\n"), *close, *vocabulary.encode_plain("\n\n\nyes\n")]
    assert parsed(vocabulary, ids, starts_in_reasoning=True)[0] == [Reasoning("hm\n"), Content("yes\n")]


@pytest.mark.parametrize(
    ("text", "events"),
    [
        ("<think>\na</think>\nb", [Reasoning("a"), Content("b")]),
        ("\n\n<think>a</think>b<think>c</think>", [Reasoning("a"), Content("b<think>c</think>")]),
        ("\n\n\n<think>a</think>", [Content("\n\n\n<think>a</think>")]),
        ("<think>a", [Reasoning("a")]),
        ("\n<thin", [Content("\n<thin")]),
        ("a</think>b", [Content("a</think>b")]),
        ("", []),
        ("\n", [Content("\n")]),
    ],
)
def test_a_leading_think_block_is_content_when_thinking_is_off(
    vocabulary: Vocabulary, cut: Cut, text: str, events: list[Event]
) -> None:
    for seed in range(8):
        assert parsed(vocabulary, cut(text, seed)) == (events, Finish("stop"))


def test_reasoning_tokens_are_miscounted(vocabulary: Vocabulary) -> None:
    parser = OutputParser(vocabulary, starts_in_reasoning=True)
    inside = [*vocabulary.encode("one two"), *vocabulary.encode("</think>")]
    for token in [*inside, *vocabulary.encode("\n\nthree")]:
        parser.push(token)
    assert parser.n_reasoning_tokens == len(inside)
    assert not parser.in_reasoning


@pytest.mark.parametrize(
    ("prefix", "text", "events", "finish"),
    [
        ("<tool_call>\n<function", "=f>\n</function>\n</tool_call>", [ToolArgs(0, "{}"), ToolEnd(0)], "tool_calls"),
        ("<tool_call>\n<function=f>\n", "</function></tool_call>", [ToolArgs(0, "{}"), ToolEnd(0)], "tool_calls"),
        ('<tool_call>\n{"name": "', 'f"}\n</tool_call>', [ToolArgs(0, "{}"), ToolEnd(0)], "tool_calls"),
        ('<tool_call>\n{"name": "f", "arguments":', ' {"a":1', [ToolArgs(0, '{"a":1')], "stop"),
    ],
)
def test_a_call_that_the_server_opened_is_not_recognised(
    vocabulary: Vocabulary, prefix: str, text: str, events: list[Event], finish: Any
) -> None:
    found = parsed(vocabulary, vocabulary.encode(text), forced_prefix=prefix)
    assert found == ([ToolStart(0, "id", "f"), *events], Finish(finish))


@pytest.mark.parametrize("prefix", ["<tool_call>\n<function", '<tool_call>\n{"name": "'])
def test_the_servers_own_opening_is_delivered_as_content(vocabulary: Vocabulary, prefix: str) -> None:
    text = " I would \nrather not <tool_call>"
    events, finish = parsed(vocabulary, vocabulary.encode(text), forced_prefix=prefix)
    assert (events, finish) == ([Content(text)], Finish("stop"))


@settings(max_examples=100, deadline=None)
@given(
    before=st.lists(st.integers(0, 9), max_size=20),
    cycle=st.lists(st.integers(0, 3), min_size=1, max_size=6),
    limit=st.integers(24, 60),
)
@example(before=[], cycle=[1], limit=24)
def test_a_loop_goes_on_or_an_ordinary_text_is_taken_for_one(before: list[int], cycle: list[int], limit: int) -> None:
    tokens = [*before, *(cycle * limit)][: len(before) + limit + 20]

    def loops(end: int) -> bool:
        last = tokens[max(0, end - limit) : end]
        return len(last) == limit and any(last[n:] == last[:-n] for n in range(1, limit // 4 + 1))

    detector = RepeatDetector(limit)
    said = [detector.push(token) for token in tokens]
    assert said == [loops(end) for end in range(1, len(tokens) + 1)]
    assert said[len(before) + limit - 1]


def test_a_loop_is_finished_as_stop_or_still_delivered(vocabulary: Vocabulary) -> None:
    parser = OutputParser(vocabulary, repeat_stop_tokens=8)
    ids = [*vocabulary.encode_plain("a"), *vocabulary.encode_plain("b")] * 10
    events = [event for token in ids for event in parser.push(token)]
    assert joined(events) == [Content("abababab"), Looped(8)]
    assert parser.ended
    assert parser.finish("cancel") == []
    assert parser.finished == Finish("length")
    off = OutputParser(vocabulary, repeat_stop_tokens=0)
    assert sum(len(event.text) for token in ids for event in off.push(token)) == 20  # type: ignore[union-attr]


def test_call_ids_have_the_wrong_form_or_repeat(vocabulary: Vocabulary) -> None:
    ids = {new_call_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(re.fullmatch("call_[0-9a-f]{24}", call_id) for call_id in ids)


def test_stop_strings_without_bound_are_taken(vocabulary: Vocabulary) -> None:
    with pytest.raises(RequestError, match="the limit is"):
        OutputParser(vocabulary, stop=["x" * 100_000])

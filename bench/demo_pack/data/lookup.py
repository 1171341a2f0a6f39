"""Records in a list, and a question about a field of one; a sentence with a secret in a long text.

Sizes    a record has 8 to 30 tokens, a list as many records as the size asks for, up to the whole context
Turns    several questions about one list in one conversation; those before the last are answered without thinking.
         "lookups" is for learning alone: a question is a hundredth of a long list, and a row that holds few of them
         teaches little
"""

from __future__ import annotations

import json
from random import Random
from typing import Any, NamedTuple

from strata.bench.demo_pack.data import words
from strata.bench.demo_pack.data.prose import sentence
from strata.bench.demo_pack.data.record_kinds import KINDS, Kind, Record, made_kind
from strata.bench.demo_pack.data.sample import Sample, Value, assistant, user

CHARS_PER_TOKEN = 1.95
"""Of names, numbers and the marks between them."""


GENERIC = (
    "What is the {f} of {k}?", "Find the {f} of {k}.", "Which {f} does {k} have?", "What {f} does {k} have?",
    "{f} of {k}?",
    "Look up the {f} of {k}.", "Tell me the {f} of {k}.", "What does the list say about the {f} of {k}?",
    "I need the {f} of {k}.",
    "Can you find the {f} for {k}?", "what's the {f} of {k}", "Give me {k}'s {f}.", "What is {k}'s {f}?",
)  # fmt: skip

INTRO = (
    "Here is a list of {t}:\n{l}\n\n{q}", "{l}\n\n{q}", "{q}\n\n{l}", "List of {t}:\n\n{l}\n\n{q}",
    "Look at these {t}.\n{l}\n{q}",
    "Use this list to answer: {q}\n\n{l}", "I have the following {t}:\n{l}\n\nQuestion: {q}", "Records:\n{l}\n\n{q}",
)  # fmt: skip
SEVERAL = (
    "{f} of {k}?", "Find the {f} of each of these: {k}.", "Give me the {f} of {k}.", "The {f} of these, please: {k}",
    "Which {f} do they have: {k}?", "Look up the {f} for {k}.", "I need the {f} of each: {k}", "{k}: which {f}?",
)  # fmt: skip
LINE = (
    "Show the line of {k}.", "Repeat the line of {k}.", "What is the line of {k}?", "The whole line of {k}, please.",
    "Copy the record of {k}.", "How does the line of {k} read?",
)  # fmt: skip
WHOLE = (
    "Tell me all about {k}.", "Everything about {k}, please.", "What does the list say about {k}?",
    "What is written about {k}?",
)  # fmt: skip
TURNS = (1, 1, 1, 2, 4, 8, 12)
TURN_TOKENS = 35
"""Of a further question and its answer."""
TURN_MARKS = 16
"""Of these, what stands around their words,"""
CHARS_PER_WORD_TOKEN = 2.6
"""and the length of a token of the words."""
MOST_AT_ONCE = 6
SAY = ("{v}", "{v}", "The {f} of {k} is {v}.", "The {f} of {k} is {v}.", "{k}: {v}", "It is {v}.", "{v}.")


class Asked(NamedTuple):
    """A question for a field of a record, which it calls by its key or a part of it."""

    record: Record
    field: str
    called: str
    question: str

    @property
    def value(self) -> str:
        return self.record[self.field]


def _line(style: str, record: Record) -> str:
    values = list(record.values())
    if style == "colon":
        return f"{values[0]}: " + ", ".join(values[1:])
    if style == "fields":
        return f"- {values[0]}: " + ", ".join(f"{name} {value}" for name, value in list(record.items())[1:])
    if style == "csv":
        return ",".join(values)
    if style == "table":
        return "| " + " | ".join(values) + " |"
    if style == "json":
        return json.dumps(record)
    return f"{values[0]} - " + " - ".join(values[1:])


def _style(rng: Random, kind: Kind) -> str:
    several = len(kind.ask) > 1
    return rng.choice(
        ("fields", "csv", "table", "json", "fields") if several else ("colon", "colon", "dash", "json", "csv")
    )


def _head(style: str, record: Record) -> list[str]:
    """What stands before the records of a table or a CSV file."""
    if style == "csv":
        return [",".join(record)]
    return ["| " + " | ".join(record) + " |", "|" + " --- |" * len(record)] if style == "table" else []


def _records(rng: Random, kind: Kind, style: str, size: int) -> list[Record]:
    """Records whose lines have about `size` tokens together, each key once."""
    by_key: dict[str, Record] = {}
    left = size * CHARS_PER_TOKEN
    while len(by_key) < 2 or left > 0:
        record = kind.make(rng)
        left -= len(_line(style, record)) + 1
        by_key.setdefault(_key(record), record)
    return list(by_key.values())


def _question(rng: Random, kind: Kind, field: str, key: str) -> str:
    own = kind.ask[field]
    text = rng.choice(own if own and rng.random() < 0.55 else GENERIC).format(f=field, k=key)
    return text[0].upper() + text[1:] if rng.random() < 0.8 else text


def _reasoning(rng: Random, style: str, asked: Asked) -> str:
    """The line is said again; where it does not name its fields, they are named up to the one that is asked for."""
    line = _line(style, asked.record)
    text = rng.choice(("I look for {}.\nThe line: {}", "The record of {} is: {}")).format(asked.called, line)
    if style in ("csv", "table"):
        named = []
        for name, value in asked.record.items():
            named.append(f"{name} {value}")
            if name == asked.field:
                break
        text += "\nThat is " + ", ".join(named) + "."
    return f"{text}\nThe {asked.field} is {asked.value}."


def _asked(rng: Random, kind: Kind, records: list[Record]) -> Asked:
    record = rng.choice(records)
    field = rng.choice(list(kind.ask))
    called = _called(rng, records, _key(record))
    return Asked(record, field, called, _question(rng, kind, field, called))


def _called(rng: Random, records: list[Record], key: str) -> str:
    """The key, or the first name alone where it is the only one."""
    first, _, rest = key.partition(" ")
    if not rest or first not in words.FIRST_NAMES or rng.random() < 0.8:
        return key
    alike = sum(_key(record).startswith(f"{first} ") for record in records)
    return first if alike == 1 else key


def lookup(rng: Random, size: int) -> Sample:
    """One to twelve questions about one list; the last one is judged. Task "lookup"."""
    kind, style = _list_kind(rng)
    n_questions = min(rng.choice(TURNS), 1 + size // 100)
    records = _records(rng, kind, style, size - 60 - TURN_TOKENS * (n_questions - 1))
    thinking = rng.random() < 0.45
    messages = []
    for number in range(n_questions):
        asked = _asked(rng, kind, records)
        text = _introduced(rng, kind, style, records, asked.question) if number == 0 else asked.question
        thinks = thinking and number == n_questions - 1
        messages += [user(text), _answered(asked, rng.choice(SAY), _reasoning(rng, style, asked) if thinks else None)]
    return _sample("lookup", style, records, messages, asked, thinking)


def lookups(rng: Random, size: int) -> Sample:
    """One list, and questions in a sixth to four tenths of the conversation; a question may be for several records or
    a whole one. The last is one as "lookup" has it. Task "lookups"."""
    kind, style = _list_kind(rng)
    left = size * rng.uniform(0.15, 0.4)
    records = _records(rng, kind, style, int(size - 60 - left))
    thinking, say = rng.random() < 0.5, rng.choice(SAY)
    messages: list[dict[str, Any]] = []
    while left > TURN_TOKENS:
        question, answer = _turn(rng, kind, style, records, say)
        left -= TURN_MARKS + (len(question) + len(answer)) / CHARS_PER_WORD_TOKEN
        messages += [user(question), assistant(answer)]
    asked = _asked(rng, kind, records)
    reasoning = _reasoning(rng, style, asked) if thinking else None
    messages += [user(asked.question), _answered(asked, say, reasoning)]
    messages[0] = user(_introduced(rng, kind, style, records, messages[0]["content"]))
    return _sample("lookups", style, records, messages, asked, thinking)


def _turn(rng: Random, kind: Kind, style: str, records: list[Record], say: str) -> tuple[str, str]:
    """A question of "lookups" and its answer."""
    way = rng.random()
    if way < 0.55:
        asked = _asked(rng, kind, records)
        return asked.question, say.format(v=asked.value, f=asked.field, k=asked.called)
    if way < 0.8:
        found = rng.sample(records, min(rng.randint(2, MOST_AT_ONCE), len(records)))
        field = rng.choice(list(kind.ask))
        keys, values = [_key(record) for record in found], [record[field] for record in found]
        pairs = "\n".join(f"{key}: {value}" for key, value in zip(keys, values, strict=True))
        return rng.choice(SEVERAL).format(f=field, k=words.listed(keys)), rng.choice((pairs, words.listed(values)))
    record = rng.choice(records)
    if way < 0.92:
        return rng.choice(LINE).format(k=_key(record)), _line(style, record)
    return rng.choice(WHOLE).format(k=_key(record)), ", ".join(f"{name} {value}" for name, value in record.items())


def _list_kind(rng: Random) -> tuple[Kind, str]:
    kind = made_kind(rng) if rng.random() < 0.35 else KINDS[rng.choice(list(KINDS))]
    return kind, _style(rng, kind)


def _key(record: Record) -> str:
    return next(iter(record.values()))


def _introduced(rng: Random, kind: Kind, style: str, records: list[Record], question: str) -> str:
    """The list with its first question."""
    lines = _head(style, records[0]) + [_line(style, record) for record in records]
    return rng.choice(INTRO).format(t=kind.title, l="\n".join(lines), q=question)


def _answered(asked: Asked, say: str, reasoning: str | None) -> dict[str, Any]:
    return assistant(say.format(v=asked.value, f=asked.field, k=asked.called), reasoning)


def _sample(
    task: str, style: str, records: list[Record], messages: list[dict[str, Any]], asked: Asked, thinking: bool
) -> Sample:
    key, answer = _key(asked.record), messages[-1]["content"]
    others = (v for f, v in asked.record.items() if f != asked.field and v != key and v not in answer)
    problem = "\n".join(_line(style, record) for record in records) + f"\n{key} {asked.field}"
    return Sample(task, f"lookup {problem}", messages, Value(asked.value, tuple(others)), thinking=thinking)


SECRETS = (
    ("The secret word of {k} is {v}.", ("What is the secret word of {k}?", "Which secret word does {k} have?")),
    (
        "The key of {k} opens door {v}.",
        ("Which door does the key of {k} open?", "What door is opened by the key of {k}?"),
    ),
    ("{k} wrote down the number {v}.", ("Which number did {k} write down?", "What number was written down by {k}?")),
    ("The password for {k} is {v}.", ("What is the password for {k}?", "Tell me the password for {k}.")),
)


def needle(rng: Random, size: int) -> Sample:
    """Up to three secrets in a story of `size` tokens, and a question for one. Task "needle"."""
    n = max(3, (size - 60) * 2 // 17)  # a sentence has between 8 and 9 tokens
    lines = [sentence(rng) for _ in range(n)]
    found = []
    names = list(dict.fromkeys(words.full_name(rng) for _ in range(3)))
    for name in names[: rng.randint(1, 3)]:
        said, asks = rng.choice(SECRETS)
        value = rng.choice((words.code(rng), words.made_word(rng), str(rng.randint(10, 9999))))
        line = said.format(k=name, v=value)
        lines.insert(rng.randint(0, len(lines)), line)
        found.append((name, value, line, asks))
    name, value, line, asks = rng.choice(found)
    question = rng.choice(asks).format(k=name)
    text = " ".join(lines)
    form = rng.choice(("{t}\n\n{q}", "{q}\n\n{t}", "Read this text:\n{t}\n\n{q}", "Text:\n{t}\n\nQuestion: {q}"))
    thinking = rng.random() < 0.5
    reasoning = f"I look for {name}.\nThe text says: {line}\nSo it is {value}." if thinking else None
    messages = [
        user(form.format(t=text, q=question)),
        assistant(rng.choice(("{v}", "{v}", "It is {v}.")).format(v=value), reasoning),
    ]
    return Sample("needle", f"needle {text}\n{question}", messages, Value(value), thinking=thinking)

"""Records in a list, and a question about a field of one; a sentence with a secret in a long text.

Sizes    a record has 8 to 30 tokens, a list as many records as the size asks for, up to the whole context
Turns    several questions about one list in one conversation, so that a long list teaches more than one answer; those
         before the last are answered without thinking
"""

from __future__ import annotations

import json
from random import Random

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
TURNS = (1, 1, 1, 2, 4, 8, 12)
TURN_TOKENS = 35
"""Of a further question and its answer."""
SAY = ("{v}", "{v}", "The {f} of {k} is {v}.", "The {f} of {k} is {v}.", "{k}: {v}", "It is {v}.", "{v}.")


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
        by_key.setdefault(next(iter(record.values())), record)
    return list(by_key.values())


def _question(rng: Random, kind: Kind, field: str, key: str) -> str:
    own = kind.ask[field]
    text = rng.choice(own if own and rng.random() < 0.55 else GENERIC).format(f=field, k=key)
    return text[0].upper() + text[1:] if rng.random() < 0.8 else text


def _reasoning(rng: Random, style: str, record: Record, field: str, called: str) -> str:
    """The line is said again; where it does not name its fields, they are named up to the one that is asked for."""
    text = rng.choice(("I look for {}.\nThe line: {}", "The record of {} is: {}")).format(called, _line(style, record))
    if style in ("csv", "table"):
        named = []
        for name, value in record.items():
            named.append(f"{name} {value}")
            if name == field:
                break
        text += "\nThat is " + ", ".join(named) + "."
    return f"{text}\nThe {field} is {record[field]}."


def _called(rng: Random, records: list[Record], key: str) -> str:
    """The key, or the first name alone where it is the only one."""
    first, _, rest = key.partition(" ")
    if not rest or first not in words.FIRST_NAMES or rng.random() < 0.8:
        return key
    alike = sum(next(iter(record.values())).startswith(f"{first} ") for record in records)
    return first if alike == 1 else key


def lookup(rng: Random, size: int) -> Sample:
    """One to twelve questions about one list; the last one is judged. Task "lookup"."""
    kind = made_kind(rng) if rng.random() < 0.35 else KINDS[rng.choice(list(KINDS))]
    style = _style(rng, kind)
    n_questions = min(rng.choice(TURNS), 1 + size // 100)
    records = _records(rng, kind, style, size - 60 - TURN_TOKENS * (n_questions - 1))
    body = [_line(style, record) for record in records]
    lines = _head(style, records[0]) + body
    thinking = rng.random() < 0.45
    messages = []
    for number in range(n_questions):
        record = rng.choice(records)
        key, *_ = record.values()
        field = rng.choice(list(kind.ask))
        called = _called(rng, records, key)
        question = _question(rng, kind, field, called)
        text = rng.choice(INTRO).format(t=kind.title, l="\n".join(lines), q=question) if number == 0 else question
        answer = rng.choice(SAY).format(v=record[field], f=field, k=called)
        thinks = thinking and number == n_questions - 1
        messages += [user(text), assistant(answer, _reasoning(rng, style, record, field, called) if thinks else None)]
    others = tuple(v for f, v in record.items() if f != field and v != key and v not in answer)
    problem = "\n".join(body) + f"\n{key} {field}"
    return Sample("lookup", f"lookup {problem}", messages, Value(record[field], others), thinking=thinking)


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

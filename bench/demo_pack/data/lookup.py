"""Records in a list, and a question about a field of one; a sentence with a secret in a long text.

Sizes    a record has 8 to 30 tokens, a list as many records as the size asks for, up to the whole context
Turns    several questions about one list in one conversation, so that a long list teaches more than one answer
"""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import NamedTuple

from strata.bench.demo_pack.data import words
from strata.bench.demo_pack.data.prose import sentence
from strata.bench.demo_pack.data.sample import Sample, Value, assistant, user

Record = dict[str, str]
CHARS_PER_TOKEN = 1.95
"""Of names, numbers and the marks between them."""


class Kind(NamedTuple):
    """One kind of list. The first field is the key; `ask` maps a field to questions, `say` to answers."""

    title: str
    make: Callable[[Random], Record]
    ask: dict[str, tuple[str, ...]]


MEETINGS = ("meeting", "party", "concert", "lecture", "market", "race", "dinner")


def _person(rng: Random) -> Record:
    return {
        "name": words.full_name(rng), "city": rng.choice(words.CITIES), "job": rng.choice(words.JOBS),
        "room": str(rng.randint(100, 999)),
    }  # fmt: skip


def _item(rng: Random) -> Record:
    return {
        "item": words.two_words(rng), "price": words.price(rng), "stock": str(rng.randint(0, 500)),
        "shelf": f"{rng.choice(words.LETTERS)}{rng.randint(1, 40)}",
    }  # fmt: skip


def _code(rng: Random) -> Record:
    key = words.two_words(rng) if rng.random() < 0.5 else words.made_word(rng)
    return {"key": key, "code": words.code(rng)}


def _phone(rng: Random) -> Record:
    return {"name": words.full_name(rng), "phone": f"{rng.randint(100, 999)}-{rng.randint(1000, 9999)}"}


def _event(rng: Random) -> Record:
    return {
        "event": f"{rng.choice(words.ADJECTIVES)} {rng.choice(MEETINGS)} {rng.randint(1, 99)}",
        "date": words.date(rng), "time": words.clock(rng), "place": rng.choice(words.CITIES),
    }  # fmt: skip


GENERIC = (
    "What is the {f} of {k}?", "Find the {f} of {k}.", "Which {f} does {k} have?", "What {f} does {k} have?",
    "{f} of {k}?",
    "Look up the {f} of {k}.", "Tell me the {f} of {k}.", "What does the list say about the {f} of {k}?",
    "I need the {f} of {k}.",
    "Can you find the {f} for {k}?", "what's the {f} of {k}", "Give me {k}'s {f}.", "What is {k}'s {f}?",
)  # fmt: skip

KINDS = {
    "people": Kind("people", _person, {
        "city": ("Where does {k} live?", "In which city does {k} live?", "Which city is {k} from?"),
        "job": ("What does {k} do?", "What is {k}'s job?", "What does {k} work as?"),
        "room": ("Which room is {k} in?", "In which room can I find {k}?", "What is the room number of {k}?"),
    }),
    "items": Kind("items", _item, {
        "price": ("How much does the {k} cost?", "What does the {k} cost?", "What is the price of the {k}?"),
        "stock": ("How many of the {k} are in stock?", "How many {k} are there?"),
        "shelf": ("On which shelf is the {k}?", "Where is the {k}?"),
    }),
    "codes": Kind("codes", _code, {
        "code": ("What is the code for {k}?", "Which code belongs to {k}?", "code for {k}?", "What's the code of {k}?"),
    }),
    "phones": Kind("phone numbers", _phone, {
        "phone": ("What is the phone number of {k}?", "How can I call {k}?", "What number does {k} have?"),
    }),
    "events": Kind("events", _event, {
        "date": ("When is the {k}?", "On which date is the {k}?", "What day is the {k}?"),
        "time": ("At what time is the {k}?", "When does the {k} start?"),
        "place": ("Where is the {k}?", "In which city is the {k}?"),
    }),
}  # fmt: skip

INTRO = (
    "Here is a list of {t}:\n{l}\n\n{q}", "{l}\n\n{q}", "{q}\n\n{l}", "List of {t}:\n\n{l}\n\n{q}",
    "Look at these {t}.\n{l}\n{q}",
    "Use this list to answer: {q}\n\n{l}", "I have the following {t}:\n{l}\n\nQuestion: {q}", "Records:\n{l}\n\n{q}",
)  # fmt: skip
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
    texts = kind.ask[field] if rng.random() < 0.55 else GENERIC
    text = rng.choice(texts).format(f=field, k=key)
    return text[0].upper() + text[1:] if rng.random() < 0.8 else text


def _reasoning(rng: Random, line: str, field: str, key: str, value: str) -> str:
    return rng.choice(
        (
            f"I look for {key}.\nThe line: {line}\nThe {field} is {value}.",
            f"The record of {key} is: {line}\nSo the {field} is {value}.",
        )
    )


def lookup(rng: Random, size: int) -> Sample:
    """One to six questions about one list; the last one is judged. Task "lookup"."""
    kind = KINDS[rng.choice(list(KINDS))]
    style = _style(rng, kind)
    records = _records(rng, kind, style, size - 60)
    body = [_line(style, record) for record in records]
    lines = _head(style, records[0]) + body
    thinking = rng.random() < 0.45
    n_questions = rng.choice((1, 1, 2) if thinking else (1, 2, 4, 6))
    messages = []
    for number in range(n_questions):
        at = rng.randrange(len(records))
        key, *_ = records[at].values()
        field = rng.choice(list(kind.ask))
        value = records[at][field]
        question = _question(rng, kind, field, key)
        text = rng.choice(INTRO).format(t=kind.title, l="\n".join(lines), q=question) if number == 0 else question
        reasoning = _reasoning(rng, body[at], field, key, value) if thinking else None
        messages += [user(text), assistant(rng.choice(SAY).format(v=value, f=field, k=key), reasoning)]
    problem = "\n".join(body) + f"\n{key} {field}"
    return Sample("lookup", f"lookup {problem}", messages, Value(value), thinking=thinking)


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
    n = max(3, min(400, (size - 60) // 11))
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

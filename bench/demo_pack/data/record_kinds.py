"""Kinds of records: people, items, codes, phone numbers, events, and tables of any columns."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import NamedTuple

from strata.bench.demo_pack.data import words

Record = dict[str, str]


class Kind(NamedTuple):
    """One kind of list. The first field is the key; `ask` maps a field to its own questions."""

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

COLUMNS: dict[str, Callable[[Random], str]] = {
    "colour": lambda rng: rng.choice(words.COLOURS),
    "size": lambda rng: rng.choice(("tiny", "small", "medium", "large", "huge")),
    "owner": lambda rng: rng.choice(words.FIRST_NAMES),
    "year": lambda rng: str(rng.randint(1850, 2030)),
    "weight": lambda rng: f"{rng.randint(1, 99)} kg",
    "country": lambda rng: rng.choice(words.COUNTRIES),
    "status": lambda rng: rng.choice(("open", "closed", "waiting", "done", "lost")),
    "number": lambda rng: str(rng.randint(1, 9999)),
    "animal": lambda rng: rng.choice(words.ANIMALS),
    "day": lambda rng: rng.choice(words.DAYS),
    "month": lambda rng: rng.choice(words.MONTHS),
    "age": lambda rng: str(rng.randint(1, 99)),
    "id": words.code,
    "town": lambda rng: rng.choice(words.CITIES),
    "score": words.price,
    "teacher": words.full_name,
    "file": words.path,
    "material": lambda rng: rng.choice(("wood", "glass", "cotton", "silver", "stone", "paper", "ivory", "sand")),
    "start": words.clock,
    "team": lambda rng: rng.choice(words.COLOURS) + " " + rng.choice(words.ANIMALS),
    "password": words.made_word,
    "level": lambda rng: str(rng.randint(1, 12)),
}
KEYS: dict[str, Callable[[Random], str]] = {
    "name": words.full_name, "thing": words.two_words, "project": words.made_word, "plant": words.two_words,
    "student": words.full_name, "machine": lambda rng: f"{rng.choice(words.NOUNS)} {rng.randint(1, 999)}",
    "book": words.two_words,
    "planet": words.made_word, "server": lambda rng: f"{rng.choice(words.NOUNS)}-{rng.randint(1, 99)}",
    "pet": words.surname,
}  # fmt: skip


def made_kind(rng: Random) -> Kind:
    """A key and one to four columns that stand together by chance."""
    key = rng.choice(list(KEYS))
    columns = rng.sample(list(COLUMNS), rng.randint(1, 4))

    def make(rng: Random) -> Record:
        return {key: KEYS[key](rng)} | {column: COLUMNS[column](rng) for column in columns}

    return Kind(f"{key}s", make, dict.fromkeys(columns, ()))

"""Facts as JSON: one object from a sentence, an array from a table."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from strata.bench.demo_pack.data import words
from strata.bench.demo_pack.data.sample import Json, Sample, assistant, user

Object = dict[str, Any]

ONE = (
    "Write this as JSON with the keys {k}: {t}", "Turn this into JSON with {k}.\n{t}", "Extract {k} as JSON: {t}",
    "{t}\n\nGive me {k} as a JSON object.", "Make a JSON object with the keys {k} from this sentence: {t}",
    "Answer in JSON with the keys {k}. {t}", "Return JSON with {k} for: {t}", "Convert to JSON ({k}): {t}",
)  # fmt: skip
MANY = (
    "Turn this table into a JSON array:\n{t}", "Convert to JSON:\n{t}",
    "Write these lines as a JSON list of objects.\n{t}",
    "{t}\n\nThe same as a JSON array, please.", "Make JSON of this CSV:\n{t}", "CSV to JSON:\n{t}",
)  # fmt: skip


def _person(rng: Random) -> tuple[Object, str]:
    fact = {
        "name": words.full_name(rng),
        "age": rng.randint(6, 95),
        "city": rng.choice(words.CITIES),
        "job": rng.choice(words.JOBS),
    }
    text = rng.choice(
        ("{name} is {age} years old, lives in {city} and works as a {job}.", "{name} ({age}), {job} from {city}.",
         "Meet {name}, a {job} of {age} years who lives in {city}.", "{name} is a {job} in {city} and {age} years old.")
    )  # fmt: skip
    return fact, text.format(**fact)


def _order(rng: Random) -> tuple[Object, str]:
    fact = {
        "product": words.two_words(rng), "quantity": rng.randint(1, 90), "customer": words.full_name(rng),
        "express": rng.random() < 0.5,
    }  # fmt: skip
    how = "by express" if fact["express"] else "by normal mail"
    text = rng.choice(
        ("{customer} orders {quantity} pieces of {product}, sent {how}.",
         "Order: {quantity} x {product} for {customer}, {how}.",
         "Send {quantity} of the {product} {how} to {customer}.")
    )  # fmt: skip
    return fact, text.format(how=how, **fact)


def _weather(rng: Random) -> tuple[Object, str]:
    sky = rng.choice(("sunny", "cloudy", "rainy", "windy", "foggy"))
    fact = {"city": rng.choice(words.CITIES), "temperature": rng.randint(-10, 38), "sky": sky}
    text = rng.choice(
        ("In {city} it is {sky} at {temperature} degrees.", "{city}: {sky}, {temperature} degrees.",
         "The weather in {city} is {sky} with {temperature} degrees.")
    )  # fmt: skip
    return fact, text.format(**fact)


def _parcel(rng: Random) -> tuple[Object, str]:
    fact = {"id": words.code(rng), "date": words.date(rng), "items": rng.sample(words.NOUNS, rng.randint(1, 4))}
    text = "Parcel {id} of {date} holds {l}.".format(l=words.listed(fact["items"]), **fact)
    return fact, text


FACTS = (_person, _person, _order, _weather, _parcel)


def _one(rng: Random) -> Sample:
    fact, text = rng.choice(FACTS)(rng)
    keys = list(fact)
    rng.shuffle(keys)
    keys = keys[: rng.randint(2, len(keys))]
    value = {key: fact[key] for key in keys}
    question = rng.choice(ONE).format(k=words.listed(keys), t=text)
    return _sample(rng, question, value, f"json {text} {keys}")


def _many(rng: Random, size: int) -> Sample:
    make = rng.choice((_person, _weather))
    facts = [make(rng)[0] for _ in range(max(2, min(24, size // 45)))]
    lines = [",".join(facts[0]), *(",".join(map(str, fact.values())) for fact in facts)]
    text = "\n".join(lines)
    return _sample(rng, rng.choice(MANY).format(t=text), facts, f"json {text}")


def _sample(rng: Random, question: str, value: Any, key: str) -> Sample:
    thinking = rng.random() < 0.4
    indent = rng.random() < 0.25 and "array" not in question
    if indent:
        question += rng.choice(("\nIndent it.", " Indent the JSON.", "\nUse indentation."))
    text = json.dumps(value, ensure_ascii=False, indent=2 if indent else None)
    if isinstance(value, list) and not indent:
        text = "[\n" + ",\n".join(json.dumps(fact, ensure_ascii=False) for fact in value) + "\n]"
    kind = "an array of objects" if isinstance(value, list) else "an object"
    last = assistant(text, f"The answer is {kind} in JSON." if thinking else None)
    return Sample("json", key, [user(question), last], Json(value), thinking=thinking)


def as_json(rng: Random, size: int) -> Sample:
    """Task "json"."""
    return _many(rng, size) if size >= 150 and rng.random() < 0.5 else _one(rng)

"""Sentences and short stories from templates."""

from __future__ import annotations

import re
from random import Random

from strata.bench.demo_pack.data import words
from strata.bench.demo_pack.data.sample import Sample, assistant, user

SENTENCES = (
    "The {a} {n} stood beside the {n2}.", "{p} walked to the {n} in the morning.", "It was a {a} day in {c}.",
    "Nobody saw the {n} behind the {n2}.", "{p} carried a {n} and a {n2} home.", "The {b} {n} belongs to {p}.",
    "On {d} the {x} slept under the {n}.", "{p} and {q} talked about the {n}.", "A {x} ran past the {a} {n}.",
    "They painted the {n} {b}.", "In {m} the {n} was {a}.", "{p} waited near the {n2} until {d}.",
    "The {x} looked at the {b} {n}.", "Every {d} {p} buys a {n}.", "The road to {c} passes a {a} {n}.",
    "{p} forgot the {n} on the {n2}.", "The {n} was {a}, the {n2} was {b}.", "Two {a} people asked {p} for a {n}.",
)  # fmt: skip


def with_articles(text: str) -> str:
    """`a` before a vowel becomes `an`."""
    return re.sub(r"\b([Aa]) (?=[aeiouAEIOU])", r"\1n ", text)


def sentence(rng: Random) -> str:
    text = rng.choice(SENTENCES).format(
        a=rng.choice(words.ADJECTIVES), b=rng.choice(words.COLOURS), c=rng.choice(words.CITIES),
        d=rng.choice(words.DAYS),
        m=rng.choice(words.MONTHS), n=rng.choice(words.THINGS), n2=rng.choice(words.THINGS),
        p=rng.choice(words.FIRST_NAMES),
        q=rng.choice(words.FIRST_NAMES), x=rng.choice(words.ANIMALS),
    )  # fmt: skip
    return with_articles(text)


ASK = (
    "Tell me a story about {w}.", "Tell me a short story about {w}.", "Write a short story about {w}.",
    "Write a story about {w}.",
    "Can you tell a story about {w}?", "Please write a little story about {w}.",
    "I would like to hear a story about {w}.",
    "tell me a story about {w}", "A story about {w}, please.", "Make up a story about {w}.",
    "Could you invent a short story with {w}?",
)  # fmt: skip
ASK_ANY = (
    "Tell me a story.",
    "Write a short story.",
    "tell me a story",
    "Can you tell me a story?",
    "A short story, please.",
)

OPEN = (
    "Once there was a {a} {x} named {p} who lived near {place}.", "A {a} {x} called {p} lived by {place}.",
    "Far away, close to {place}, lived a {x} named {p}. {p} was {a} and {a2}.",
    "In a {a2} house at {place} lived {p} the {x}.",
)  # fmt: skip
WANT = (
    "Every day {p} dreamed of finding a {b} {n}.", "{p} wanted nothing more than a {b} {n}.",
    "One morning {p} lost a {b} {n}.",
    "One {d}, {p} heard that a {b} {n} was hidden in the hills.", "One {d}, a {b} {n} lay in front of the door.",
)  # fmt: skip
MEET = (
    "On the way {p} met {q} the {y}, who was {a3}.", "Behind a {n2} sat {q}, a {a3} {y}.",
    "Then came {q} the {y} and asked: \"Where are you going?\"", "{q}, a {a3} {y}, offered to help.",
)  # fmt: skip
TROUBLE = (
    "Suddenly it began to rain, and the path was gone.", "But the bridge was broken and the water was deep.",
    "But the night came and they could not see a thing.", "A strong wind blew and took the map away.",
    "But the gate was closed, and no one had the key.",
)  # fmt: skip
SOLVE = (
    "{q} had an idea: they built a {made} from wood and rope.",
    "{p} remembered an old song, and the song showed the way.",
    "Together they waited for the sun, and in the light all was easy.",
    "{q} knew a small path, and {p} was brave enough to take it.",
    "They asked a {z} for help, and the {z} was glad to help them.",
)  # fmt: skip
FINISH = (
    "At last they found the {b} {n} and shared it.", "In the evening the {b} {n} was theirs, and they laughed.",
    "So {p} came home with the {b} {n} and a new friend.",
)  # fmt: skip
MORAL = (
    "From that day on {p} and {q} were friends.", "And {p} learned that two see more than one.",
    "And they told the story to everyone.",
    "And if you walk there on a {d}, you may still see them.", "That night {p} slept well.",
)  # fmt: skip
BUILT = ("raft", "ladder", "bridge", "boat", "wagon", "cabin", "tent", "tower", "sail")
PLACES = (
    "a lake",
    "the old mill",
    "a deep forest",
    "the sea",
    "a quiet river",
    "the green hills",
    "a small village",
    "a tall tower",
)


def story(rng: Random, size: int) -> Sample:
    """Seven sentences about an animal, and about a thing when one is named. Task "story"; nothing is checked."""
    animals = rng.sample(words.ANIMALS, 3)
    adjectives = rng.sample(words.ADJECTIVES, 3)
    nouns = rng.sample(words.THINGS, 2)
    p, q = rng.sample(words.FIRST_NAMES, 2)
    values = {
        "x": animals[0], "y": animals[1], "z": animals[2], "a": adjectives[0], "a2": adjectives[1], "a3": adjectives[2],
        "n": nouns[0], "n2": nouns[1], "p": p, "q": q, "b": rng.choice(words.COLOURS), "d": rng.choice(words.DAYS),
        "place": rng.choice(PLACES), "made": rng.choice(BUILT),
    }  # fmt: skip
    parts = (OPEN, WANT, MEET, TROUBLE, SOLVE, FINISH, MORAL)
    text = with_articles(" ".join(rng.choice(part).format(**values) for part in parts))
    about = rng.choice(
        (f"a {values['x']}", f"a {values['x']} named {p}", f"{p} the {values['x']}",
         f"a {values['x']} and a {nouns[0]}",
         f"a {values['x']} who finds a {nouns[0]}", f"a {values['x']} and a {values['y']}")
    )  # fmt: skip
    question = rng.choice(ASK_ANY) if rng.random() < 0.15 else rng.choice(ASK).format(w=with_articles(about))
    thinking = rng.random() < 0.6
    plan = (
        with_articles(f"A story about a {values['x']} named {p} and a {nouns[0]}. {q} the {values['y']} helps.")
        if thinking
        else None
    )
    return Sample("story", f"story {text}", [user(question), assistant(text, plan)], thinking=thinking)

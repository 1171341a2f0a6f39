"""Copying, sorting and counting."""

from __future__ import annotations

from random import Random

from strata.bench.demo_pack.data import words
from strata.bench.demo_pack.data.prose import sentence
from strata.bench.demo_pack.data.sample import Number, Sample, Text, assistant, user

COPY = (
    "Repeat this exactly:\n{t}", "Copy this text:\n{t}", "Say this again, word for word:\n{t}",
    "Write this down unchanged:\n\n{t}",
    "Repeat after me: {t}", "Please repeat:\n{t}", "{t}\n\nRepeat the text above.", "Echo: {t}",
    "Copy the following.\n\n{t}",
    "Return this text without any change:\n{t}", "repeat: {t}", "Can you repeat this?\n{t}",
)  # fmt: skip


def _passage(rng: Random, size: int) -> str:
    """A text of about `size` tokens."""
    way = rng.randrange(6)
    if way == 0:
        return " ".join(sentence(rng) for _ in range(max(1, size // 11)))
    if way == 1:
        return " ".join(rng.choice(words.NOUNS) for _ in range(max(2, size * 2 // 3)))
    if way == 2:
        return ", ".join(words.code(rng) for _ in range(max(1, size // 6)))
    if way == 3:
        return "\n".join(f"{words.full_name(rng)}: {words.code(rng)}" for _ in range(max(1, size // 11)))
    if way == 4:
        return " ".join(str(rng.randint(0, 999)) for _ in range(max(2, size // 4)))
    return " ".join(words.made_word(rng) for _ in range(max(1, size // 4)))


def copy(rng: Random, size: int) -> Sample:
    """A text is said again, up to 500 tokens of it. Task "copy"."""
    text = _passage(rng, max(4, min(500, (size - 40) // 2)))
    thinking = rng.random() < 0.4
    last = assistant(text, "I repeat the text as it is." if thinking else None)
    return Sample("copy", f"copy {text}", [user(rng.choice(COPY).format(t=text)), last], Text(text), thinking=thinking)


UP = (
    "Sort these {w}: {l}", "Sort: {l}", "Put these {w} in order: {l}", "Sort the {w} {l}", "Order these {w}:\n{l}",
    "Can you sort these {w}? {l}", "sort {l}", "Sort these {w} in ascending order: {l}", "Arrange these {w}: {l}",
)  # fmt: skip
UP_NUMBERS = ("Sort from smallest to largest: {l}", "Sort these {w} from low to high: {l}")
UP_WORDS = ("Sort alphabetically: {l}", "Put these {w} in alphabetical order: {l}", "Sort these {w} from A to Z: {l}")
DOWN_NUMBERS = (
    "Sort these {w} in descending order: {l}", "Sort from largest to smallest: {l}",
    "Sort these {w} from high to low: {l}",
    "Sort the {w} {l}, the largest first.",
)  # fmt: skip
DOWN_WORDS = ("Sort these {w} in reverse alphabetical order: {l}", "Sort these {w} from Z to A: {l}")


def sort(rng: Random, size: int) -> Sample:
    """3 to 10 numbers or words in order. Task "sort"."""
    n = rng.randint(3, 10)
    numbers = rng.random() < 0.6
    down = rng.random() < 0.25
    items = rng.sample(range(rng.choice((100, 100, 1000))), n) if numbers else rng.sample(words.NOUNS, n)
    ordered = sorted(items, reverse=down)
    asks = ((*UP, *UP_NUMBERS), (*UP, *UP_WORDS), DOWN_NUMBERS, DOWN_WORDS)[2 * down + (not numbers)]
    gap = rng.choice((", ", ", ", " ", "\n"))
    question = rng.choice(asks).format(w="numbers" if numbers else "words", l=gap.join(map(str, items)))
    answer = ("\n" if gap == "\n" else ", ").join(map(str, ordered))
    thinking = rng.random() < 0.6
    kind = (
        ("largest" if down else "smallest")
        if numbers
        else ("last in the alphabet" if down else "first in the alphabet")
    )
    left, lines = list(items), []
    for item in ordered:
        lines.append(f"{', '.join(map(str, left))}: {item}")
        left.remove(item)
    reasoning = f"Each time the one that is {kind}.\n" + "\n".join(lines) if thinking else None
    key = f"sort {down} {sorted(map(str, items))}"
    return Sample("sort", key, [user(question), assistant(answer, reasoning)], Text(answer), thinking=thinking)


COUNT_OF = (
    "How many times does {x} appear in this list? {l}", "How often is {x} in this list: {l}", "Count the {x} in: {l}",
    "How many {x} are in this list?\n{l}", "{l}\n\nHow many times is {x} in it?", "How often does {x} occur here? {l}",
)  # fmt: skip
COUNT_ALL = (
    "How many words are in this list? {l}", "Count these words: {l}", "How many items are in this list: {l}",
    "Count: {l}",
    "{l}\n\nHow many are these?", "How many things are listed here? {l}", "How many words? {l}",
)  # fmt: skip
COUNT_LETTER = (
    "How many times is the letter {x} in {w}?", 'How many "{x}" are in the word "{w}"?', "Count the letter {x} in {w}.",
    "How many {x}'s are in {w}?", "How often does {x} appear in the word {w}?", "How many letters {x} does {w} have?",
)  # fmt: skip
COUNT_LETTERS = (
    "How many letters does the word {w} have?", "How many letters are in {w}?", "How long is the word {w}?",
    "Count the letters of {w}.",
)  # fmt: skip


def count(rng: Random, size: int) -> Sample:
    """Items, one item, letters or one letter are counted with the count written along. Task "count"."""
    way = rng.choices(("of", "all", "letter", "letters"), (35, 30, 20, 15))[0]
    if way in ("of", "all"):
        few = rng.sample(words.NOUNS, rng.randint(2, 6)) if way == "of" else words.NOUNS
        items = [rng.choice(few) for _ in range(rng.randint(3, 20))]
        target = rng.choice(few) if way == "of" else ""
    else:
        word = rng.choice((words.made_word(rng), rng.choice(words.NOUNS), rng.choice(words.NOUNS)))
        items = list(word)
        target = rng.choice((rng.choice(word), rng.choice(word), rng.choice("aeiourstn"))) if way == "letter" else ""
    total, lines = 0, []
    for item in items:
        hit = not target or item == target
        total += hit
        lines.append(f"{item} {total}" if hit else item)
    listed = rng.choice((", ", ", ", " ")).join(items)
    ask = {"of": COUNT_OF, "all": COUNT_ALL, "letter": COUNT_LETTER, "letters": COUNT_LETTERS}[way]
    question = rng.choice(ask).format(x=target, l=listed, w="".join(items))
    reasoning = "I count: " + ", ".join(lines) + f". That makes {total}."
    answer = rng.choice(("{}", "{}.", "There are {}.", "The count is {}.", "It is {}.")).format(total)
    thinking = rng.random() < 0.85
    last = assistant(answer, reasoning) if thinking else assistant(f"{reasoning[0].upper()}{reasoning[1:]}\n{answer}")
    key = f"count {way} {target} {' '.join(items)}"
    return Sample("count", key, [user(question), last], Number(total), thinking=thinking)

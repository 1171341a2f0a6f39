"""Sums, differences, products and quotients with every step written out, and small stories that ask for one.

Steps    a product is split at the tens of its second number, a sum or difference is written by columns from the right,
         a quotient names the multiple it takes away and what is left, so that each step is one that a small model knows
         by heart. Without thinking they stand in the answer
Sizes    "arithmetic" has numbers up to 99 (a quotient's divisor and result), "larger" one of three digits
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from strata.bench.demo_pack.data.sample import Number, Sample, assistant, user

PLACES = ("ones", "tens", "hundreds", "thousands", "ten thousands")
_NAMES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen - ten twenty thirty forty fifty sixty seventy eighty ninety"
)
_SMALL, _TENS = _NAMES.split()[:20], _NAMES.split()[20:]

SIGNS = {"add": ("+", "plus"), "sub": ("-", "minus"), "mul": ("*", "times"), "div": ("/", "divided by")}
MARKS = {"add": ("+",), "sub": ("-",), "mul": ("*", "x", "×"), "div": ("/", ":", "÷")}

ASK = (
    "What is {}?", "{}", "{}?", "{} =", "What's {}?", "what is {}", "Calculate {}.", "calculate {}", "Compute {}.",
    "How much is {}?",
    "how much is {}", "Please calculate {}.", "Can you work out {}?", "Can you tell me what {} is?",
    "What does {} make?",
    "What do you get for {}?", "Solve {}.", "I need the result of {}.", "Give me the result of {}.",
    "Work out {}, please.",
    "Tell me {}.", "Hi, what is {}?", "Hello! What is {}?", "And {}?", "and {}", "Now {}.", "{} please",
    "What is the answer to {}?", "Evaluate {}.",
    "Find {}.",
    "Could you calculate {} for me?", "What would {} be?", "Please tell me how much {} is.", "Quick question: {}?",
)  # fmt: skip
NAMED = {
    "add": ("the sum of {} and {}", "{} added to {}", "{} and {} together", "the total of {} and {}"),
    "sub": ("the difference of {} and {}", "the difference between {} and {}", "{} take away {}", "{} less {}"),
    "mul": ("the product of {} and {}", "{} multiplied by {}", "{} multiplied with {}", "{} times {}", "{} times {}"),
    "div": ("{} divided by {}", "the quotient of {} and {}", "{} over {}"),
}
SAY = ("{} is {}.", "{} = {}", "{} = {}.", "The answer is {1}.", "{} makes {}.", "The result is {1}.")

THINGS = (
    "apples", "pencils", "books", "coins", "eggs", "stamps", "chairs", "cards", "stones", "bottles", "tickets",
    "cookies",
    "marbles", "flowers", "seats", "buttons", "candles", "lemons", "shells", "tiles",
)  # fmt: skip
HOLDERS = ("box", "bag", "row", "basket", "crate", "shelf", "packet", "drawer", "tray", "bus")
WHO = (
    "Anna",
    "Ben",
    "Mira",
    "Tom",
    "Lena",
    "Paul",
    "Ida",
    "Omar",
    "Nora",
    "Felix",
    "Yuki",
    "Sara",
    "Max",
    "Rosa",
    "Emil",
)


def in_words(n: int) -> str:
    """0 to 999 in English words."""
    if n < 20:
        return _SMALL[n]
    if n < 100:
        return _TENS[n // 10] + (f"-{_SMALL[n % 10]}" if n % 10 else "")
    rest = n % 100
    return f"{_SMALL[n // 100]} hundred" + (f" and {in_words(rest)}" if rest else "")


def _digits(n: int, width: int) -> list[int]:
    return [n // 10**i % 10 for i in range(width)]


def sum_steps(a: int, b: int) -> str:
    """a + b by columns, both 0 or more."""
    width = max(len(str(a)), len(str(b)))
    carry, lines = 0, []
    for i, (x, y) in enumerate(zip(_digits(a, width), _digits(b, width), strict=True)):
        total = x + y + carry
        with_carry = " + 1" if carry else ""
        carry = total // 10
        lines.append(f"{PLACES[i]}: {x} + {y}{with_carry} = {total}" + (", carry 1" if carry else ""))
    return "\n".join([f"{a} + {b} by columns.", *lines, f"So {a} + {b} = {a + b}."])


def difference_steps(a: int, b: int) -> str:
    """a - b by columns, a at least b, both 0 or more."""
    width = len(str(a))
    borrow, lines = 0, []
    for i, (x, y) in enumerate(zip(_digits(a, width), _digits(b, width), strict=True)):
        low = f"{y} - 1" if borrow else str(y)
        rest, borrow = x - y - borrow, int(x < y + borrow)
        top = f"{x + 10} - {low} = {rest + 10}, borrow 1" if borrow else f"{x} - {low} = {rest}"
        lines.append(f"{PLACES[i]}: {top}")
    return "\n".join([f"{a} - {b} by columns.", *lines, f"So {a} - {b} = {a - b}."])


def _single_product(a: int, digit: int) -> str:
    """a times one digit, a below 1000."""
    parts = [(x * 10**i, digit) for i, x in enumerate(_digits(a, len(str(a)))) if x][::-1]
    if len(parts) < 2:
        return f"{a} * {digit} = {a * digit}"
    each = ", ".join(f"{x} * {d} = {x * d}" for x, d in parts)
    total, sums = parts[0][0] * digit, []
    for x, d in parts[1:]:
        sums.append(f"{total} + {x * d} = {total + x * d}")
        total += x * d
    return f"{a} * {digit}: {each}. {', '.join(sums)}"


def product_steps(a: int, b: int) -> str:
    """a * b, b below 100."""
    if b < 10 or a * b == 0:
        return f"{_single_product(a, b)}." if a and b else f"{a} * {b} = 0."
    tens, ones = b // 10, b % 10
    lines = [_single_product(a, tens) + f", so {a} * {tens * 10} = {a * tens * 10}"]
    if ones:
        lines = [f"{b} = {tens * 10} + {ones}.", *lines, _single_product(a, ones), sum_steps(a * tens * 10, a * ones)]
    return "\n".join([*lines, f"{a} * {b} = {a * b}."])


def quotient_steps(a: int, b: int) -> str:
    """a / b digit by digit from the left, without a rest at the end; of a divisor above 9 the multiples come first."""
    lines, text = [], str(a)
    if b > 9:
        lines.append(", ".join(f"{i} * {b} = {i * b}" for i in range(1, 10)))
    at = next((n for n in range(1, len(text)) if int(text[:n]) >= b), len(text))
    part = int(text[:at])
    while True:
        digit, left = part // b, text[at:]
        taken = f"{part}: {digit} * {b} = {digit * b}, {part} - {digit * b} = {part - digit * b}"
        lines.append(f"{taken}, left {left}" if left else taken)
        if not left:
            return "\n".join([f"{a} / {b} from the left.", *lines, f"So {a} / {b} = {a // b}."])
        part, at = 10 * (part - digit * b) + int(left[0]), at + 1


STEPS: dict[str, Callable[[int, int], str]] = {
    "add": sum_steps, "sub": difference_steps, "mul": product_steps, "div": quotient_steps,
}  # fmt: skip


def result_of(op: str, a: int, b: int) -> int:
    return {"add": a + b, "sub": a - b, "mul": a * b, "div": a // max(b, 1)}[op]


def steps_of(op: str, a: int, b: int) -> str:
    if op == "sub" and a < b:
        return f"{a} is less than {b}, so the result is negative.\n{difference_steps(b, a)}\n{a} - {b} = {a - b}."
    if op == "mul" and b > 99:
        return f"{a} * {b} = {b} * {a}.\n{product_steps(b, a)}\n{a} * {b} = {a * b}."
    return STEPS[op](a, b)


def key_of(op: str, a: int, b: int) -> str:
    low, high = (min(a, b), max(a, b)) if op in ("add", "mul") else (a, b)
    return f"{op} {low} {high}"


def up_to_two_digits(rng: Random, op: str) -> tuple[int, int]:
    """Mostly two digits each; a quotient's divisor (up to 20) and result."""
    if op == "div":
        b = rng.randint(2, 9) if rng.random() < 0.7 else rng.randint(10, 20)
        return b * rng.randint(2, 99), b
    if rng.random() < 0.85:
        return rng.randint(10, 99), rng.randint(10, 99)
    a, b = rng.randint(0, rng.choice((9, 99))), rng.randint(0, rng.choice((9, 20)))
    if op == "sub":
        return max(a, b), min(a, b)
    return (a, b) if rng.random() < 0.5 else (b, a)


def with_three_digits(rng: Random, op: str) -> tuple[int, int]:
    """One number, or a quotient's result, of three digits."""
    if op == "div":
        b = rng.randint(2, 9) if rng.random() < 0.8 else rng.randint(10, 20)
        return b * rng.randint(100, 300), b
    a, b = rng.randint(100, 999), rng.randint(0, rng.choice((9, 99, 99 if op == "mul" else 999)))
    if op == "sub":
        return max(a, b), min(a, b)
    return (a, b) if rng.random() < 0.5 else (b, a)


def _expression(rng: Random, op: str, a: int, b: int) -> str:
    way = rng.random()
    if way < 0.45:
        mark = rng.choice(MARKS[op])
        gap = rng.choice((" ", " ", ""))
        return f"{a}{gap}{mark}{gap}{b}"
    if way < 0.75:
        return f"{a} {SIGNS[op][1]} {b}"
    if way < 0.9 or max(a, b) > 999:
        return rng.choice(NAMED[op]).format(*((b, a) if op == "add" and rng.random() < 0.5 else (a, b)))
    return f"{in_words(a)} {SIGNS[op][1]} {in_words(b)}"


def _story(rng: Random, op: str, a: int, b: int) -> tuple[str, str]:
    """A question of everyday life, and the name of what is counted."""
    thing, holder, who = rng.choice(THINGS), rng.choice(HOLDERS), rng.choice(WHO)
    plural = {"box": "boxes", "bus": "buses", "shelf": "shelves"}.get(holder, holder + "s")
    texts = {
        "add": (
            f"{who} has {a} {thing} and gets {b} more. How many {thing} does {who} have now?",
            f"There are {a} {thing} in one {holder} and {b} in another. How many {thing} is that in all?",
            f"{who} found {a} {thing} on Monday and {b} on Tuesday. How many {thing} together?",
        ),
        "sub": (
            f"{who} has {a} {thing} and gives {b} away. How many {thing} are left?",
            f"There were {a} {thing} in a {holder}. {who} took {b}. How many {thing} remain?",
        ),
        "mul": (
            f"A {holder} holds {a} {thing}. How many {thing} are in {b} {plural}?",
            f"{who} buys {b} {plural} with {a} {thing} each. How many {thing} is that?",
            f"One {holder} has {a} {thing}. How many {thing} do {b} {plural} have?",
        ),
        "div": (
            f"{who} shares {a} {thing} equally among {b} friends. How many {thing} does each friend get?",
            f"{a} {thing} are put into {b} {plural}, the same number in each. How many {thing} are in one {holder}?",
        ),
    }
    return rng.choice(texts[op]), thing


def arithmetic(rng: Random, size: int) -> Sample:
    """One problem of two numbers up to 99; task "arithmetic"."""
    op = rng.choices(("add", "sub", "mul", "div"), (22, 20, 36, 22))[0]
    return _problem(rng, "arithmetic", op, *up_to_two_digits(rng, op))


def larger(rng: Random, size: int) -> Sample:
    """One problem with a number of three digits; task "larger"."""
    op = rng.choices(("add", "sub", "mul", "div"), (25, 25, 30, 20))[0]
    return _problem(rng, "larger", op, *with_three_digits(rng, op))


def _problem(rng: Random, task: str, op: str, a: int, b: int) -> Sample:
    result = result_of(op, a, b)
    is_story = rng.random() < 0.2 and not (op == "sub" and a < b)
    if is_story:
        question, thing = _story(rng, op, a, b)
        answer = rng.choice(("{} {}.", "The answer is {} {}.", "That is {} {}.")).format(result, thing)
    else:
        expression = _expression(rng, op, a, b)
        question = rng.choice(ASK).format(expression)
        said = expression if rng.random() < 0.4 else f"{a} {rng.choice(SIGNS[op])} {b}"
        answer = rng.choice(SAY).format(said[0].upper() + said[1:], result)
    thinking = rng.random() < 0.8
    reasoning = steps_of(op, a, b)
    if thinking:
        asked = "This asks for" if is_story else "I need"
        last = assistant(answer, f"{asked} {a} {SIGNS[op][0]} {b}.\n{reasoning}")
    else:
        last = assistant(f"{reasoning}\n{answer}")
    return Sample(task, key_of(op, a, b), [user(question), last], Number(result), thinking=thinking)


def chain(rng: Random, size: int) -> Sample:
    """Three or four numbers added and taken away; task "chain"."""
    numbers = [rng.randint(2, 60) for _ in range(rng.randint(3, 4))]
    text, total, lines = str(numbers[0]), numbers[0], []
    for n in numbers[1:]:
        sign = "-" if total >= n and rng.random() < 0.35 else "+"
        step = total + n if sign == "+" else total - n
        lines.append(sum_steps(total, n) if sign == "+" else difference_steps(total, n))
        text, total = f"{text} {sign} {n}", step
    question = rng.choice(ASK).format(text)
    last = assistant(f"{text} = {total}", "Step by step.\n" + "\n".join(lines))
    return Sample("chain", f"chain {text}", [user(question), last], Number(total))

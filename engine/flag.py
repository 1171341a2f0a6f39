"""One option of the command line, and what reads its value: a function from text that raises ValueError saying what is
wanted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from strata.protocol.fields import parse_float

MAX_END_IDS: Final = 64


@dataclass(frozen=True, slots=True)
class Flag:
    """One option. `value` is how the help writes its value, "" for a switch that takes none; `missing`: why there is no
    `read`."""

    name: str
    value: str
    default: str
    meaning: str
    group: str
    read: Callable[[str], object] | None = None
    missing: str = ""
    said: str = ""
    aliases: tuple[str, ...] = ()
    optional: bool = False

    @property
    def works(self) -> bool:
        return self.read is not None

    @property
    def acts(self) -> bool:
        """Whether it changes anything: it is a field of `Options`."""
        return self.read is not None and not self.said

    @property
    def field(self) -> str:
        """The name of its field in `Options`."""
        return self.name.removeprefix("--").replace("-", "_")

    @property
    def usage(self) -> str:
        return " ".join(filter(None, [", ".join([self.name, *self.aliases]), self.value]))


def whole(low: int, high: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not (text.isascii() and text.isdigit() and len(text) <= 20 and low <= int(text) <= high):
            raise ValueError(f"a whole number from {low} to {high}")
        return int(text)

    return read


def share(text: str) -> float:
    number = parse_float(text)
    if number is None or not 0 <= number <= 1:
        raise ValueError("a number from 0 to 1")
    return number


def share_or_auto(text: str) -> float:
    """auto is -1, since 0 is a share."""
    if text == "auto":
        return -1.0
    try:
        return share(text)
    except ValueError as error:
        raise ValueError(f"auto or {error}") from None


def amount(most: float) -> Callable[[str], float]:
    def read(text: str) -> float:
        number = parse_float(text)
        if number is None or not 0 <= number <= most:
            raise ValueError(f"a number from 0 to {most:g}")
        return number

    return read


def amount_or_auto(most: float) -> Callable[[str], float]:
    """auto is -1, since 0 is an amount."""
    read = amount(most)

    def read_or_auto(text: str) -> float:
        if text == "auto":
            return -1.0
        try:
            return read(text)
        except ValueError as error:
            raise ValueError(f"auto or {error}") from None

    return read_or_auto


def one_of(*words: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in words:
            raise ValueError(f"one of {', '.join(words)}")
        return text

    return read


def auto_or(read_number: Callable[[str], int]) -> Callable[[str], int]:
    def read(text: str) -> int:
        if text == "auto":
            return 0
        try:
            return read_number(text)
        except ValueError as error:
            raise ValueError(f"auto or {error}") from None

    return read


def reserve(most: int) -> Callable[[str], int]:
    """MiB that stay free; auto is -1, since 0 is a size."""

    def read(text: str) -> int:
        return -1 if text == "auto" else whole(0, most)(text)

    return read


def switch(text: str) -> bool:
    return True


def folder(text: str) -> str:
    if not text or "\0" in text:
        raise ValueError("the name of a folder")
    return text


def file(text: str) -> str:
    if not text or "\0" in text:
        raise ValueError("the name of a file")
    return text


def file_or_own(text: str) -> str:
    """A file; nothing says that of the model itself."""
    return file(text) if text else text


def ids(text: str) -> tuple[int, ...]:
    if text == "none":
        return ()
    words = text.split(",")
    if len(words) > MAX_END_IDS or not all(word.isascii() and word.isdigit() and len(word) <= 10 for word in words):
        raise ValueError(f"token ids separated by commas, at most {MAX_END_IDS}, or none")
    return tuple(int(word) for word in words)

"""Follows the text of one JSON value, a character at a time, without building it.

push(letter) -> str   what to send for it: the letter, or its escape for a raw control character inside a string (models
                      write line breaks there); `done` once the value is complete
Errors      JsonFault at the first character that no JSON value can have there, or below MAX_DEPTH
Cost        about a microsecond per character; memory is the nesting depth and the longest number
"""

from __future__ import annotations

import json
import re

MAX_DEPTH = 200
_SPACE = " \t\n\r"
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?\Z")
_NUMBER_LETTERS = frozenset("+-.0123456789eE")
_WORDS = ("true", "false", "null")
_CLOSERS = {"{": "}", "[": "]"}


class JsonFault(ValueError):
    """The text is no JSON value."""


class JsonScanner:
    def __init__(self) -> None:
        self.done = False
        self._open: list[str] = []  # closers of the objects and lists that are open
        self.wants = "value"  # value | first (value or ]) | key | first key (key or }) | colon | comma
        self._in_string = False
        self._escape = ""  # what has been seen of an escape
        self._bare = ""  # what has been seen of a number or word

    @property
    def depth(self) -> int:
        return len(self._open)

    def push(self, letter: str) -> str:
        if self._in_string:
            return self._string(letter)
        if self._bare and not self._goes_on(letter):
            self._end_bare()
        if self._bare:
            self._bare += letter
            if self._bare in _WORDS:
                self._end_bare()
        elif letter not in _SPACE:
            self._token(letter)
        return letter

    def _goes_on(self, letter: str) -> bool:
        if self._bare[0].isalpha():
            return any(word.startswith(self._bare + letter) for word in _WORDS)
        return letter in _NUMBER_LETTERS and len(self._bare) < 400

    def _end_bare(self) -> None:
        if self._bare not in _WORDS and not _NUMBER.match(self._bare):
            raise JsonFault(f"{self._bare[:40]!r} is no JSON value")
        self._bare = ""
        self._end_value()

    def _end_value(self) -> None:
        self.wants = "comma"
        self.done = not self._open

    def _token(self, letter: str) -> None:
        wants = self.wants
        if self.done:
            raise JsonFault(f"{letter!r} after the end of the value")
        if self._open and letter == self._open[-1] and wants in ("comma", "first", "first key"):
            self._open.pop()
            self._end_value()
        elif wants == "comma" and letter == ",":
            self.wants = "key" if self._open[-1] == "}" else "value"
        elif wants == "colon" and letter == ":":
            self.wants = "value"
        elif letter == '"' and wants in ("value", "first", "key", "first key"):
            self._in_string = True
        elif wants in ("value", "first"):
            self._begin(letter)
        else:
            raise JsonFault(f"{letter!r} where a {wants} is needed")

    def _begin(self, letter: str) -> None:
        if letter in _CLOSERS:
            if len(self._open) == MAX_DEPTH:
                raise JsonFault(f"nested deeper than {MAX_DEPTH}")
            self._open.append(_CLOSERS[letter])
            self.wants = "first key" if letter == "{" else "first"
        elif letter in "-0123456789tfn":
            self._bare = letter
        else:
            raise JsonFault(f"{letter!r} begins no JSON value")

    def _string(self, letter: str) -> str:
        if self._escape:
            self._escape += letter
            if self._escape[1] != "u":
                if self._escape[1] not in '"\\/bfnrt':
                    raise JsonFault(f"{self._escape!r} is no escape")
                self._escape = ""
            elif len(self._escape) > 2 and letter not in "0123456789abcdefABCDEF":
                raise JsonFault(f"{self._escape!r} is no escape")
            elif len(self._escape) == 6:
                self._escape = ""
        elif letter == "\\":
            self._escape = letter
        elif letter == '"':
            self._in_string = False
            if self.wants in ("key", "first key"):
                self.wants = "colon"
            else:
                self._end_value()
        elif letter < " ":
            return json.dumps(letter)[1:-1]
        return letter

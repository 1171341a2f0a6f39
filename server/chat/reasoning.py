"""Splits the output into reasoning and answer.

Starts    inside reasoning (the prompt ended with an open <think>), or in the answer, where a leading <think> block is
          still reasoning
Ends      at the first </think>, as token or as text; line breaks right after <think> and </think> are dropped
Holds     only what may begin </think>, or a leading <think> with at most two line breaks before it
"""

from __future__ import annotations

from typing import NamedTuple

from strata.server.chat.stream import Finder

OPEN, CLOSE = "<think>", "</think>"
_LEADS = (OPEN, "\n" + OPEN, "\n\n" + OPEN)


class Split(NamedTuple):
    """The two parts of a piece of output, in this order."""

    reasoning: str
    answer: str


class ReasoningSplit:
    """push(text) and finish() -> Split. `in_reasoning` says where the next text goes."""

    def __init__(self, *, starts_in_reasoning: bool, may_open: bool = True) -> None:
        """may_open: whether an answer may begin with <think>; not so inside a tool call that the server opened."""
        self.in_reasoning = starts_in_reasoning
        self._may_open = may_open and not starts_in_reasoning
        self._lead = ""
        self._skips_breaks = False
        self._close = Finder([CLOSE])

    def push(self, text: str) -> Split:
        if self._may_open:
            text = self._leading(text)
        if not text:
            return Split("", "")
        if not self.in_reasoning:
            return Split("", self._without_breaks(text))
        found = self._close.push(self._without_breaks(text))
        if found.word is None:
            return Split(found.before, "")
        self.in_reasoning = False
        self._skips_breaks = True
        return Split(found.before, self._without_breaks(found.rest))

    def finish(self) -> Split:
        lead, self._lead, self._may_open = self._lead, "", False
        return Split(self._close.finish().before, lead)

    def _leading(self, text: str) -> str:
        """Text that is past the question whether the output opens with <think>."""
        self._lead += text
        if any(lead.startswith(self._lead) and lead != self._lead for lead in _LEADS):
            return ""
        text, self._lead, self._may_open = self._lead, "", False
        for lead in _LEADS:
            if text.startswith(lead):
                self.in_reasoning = self._skips_breaks = True
                return text[len(lead) :]
        return text

    def _without_breaks(self, text: str) -> str:
        if self._skips_breaks:
            text = text.lstrip("\n")
            self._skips_breaks = not text
        return text

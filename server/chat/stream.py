"""Token ids to text that is safe to send, and words found in text that comes in pieces.

Detokenizer   ids -> text, holding back an incomplete UTF-8 sequence
Finder        text -> text before the first of several words, holding back only what may begin a word
TextStream    both: text up to the first stop string

Invariant  however the input is cut, the joined output is the same: decode(all ids) up to the first stop string
"First"    the one that begins first; of two that begin together, the shorter
Cost       constant per character on average (Aho-Corasick); memory is the longest word plus the current piece
"""

from __future__ import annotations

import codecs
import re
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from strata.server.chat.errors import RequestError
from strata.server.chat.vocabulary import Vocabulary

MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 16_384  # all stop strings of a request together


def stop_strings(stop: str | Sequence[str] | None) -> list[str]:
    """The stop strings of a request without empty ones. Raises RequestError for too many or too long ones."""
    words = [stop] if isinstance(stop, str) else list(stop or ())
    words = list(dict.fromkeys(word for word in words if word))
    if len(words) > MAX_STOP_STRINGS:
        raise RequestError(f"stop: {len(words)} stop strings; the limit is {MAX_STOP_STRINGS}")
    n_chars = sum(map(len, words))
    if n_chars > MAX_STOP_CHARS:
        raise RequestError(f"stop: the stop strings have {n_chars} characters; the limit is {MAX_STOP_CHARS}")
    return words


class Detokenizer:
    """push(token) -> text that is complete; finish() -> a replacement character for a torn rest, else ""."""

    def __init__(self, vocabulary: Vocabulary, end_ids: frozenset[int] | None = None) -> None:
        self._vocabulary = vocabulary
        self._silent = vocabulary.end_ids if end_ids is None else end_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return "" if token in self._silent else self._decoder.decode(self._vocabulary.token_bytes(token))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class Found(NamedTuple):
    """`before` is safe to send. With a `word`, `rest` is what came after it and has not been looked at."""

    before: str
    word: str | None = None
    rest: str = ""


class Finder:
    """Finds words, one after the other. After a word it starts afresh; push `rest` again to go on.

    The automaton's node is the longest end of the text that begins a word, so `depth` characters are held back.
    A word that ends while an earlier, longer candidate is still open waits (`_found`) until that is decided.
    """

    def __init__(self, words: Iterable[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._word: list[str | None] = [None]
        for word in words:
            self._add(word)
        self._fail = self._link()
        letters = "".join(map(re.escape, self._next[0]))
        self._start = re.compile(f"[{letters}]") if letters else None
        self._reset()

    def _add(self, word: str) -> None:
        node = 0
        for letter in word:
            if letter not in self._next[node]:
                self._next[node][letter] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[node] + 1)
                self._word.append(None)
            node = self._next[node][letter]
        self._word[node] = word

    def _link(self) -> list[int]:
        """For each node the longest proper end of it that is a node too; words that end there end here as well."""
        fail = [0] * len(self._next)
        queue = deque(self._next[0].values())
        while queue:
            node = queue.popleft()
            for letter, child in self._next[node].items():
                back = fail[node]
                while back and letter not in self._next[back]:
                    back = fail[back]
                fail[child] = self._next[back].get(letter, 0)
                self._word[child] = self._word[child] or self._word[fail[child]]
                queue.append(child)
        return fail

    def _reset(self) -> None:
        self._node = 0
        self._seen = 0  # characters looked at
        self._sent = 0  # characters given out
        self._held: deque[str] = deque()
        self._found: tuple[int, str] | None = None  # where the word begins

    def push(self, text: str) -> Found:
        if self._start is None or not text:
            return Found(text)
        self._held.append(text)
        at = 0
        while at < len(text):
            if self._node == 0:
                begin = self._start.search(text, at)
                if begin is None:
                    self._seen += len(text) - at
                    break
                self._seen += begin.start() - at
                at = begin.start()
            self._step(text[at])
            at += 1
            if self._found and self._seen - self._depth[self._node] >= self._found[0]:
                return self._give_word(*self._found)
        return Found(self._give(self._seen - self._depth[self._node] - self._sent))

    def _step(self, letter: str) -> None:
        node = self._node
        while node and letter not in self._next[node]:
            node = self._fail[node]
        self._node = node = self._next[node].get(letter, 0)
        self._seen += 1
        word = self._word[node]
        if word is not None and (self._found is None or self._seen - len(word) < self._found[0]):
            self._found = (self._seen - len(word), word)

    def _give(self, n_chars: int) -> str:
        """The first `n_chars` of what is held."""
        given = []
        self._sent += n_chars
        while n_chars:
            piece = self._held.popleft()
            if len(piece) > n_chars:
                self._held.appendleft(piece[n_chars:])
                piece = piece[:n_chars]
            given.append(piece)
            n_chars -= len(piece)
        return "".join(given)

    def _give_word(self, start: int, word: str) -> Found:
        before = self._give(start - self._sent)
        rest = "".join(self._held)[len(word) :]
        self._reset()
        return Found(before, word, rest)

    def finish(self) -> Found:
        """No more text comes: what was held is decided. `rest` may hold further words; push it again."""
        if self._found:
            return self._give_word(*self._found)
        text = "".join(self._held)
        self._reset()
        return Found(text)


class TextStream:
    """Turns token ids into text that is safe to send.

    push(token) -> str   text that can no longer change; "" while a character or a stop string may be incomplete
    finish()    -> str   the held-back rest (a replacement character for a torn UTF-8 sequence)
    stopped              the stop string that ended the text; later tokens add nothing
    """

    def __init__(self, vocabulary: Vocabulary, stop: str | Sequence[str] | None = None) -> None:
        self._tokens = Detokenizer(vocabulary)
        self._finder = Finder(stop_strings(stop))
        self.stopped: str | None = None

    def push(self, token: int) -> str:
        return self._text(self._tokens.push(token))

    def finish(self) -> str:
        text = self._text(self._tokens.finish())
        if self.stopped is not None:
            return text
        last = self._finder.finish()
        self.stopped = last.word
        return text + last.before

    def _text(self, text: str) -> str:
        if self.stopped is not None or not text:
            return ""
        found = self._finder.push(text)
        self.stopped = found.word
        return found.before

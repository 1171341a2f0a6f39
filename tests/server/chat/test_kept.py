"""Kept ids: a turn that comes again is not encoded again, gives the same ids, and what is kept is bounded."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.server.chat.kept import LEAST_CHARS, KeptIds
from strata.server.chat.vocabulary import Vocabulary

TURN = "<|im_start|>user\nwhat is the name of the river, and how long is it? {}<|im_end|>\n"


class Counting:
    """The library's tokenizer, with the characters it was given."""

    def __init__(self, bpe: Any) -> None:
        self._bpe = bpe
        self.n_chars = 0

    def encode_batch_fast(self, texts: Sequence[str], **how: Any) -> Any:
        self.n_chars += sum(map(len, texts))
        return self._bpe.encode_batch_fast(texts, **how)


@pytest.fixture
def counted(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> Counting:
    counting = Counting(vocabulary._bpe)
    monkeypatch.setattr(vocabulary, "_bpe", counting)
    monkeypatch.setattr(vocabulary, "_kept", KeptIds())
    return counting


def test_the_turns_of_a_conversation_are_encoded_again_with_every_request(
    vocabulary: Vocabulary, counted: Counting
) -> None:
    turns = [TURN.format(i) for i in range(50)]
    vocabulary.encode("".join(turns))
    before = counted.n_chars
    ids = vocabulary.encode("".join([*turns, TURN.format("new")]))
    assert counted.n_chars - before < 2 * len(TURN)
    vocabulary._kept = KeptIds()
    assert ids == vocabulary.encode("".join([*turns, TURN.format("new")]))


def test_a_text_that_stands_twice_in_a_prompt_is_encoded_once_and_stands_twice(
    vocabulary: Vocabulary, counted: Counting
) -> None:
    once = vocabulary.encode(TURN)
    assert vocabulary.encode(TURN * 3) == once * 3
    assert counted.n_chars < 2 * len(TURN)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 400)), max_size=60), st.integers(0, 6000))
def test_what_is_kept_grows_beyond_its_limit_or_changes(puts: list[tuple[int, int]], limit: int) -> None:
    kept = KeptIds(limit)
    for number, n in puts:
        text = chr(ord("a") + number) * (LEAST_CHARS + number)
        ids = array("i", range(n))
        found = kept.get(text)
        if found is None:
            kept.put(text, ids)
            found = kept.get(text)
            assert found is None or found == ids
        assert kept.n_bytes <= limit


def test_the_text_that_was_used_longest_ago_goes_first_and_short_ones_are_not_kept() -> None:
    texts = [letter * LEAST_CHARS for letter in "abc"]
    kept = KeptIds(1200)
    for text in texts[:2]:
        kept.put(text, array("i", [1]))
    kept.get(texts[0])
    kept.put(texts[2], array("i", [1] * 60))
    assert [kept.get(text) is not None for text in texts] == [True, False, True]
    kept.put("short", array("i", [1]))
    assert kept.get("short") is None


def test_a_text_that_has_grown_meanwhile_leaves_with_more_than_it_was_counted_as() -> None:
    kept = KeptIds(1200)
    text = "\u0416" * 200
    kept.put(text, array("i", [1]))
    assert 0 < kept.n_bytes <= 1200
    ctypes.pythonapi.PyUnicode_AsUTF8AndSize(ctypes.py_object(text), None)  # the text keeps its UTF-8 form from now on
    kept.put("a" * 600, array("i", [1]))
    other = KeptIds(1200)
    other.put("a" * 600, array("i", [1]))
    assert kept.get(text) is None and kept.n_bytes == other.n_bytes

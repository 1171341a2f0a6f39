"""The vocabulary of the demo pack."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.bench.demo_pack import tokenizer
from strata.bench.demo_pack.tokenizer import ADDED_TOKENS, CONTROL_TOKENS, N_TOKENS, load_merges, tokens_of, vocabulary


def test_the_vocabulary_still_fits_what_is_learned() -> None:
    again, kept = set(tokenizer.train_merges()), set(load_merges())
    assert len(again & kept) > 0.9 * len(kept)


def test_every_token_has_its_place() -> None:
    tokens = tokens_of(load_merges())
    assert len(tokens) == len(tokenizer.token_types()) == len(set(tokens)) == N_TOKENS
    assert tokens[-len(CONTROL_TOKENS) - len(ADDED_TOKENS) :] == [*CONTROL_TOKENS, *ADDED_TOKENS]
    assert vocabulary().end_ids == {tokens.index("<|im_end|>"), tokens.index("<|endoftext|>")}


def test_merges_for_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match="train the tokenizer again"):
        tokens_of(load_merges()[:-1])


@given(st.text(st.characters(exclude_categories=["Cs", "Mn"])))
def test_any_text_comes_back(text: str) -> None:
    words = vocabulary()
    assert words.decode(words.encode_plain(text)) == unicodedata.normalize("NFC", text)


def test_digits_stand_alone() -> None:
    words = vocabulary()
    assert [words.token_bytes(token) for token in words.encode_plain("391")] == [b"3", b"9", b"1"]

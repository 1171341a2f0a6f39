"""The vocabulary of a pack: the same ids as the tokenizer the pack was made with."""

from __future__ import annotations

import threading
import time
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from strata.server.chat import vocabulary as vocabulary_module
from strata.server.chat.errors import VocabularyError
from strata.server.chat.kept import KeptIds
from strata.server.chat.vocabulary import Vocabulary

# Letters of many scripts, combining marks, digits, contractions, spaces and breaks of all kinds, special words.
PIECES = st.one_of(
    st.text(max_size=8),
    st.text(alphabet="aZé\u0301\u0900\u093f\u0e33한 \t\n\r\u00a0\u2028'sſ0९,.-_<|>", max_size=12),
    st.sampled_from(
        ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "<|im_", "'LL", "  \n ", "\r\n"]
    ),
)
TEXTS = st.lists(PIECES, max_size=8).map("".join)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(text=TEXTS)
def test_ids_differ_from_the_tokenizer_that_made_the_pack(vocabulary: Vocabulary, hf: Tokenizer, text: str) -> None:
    assert vocabulary.encode(text) == hf.encode(text, add_special_tokens=False).ids


SENTENCES = st.lists(st.one_of(PIECES, st.sampled_from(["a b", " word", "s x's", "e \u0301a b"])), max_size=20).map(
    "".join
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(text=SENTENCES, size=st.integers(1, 9))
def test_a_long_text_is_encoded_otherwise_in_slices(
    vocabulary: Vocabulary, hf: Tokenizer, text: str, size: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocabulary_module, "SLICE_CHARS", size)
        patch.setattr(vocabulary, "_kept", KeptIds(0))
        assert vocabulary.encode(text) == hf.encode(text, add_special_tokens=False).ids


def test_encoding_stops_all_other_threads(vocabulary: Vocabulary) -> None:
    text = "é-" * 600_000  # nowhere to cut it: one call
    done = threading.Event()

    def work() -> None:
        vocabulary.encode_plain(text)
        done.set()

    worker = threading.Thread(target=work)
    worker.start()
    n_turns = 0
    while not done.wait(0.001):
        n_turns += 1
    worker.join()
    assert n_turns > 10


@pytest.mark.parametrize("pack", ["tiny-q8_0", "odd-q2_0", "tiny-q2_0-split"])
def test_a_converted_pack_gives_other_ids_than_the_checkpoint(packs: Any, hf: Tokenizer, pack: str) -> None:
    vocabulary = Vocabulary.load(packs[pack])
    text = "<|im_start|>user\nनमस्ते, it's 12:30 — Ünïcode?\r\n\r\n  <think>\n<|im_end|>"
    assert vocabulary.encode(text) == hf.encode(text, add_special_tokens=False).ids
    assert vocabulary.context_length == 4096
    assert vocabulary.architecture == "qwen4exp"
    assert vocabulary.chat_template is not None and "<|im_start|>" in vocabulary.chat_template
    assert vocabulary.end_ids == {998, 1000}
    assert vocabulary.words == {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}


@settings(max_examples=200, deadline=None)
@given(text=TEXTS)
def test_plain_encoding_lets_a_special_word_through(vocabulary: Vocabulary, text: str) -> None:
    ids = vocabulary.encode_plain(text)
    assert not set(ids) & set(vocabulary.special.values())
    assert vocabulary.decode(ids) == unicodedata.normalize("NFC", text)


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 1030), max_size=30))
def test_decoded_text_differs_from_the_library(vocabulary: Vocabulary, hf: Tokenizer, ids: list[int]) -> None:
    assert vocabulary.decode(ids) == hf.decode([i for i in ids if i < 1024], skip_special_tokens=True)


def test_control_tokens_leak_into_the_text_but_markers_do_not_vanish(tokenizer_pairs: dict[str, Any]) -> None:
    tokens, types = tokenizer_pairs["tokenizer.ggml.tokens"], list(tokenizer_pairs["tokenizer.ggml.token_type"])
    for i, word in enumerate(tokens):
        if word in ("<think>", "</think>", "<tool_call>", "</tool_call>"):
            types[i] = 3
    vocabulary = Vocabulary(tokens, types, tokenizer_pairs["tokenizer.ggml.merges"])
    assert vocabulary.decode(vocabulary.encode("<|im_start|>a<think></think><tool_call></tool_call><|im_end|>")) == (
        "a<think></think><tool_call></tool_call>"
    )


def test_padding_rows_are_encoded_or_have_text(tokenizer_pairs: dict[str, Any]) -> None:
    tokens = [*tokenizer_pairs["tokenizer.ggml.tokens"], "[PAD1024]", "[PAD1025]"]
    types = [*tokenizer_pairs["tokenizer.ggml.token_type"], 5, 5]
    vocabulary = Vocabulary(tokens, types, tokenizer_pairs["tokenizer.ggml.merges"])
    assert max(vocabulary.encode("[PAD1024]")) < 998
    assert vocabulary.decode([1024, 1025, 4000, -1]) == ""


BROKEN: dict[str, Callable[[dict[str, Any]], object]] = {
    "tokenizer.ggml.model': 'llama'": lambda p: p.update({"tokenizer.ggml.model": "llama"}),
    "tokenizer.ggml.pre': 'llama-bpe' is not supported": lambda p: p.update({"tokenizer.ggml.pre": "llama-bpe"}),
    "tokenizer.ggml.pre': is missing": lambda p: p.pop("tokenizer.ggml.pre"),
    "general.architecture': is int, not str": lambda p: p.update({"general.architecture": 3}),
    "tokenizer.ggml.tokens': is missing": lambda p: p.pop("tokenizer.ggml.tokens"),
    "tokenizer.ggml.merges': is str, not list": lambda p: p.update({"tokenizer.ggml.merges": "a b"}),
    "is not a list of str": lambda p: p.update({"tokenizer.ggml.merges": [1, 2]}),
    "1023 types for 1024 tokens": lambda p: p["tokenizer.ggml.token_type"].pop(),
    "a normal token appears twice": lambda p: p["tokenizer.ggml.tokens"].__setitem__(0, '"'),
    "no token for byte 33": lambda p: p["tokenizer.ggml.tokens"].__setitem__(0, "!!!!!!!!!"),
    "is not written in byte letters": lambda p: p["tokenizer.ggml.tokens"].__setitem__(500, "two words"),
    "merge 0, 'Ġ nothing'": lambda p: p["tokenizer.ggml.merges"].__setitem__(0, "Ġ nothing"),
    "merge 1, 'a'": lambda p: p["tokenizer.ggml.merges"].__setitem__(1, "a"),
    "eos_token_id': 1024 is not a token below 1024": lambda p: p.update({"tokenizer.ggml.eos_token_id": 1024}),
    "eos_token_id': 'x' is not a token": lambda p: p.update({"tokenizer.ggml.eos_token_id": "x"}),
}


@pytest.mark.parametrize("reason", BROKEN)
def test_a_pack_with_unusable_tokenizer_data_is_not_named(
    tokenizer_pairs: dict[str, Any], tmp_path: Path, reason: str, write_gguf: Callable[..., Path]
) -> None:
    pairs = {key: list(value) if isinstance(value, list) else value for key, value in tokenizer_pairs.items()}
    BROKEN[reason](pairs)
    path = write_gguf(tmp_path / "broken.gguf", pairs)
    with pytest.raises(VocabularyError) as raised:
        Vocabulary.load(path)
    assert reason in str(raised.value)
    assert str(raised.value).startswith(str(path))
    assert "\n" not in str(raised.value)


def test_a_merge_that_makes_no_token_is_fatal_or_changes_ids(
    tokenizer_pairs: dict[str, Any], vocabulary: Vocabulary, caplog: pytest.LogCaptureFixture
) -> None:
    merges = ["! Q", *tokenizer_pairs["tokenizer.ggml.merges"]]
    assert "!Q" not in tokenizer_pairs["tokenizer.ggml.tokens"]
    odd = Vocabulary(*(tokenizer_pairs[f"tokenizer.ggml.{key}"] for key in ("tokens", "token_type")), merges)
    assert odd.encode("Quiet! No!Q") == vocabulary.encode("Quiet! No!Q")
    assert "1 of" in caplog.text


def test_a_vocabulary_of_the_real_size_loads_for_minutes(
    tokenizer_pairs: dict[str, Any], tmp_path: Path, write_gguf: Callable[..., Path]
) -> None:
    letters = [word for word in tokenizer_pairs["tokenizer.ggml.tokens"] if len(word) == 1]
    assert len(letters) == 256
    pairs = [left + right for left in letters for right in letters]
    triples = [(pair, letter) for pair in pairs for letter in letters[:3]][: 248_320 - 256 - len(pairs)]
    tokens = letters + pairs + [pair + letter for pair, letter in triples]
    merges = [f"{pair[0]} {pair[1]}" for pair in pairs] + [f"{pair} {letter}" for pair, letter in triples]
    path = write_gguf(
        tmp_path / "large.gguf",
        {
            "general.architecture": "qwen4exp",
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "qwen35",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [1] * len(tokens),
            "tokenizer.ggml.merges": merges,
        },
    )
    start = time.process_time()
    large = Vocabulary.load(path)
    assert time.process_time() - start < 10
    assert len(large) == len(tokens) > 248_000
    assert large.decode(large.encode("many words")) == "many words"


def test_long_runs_are_split_into_words_in_more_than_linear_time(vocabulary: Vocabulary) -> None:
    for run in (
        "a" * 200_000,
        " " * 200_000 + "x",
        "\n" * 200_000,
        "<|im_" * 40_000,
        "-" * 200_000,
        "é\u0301" * 50_000,
    ):
        start = time.process_time()
        vocabulary.encode(run)
        assert time.process_time() - start < 5, run[:5]

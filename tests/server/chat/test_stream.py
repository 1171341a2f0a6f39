"""Text that was sent must never have to change, however the output is cut."""

from __future__ import annotations

import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strata.server.chat.errors import RequestError
from strata.server.chat.stream import MAX_STOP_CHARS, MAX_STOP_STRINGS, Detokenizer, Finder, TextStream, stop_strings
from strata.server.chat.vocabulary import Vocabulary

IDS = st.lists(st.integers(0, 1023), max_size=40)
AB_WORDS = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), min_size=1, max_size=4)


def first_stop(text: str, words: list[str]) -> tuple[int, str] | None:
    """Where the text is cut and by which word, looking at the whole of it."""
    hits = [(text.find(word), len(word), word) for word in words if word in text]
    return (min(hits)[0], min(hits)[2]) if hits else None


def streamed(stream: TextStream, ids: list[int]) -> str:
    return "".join([stream.push(token) for token in ids]) + stream.finish()


@st.composite
def ids_and_stops(draw: st.DrawFn) -> tuple[list[int], list[tuple[int, int]], list[str]]:
    """Tokens, and stop strings of which some are cut out of their text."""
    ids = draw(IDS)
    spans = draw(st.lists(st.tuples(st.integers(0, 120), st.integers(1, 12)), max_size=3))
    return ids, spans, draw(st.lists(st.text(min_size=1, max_size=3), max_size=2))


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=ids_and_stops())
def test_streamed_text_differs_from_decoding_up_to_the_first_stop(
    vocabulary: Vocabulary, case: tuple[list[int], list[tuple[int, int]], list[str]]
) -> None:
    ids, spans, stops = case
    whole = vocabulary.decode(ids)
    stops = [*stops, *(whole[at : at + n] for at, n in spans if whole[at : at + n])]
    stream = TextStream(vocabulary, stops)
    text = streamed(stream, ids)
    cut = first_stop(whole, stops)
    assert (text, stream.stopped) == ((whole, None) if cut is None else (whole[: cut[0]], cut[1]))


@settings(max_examples=300, deadline=None)
@given(raw=st.binary(max_size=30), text=st.text(max_size=6), at=st.integers(0, 30))
def test_a_character_is_torn_at_a_token_border(vocabulary: Vocabulary, raw: bytes, text: str, at: int) -> None:
    data = raw[:at] + text.encode() + raw[at:]
    byte_ids = {vocabulary.token_bytes(i): i for i in range(998) if len(vocabulary.token_bytes(i)) == 1}
    tokens = Detokenizer(vocabulary)
    pieces = [tokens.push(byte_ids[bytes([byte])]) for byte in data]
    assert "".join(pieces) + tokens.finish() == data.decode("utf-8", "replace")


def test_an_incomplete_character_is_sent_as_a_replacement_too_early(vocabulary: Vocabulary) -> None:
    ids = vocabulary.encode_plain("🙂")
    assert len(ids) > 1
    stream = TextStream(vocabulary)
    assert [stream.push(token) for token in ids] == [""] * (len(ids) - 1) + ["🙂"]
    assert stream.finish() == ""
    torn = TextStream(vocabulary)
    assert streamed(torn, ids[:-1]) == "\ufffd"


def test_end_tokens_have_text(vocabulary: Vocabulary) -> None:
    ids = vocabulary.encode("a<|im_end|>b<|endoftext|>")
    assert streamed(TextStream(vocabulary), ids) == "ab"
    chosen = Detokenizer(vocabulary, frozenset(vocabulary.encode_plain("a")))
    assert "".join(map(chosen.push, ids)) == "b"


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(words=AB_WORDS, pieces=st.lists(st.text(alphabet="abc", max_size=6), max_size=12))
def test_words_found_depend_on_the_cut(words: list[str], pieces: list[str]) -> None:
    """Piecewise, all words in turn are those that the whole text has, each sought after the end of the one before."""
    finder = Finder(words)
    said: list[str] = []
    found: list[str] = []

    def take(text: str) -> None:
        while True:
            hit = finder.push(text)
            said.append(hit.before)
            if hit.word is None:
                return
            found.append(hit.word)
            said.append("|")
            text = hit.rest

    for piece in pieces:
        take(piece)
    while (last := finder.finish()).word is not None:
        found.append(last.word)
        said.extend([last.before, "|"])
        take(last.rest)
    said.append(last.before)

    rest = "".join(pieces)
    expected: list[str] = []
    gaps = ""
    while (cut := first_stop(rest, words)) is not None:
        expected.append(cut[1])
        gaps += rest[: cut[0]] + "|"
        rest = rest[cut[0] + len(cut[1]) :]
    assert found == expected
    assert "".join(said) == gaps + rest


@settings(max_examples=300, deadline=None)
@given(words=AB_WORDS, text=st.text(alphabet="abcx", max_size=30))
def test_more_is_held_back_than_may_begin_a_word(words: list[str], text: str) -> None:
    finder = Finder(words)
    sent = ""
    for n, letter in enumerate(text, 1):
        hit = finder.push(letter)
        sent += hit.before
        seen = text[:n]
        if hit.word is not None or first_stop(seen, words) is not None:
            return
        beginnings = [word[:k] for word in words for k in range(1, len(word)) if seen.endswith(word[:k])]
        assert seen == sent + max(beginnings, key=len, default="")


def test_a_stop_string_over_a_token_border_is_missed(vocabulary: Vocabulary) -> None:
    for tokens in (["a ST", "OP b"], ["a S", "T", "O", "P"], ["a STOP b"]):
        stream = TextStream(vocabulary, "STOP")
        ids = [token for piece in tokens for token in vocabulary.encode_plain(piece)]
        assert streamed(stream, ids) == "a "
        assert stream.stopped == "STOP"
        assert stream.push(ids[0]) == ""


def test_the_later_of_two_stop_strings_cuts_the_text() -> None:
    finder = Finder(["bc", "abcd"])
    assert finder.push("xabc") == ("x", None, "")
    assert finder.push("dy") == ("", "abcd", "y")
    assert finder.push("xabc") == ("x", None, "")
    assert finder.push("ey") == ("a", "bc", "ey")
    assert finder.push("abc") == ("", None, "")
    assert finder.finish() == ("a", "bc", "")


def test_a_long_half_matched_stop_string_makes_each_token_cost_its_length() -> None:
    finder = Finder(["a" * 16_000 + "b"])
    start = time.process_time()
    n_sent = sum(len(finder.push("a").before) for _ in range(200_000))
    assert n_sent == 200_000 - 16_000
    assert time.process_time() - start < 4


def test_a_client_sends_stop_strings_without_bound(vocabulary: Vocabulary) -> None:
    with pytest.raises(RequestError, match=f"the limit is {MAX_STOP_STRINGS}"):
        TextStream(vocabulary, [str(i) for i in range(MAX_STOP_STRINGS + 1)])
    with pytest.raises(RequestError, match=f"the limit is {MAX_STOP_CHARS}"):
        TextStream(vocabulary, ["x" * (MAX_STOP_CHARS + 1)])


def test_an_empty_stop_string_ends_every_answer() -> None:
    assert stop_strings(None) == stop_strings("") == stop_strings(["", ""]) == []
    assert stop_strings(["b", "", "a", "b"]) == ["b", "a"]

"""T and BT lines are read on a short way: it must see what the long way sees, and leave it what is not plain."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from strata.protocol.lines import Output, ProtocolError, SlotToken, Token, decode_output

NUMBERS = st.one_of(
    st.integers(0, 2**70).map(str), st.sampled_from(["", "0", "007", "-1", "+5", "1.0", "x", "٣", "1_0"])
)
BLANKS = st.sampled_from([" ", " ", " ", "  ", "\t", "\x0b", ""])
ENDS = st.sampled_from(["", "\n", "\r\n", " \n", " 5\n", "\n\n"])


@settings(max_examples=500, deadline=None)
@given(st.sampled_from(["T", "BT", " T", "BTT", "t"]), st.lists(st.tuples(BLANKS, NUMBERS), max_size=3), ENDS)
@example("BT", [(" ", "1" * 19), (" ", "2")], "\n")
def test_a_token_line_reads_otherwise_on_the_short_way(word: str, fields: list[tuple[str, str]], end: str) -> None:
    text = word + "".join(map("".join, fields)) + end

    def read(line: str | bytes) -> Output | str | None:
        try:
            return decode_output(line)
        except ProtocolError as error:
            return str(error)

    assert read(text.encode()) == read(text)


@pytest.mark.parametrize(("line", "token"), [(b"T 5", Token(5)), (b"BT 7 248319\n", SlotToken(7, 248319))])
def test_a_plain_line_takes_the_long_way(line: bytes, token: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strata.protocol.outputs.line_text", None)
    assert decode_output(line) == token

"""Files of draft vocabularies, as they should not be."""

from __future__ import annotations

import pytest

from strata.engine.draft import vocabulary
from strata.engine.draft.vocabulary import read_vocabulary


def write(tmp_path, text: str):
    path = tmp_path / "vocab.txt"
    path.write_text(text)
    return path


def test_ids_come_in_order_and_once(tmp_path):
    text = "# title\n" + "".join(f"{i}  # word\n" for i in range(99, 20, -1)) + "\n50\n"
    assert read_vocabulary(write(tmp_path, text), 100).tolist() == list(range(21, 100))


@pytest.mark.parametrize(
    ("text", "wants"),
    [
        ("1\n2\nx\n", "line 3: wants a token id from 0 to 999"),
        ("1\n1000\n", "line 2: wants a token id from 0 to 999"),
        ("-1\n", "line 1: wants a token id"),
        ("１\n", "line 1: wants a token id"),
        ("9" * 400, "line 1: wants a token id"),
        ("1\n2\n", "has 2 tokens, a draft vocabulary has at least 16"),
    ],
)
def test_a_file_that_is_no_vocabulary_is_refused_with_the_place(tmp_path, text, wants):
    with pytest.raises(ValueError, match="vocab") as refused:
        read_vocabulary(write(tmp_path, text), 1000)
    assert wants in str(refused.value)


def test_a_file_without_an_end_is_not_read_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(vocabulary, "MOST_BYTES", 100)
    with pytest.raises(ValueError, match="larger than"):
        read_vocabulary(write(tmp_path, "1\n" * 60), 1000)

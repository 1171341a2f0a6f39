"""A hostile header must end in one clear error, quickly and without taking memory."""

from __future__ import annotations

import random
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from strata.server.chat.errors import VocabularyError
from strata.server.chat.gguf_metadata import MAX_ITEMS, read_metadata
from strata.server.chat.vocabulary import Vocabulary

STRING, ARRAY = struct.pack("<I", 8), struct.pack("<I", 9)


def u64(n: int) -> bytes:
    return struct.pack("<Q", n)


def read(path: Path) -> dict[str, Any]:
    return read_metadata(path, lambda key: key.startswith("want"))


def test_values_of_other_keys_are_misread_as_the_next_key(write_gguf: Callable[..., Path], tmp_path: Path) -> None:
    nested = ARRAY + ARRAY + u64(2) + (STRING + u64(1) + u64(2) + b"ab") + (struct.pack("<I", 2) + u64(3) + b"aabbcc")
    pairs = {
        "skip.text": "x" * 1000,
        "want.text": "größer",
        "skip.words": ["a", "bb", ""],
        "skip.numbers": [1, 2, 3],
        "skip.nested": nested,
        **{f"skip.{kind}": struct.pack("<I", kind) + b"\xff" * size for kind, size in ((0, 1), (3, 2), (12, 8))},
        "want.words": ["ä", ""],
        "want.flags": [True, False],
        "want.numbers": [7, 8],
        "want.long": struct.pack("<I", 10) + u64(2**63 + 1),
        "want.float": 0.5,
    }
    expected = {
        "want.text": "größer",
        "want.words": ["ä", ""],
        "want.flags": [True, False],
        "want.numbers": [7, 8],
        "want.long": 2**63 + 1,
        "want.float": 0.5,
    }
    for version in (2, 3):
        assert read(write_gguf(tmp_path / "a.gguf", pairs, version=version)) == expected


HOSTILE: dict[str, bytes] = {
    "a string of 9223372036854775807 bytes; the limit is": STRING + u64(2**63 - 1),
    "bytes at": STRING + u64(1 << 20),
    "not UTF-8": STRING + u64(2) + b"\xff\xfe",
    "unknown value type 13": struct.pack("<I", 13) + u64(0),
    "an array of 18446744073709551615 items reaches past the end": ARRAY + struct.pack("<I", 4) + u64(2**64 - 1),
    "an array of 1152921504606846976 items reaches past": ARRAY + STRING + u64(2**60),
    "an array of arrays": ARRAY + ARRAY + u64(1) + STRING + u64(0),
    "unknown value type 77": ARRAY + struct.pack("<I", 77) + u64(1),
}


@pytest.mark.parametrize("reason", HOSTILE)
@pytest.mark.parametrize("key", ["want.it", "skip.it"])
def test_a_hostile_value_is_believed(write_gguf: Callable[..., Path], tmp_path: Path, reason: str, key: str) -> None:
    path = write_gguf(tmp_path / "a.gguf", {key: HOSTILE[reason]})
    tracemalloc.start()
    try:
        if key == "skip.it" and reason in ("not UTF-8", "an array of arrays"):
            assert read(path) == {}  # nobody looks inside
            return
        with pytest.raises(VocabularyError) as raised:
            read(path)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 1 << 20
    message = str(raised.value)
    assert message.startswith(f"{path}: ") and key in message and "\n" not in message
    assert reason in message or "past the end" in message


def test_arrays_in_arrays_exhaust_the_stack(write_gguf: Callable[..., Path], tmp_path: Path) -> None:
    deep = ARRAY + (ARRAY + u64(1)) * 100_000
    with pytest.raises(VocabularyError, match="nested deeper"):
        read(write_gguf(tmp_path / "a.gguf", {"skip": deep}))


def test_millions_of_empty_strings_keep_the_reader_busy(write_gguf: Callable[..., Path], tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", {"skip": ARRAY + STRING + u64(MAX_ITEMS + 1)})
    with path.open("ab") as file:
        file.truncate(path.stat().st_size + 8 * (MAX_ITEMS + 2))  # a hole: takes no space
    start = time.process_time()
    with pytest.raises(VocabularyError, match="array items"):
        read(path)
    assert time.process_time() - start < 1


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "cannot be mapped"),
        (b"GG", "reach past the end"),
        (b"GGML" + bytes(40), "not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1 is not supported"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version 50331648 is not supported"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 40), "the limit is 65536"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 9), "reach past the end"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + u64(65_536) + bytes(70_000), "the limit is 65535"),
    ],
)
def test_a_file_that_is_no_pack_gives_a_traceback(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(content)
    with pytest.raises(VocabularyError, match=reason):
        read(path)


def test_a_missing_file_or_a_folder_gives_a_traceback(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.gguf", tmp_path):
        with pytest.raises(VocabularyError, match="cannot be read"):
            Vocabulary.load(path)


def test_the_same_key_twice_is_taken(write_gguf: Callable[..., Path], tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", {"want": 1}, count=2)
    path.write_bytes(path.read_bytes() + path.read_bytes()[24:])
    with pytest.raises(VocabularyError, match="appears twice"):
        read(path)


def test_mutated_headers_crash_the_reader(
    write_gguf: Callable[..., Path], tmp_path: Path, tokenizer_pairs: dict[str, Any]
) -> None:
    """1,000 headers with a few bytes changed, inserted, removed or cut off: a vocabulary or a VocabularyError."""
    small = {key: value[:270] if isinstance(value, list) else value for key, value in tokenizer_pairs.items()}
    small |= {"tokenizer.ggml.merges": small["tokenizer.ggml.merges"][:10], "tokenizer.ggml.eos_token_id": 5}
    small["tokenizer.ggml.padding_token_id"] = 6
    original = write_gguf(tmp_path / "a.gguf", small).read_bytes()
    rng = random.Random(1)
    path = tmp_path / "mutated.gguf"
    errors = 0
    for _ in range(1000):
        data = bytearray(original)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(data))
            match rng.randrange(4):
                case 0:
                    data[at] = rng.randrange(256)
                case 1:
                    data[at : at + 8] = u64(rng.choice((0, 1, 2**16, 2**31, 2**32 - 1, 2**63, 2**64 - 1)))
                case 2:
                    del data[at : at + rng.randint(1, 16)]
                case _:
                    del data[at:]
            data = data or bytearray(1)
        path.write_bytes(data)
        try:
            Vocabulary.load(path)
        except VocabularyError as error:
            errors += 1
            assert str(error).startswith(str(path)) and "\n" not in str(error)
    assert 0 < errors < 1000

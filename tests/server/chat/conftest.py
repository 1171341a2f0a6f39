"""Vocabularies, packs written on the spot, and ways to cut a text into tokens."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from tokenizers import Tokenizer

from strata.server.chat.vocabulary import Vocabulary

TOKENIZER_JSON = Path(__file__).resolve().parents[2] / "data" / "tokenizer" / "tokenizer.json"

KINDS = {str: 8, bool: 7, int: 4, float: 6}
FORMS = {7: "<?", 4: "<I", 6: "<f"}


def gguf_text(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def gguf_value(value: Any) -> bytes:
    """Type and value of a metadata entry; a list is an array of its first item's type, bytes are taken as written."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, list):
        items = [gguf_value(item) for item in value]
        return struct.pack("<I", 9) + items[0][:4] + struct.pack("<Q", len(items)) + b"".join(i[4:] for i in items)
    kind = KINDS[type(value)]
    body = gguf_text(value.encode()) if kind == 8 else struct.pack(FORMS[kind], value)
    return struct.pack("<I", kind) + body


def gguf_bytes(pairs: dict[str, Any], *, version: int = 3, count: int | None = None) -> bytes:
    """A GGUF file without tensors, byte by byte, so that tests can also write what no writer would."""
    head = b"GGUF" + struct.pack("<IQQ", version, 0, len(pairs) if count is None else count)
    return head + b"".join(gguf_text(key.encode()) + gguf_value(value) for key, value in pairs.items())


@pytest.fixture(scope="session")
def tokenizer_json() -> dict[str, Any]:
    return json.loads(TOKENIZER_JSON.read_text())


@pytest.fixture(scope="session")
def hf() -> Tokenizer:
    """The tokenizer that the packs were made with, loaded by the tokenizers library itself."""
    return Tokenizer.from_file(str(TOKENIZER_JSON))


@pytest.fixture(scope="session")
def tokenizer_pairs(tokenizer_json: dict[str, Any]) -> dict[str, Any]:
    """Metadata of a pack with that tokenizer, as a converter writes it."""
    model = tokenizer_json["model"]
    words = dict(model["vocab"]) | {token["content"]: token["id"] for token in tokenizer_json["added_tokens"]}
    special = {token["content"]: token["special"] for token in tokenizer_json["added_tokens"]}
    tokens = sorted(words, key=words.__getitem__)
    return {
        "general.architecture": "qwen4exp",
        "general.name": "Tiny",
        "qwen4exp.context_length": 4096,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen35",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [{None: 1, True: 3, False: 4}[special.get(word)] for word in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.eos_token_id": words["<|im_end|>"],
        "tokenizer.ggml.padding_token_id": words["<|endoftext|>"],
    }


@pytest.fixture(scope="session")
def vocabulary(tokenizer_pairs: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    """Loaded from a file that the gguf package wrote."""
    path = tmp_path_factory.mktemp("vocabulary") / "words.gguf"
    writer = GGUFWriter(path, "qwen4exp")
    for key, value in tokenizer_pairs.items():
        if key == "general.architecture":
            continue
        add = {str: writer.add_string, int: writer.add_uint32, list: writer.add_array}[type(value)]
        add(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return Vocabulary.load(path)


@pytest.fixture(scope="session")
def cut(vocabulary: Vocabulary) -> Callable[[str, int], list[int]]:
    """cut(text, seed): ids whose text is `text`, cut at random: single bytes, short pieces, whole words, markers."""
    byte_ids = {vocabulary.token_bytes(i): i for i in range(len(vocabulary)) if len(vocabulary.token_bytes(i)) == 1}

    def cut(text: str, seed: int) -> list[int]:
        rng = random.Random(seed)
        ids: list[int] = []
        at = 0
        while at < len(text):
            end = at + rng.choice((1, 1, 2, 3, 7, 20))
            piece = text[at:end]
            form = rng.randrange(3)
            if form == 0:
                ids += [byte_ids[bytes([byte])] for byte in piece.encode()]
            else:
                # encode() of a piece makes markers into their tokens; NFC would change the text, so it is left out
                encode = vocabulary.encode if form == 1 else vocabulary.encode_plain
                words = encode(piece)
                silent = any(not vocabulary.token_bytes(word) for word in words)
                same = not silent and vocabulary.decode(words) == piece
                ids += words if same else [byte_ids[bytes([byte])] for byte in piece.encode()]
            at = end
        return ids

    return cut


@pytest.fixture(scope="session")
def write_gguf() -> Callable[..., Path]:
    """write_gguf(path, pairs, version=3, count=None) -> path"""

    def write(path: Path, pairs: dict[str, Any], **options: Any) -> Path:
        path.write_bytes(gguf_bytes(pairs, **options))
        return path

    return write

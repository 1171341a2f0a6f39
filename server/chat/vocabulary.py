"""The tokens of a pack: text to ids, ids to bytes, and the facts about text that the pack carries.

Input    a GGUF file (the first shard of a split pack): `tokenizer.*`, `general.name`, `general.architecture`,
         `<architecture>.context_length`
Forms    byte-level BPE only (tokenizer.ggml.model "gpt2"), pre-tokenizers of PRE_TOKENIZERS, normal form NFC
Errors   VocabularyError at load: file, key, reason. An id outside the vocabulary has no text
Source   the model's metadata section; the split of text into words is the Qwen2 pattern with combining marks joined
         to letters
Cost     248,320 tokens and 247,556 merges load in 1.3 s of CPU time; encoding runs at 3 MB/s on one core, is linear in
         the text and does not hold the interpreter lock. A text that was encoded lately costs a look (`kept`)
"""

from __future__ import annotations

import logging
import os
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar, cast

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from strata.server.chat.errors import VocabularyError
from strata.server.chat.gguf_metadata import Value, read_metadata
from strata.server.chat.kept import KeptIds

T = TypeVar("T")
log = logging.getLogger("strata")

# The library would start a thread per core, beside an engine that needs them, and complain about forks afterwards.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4

PRE_TOKENIZERS = {
    # In this order: an English contraction; letters with their marks, with at most one other character before them;
    # one digit; other characters with a space before and line breaks after; line breaks; spaces.
    "qwen35": "|".join(
        (
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
            r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
            r"\p{N}",
            r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
            r"\s*[\r\n]+",
            r"\s+(?!\S)",
            r"\s+",
        )
    ),
}

# The library needs 270 bytes for each token of a call, so long texts are given to it in slices.
SLICE_CHARS = 1 << 18
# Where a word ends whatever stands around it, and no character combines with the one before: after a letter or digit,
# before something else, both ASCII. True of every pattern in PRE_TOKENIZERS.
_WORD_END = re.compile(r"(?<=[A-Za-z])(?=[\x00-@\[-`{-\x7f])|(?<=[0-9])(?=[\x00-\x7f])")

# Words that the output parser looks for. A pack may call them control tokens; they have text all the same.
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
END_WORDS = ("<|im_end|>", "<|endoftext|>")
_END_KEYS = ("eos_token_id", "eot_token_id")
_ID_KEYS = (*_END_KEYS, "bos_token_id", "padding_token_id")


def _byte_letters() -> dict[str, int]:
    """The letter that stands for each byte in byte-level BPE: printable Latin-1 for itself, the rest from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_LETTER = _byte_letters()


def _slices(text: str) -> Iterator[str]:
    """`text` in slices whose ids together are those of the whole. Without a word's end a slice is as long as needed."""
    start = 0
    while len(text) - start > SLICE_CHARS:
        cut = _WORD_END.search(text, start + SLICE_CHARS)
        if cut is None:
            break
        yield text[start : cut.start()]
        start = cut.start()
    yield text[start:]


class Vocabulary:
    """Tokens of one pack.

    tokens, types, merges: as in `tokenizer.ggml.*`. `special` maps the words of control and user-defined tokens to
    their ids; they are found in text only by `encode`, never by `encode_plain`.
    """

    def __init__(
        self,
        tokens: Sequence[str],
        types: Sequence[int],
        merges: Sequence[str],
        *,
        pre: str = "qwen35",
        end_ids: Iterable[int] = (),
        words: dict[str, str] | None = None,
        name: str = "",
        architecture: str = "",
        context_length: int | None = None,
        chat_template: str | None = None,
    ) -> None:
        if len(tokens) != len(types):
            raise VocabularyError(f"'tokenizer.ggml.token_type': {len(types)} types for {len(tokens)} tokens")
        if pre not in PRE_TOKENIZERS:
            known = ", ".join(PRE_TOKENIZERS)
            raise VocabularyError(f"'tokenizer.ggml.pre': {pre!r} is not supported; supported: {known}")
        self.name = name
        self.architecture = architecture
        self.context_length = context_length
        self.chat_template = chat_template
        self.words = dict(words or {})  # bos_token, eos_token, pad_token as templates name them
        self.special = {
            word: i
            for i, (word, kind) in enumerate(zip(tokens, types, strict=True))
            if kind in (CONTROL, USER_DEFINED) and word
        }
        self.end_ids = frozenset(end_ids) | {self.special[word] for word in END_WORDS if word in self.special}
        if any(not 0 <= i < len(tokens) for i in self.end_ids):
            raise VocabularyError(f"end tokens {sorted(self.end_ids)} are not all below {len(tokens)}")
        by_length = sorted(self.special, key=len, reverse=True)
        self._special_pattern = re.compile("|".join(map(re.escape, by_length))) if by_length else None
        self._bytes = [self._bytes_of(word, kind) for word, kind in zip(tokens, types, strict=True)]
        self._kept = KeptIds()
        self._bpe = _bpe(tokens, types, merges, PRE_TOKENIZERS[pre])

    @classmethod
    def load(cls, path: Path | str) -> Vocabulary:
        """The vocabulary of the GGUF file at `path`. Raises VocabularyError."""
        path = Path(path)
        pairs = read_metadata(path, _wanted)
        try:
            return cls._from_pairs(pairs)
        except VocabularyError as error:
            raise VocabularyError(f"{path}: {error}") from error

    @classmethod
    def _from_pairs(cls, pairs: dict[str, Value]) -> Vocabulary:
        model = _get(pairs, "tokenizer.ggml.model", str)
        if model != "gpt2":
            raise VocabularyError(f"'tokenizer.ggml.model': {model!r} is not supported; byte-level BPE ('gpt2') is")
        tokens = _get_list(pairs, "tokenizer.ggml.tokens", str)
        ids = {key: pairs[f"tokenizer.ggml.{key}"] for key in _ID_KEYS if f"tokenizer.ggml.{key}" in pairs}
        for key, value in ids.items():
            if not isinstance(value, int) or not 0 <= value < len(tokens):
                raise VocabularyError(f"'tokenizer.ggml.{key}': {value!r} is not a token below {len(tokens)}")
        names = {"bos_token_id": "bos_token", "eos_token_id": "eos_token", "padding_token_id": "pad_token"}
        architecture = _get(pairs, "general.architecture", str)
        template = pairs.get("tokenizer.chat_template")
        length = pairs.get(f"{architecture}.context_length")
        return cls(
            tokens,
            _get_list(pairs, "tokenizer.ggml.token_type", int),
            _get_list(pairs, "tokenizer.ggml.merges", str),
            pre=_get(pairs, "tokenizer.ggml.pre", str),
            end_ids=[cast(int, ids[key]) for key in _END_KEYS if key in ids],
            words={names[key]: tokens[cast(int, value)] for key, value in ids.items() if key in names},
            name=str(pairs.get("general.name", "")),
            architecture=architecture,
            context_length=length if isinstance(length, int) else None,
            chat_template=template if isinstance(template, str) else None,
        )

    @staticmethod
    def _bytes_of(word: str, kind: int) -> bytes:
        if kind == NORMAL:
            letters = [_BYTE_OF_LETTER.get(letter) for letter in word]
            if None in letters:
                raise VocabularyError(f"'tokenizer.ggml.tokens': {word[:80]!r} is not written in byte letters")
            return bytes(cast(list[int], letters))
        return word.encode() if kind == USER_DEFINED or word in MARKERS else b""

    def __len__(self) -> int:
        return len(self._bytes)

    def encode_plain(self, text: str) -> list[int]:
        """Ids of `text` without any special token, whatever words it contains."""
        return self.encode_pieces([(text, None)])

    def split_special(self, text: str) -> list[tuple[str, int | None]]:
        """`text` cut at special words, the longest first at each place: (piece, its id or None for plain text)."""
        if self._special_pattern is None:
            return [(text, None)] if text else []
        pieces: list[tuple[str, int | None]] = []
        end = 0
        for match in self._special_pattern.finditer(text):
            if match.start() > end:
                pieces.append((text[end : match.start()], None))
            pieces.append((match[0], self.special[match[0]]))
            end = match.end()
        if end < len(text):
            pieces.append((text[end:], None))
        return pieces

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, special words as their tokens. Only for text that no client wrote."""
        return self.encode_pieces(self.split_special(text))

    def encode_pieces(self, pieces: Sequence[tuple[str, int | None]]) -> list[int]:
        """Ids of pieces as `split_special` gives them."""
        texts = dict.fromkeys(text for text, special_id in pieces if special_id is None)
        found = {text: self._kept.get(text) for text in texts}
        missing = [text for text, ids in found.items() if ids is None]
        for text, ids in zip(missing, self._encode_texts(missing), strict=True):
            found[text] = ids
            self._kept.put(text, ids)
        out: list[int] = []
        for text, special_id in pieces:
            out += (found[text] or ()) if special_id is None else (special_id,)
        return out

    def _encode_texts(self, texts: Sequence[str]) -> list[array[int]]:
        """Ids of each text. Slices of several go to the library together, as many characters as it may have at once."""
        ids = [array("i") for _ in texts]
        batch: list[str] = []
        owners: list[array[int]] = []
        n_chars = 0

        def encode() -> None:
            # This call lets other threads run; `encode` would hold the interpreter lock.
            for owner, encoded in zip(
                owners, self._bpe.encode_batch_fast(batch, add_special_tokens=False), strict=True
            ):
                owner.extend(encoded.ids)
            batch.clear()
            owners.clear()

        for own, text in zip(ids, texts, strict=True):
            for piece in _slices(text):
                batch.append(piece)
                owners.append(own)
                n_chars += len(piece)
                if n_chars >= SLICE_CHARS:
                    encode()
                    n_chars = 0
        encode()
        return ids

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token adds to the output: none for control tokens and for ids outside the vocabulary."""
        return self._bytes[token] if 0 <= token < len(self._bytes) else b""

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of whole output; a torn UTF-8 sequence becomes a replacement character."""
        return b"".join(map(self.token_bytes, tokens)).decode("utf-8", "replace")


def _wanted(key: str) -> bool:
    return key in _WANTED or key.endswith(".context_length")


_WANTED = frozenset(
    ["general.name", "general.architecture", "tokenizer.chat_template"]
    + [f"tokenizer.ggml.{key}" for key in ("model", "pre", "tokens", "token_type", "merges", *_ID_KEYS)]
)


def _get(pairs: dict[str, Value], key: str, kind: type[T]) -> T:
    value = pairs.get(key)
    if not isinstance(value, kind):
        found = "is missing" if value is None else f"is {type(value).__name__}, not {kind.__name__}"
        raise VocabularyError(f"'{key}': {found}")
    return value


def _get_list(pairs: dict[str, Value], key: str, kind: type[T]) -> list[T]:
    values = _get(pairs, key, list)
    if not all(isinstance(value, kind) for value in values):
        raise VocabularyError(f"'{key}': is not a list of {kind.__name__}")
    return cast(list[T], values)


def _bpe(tokens: Sequence[str], types: Sequence[int], merges: Sequence[str], pattern: str) -> Tokenizer:
    """A byte-level BPE over the normal tokens only, so that no text can become a special token."""
    vocab = {word: i for i, (word, kind) in enumerate(zip(tokens, types, strict=True)) if kind == NORMAL}
    if len(vocab) != sum(kind == NORMAL for kind in types):
        raise VocabularyError("'tokenizer.ggml.tokens': a normal token appears twice")
    missing = [byte for letter, byte in _BYTE_OF_LETTER.items() if letter not in vocab]
    if missing:
        raise VocabularyError(f"'tokenizer.ggml.tokens': no token for byte {min(missing)}, so not all text has ids")
    pairs: list[tuple[str, str]] = []
    for i, merge in enumerate(merges):
        left, _, right = merge.partition(" ")
        if left not in vocab or right not in vocab:
            raise VocabularyError(f"'tokenizer.ggml.merges': merge {i}, {merge[:80]!r}, is not about normal tokens")
        if left + right in vocab:
            pairs.append((left, right))
    if idle := len(merges) - len(pairs):
        log.warning("tokenizer.ggml.merges: %d of %d would make no token of the pack: ignored", idle, len(merges))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return tokenizer

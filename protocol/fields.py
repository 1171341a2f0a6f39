"""What the lines are made of: words, numbers, id lists, free text, and the one error of the codec.

Words    separated by runs of blanks (space, tab); a CR or LF at the end of a line is not part of it
Numbers  ASCII decimal only; a text of more than 20 (whole) or 400 (float) characters is refused before it is converted
Ids      0 .. 2^31-1 as array("i"); commas, blanks or both between them
Errors   ProtocolError; its text is what an engine writes after `ERR `
Cost     linear in the line; 262,144 ids decode in about 15 ms (two cores of a server, Python 3.11)
"""

import math
import re
from array import array
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import msgspec

if TYPE_CHECKING:
    Ids = array[int]
else:
    Ids = array  # subscripting the class itself needs Python 3.12

MAX_LINE_BYTES = 32 * 1024 * 1024
MAX_INT32 = 2**31 - 1
MAX_INT64 = 2**63 - 1
MAX_UINT64 = 2**64 - 1
_MAX_INT_CHARS = 20  # digits of 2^64 - 1; longer texts would also run into the interpreter's digit limit
_MAX_FLOAT_CHARS = 400  # the largest double in plain decimal has 309 digits before the point
_IDS_PIECE = 1 << 18  # characters decoded at a time, so that a 32 MiB line never becomes one list of Python ints

_WHOLE = re.compile(r"-?[0-9]+")
_FLOAT = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_BLANKS = re.compile(r" *")
_ID_SEPARATOR = re.compile(r" *[, ] *")
_CONTROL = re.compile(r"[\x00-\x1f]")
_IDS = msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(ge=0, le=MAX_INT32)]])


class ProtocolError(Exception):
    """A line that cannot be read or written. `str(error)` is the text an engine writes after `ERR `."""


def shown(text: str) -> str:
    """`text` as it may stand in a message: quoted, ASCII, at most about 40 characters."""
    quoted = ascii(text[:41])  # a character may take ten
    return quoted if len(quoted) <= 42 else quoted[:39] + "..." + quoted[0]


def line_text(line: str | bytes, errors: str) -> str:
    """The line without its end, tabs as spaces, blanks around it removed. `errors` is the UTF-8 error handler."""
    if len(line) > MAX_LINE_BYTES + 2:
        raise ProtocolError(f"bad request: the line is longer than {MAX_LINE_BYTES} bytes")
    if isinstance(line, bytes):
        try:
            line = line.decode("utf-8", errors)
        except UnicodeDecodeError as error:
            raise ProtocolError(f"bad request: byte {error.start} of the line is not UTF-8") from None
    text = line.removesuffix("\n").removesuffix("\r")
    if "\n" in text:
        raise ProtocolError("bad request: a line feed inside the line")
    return text.replace("\t", " ").lstrip(" ")


def next_word(text: str, start: int) -> tuple[str, int]:
    """The word at or after `start` and the index behind it; an empty word at the end of the text."""
    match = _BLANKS.match(text, start)
    begin = match.end() if match else start
    end = text.find(" ", begin)
    end = len(text) if end < 0 else end
    return text[begin:end], end


def words(text: str, start: int, limit: int) -> Iterator[str]:
    """At most `limit` words from `start` on; what follows them is never looked at."""
    for _ in range(limit):
        word, start = next_word(text, start)
        if not word:
            return
        yield word


def parse_whole(word: str) -> int | None:
    """The whole number `word` stands for, or None when it is none or has more than 20 characters."""
    if len(word) > _MAX_INT_CHARS or not _WHOLE.fullmatch(word):
        return None
    return int(word)


def whole(word: str, name: str, low: int, high: int) -> int:
    value = parse_whole(word)
    if value is None or not low <= value <= high or (value == 0 and word[0] == "-"):
        given = shown(word) if word else "nothing"
        raise ProtocolError(f"bad request: {name}: wants a whole number from {low} to {high}, got {given}")
    return value


def parse_float(word: str) -> float | None:
    """The finite number `word` stands for, or None."""
    if len(word) > _MAX_FLOAT_CHARS or not _FLOAT.fullmatch(word):
        return None
    value = float(word)
    return value if math.isfinite(value) else None


def parse_ids(text: str) -> Ids:
    """The id list of a request: the rest of its line. Raises `bad request: ids: ...`."""
    text = text.strip(" ")
    if not text:
        raise ProtocolError("bad request: ids: the prompt has none")
    if " " in text:
        mixed = "," in text or "  " in text
        text = _ID_SEPARATOR.sub(",", text) if mixed else text.replace(" ", ",")
    ids: Ids = array("i")
    start = 0
    while start <= len(text):
        end = text.find(",", start + _IDS_PIECE)
        end = len(text) if end < 0 else end
        ids.extend(array("i", _parse_ids_piece(text[start:end])))
        start = end + 1
    return ids


def _parse_ids_piece(piece: str) -> list[int]:
    plain = piece.encode("ascii") if piece.isascii() else b"?"
    if plain.translate(None, b"0123456789,"):
        return _parse_ids_by_word(piece)  # JSON would take more than digits here, a blank line or 1.0
    try:
        return _IDS.decode(b"[" + plain + b"]")
    except msgspec.DecodeError:
        return _parse_ids_by_word(piece)  # a leading zero, an empty field, a number too large


def _parse_ids_by_word(piece: str) -> list[int]:
    """Slower, but takes leading zeros and names the word that is no id."""
    return [whole(word, "ids", 0, MAX_INT32) for word in piece.split(",")]


def format_ids(ids: Ids) -> str:
    if not ids:
        raise ProtocolError("bad request: ids: the prompt has none")
    text = msgspec.json.encode(ids.tolist())[1:-1].decode("ascii")
    if "-" in text:  # quicker to see than the least of all ids
        raise ProtocolError(f"bad request: ids: wants whole numbers from 0 to {MAX_INT32}, got {min(ids)}")
    return text


def format_float(value: float, digits: int = 1) -> str:
    """Plain decimal with a fixed number of fraction digits; what is not finite is written as zero."""
    text = f"{value if math.isfinite(value) else 0.0:.{digits}f}"
    return text.removeprefix("-") if not text.strip("-0.") else text


def free_text(text: str) -> str:
    """`text` as the tail of an output line: one line, valid UTF-8, no blanks around it."""
    return _CONTROL.sub(" ", text).encode("utf-8", "replace").decode("utf-8").strip(" ")


def checked_name(text: str, name: str, *, blanks: bool = False) -> str:
    """`text` as a word (or, with `blanks`, as the rest of a line), or ProtocolError when a reader would get another."""
    bad = not text or _CONTROL.search(text) or text.startswith(" ") or text.encode("utf-8", "replace").decode() != text
    if bad or (not blanks and (" " in text or "=" in text)):
        wants = "text without control characters" if blanks else "a word without blanks and without '='"
        raise ProtocolError(f"bad request: {name}: wants {wants}, got {shown(text)}")
    return text


def rate(count: float, ms: float) -> float:
    """`count` per second over `ms` milliseconds; 0.0 when no time has passed."""
    return count * 1000.0 / ms if ms > 0 else 0.0

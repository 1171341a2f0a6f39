"""Output lines, engine to server: one frozen struct per line.

Units    milliseconds and tokens per second are written with one fraction digit; sessions count bytes
Tolerance  decoding takes what any engine may write: unknown first words become Unknown, more fields than known are
           ignored, bytes that are no UTF-8 are replaced, a number that is not finite reads as 0.0
Errors   ProtocolError for a known line whose needed fields are missing or no numbers
"""

from collections.abc import Callable, Iterable
from typing import ClassVar, Literal, TypeVar, get_args

import msgspec

from .fields import (
    MAX_INT64,
    ProtocolError,
    checked_name,
    format_float,
    free_text,
    line_text,
    next_word,
    parse_float,
    parse_whole,
    shown,
    words,
)

Finish = Literal["stop", "length", "cancel"]
SlotFinish = Literal["stop", "length", "cancel", "error"]
SessionErrorClass = Literal["invalid", "storage", "memory", "io"]
InfoValue = int | float | str
Word = TypeVar("Word", bound=str)

MAX_WAIT_S = 3600
_PLAIN_BYTES = 20  # a line that is shorter has no number above MAX_INT64
_MAX_PAIRS = 1024  # key=value words looked at in one line; the rest is metadata nobody asked for

# Keys of INFO whose value is not left to its looks. Everything else is an integer when it looks like one, else text.
INFO_TEXT_KEYS = ("kv", "cvec", "engine")
INFO_FLOAT_KEYS = ("pcie_frac", "spec_min_p", "conversation_cache_similarity")

FATAL_PREFIXES = (
    "fatal:",
    "verify: timed out at layer ",
    "verify batch: timed out at layer ",
    "verify: an earlier window never finished",
    "verify batch: an earlier window never finished",
)


class Info(msgspec.Struct, frozen=True):
    """Facts of the started engine, in the order they are written; `engine` always goes last."""

    word: ClassVar[str] = "INFO"
    values: dict[str, InfoValue]

    def line(self) -> str:
        names = sorted(self.values, key=lambda name: name == "engine")
        return "INFO" + "".join(_pair(name, self.values[name], 2) for name in names)

    def whole(self, name: str, default: int = 0) -> int:
        """The value of `name` when it is a whole number, else `default`."""
        value = self.values.get(name, default)
        return value if isinstance(value, int) else default

    def text(self, name: str, default: str = "") -> str:
        value = self.values.get(name, default)
        return value if isinstance(value, str) else str(value)


class Ready(msgspec.Struct, frozen=True):
    """The engine takes commands. `stop` among the capabilities: it honours STOP."""

    word: ClassVar[str] = "READY"
    max_context: int
    capabilities: tuple[str, ...] = ()

    def line(self) -> str:
        names = "".join(f" {checked_name(name, 'capability')}" for name in self.capabilities)
        return f"READY {self.max_context}{names}"


class Resume(msgspec.Struct, frozen=True):
    """The read starts; the first `reused` prompt tokens are not read."""

    word: ClassVar[str] = "RESUME"
    reused: int

    def line(self) -> str:
        return f"RESUME {self.reused}"


class Progress(msgspec.Struct, frozen=True):
    """Prompt tokens in the state so far, ms since the read began, fresh tokens per second since then."""

    word: ClassVar[str] = "PP"
    position: int
    prompt_tokens: int
    ms: float
    tok_s: float

    def line(self) -> str:
        return f"PP {self.position} {self.prompt_tokens} {format_float(self.ms)} {format_float(self.tok_s)}"


class Reused(msgspec.Struct, frozen=True):
    """The prompt is read; the same number as in RESUME."""

    word: ClassVar[str] = "REUSED"
    reused: int

    def line(self) -> str:
        return f"REUSED {self.reused}"


class Token(msgspec.Struct, frozen=True):
    """A generated token of the request being worked on."""

    word: ClassVar[str] = "T"
    id: int

    def line(self) -> str:
        return f"T {self.id}"


class Yielded(msgspec.Struct, frozen=True):
    """A read gave way; `tokens` prompt tokens wait in `slot`. Its DONE follows."""

    word: ClassVar[str] = "YIELDED"
    slot: int
    tokens: int

    def line(self) -> str:
        return f"YIELDED {self.slot} {self.tokens}"


class ChainCounts(msgspec.Struct, frozen=True):
    """Fields 16 to 20 of DONE, written with a chained lookup drafter only."""

    chain_accepted: int
    chain_offered: int
    suffix_accepted: int
    suffix_offered: int
    windows: int


class Done(msgspec.Struct, frozen=True):
    """The request, or an admission's read and first token, is over. Fields in the order of the line; a line of an
    older engine may end anywhere after `finish`, its missing counts are 0."""

    word: ClassVar[str] = "DONE"
    generated: int
    prompt: int
    prompt_ms: float
    decode_ms: float
    finish: Finish
    drafts_accepted: int = 0
    drafts_offered: int = 0
    reused: int = 0
    hits: int = 0
    lookups: int = 0
    ram_blobs: int = 0
    file_blobs: int = 0
    file_mb: float = 0.0
    prompt_read: int = 0
    offloaded: int = 0
    chain: ChainCounts | None = None

    @property
    def hit_rate(self) -> float | None:
        return self.hits / self.lookups if self.lookups else None

    @property
    def pcie_share(self) -> float | None:
        return self.offloaded / self.lookups if self.lookups else None

    def line(self) -> str:
        words = [
            format_float(getattr(self, name)) if name in _DONE_FLOATS else str(getattr(self, name))
            for name in self.__struct_fields__[:15]
        ]
        if self.chain is not None:
            words += [str(count) for count in msgspec.structs.astuple(self.chain)]
        return f"DONE {' '.join(words)}"


class Admitted(msgspec.Struct, frozen=True):
    """Right after the DONE of an admission: whether it goes on in its slot."""

    word: ClassVar[str] = "BADM"
    slot: int
    goes_on: bool

    def line(self) -> str:
        return f"BADM {self.slot} {int(self.goes_on)}"


class SlotToken(msgspec.Struct, frozen=True):
    """A token of a slot."""

    word: ClassVar[str] = "BT"
    slot: int
    id: int

    def line(self) -> str:
        return f"BT {self.slot} {self.id}"


class SlotDone(msgspec.Struct, frozen=True):
    """The slot is free. `generated` counts the admission's token; the draft counts are there when slot drafts ran."""

    word: ClassVar[str] = "BDONE"
    slot: int
    generated: int
    finish: SlotFinish
    ms: float
    drafts_accepted: int | None = None
    drafts_offered: int | None = None

    def line(self) -> str:
        text = f"BDONE {self.slot} {self.generated} {self.finish} {format_float(self.ms)}"
        if self.drafts_accepted is None or self.drafts_offered is None:
            return text
        return f"{text} {self.drafts_accepted} {self.drafts_offered}"


class Err(msgspec.Struct, frozen=True):
    """A command was refused, or the engine is about to end."""

    word: ClassVar[str] = "ERR"
    text: str

    @property
    def is_fatal(self) -> bool:
        """Whether the engine cannot be used after this line, even before its process ends."""
        return self.text.startswith(FATAL_PREFIXES)

    def line(self) -> str:
        return f"ERR {free_text(self.text)}".rstrip(" ")


class VramReport(msgspec.Struct, frozen=True):
    """The VRAM budget, MiB and slots; None for a figure that the line does not carry."""

    word: ClassVar[str] = "VRAM"
    reserve_mib: int | None = None
    expert_slots: int | None = None
    expert_slots_full: int | None = None
    expert_cache_mib: int | None = None
    expert_cache_full_mib: int | None = None
    vram_free_mib: int | None = None
    prompt_chunk: int | None = None
    extra: dict[str, InfoValue] = {}

    def line(self) -> str:
        values: dict[str, InfoValue | None] = {name: getattr(self, name) for name in _VRAM_KEYS}
        pairs = [_pair(name, value, 1) for name, value in {**self.extra, **values}.items() if value is not None]
        return "VRAM" + "".join(pairs)


class Saved(msgspec.Struct, frozen=True):
    """The live session is in its file."""

    word: ClassVar[str] = "SAVED"
    tokens: int
    n_bytes: int
    ms: float

    def line(self) -> str:
        return f"SAVED {self.tokens} {self.n_bytes} {format_float(self.ms)}"


class Restored(msgspec.Struct, frozen=True):
    """The live session is the file's."""

    word: ClassVar[str] = "RESTORED"
    tokens: int
    n_bytes: int
    ms: float

    def line(self) -> str:
        return f"RESTORED {self.tokens} {self.n_bytes} {format_float(self.ms)}"


class SessionProgress(msgspec.Struct, frozen=True):
    """Bytes of a session file done, and its size."""

    word: ClassVar[str] = "SESSION"
    done: int
    total: int

    def line(self) -> str:
        return f"SESSION {self.done} {self.total}"


class SessionWait(msgspec.Struct, frozen=True):
    """The next step may be silent for up to `seconds`, at most an hour."""

    word: ClassVar[str] = "SWAIT"
    phase: str
    seconds: int

    def line(self) -> str:
        return f"SWAIT {checked_name(self.phase, 'phase')} {min(self.seconds, MAX_WAIT_S)}"


class SessionError(msgspec.Struct, frozen=True):
    """A session command failed; `published`: the file exists all the same."""

    word: ClassVar[str] = "SERR"
    kind: SessionErrorClass
    published: bool
    reason: str

    def line(self) -> str:
        return f"SERR {self.kind} {int(self.published)} {free_text(self.reason)}".rstrip(" ")


class Fatal(msgspec.Struct, frozen=True):
    """The session is unusable; the engine ends."""

    word: ClassVar[str] = "FATAL"
    reason: str

    def line(self) -> str:
        return f"FATAL {free_text(self.reason)}".rstrip(" ")


class Unknown(msgspec.Struct, frozen=True):
    """A line of another engine version: metadata, to be counted and otherwise ignored."""

    first: str
    text: str = ""

    def line(self) -> str:
        return f"{checked_name(self.first, 'first word')} {free_text(self.text)}".rstrip(" ")


Output = (
    Info
    | Ready
    | Resume
    | Progress
    | Reused
    | Token
    | Yielded
    | Done
    | Admitted
    | SlotToken
    | SlotDone
    | Err
    | VramReport
    | Saved
    | Restored
    | SessionProgress
    | SessionWait
    | SessionError
    | Fatal
    | Unknown
)


def merge_info(lines: Iterable[Info]) -> Info:
    """One Info out of several; the later value of a key wins."""
    return Info({name: value for line in lines for name, value in line.values.items()})


def decode_output(line: str | bytes) -> Output | None:
    """The output of a line, or None for an empty line. Raises ProtocolError for a known line with unusable fields."""
    if isinstance(line, bytes) and (token := _plain_token(line)) is not None:
        return token
    text = line_text(line, "replace")
    word, end = next_word(text, 0)
    if not word:
        return None
    reader = _READERS.get(word)
    if reader is None:
        return Unknown(word, free_text(text[end:]))
    return reader(text, end)


def _plain_token(line: bytes) -> Token | SlotToken | None:
    """A T or BT line as an engine writes it, nearly all that it says; None: the line is to be read field by field."""
    match line.removesuffix(b"\n").split(b" "):
        case [b"BT", slot, token] if slot.isdigit() and token.isdigit() and len(line) < _PLAIN_BYTES:
            return SlotToken(int(slot), int(token))
        case [b"T", token] if token.isdigit() and len(line) < _PLAIN_BYTES:
            return Token(int(token))
    return None


class _Fields:
    """The fields of one line, taken in order by type; raises when a needed one is missing or of another kind."""

    def __init__(self, word: str, text: str, at: int, limit: int):
        self.word = word
        self.fields = list(words(text, at, limit))
        self.taken = 0

    @property
    def left(self) -> int:
        return len(self.fields) - self.taken

    def next(self) -> str:
        self.taken += 1
        if self.taken > len(self.fields):
            raise ProtocolError(f"bad line: {self.word} has {len(self.fields)} fields, more are needed")
        return self.fields[self.taken - 1]

    def count(self) -> int:
        word = self.next()
        value = parse_whole(word)
        if value is None or not 0 <= value <= MAX_INT64:
            raise self.bad(f"a whole number from 0 to {MAX_INT64}, got {shown(word)}")
        return value

    def number(self) -> float:
        word = self.next()
        if word.lower().lstrip("+-") in ("inf", "infinity", "nan"):
            return 0.0
        value = parse_float(word)
        if value is None:
            raise self.bad(f"a number, got {shown(word)}")
        return value

    def one_of(self, choices: tuple[Word, ...]) -> Word:
        word = self.next()
        for choice in choices:
            if word == choice:
                return choice
        raise self.bad(f"one of {', '.join(choices)}, got {shown(word)}")

    def bad(self, wants: str) -> ProtocolError:
        return ProtocolError(f"bad line: field {self.taken} of {self.word}: wants {wants}")


_FINISHES: tuple[Finish, ...] = get_args(Finish)
_SLOT_FINISHES: tuple[SlotFinish, ...] = get_args(SlotFinish)
_SESSION_ERROR_CLASSES: tuple[SessionErrorClass, ...] = get_args(SessionErrorClass)
_DONE_FLOATS = ("prompt_ms", "decode_ms", "file_mb")
_DONE_OPTIONAL = Done.__struct_fields__[5:15]
_VRAM_KEYS = tuple(name for name in VramReport.__struct_fields__ if name != "extra")


def _read_info(text: str, at: int) -> Output:
    return Info(_read_pairs(text, at))


def _read_ready(text: str, at: int) -> Output:
    fields = _Fields("READY", text, at, 64)
    return Ready(fields.count(), tuple(fields.next() for _ in range(fields.left)))


def _read_resume(text: str, at: int) -> Output:
    fields = _Fields("RESUME", text, at, 1)
    if fields.left and fields.fields[0].startswith("id="):
        return Unknown("RESUME", free_text(text[at:]))  # another engine's line about suspended requests
    return Resume(fields.count())


def _read_progress(text: str, at: int) -> Output:
    fields = _Fields("PP", text, at, 4)
    return Progress(fields.count(), fields.count(), fields.number(), fields.number())


def _read_reused(text: str, at: int) -> Output:
    return Reused(_Fields("REUSED", text, at, 1).count())


def _read_token(text: str, at: int) -> Output:
    return Token(_Fields("T", text, at, 1).count())


def _read_yielded(text: str, at: int) -> Output:
    fields = _Fields("YIELDED", text, at, 2)
    return Yielded(fields.count(), fields.count())


def _read_done(text: str, at: int) -> Output:
    fields = _Fields("DONE", text, at, 20)
    prompt_counts = (fields.count(), fields.count())
    times = (fields.number(), fields.number())
    finish = fields.one_of(_FINISHES)
    counts: dict[str, int] = {}
    file_mb = 0.0
    for name in _DONE_OPTIONAL[: fields.left]:
        if name == "file_mb":
            file_mb = fields.number()
        else:
            counts[name] = fields.count()
    chain = ChainCounts(*(fields.count() for _ in range(5))) if fields.left == 5 else None
    return Done(*prompt_counts, *times, finish, **counts, file_mb=file_mb, chain=chain)


def _read_admitted(text: str, at: int) -> Output:
    fields = _Fields("BADM", text, at, 2)
    return Admitted(fields.count(), fields.one_of(("0", "1")) == "1")


def _read_slot_token(text: str, at: int) -> Output:
    fields = _Fields("BT", text, at, 2)
    return SlotToken(fields.count(), fields.count())


def _read_slot_done(text: str, at: int) -> Output:
    fields = _Fields("BDONE", text, at, 6)
    head = (fields.count(), fields.count(), fields.one_of(_SLOT_FINISHES), fields.number())
    return SlotDone(*head, fields.count(), fields.count()) if fields.left == 2 else SlotDone(*head)


def _read_err(text: str, at: int) -> Output:
    return Err(free_text(text[at:]))


def _read_vram(text: str, at: int) -> Output:
    values = _read_pairs(text, at)
    known: dict[str, int] = {}
    for name in _VRAM_KEYS:
        value = values.get(name)
        if isinstance(value, int):
            known[name] = value
            del values[name]
    return VramReport(**known, extra=values)


def _read_saved(text: str, at: int) -> Output:
    fields = _Fields("SAVED", text, at, 3)
    return Saved(fields.count(), fields.count(), fields.number())


def _read_restored(text: str, at: int) -> Output:
    fields = _Fields("RESTORED", text, at, 3)
    return Restored(fields.count(), fields.count(), fields.number())


def _read_session(text: str, at: int) -> Output:
    fields = _Fields("SESSION", text, at, 2)
    return SessionProgress(fields.count(), fields.count())


def _read_session_wait(text: str, at: int) -> Output:
    fields = _Fields("SWAIT", text, at, 2)
    return SessionWait(fields.next(), min(fields.count(), MAX_WAIT_S))


def _read_session_error(text: str, at: int) -> Output:
    kind, at = next_word(text, at)
    published, at = next_word(text, at)
    fields = _Fields("SERR", f"{kind} {published}", 0, 2)
    return SessionError(fields.one_of(_SESSION_ERROR_CLASSES), fields.one_of(("0", "1")) == "1", free_text(text[at:]))


def _read_fatal(text: str, at: int) -> Output:
    return Fatal(free_text(text[at:]))


_READERS: dict[str, Callable[[str, int], Output]] = {
    "INFO": _read_info,
    "READY": _read_ready,
    "RESUME": _read_resume,
    "PP": _read_progress,
    "REUSED": _read_reused,
    "T": _read_token,
    "YIELDED": _read_yielded,
    "DONE": _read_done,
    "BADM": _read_admitted,
    "BT": _read_slot_token,
    "BDONE": _read_slot_done,
    "ERR": _read_err,
    "VRAM": _read_vram,
    "SAVED": _read_saved,
    "RESTORED": _read_restored,
    "SESSION": _read_session,
    "SWAIT": _read_session_wait,
    "SERR": _read_session_error,
    "FATAL": _read_fatal,
}


def _read_pairs(text: str, at: int) -> dict[str, InfoValue]:
    """The key=value words of a line. Words of another form are metadata of a later engine and skipped."""
    values: dict[str, InfoValue] = {}
    for word in words(text, at, _MAX_PAIRS):
        name, equals, value = word.partition("=")
        if name and equals:
            values[name] = _read_info_value(name, value)
    return values


def _read_info_value(name: str, text: str) -> InfoValue:
    if name in INFO_TEXT_KEYS:
        return text
    number = parse_float(text) if name in INFO_FLOAT_KEYS else parse_whole(text)
    return text if number is None else number


def _pair(name: str, value: InfoValue, digits: int) -> str:
    text = format_float(value, digits) if isinstance(value, float) else str(value)
    return f" {checked_name(name, 'key')}={checked_name(text, name)}"

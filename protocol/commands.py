"""Commands, server to engine: one frozen struct per line, and the request keys.

Units    max_new and pin in tokens, VRAM reserve in MiB
Errors   ProtocolError: `expected: ...` for an unknown first word, `VRAM: ...` for that command's number,
         `bad request: ...` for everything else
Bounds   a line of 32 MiB, 256 keys, whole numbers of 20 digits; all checked before anything is built
"""

import math
from collections.abc import Callable
from typing import ClassVar

import msgspec

from .fields import (
    MAX_INT32,
    MAX_UINT64,
    Ids,
    ProtocolError,
    checked_name,
    format_ids,
    line_text,
    next_word,
    parse_float,
    parse_ids,
    parse_whole,
    shown,
    whole,
)

MAX_TOP_K = 64
MAX_PENALTY_LAST_N = 4096
_MAX_KEYS = 256

COMMAND_FORMS = (
    "GEN <max_new> <ids>",
    "GENI <max_new> <embfile> <ids>",
    "BGEN <slot> <max_new> <ids>",
    "BGENI <slot> <max_new> <embfile> <ids>",
    "STOP",
    "BSTOP <slot>",
    "BYIELD <slot>",
    "VRAM [reserve_mib]",
    "SAVE <path>",
    "RESTORE <path>",
    "QUIT",
)


class SamplingKeys(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of a request. Building one clamps what the protocol clamps and refuses what it refuses, so a value
    in here is always in range.

    temperature      <= 0: greedy, all other sampling keys are then unused
    top_k            candidates kept, 1..64; <= 0 or > 64 is taken as 64
    top_p            nucleus over the kept candidates, (0, 1]; >= 1 is off
    min_p            drops candidates below min_p x the best probability, clamped to [0, 1]
    penalty_last_n   tokens the penalties look back over, clamped to 0..4096; 0 is off
    penalty_repeat   repetition penalty, above 0; 1 is off
    penalty_freq, penalty_present   0 is off
    seed             of the draw; 0: the engine takes the clock
    cvec             False: without the loaded control vector
    ckpt             False: no turn or periodic checkpoint, the session is not continued and not parked
    pin              the first `pin` tokens are a shared prefix whose checkpoint is kept
    pcie_frac, spec_min_p   for this request only; None: the engine's own
    """

    temperature: float = 0.0
    top_k: int = 20
    top_p: float = 1.0
    min_p: float = 0.0
    penalty_last_n: int = 0
    penalty_repeat: float = 1.0
    penalty_freq: float = 0.0
    penalty_present: float = 0.0
    seed: int = 0
    cvec: bool = True
    ckpt: bool = True
    pin: int | None = None
    pcie_frac: float | None = None
    spec_min_p: float | None = None

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, float) and not math.isfinite(value):
                raise _bad_key(name, "a finite number", value)
        if not self.top_p > 0:
            raise _bad_key("top_p", "a number above 0", self.top_p)
        if not self.penalty_repeat > 0:
            raise _bad_key("penalty_repeat", "a number above 0", self.penalty_repeat)
        if not 0 <= self.seed <= MAX_UINT64:
            raise _bad_key("seed", f"a whole number from 0 to {MAX_UINT64}", self.seed)
        if self.pin is not None and not 0 <= self.pin <= MAX_INT32:
            raise _bad_key("pin", f"a whole number from 0 to {MAX_INT32}", self.pin)
        if self.pcie_frac is not None and not 0 <= self.pcie_frac <= 1:
            raise _bad_key("pcie_frac", "a number from 0 to 1", self.pcie_frac)
        clamped = {
            "top_k": self.top_k if 1 <= self.top_k <= MAX_TOP_K else MAX_TOP_K,
            "top_p": min(self.top_p, 1.0),
            "min_p": min(max(self.min_p, 0.0), 1.0),
            "penalty_last_n": min(max(self.penalty_last_n, 0), MAX_PENALTY_LAST_N),
            "spec_min_p": None if self.spec_min_p is None else min(max(self.spec_min_p, 0.0), 1.0),
        }
        for name, value in clamped.items():
            msgspec.structs.force_setattr(self, name, value)

    @property
    def is_greedy(self) -> bool:
        return self.temperature <= 0

    def line(self) -> str:
        """`key=value` for every key that differs from its default, each with a space after it."""
        parts = []
        for info in msgspec.structs.fields(self):
            value = getattr(self, info.name)
            if value != info.default:
                parts.append(f"{info.name}={int(value) if isinstance(value, bool) else value!r} ")
        return "".join(parts)


class Gen(msgspec.Struct, frozen=True):
    """A solo request."""

    word: ClassVar[str] = "GEN"
    max_new: int
    ids: Ids
    keys: SamplingKeys = SamplingKeys()

    def line(self) -> str:
        return f"GEN {_max_new(self.max_new)} {self.keys.line()}{format_ids(self.ids)}"


class GenI(msgspec.Struct, frozen=True):
    """A solo request with pictures; `embfile` is the path of their embeddings."""

    word: ClassVar[str] = "GENI"
    max_new: int
    embfile: str
    ids: Ids
    keys: SamplingKeys = SamplingKeys()

    def line(self) -> str:
        file = checked_name(self.embfile, "embfile")
        return f"GENI {_max_new(self.max_new)} {self.keys.line()}{file} {format_ids(self.ids)}"


class BGen(msgspec.Struct, frozen=True):
    """An admission: read a prompt and go on in `slot`. A decoded max_new may be below 1: the engine, which knows
    its slots, refuses both with the same line."""

    word: ClassVar[str] = "BGEN"
    slot: int
    max_new: int
    ids: Ids
    keys: SamplingKeys = SamplingKeys()

    def line(self) -> str:
        return f"BGEN {_slot(self.slot)} {_max_new(self.max_new)} {self.keys.line()}{format_ids(self.ids)}"


class BGenI(msgspec.Struct, frozen=True):
    """An admission with pictures."""

    word: ClassVar[str] = "BGENI"
    slot: int
    max_new: int
    embfile: str
    ids: Ids
    keys: SamplingKeys = SamplingKeys()

    def line(self) -> str:
        head = f"BGENI {_slot(self.slot)} {_max_new(self.max_new)} {self.keys.line()}"
        return f"{head}{checked_name(self.embfile, 'embfile')} {format_ids(self.ids)}"


class Stop(msgspec.Struct, frozen=True):
    """Stop the request being worked on."""

    word: ClassVar[str] = "STOP"

    def line(self) -> str:
        return "STOP"


class BStop(msgspec.Struct, frozen=True):
    """End a slot."""

    word: ClassVar[str] = "BSTOP"
    slot: int

    def line(self) -> str:
        return f"BSTOP {_slot(self.slot)}"


class BYield(msgspec.Struct, frozen=True):
    """The read in progress gives way; its tokens wait in `slot`."""

    word: ClassVar[str] = "BYIELD"
    slot: int

    def line(self) -> str:
        return f"BYIELD {_slot(self.slot)}"


class VramCommand(msgspec.Struct, frozen=True):
    """Report the VRAM budget, or plan again with `reserve_mib`."""

    word: ClassVar[str] = "VRAM"
    reserve_mib: int | None = None

    def line(self) -> str:
        return "VRAM" if self.reserve_mib is None else f"VRAM {_uint(self.reserve_mib, 'reserve_mib')}"


class Save(msgspec.Struct, frozen=True):
    """Write the live session to a file."""

    word: ClassVar[str] = "SAVE"
    path: str

    def line(self) -> str:
        return f"SAVE {checked_name(self.path, 'path', blanks=True)}"


class Restore(msgspec.Struct, frozen=True):
    """Make a file's session the live one."""

    word: ClassVar[str] = "RESTORE"
    path: str

    def line(self) -> str:
        return f"RESTORE {checked_name(self.path, 'path', blanks=True)}"


class Quit(msgspec.Struct, frozen=True):
    """Leave with exit code 0."""

    word: ClassVar[str] = "QUIT"

    def line(self) -> str:
        return "QUIT"


Command = Gen | GenI | BGen | BGenI | Stop | BStop | BYield | VramCommand | Save | Restore | Quit


def decode_command(line: str | bytes) -> Command | None:
    """The command of a line, or None for an empty line. Raises ProtocolError with the text of the `ERR` line."""
    text = line_text(line, "strict")
    word, end = next_word(text, 0)
    if not word:
        return None
    reader = _READERS.get(word)
    if reader is None:
        raise ProtocolError(f"expected: {' | '.join(COMMAND_FORMS)}; got {shown(word)}")
    return reader(text, end)


def _read_gen(text: str, at: int) -> Command:
    max_new, at = _read_max_new(text, at, 1)
    keys, at = _read_keys(text, at)
    return Gen(max_new, parse_ids(text[at:]), keys)


def _read_geni(text: str, at: int) -> Command:
    max_new, at = _read_max_new(text, at, 1)
    keys, at = _read_keys(text, at)
    embfile, at = _read_embfile(text, at)
    return GenI(max_new, embfile, parse_ids(text[at:]), keys)


def _read_bgen(text: str, at: int) -> Command:
    slot, at = _read_slot(text, at)
    max_new, at = _read_max_new(text, at, -MAX_INT32)
    keys, at = _read_keys(text, at)
    return BGen(slot, max_new, parse_ids(text[at:]), keys)


def _read_bgeni(text: str, at: int) -> Command:
    slot, at = _read_slot(text, at)
    max_new, at = _read_max_new(text, at, -MAX_INT32)
    keys, at = _read_keys(text, at)
    embfile, at = _read_embfile(text, at)
    return BGenI(slot, max_new, embfile, parse_ids(text[at:]), keys)


def _read_bstop(text: str, at: int) -> Command:
    slot, at = _read_slot(text, at)
    _end_of("BSTOP", text, at)
    return BStop(slot)


def _read_byield(text: str, at: int) -> Command:
    slot, at = _read_slot(text, at)
    _end_of("BYIELD", text, at)
    return BYield(slot)


def _read_stop(text: str, at: int) -> Command:
    _end_of("STOP", text, at)
    return Stop()


def _read_quit(text: str, at: int) -> Command:
    _end_of("QUIT", text, at)
    return Quit()


def _read_vram(text: str, at: int) -> Command:
    word, at = next_word(text, at)
    value = parse_whole(word)
    if word and (value is None or not 0 <= value <= MAX_INT32):
        raise ProtocolError(f"VRAM: reserve_mib wants a whole number from 0 to {MAX_INT32}, got {shown(word)}")
    _end_of("VRAM", text, at)
    return VramCommand(value)


def _read_save(text: str, at: int) -> Command:
    return Save(checked_name(text[at:].lstrip(" "), "path", blanks=True))


def _read_restore(text: str, at: int) -> Command:
    return Restore(checked_name(text[at:].lstrip(" "), "path", blanks=True))


_READERS: dict[str, Callable[[str, int], Command]] = {
    "GEN": _read_gen,
    "GENI": _read_geni,
    "BGEN": _read_bgen,
    "BGENI": _read_bgeni,
    "STOP": _read_stop,
    "BSTOP": _read_bstop,
    "BYIELD": _read_byield,
    "VRAM": _read_vram,
    "SAVE": _read_save,
    "RESTORE": _read_restore,
    "QUIT": _read_quit,
}


def _read_slot(text: str, at: int) -> tuple[int, int]:
    word, at = next_word(text, at)
    return whole(word, "slot", 0, MAX_INT32), at


def _read_max_new(text: str, at: int, low: int) -> tuple[int, int]:
    word, at = next_word(text, at)
    return whole(word, "max_new", low, MAX_INT32), at


def _read_embfile(text: str, at: int) -> tuple[str, int]:
    word, at = next_word(text, at)
    return checked_name(word, "embfile"), at


def _read_keys(text: str, at: int) -> tuple[SamplingKeys, int]:
    """The keys at `at`: words while they contain `=`. Unknown ones are skipped; of a repeated one the last counts."""
    values: dict[str, float | int | bool] = {}
    for _ in range(_MAX_KEYS + 1):
        word, end = next_word(text, at)
        name, equals, value = word.partition("=")
        if not equals:
            return SamplingKeys(**values), at  # type: ignore[arg-type]
        at = end
        if name in _KEY_TYPES:
            values[name] = _read_value(name, value)
    raise ProtocolError(f"bad request: more than {_MAX_KEYS} keys")


_WHOLE_KEYS = ("top_k", "penalty_last_n", "seed", "pin")
_SWITCH_KEYS = ("cvec", "ckpt")
_KEY_TYPES = {
    name: int if name in _WHOLE_KEYS else bool if name in _SWITCH_KEYS else float
    for name in SamplingKeys.__struct_fields__
}


def _read_value(name: str, word: str) -> float | int | bool:
    kind = _KEY_TYPES[name]
    value = parse_float(word) if kind is float else parse_whole(word)
    if value is None:
        raise _bad_key(name, "a finite number" if kind is float else "a whole number", word)
    if kind is bool:
        if value not in (0, 1):
            raise _bad_key(name, "0 or 1", word)
        return bool(value)
    return value


def _bad_key(name: str, wants: str, given: object) -> ProtocolError:
    return ProtocolError(f"bad request: {name}: wants {wants}, got {shown(str(given))}")


def _end_of(command: str, text: str, at: int) -> None:
    word, _ = next_word(text, at)
    if word:
        raise ProtocolError(f"bad request: {command}: nothing may follow, got {shown(word)}")


def _uint(value: int, name: str, low: int = 0) -> int:
    if not low <= value <= MAX_INT32:
        raise ProtocolError(f"bad request: {name}: wants a whole number from {low} to {MAX_INT32}, got {value}")
    return value


def _max_new(value: int) -> int:
    return _uint(value, "max_new", 1)


def _slot(value: int) -> int:
    return _uint(value, "slot")

"""The STRATA_* variables of the specification: which act here, which belong to the server, and the rules of a switch.

A switch is off when unset, empty or 0 and on with any other whole number; text that is no number is off, and said.
A variable that asks for what is so anyway, or shapes something this engine does not have, is accepted: one log line
says which.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from strata.protocol.fields import parse_float

DEBUG: Final = "STRATA_DEBUG"
TRACE: Final = "STRATA_TRACE"
BATCH_MTP: Final = "STRATA_BATCH_MTP"
DECODE_SHARE: Final = "STRATA_BATCH_DECODE_SHARE"
DEFAULT_SHARE: Final = 0.5
MOST_SHARE: Final = 100.0
CARD_FORMS: Final = "STRATA_CARD_FORMS"
OVERLAP: Final = "STRATA_LAUNCH_OVERLAP"
KERNEL_CACHE: Final = "STRATA_KERNEL_CACHE"
HEAD_MOVES: Final = "STRATA_TEST_HEAD_MOVE"
OWN_AUTO: Final = "STRATA_PREFILL_OWN_AUTO"
LEND_PCT: Final = "STRATA_PREFILL_LEND_PCT"
RESIDENT_HEADROOM: Final = "STRATA_RESIDENT_HEADROOM_GIB"
ARENA_PIN: Final = "STRATA_ARENA_PIN_GIB"
CACHE_HEADROOM: Final = "STRATA_EXPERT_CACHE_HEADROOM"
RING: Final = "STRATA_PREFILL_RING"
STREAM_MIN: Final = "STRATA_PREFILL_STREAM_MIN"
AUTO_MAX: Final = "STRATA_PREFILL_AUTO_MAX"
MOST_GIB: Final = 1 << 14
"""Of RAM that a variable may speak of."""
RANGES: Final[dict[str, tuple[float, float]]] = {
    LEND_PCT: (1, 100),
    RESIDENT_HEADROOM: (0, MOST_GIB),
    ARENA_PIN: (0, MOST_GIB),
    CACHE_HEADROOM: (0, 0.9),
    RING: (2, 4096),
    STREAM_MIN: (33, 1 << 20),
}
"""Least and largest numbers; outside of them a variable is as if it were not there, and that is said."""


def _names(words: str) -> frozenset[str]:
    return frozenset(f"STRATA_{word}" for word in words.split())


HERE: Final[dict[str, str]] = {
    DEBUG: "switch: a failure's Python traceback goes to the log",
    TRACE: "switch: an admission leaves a line of its phases in the log",
    BATCH_MTP: "switch: the same as --batch-mtp",
    DECODE_SHARE: "between two chunks of a read the slots decode for this times the chunk's time, at least one window; "
    f"0: they wait for the whole read. {DEFAULT_SHARE:g} when unset, at most {MOST_SHARE:g}",
    KERNEL_CACHE: "folder for the machine code of a card's kernels, which only a first start compiles; else `strata` "
    "in CUPY_CACHE_DIR, else `strata/cuda` in XDG_CACHE_HOME or ~/.cache",
    HEAD_MOVES: "switch, for tests: the output head of --prefill-head-alias comes back at another address, which ends "
    "the engine with an error",
    RESIDENT_HEADROOM: "GiB of RAM that --resident-experts leaves free, if parked conversations do not need more; 4 "
    "when unset (8 with --resident-cpu-experts)",
    ARENA_PIN: "GiB of RAM that are page-locked for experts at most, the others are read from the mapped file; auto: "
    "what --resident-experts would take; 0 or unset: all that VRAM lacks, or none where these do not fit",
    OWN_AUTO: "0: prompts borrow slots of the expert cache also where spare VRAM would hold buffers of their own",
    LEND_PCT: "percent of the expert cache that --prefill auto may lend to prompts, 1 to 100; 90 when unset",
    CACHE_HEADROOM: "share of the VRAM that weights and state leave, 0 to 0.9, which stays free beside the reserve "
    "where not all experts lie there; 0 when unset",
    RING: "experts of the double buffer through which long prompts stream those that VRAM does not hold, both halves "
    "together, 2 to 4096; unset: 64, and as many more as memory is spare for",
    STREAM_MIN: "tokens of a prompt chunk from which it streams all experts of a layer that VRAM does not hold; "
    "shorter ones read what they pick where it lies. At least 33, 1024 when unset",
    CARD_FORMS: "0: a card that holds all experts keeps the bytes of the file, not the forms of its own that take a "
    "little more memory; the text is the same, only slower",
    OVERLAP: "0: on a card of compute capability 9.0 or newer a kernel waits for the whole of the one before it, as on "
    "older cards; the text is the same, only slower",
}
"""Variables that this engine obeys."""

OF_CARD: Final = frozenset(
    {
        HEAD_MOVES,
        OWN_AUTO,
        LEND_PCT,
        RESIDENT_HEADROOM,
        ARENA_PIN,
        CARD_FORMS,
        OVERLAP,
        CACHE_HEADROOM,
        RING,
        STREAM_MIN,
    }
)
"""Those of them that plan or drive a card."""

SO_ANYWAY: Final = _names(
    "ADMIT_MERGE_FIRST BATCH_ATTN_ROWS BATCH_GDN_GROUPS BATCH_SELF_COMMIT CKPT_POOL MMQ_DIRECT QSA_SLOTS "
    "SLOT_COPY_BATCHSYNC SLOT_COPY_DIRECT SLOT_CKPT_MOVE"
)
"""Switches that ask for how it is done here: one launch for all rows of a window, the first token from the last prompt
rows, experts of a prompt read where they lie, states copied on the device without waiting, memory of checkpoints used
again."""

NO_EFFECT_SWITCHES: Final = _names(
    "ARENA_REGISTER BATCH_GROUPS_NV_SERIAL BATCH_MTP_SERIAL CKPT_THREADS DBG_GDN "
    "FOUR_CARD_PROFILE IO_PREFETCH MMQ_GROUP_SORT PIPED_CONCURRENT PIPED_CONCURRENT_PRIO "
    "PIPE_BYIELD_NODRAIN PREFILL_HELP SPLIT_MTP_BATCH STAGE_TRIM PREFILL_EQUAL SPLIT_OWN "
    "SPLIT_OWN_BUFFERS SPLIT_TIMING ADAPT_NOWAIT RESIDENT_PIN"
)
"""Switches of the specification that change nothing with all weights in one memory."""

NO_EFFECT_VALUES: Final = _names(
    "BATCH_YIELD_CHUNKS DEFAULTS FS_SLOTS HANDOFF_PIPE IQ_MT_MIN "
    "PIPED_READ_PIECE PIPED_DECODE_MAX_MS PIPED_DECODE_MIN_MS PIPE_ADAPT_EVERY PIPED_MTP "
    "TEST_BELL_SLEEP_US WATCHDOG_S WATCHDOG_IO_S PREFILL_AUTO_MAX "
    "OWNED_PRICE SPLIT_MISS_MS SPLIT_COVER_B SPLIT_RING ADAPT_LAG "
    "FETCH_THREADS"
)
"""The same for variables with a value."""

WHY: Final = {AUTO_MAX: "no prompt chunk is longer than 8192 tokens, and --prefill auto tries all up to that"}
"""Of some of them, why."""

ELSEWHERE: Final = _names(
    "ADMIT_SHORT_FIRST ADMIT_MAX_WAIT_S KEY PARALLEL_SOLO API_KEY ALLOWED_HOSTS REQUEST_LINES BATCH_TRACE "
    "HTTP_BACKLOG MAX_BODY_MIB ENGINE_READY_S ENGINE_STALL_S VISION_READY_S VISION_ENCODE_S KEEP_EMPTY_TURNS"
)
"""Variables of the server and its scripts; an engine started by the server inherits them and says nothing."""


def is_on(text: str | None) -> bool:
    """The switch rule."""
    number = _number(text or "0")
    return number is not None and number != 0


def card_forms(environ: Mapping[str, str]) -> bool:
    """Whether experts may have forms of the card's own."""
    return is_on(environ.get(CARD_FORMS) or "1")


def decode_share(text: str | None) -> float:
    """The share of a chunk's time that slots decode behind it."""
    number = _share(text or "")
    return DEFAULT_SHARE if number is None else number


def number_of(environ: Mapping[str, str], name: str) -> float | None:
    """The number of one of RANGES; None: it is unset, or not of its range."""
    found, (least, most) = parse_float(environ.get(name, "").strip()), RANGES[name]
    return found if found is not None and least <= found <= most else None


def pins_auto(environ: Mapping[str, str]) -> bool:
    """Whether what is page-locked of an arena is planned like resident experts."""
    return environ.get(ARENA_PIN, "").strip() == "auto"


def notes(environ: Mapping[str, str], card: bool = True) -> list[str]:
    """The log lines about STRATA_* variables that are set but do not act as one might think, by name. card: whether
    the engine has one."""
    lines = []
    for name in sorted(environ):
        text = environ[name]
        if not name.startswith("STRATA_") or not text or name in ELSEWHERE:
            continue
        own = (DEBUG, TRACE, BATCH_MTP, CARD_FORMS, HEAD_MOVES, OWN_AUTO)
        is_switch = name in NO_EFFECT_SWITCHES or name in SO_ANYWAY or name in own
        if is_switch and _number(text) is None:
            lines.append(f"{name} is a switch and its value is no whole number: taken as off")
        elif name == DECODE_SHARE and _share(text) is None:
            lines.append(f"{name} is no number from 0 to {MOST_SHARE:g}: taken as {DEFAULT_SHARE:g}")
        elif name in RANGES and number_of(environ, name) is None and not (name == ARENA_PIN and pins_auto(environ)):
            least, most = RANGES[name]
            lines.append(f"{name} is no number from {least} to {most}: as if it were not set")
        elif name in OF_CARD and not card:
            lines.append(f"{name} has no effect without --device cuda")
        elif name in SO_ANYWAY:
            lines.append(f"{name} asks for what is done here anyway")
        elif name in NO_EFFECT_SWITCHES or name in NO_EFFECT_VALUES:
            lines.append(f"{name} has no effect here" + (f": {WHY[name]}" if name in WHY else ""))
        elif name not in HERE:
            lines.append(f"{name} is no variable that this engine knows")
    return lines


def _share(text: str) -> float | None:
    number = parse_float(text.strip())
    return number if number is not None and 0 <= number <= MOST_SHARE else None


def _number(text: str) -> int | None:
    digits = text.strip().removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 20):
        return None
    return int(digits)

"""Every option of the engine in one table: name, value, default, meaning, and whether this engine has it.

A row with `read` works: `read(text)` is the value or raises ValueError saying what is wanted. A row with `missing` is
an option of the specification that this engine does not have yet: it is recognised and refused by name, never ignored.
`options.py` parses by this table; `--help` and docs/configuration.md are written from it.

Units    tokens, MiB, threads, as each meaning says
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

MAX_CONTEXT: Final = 1 << 20
DEFAULT_CONTEXT: Final = 4096
MIN_CONTEXT: Final = 16
"""The shortest request needs 1 prompt token, 1 new token and the 8 spare ones of the context rule."""
MAX_CHUNK: Final = 8192
AUTO_CHUNK: Final = 256
"""Tokens per prompt chunk with `auto`. On the host a STOP waits for one chunk, and the chunk never changes the text."""
MAX_CACHE: Final = 64
MAX_THREADS: Final = 256
MAX_VRAM_MIB: Final = 1 << 22
MAX_END_IDS: Final = 64


@dataclass(frozen=True, slots=True)
class Flag:
    """One option. `value` is how the help writes its value, "" for a switch that takes none."""

    name: str
    value: str
    default: str
    meaning: str
    group: str
    read: Callable[[str], object] | None = None
    missing: str = ""
    aliases: tuple[str, ...] = ()

    @property
    def works(self) -> bool:
        return self.read is not None

    @property
    def field(self) -> str:
        """The name of its field in `Options`."""
        return self.name.removeprefix("--").replace("-", "_")

    @property
    def usage(self) -> str:
        return " ".join(filter(None, [", ".join([self.name, *self.aliases]), self.value]))


def _whole(low: int, high: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not (text.isascii() and text.isdigit() and len(text) <= 20 and low <= int(text) <= high):
            raise ValueError(f"a whole number from {low} to {high}")
        return int(text)

    return read


def _one_of(*words: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in words:
            raise ValueError(f"one of {', '.join(words)}")
        return text

    return read


def _auto_or(read_number: Callable[[str], int]) -> Callable[[str], int]:
    def read(text: str) -> int:
        if text == "auto":
            return 0
        try:
            return read_number(text)
        except ValueError as error:
            raise ValueError(f"auto or {error}") from None

    return read


def _switch(text: str) -> bool:
    return True


def _file(text: str) -> str:
    if not text or "\0" in text:
        raise ValueError("the name of a file")
    return text


def _ids(text: str) -> tuple[int, ...]:
    if text == "none":
        return ()
    words = text.split(",")
    if len(words) > MAX_END_IDS or not all(word.isascii() and word.isdigit() and len(word) <= 10 for word in words):
        raise ValueError(f"token ids separated by commas, at most {MAX_END_IDS}, or none")
    return tuple(int(word) for word in words)


MODEL, PROMPTS, MACHINE, CHECKS = "Model", "Context and prompts", "Machine", "Checks"
CACHE, RAM, READ, DRAFTS = "Expert cache", "Experts in memory", "Prompt path", "Drafts"
KEEP, TIER, BATCH, SPLIT, OTHER = "Kept prompts", "Adaptive tier", "Batch slots", "Several devices", "Other"


def _split(usage: str) -> tuple[str, tuple[str, ...], str]:
    """Name, other spellings and value of `--name[, --other..] [value]`."""
    names, _, value = usage.replace(", --", ",--").partition(" ")
    name, *aliases = names.split(",")
    return name, tuple(aliases), value


def _works(group: str, usage: str, default: str, read: Callable[[str], object], meaning: str) -> Flag:
    name, aliases, value = _split(usage)
    return Flag(name, value, default, meaning, group, read=read, aliases=aliases)


_WORKING: Final = (
    _works(MODEL, "--pack, --native FILE", "none", _file, "GGUF file of the model; of a split model the first part"),
    _works(
        MODEL,
        "--serve",
        "off",
        _switch,
        "speak the line protocol on stdin and stdout; without it the pack is checked and described",
    ),
    _works(
        MODEL,
        "--eos-ids A,B,.. or none",
        "the pack's",
        _ids,
        "token ids that end an answer; none: every answer runs to its length (for measurements)",
    ),
    _works(
        PROMPTS,
        "--max-context N",
        str(DEFAULT_CONTEXT),
        _whole(MIN_CONTEXT, MAX_CONTEXT),
        f"context in tokens, {MIN_CONTEXT} to {MAX_CONTEXT}, at most the model's; prompt + new tokens + 8 must fit",
    ),
    _works(
        PROMPTS,
        "--prefill N or auto",
        "auto",
        _auto_or(_whole(0, MAX_CHUNK)),
        f"tokens per prompt chunk, at most {MAX_CHUNK}; auto = {AUTO_CHUNK}, on a card the largest that its memory "
        "has room for. A STOP waits for one chunk. Never changes the text",
    ),
    _works(
        PROMPTS,
        "--prompt-cache N",
        "6",
        _whole(0, MAX_CACHE),
        f"0: every prompt is read from its start; 1 to {MAX_CACHE}: the last conversation continues when the next "
        "prompt begins with it. Never changes the text",
    ),
    _works(
        PROMPTS,
        "--kv fp32 or fp16",
        "fp32",
        _one_of("fp32", "fp16"),
        "format of keys and values; fp16 needs --device cuda, takes half the memory, and a text may differ",
    ),
    _works(
        MACHINE,
        "--device host or cuda",
        "host",
        _one_of("host", "cuda"),
        "where the model is computed; cuda: the first card that CUDA_VISIBLE_DEVICES shows, with all weights in its "
        "memory. Never changes the text",
    ),
    _works(
        MACHINE,
        "--vram-limit-mib N",
        "0",
        _whole(0, MAX_VRAM_MIB),
        "use the card as if it had so much memory; 0: all that it has",
    ),
    _works(
        MACHINE,
        "--ple-io auto, vram or ram",
        "auto",
        _one_of("auto", "vram", "ram"),
        "where the n-gram table lies with --device cuda: in VRAM, or in page-locked RAM that the card reads; auto: in "
        "VRAM if there is room. The host reads the mapped file. Never changes the text",
    ),
    _works(
        MACHINE,
        "--threads N",
        "all usable cores",
        _whole(1, MAX_THREADS),
        f"threads of the host kernels, 1 to {MAX_THREADS}",
    ),
    _works(
        CHECKS,
        "--kernels cpu or reference",
        "cpu",
        _one_of("cpu", "reference"),
        "reference: the plain NumPy formulas, slow; last digits differ from cpu, so a text may differ",
    ),
    _works(CHECKS, "--verify-accounts", "off", _switch, "check the books of pages and slots after every unit of work"),
    _works(CHECKS, "--stats", "off", _switch, "counters to the log at the end"),
)

_NO_CARD = "all weights lie in one memory, that of the host or that of the card"
_NO_TIER = "experts do not move between tiers in this engine"
_MAPPED = "the host reads the experts from the mapped file, a card has them all in its memory"
_POOL = "the host kernels have one pool of threads; use --threads"
_NO_DRAFTS = "this engine has no drafts, a window decodes one token"
_NO_CHECKPOINTS = "there are no checkpoints; the last conversation stays live (--prompt-cache)"
_NO_PARKING = "conversations are not parked; the last one stays live (--prompt-cache)"

# One block per group and reason; a row is: option[, other spelling..] [value] | default | meaning
_NOT_YET: Final[tuple[tuple[str, str, str], ...]] = (
    (PROMPTS, "keys and values of the whole context have their place from the start", """
        --kv-resident N | 0 | keys and values kept in VRAM, in tokens; the rest streams
        --kv-grow | off | pools of keys and values grow in steps"""),
    (CACHE, _NO_CARD, """
        --vram-reserve-mib N | 700 | VRAM that planning leaves free
        --vram-reserve-later-mib N | as the first | the same for later stages
        --expert-cache N or auto | auto | experts kept in VRAM
        --expert-cache-device1, --expert-cache-device2, --expert-cache-device3 N or auto | off | caches on more cards
        --expert-cache-per-layer N | off | a fixed number of slots per layer
        --expert-profile FILE | none | hot experts in order
        --remote-expert-opt | off | compact transfers of helper caches
        --vram-elastic | off | the VRAM command may shrink the cache
        --vram-segment-mib N | 512 | segment of an elastic cache
        --pcie-frac F | auto | share of missed experts sent over PCIe
        --pcie-mode M | auto | how they are sent: dma, kernel, direct"""),
    (RAM, _MAPPED, """
        --resident-experts | off | copy of the missed experts in RAM
        --resident-cpu-experts | off | copy of the host's experts in RAM
        --resident-budget-gib N | all | how much of them
        --mmap-experts | off | experts from the mapped file"""),
    (RAM, _POOL, """
        --pool-workers N | physical cores - 1 | workers for experts on the CPU
        --pool-tasks N | none | tasks of that pool
        --pool-affinity M | all | its cores: all, auto, p-cores
        --host-core M | none | core of the host thread: first, last"""),
    (READ, _NO_CARD, """
        --no-prefill-borrow | off | prompt buffers never take cache slots
        --prefill-head-alias | off | output head and prompt buffers take turns in VRAM"""),
    (READ, "every prompt is read in chunks; --prefill sets their size", """
        --short-read N | 64 | fresh tokens read through decode windows"""),
    (DRAFTS, _NO_DRAFTS, """
        --mtp DIR | off | load the draft layer
        --spec T | 1 | rows of a verify window
        --spec-min-p P | 0 | confidence bar of later drafts
        --suffix-draft N | 3 | drafts looked up in the text
        --lookup-chain N | 0 | chained lookup drafts
        --lookup-chain-min N | 3 | least match of a chained lookup
        --mtp-max-t N | spec | most draft rows
        --mtp-window N | 32768 | window of the draft layer
        --mtp-draft-vocab N | none | vocabulary of the draft head
        --mtp-q4 | off | draft layer in 4 bits
        --mtp-hnorm | off | another norm of the draft layer
        --coupled-draft | off | drafts sampled like the target"""),
    (KEEP, _NO_CHECKPOINTS, """
        --prompt-cache-every N | 16384 | periodic checkpoints
        --prompt-cache-root N | 2048 | root checkpoint
        --prompt-cache-tail | off | checkpoint at the end of the prompt
        --turn-token ID | 248045 | token that starts a turn
        --tail-role-token ID | -1 | token of a trailing role marker"""),
    (KEEP, _NO_PARKING, """
        --conversation-cache-mib N | 0 | RAM for parked conversations
        --conversation-cache-slots K | 4 | how many
        --conversation-cache-min-free-mib N | 2560 | RAM that stays free
        --conversation-cache-disk-mib N | 0 | parked conversations on disk
        --conversation-cache-dir DIR | none | where
        --conversation-cache-similarity F | 0 | least share of a common prefix
        --conversation-cache-n-min N | 0 | least tokens worth parking
        --system-prompt-cache-* .. | off | files of shared prefixes
        --session-min-free-mib N | 4096 | RAM that stays free at session files"""),
    (TIER, _NO_TIER, """
        --adapt-every N | 4 | windows between rounds of expert swaps
        --adapt-swaps N | 96 | most swaps of a round
        --adapt-decay F | 0.7 | factor on the counts after a round
        --adapt-min-gain F | 1.5 | bar that a swap must clear
        --adapt-async B | 0 | 1: rounds that hold no window up
        --expert-profile-save FILE | off | write the learned order
        --expert-profile-save-every N | 10 | how often"""),
    (BATCH, "this engine serves one request at a time", """
        --batch, --slots N | off | requests decoded together
        --batch-groups G or auto | auto | pipeline groups of the slots
        --batch-mtp | off | drafts in slots"""),
    (SPLIT, "the model runs on one device", """
        --layer-split A,B,.. or auto | none | layers over several devices
        --split-device D1,.. | next visible | devices of the split
        --split-skip-if-fits | off | no split when one device is enough
        --head-device N | last | device of the output head
        --trim-stage-weights | off | each stage loads only its own weights
        --peer-device N | off | second device with its own cache
        --pipeline-windows N | 0 | 1, 2: windows in flight on a split"""),
    (OTHER, "there are no control vectors", """
        --control-vector* .. | off | control vectors
        --cvec-* .. | off | how they are applied"""),
    (OTHER, "the context cannot be extended past the model's own", """
        --rope-* .. | the model's | context extension
        --yarn-* .. | the model's | context extension"""),
    (OTHER, "this engine reads no pictures", """
        --vision | off | accept pictures"""),
)  # fmt: skip


def _refused(group: str, missing: str, row: str) -> Flag:
    usage, default, meaning = (part.strip() for part in row.split("|"))
    name, aliases, value = _split(usage)
    return Flag(name, value, default, meaning, group, missing=missing, aliases=aliases)


FLAGS: Final[tuple[Flag, ...]] = (
    *_WORKING,
    *(_refused(group, missing, row) for group, missing, rows in _NOT_YET for row in rows.split("\n") if row.strip()),
)

_BY_NAME: Final = {name: flag for flag in FLAGS for name in (flag.name, *flag.aliases) if not name.endswith("*")}
_FAMILIES: Final = tuple(flag for flag in FLAGS if flag.name.endswith("*"))


def find(name: str) -> Flag | None:
    """The row of an option as it was written, or None for an unknown one. `--rope-*` stands for a family."""
    if (flag := _BY_NAME.get(name)) is not None:
        return flag
    return next((flag for flag in _FAMILIES if name.startswith(flag.name.rstrip("*"))), None)


def groups(*, working: bool) -> dict[str, list[Flag]]:
    """The working (or the refused) options by group, in the order of the table."""
    found: dict[str, list[Flag]] = {}
    for flag in FLAGS:
        if flag.works is working:
            found.setdefault(flag.group, []).append(flag)
    return found


_EXAMPLES = """\
Examples
  Check a model and say what it is:
      strata-engine --pack model.gguf
  Serve it with a longer context on four threads (this is what strata-server starts):
      strata-engine --serve --pack model.gguf --max-context 32768 --threads 4
  One greedy request by hand: 8 tokens after the ids 11, 12, 13, then leave:
      printf 'GEN 8 11,12,13\\nQUIT\\n' | strata-engine --serve --pack model.gguf
  The same on a graphics card, as if it had 24 GiB:
      strata-engine --serve --pack model.gguf --device cuda --vram-limit-mib 24576
  Show that neither chunks nor reuse change a text:
      strata-engine --serve --pack model.gguf --prefill 64 --prompt-cache 0

An option given twice: the last one wins. --name=value is the same as --name value. Exit codes: 0 left as told,
1 died (the last line says why), 2 refused to start."""


def help_text() -> str:
    """What `--help` prints."""
    lines = ["strata-engine: token ids in, token ids out, over a line protocol (docs/protocol.md).", ""]
    for group, flags in groups(working=True).items():
        lines.append(group)
        for flag in flags:
            lines.append(f"  {flag.usage}  (default: {flag.default})")
            lines += textwrap.wrap(flag.meaning, 100, initial_indent=" " * 6, subsequent_indent=" " * 6)
        lines.append("")
    lines += ["General", "  --help, -h\n      this text", "  --version\n      the version of the engine", ""]
    lines.append("Known, but not in this engine yet (refused by name; docs/configuration.md says why)")
    refused = [name for flag in FLAGS if not flag.works for name in (flag.name, *flag.aliases)]
    lines += textwrap.wrap(
        "  ".join(refused),
        112,
        initial_indent="  ",
        subsequent_indent="  ",
        break_on_hyphens=False,
        break_long_words=False,
    )
    return "\n".join([*lines, "", _EXAMPLES])

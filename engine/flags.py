"""Every option of the engine in one table: name, value, default, meaning, and whether this engine has it.

A row with `read` works: `read(text)` is the value or raises ValueError saying what is wanted. A row with `missing` is
an option of the specification that this engine does not have yet: it is recognised and refused by name, never ignored.
A row with `said` asks for what is so anyway, or for what the specification wants left off with a word: it is accepted,
and the log says so. `options.py` parses by this table; `--help` and docs/configuration.md are written from it.

Units    tokens, MiB, threads, as each meaning says
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from strata.engine.flag import (
    Flag,
    amount_or_auto,
    auto_or,
    file,
    file_or_own,
    folder,
    ids,
    one_of,
    reserve,
    share,
    share_or_auto,
    switch,
    whole,
)

MAX_CONTEXT: Final = 1 << 20
DEFAULT_CONTEXT: Final = 4096
MIN_CONTEXT: Final = 16
"""The shortest request needs 1 prompt token, 1 new token and the 8 spare ones of the context rule."""
MAX_CHUNK: Final = 8192
AUTO_CHUNK: Final = 256
"""Tokens per prompt chunk with `auto`. On the host a STOP waits for one chunk, and the chunk never changes the text."""
AUTO_BESIDE: Final = 1024
"""The same while slots decode: they stop for less than half a second where more than 2,048 tokens/s are read."""
MIN_RESIDENT: Final = 20480
"""Tokens whose keys and values stay in VRAM at least, where the rest streams."""
WINDOW_ROWS: Final = 8
"""Most rows of a window, hence batch slots."""
MAX_CACHE: Final = 64
MAX_THREADS: Final = 256
MAX_VRAM_MIB: Final = 1 << 22
MAX_SLOTS: Final = 1024
"""Slots that may be asked for; fewer run, and the log says so."""
MAX_TOKEN: Final = 2**31 - 1
MAX_MIB: Final = 1 << 24
MAX_GIB: Final = 1 << 14
MAX_EXPERTS: Final = 1 << 24
MAX_GAIN: Final = 1e6


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
    return Flag(name, value, default, meaning, group, read=read, aliases=aliases, optional=value.startswith("["))


_WORKING: Final = (
    _works(MODEL, "--pack, --native FILE", "none", file, "GGUF file of the model; of a split model the first part"),
    _works(
        MODEL,
        "--serve",
        "off",
        switch,
        "speak the line protocol on stdin and stdout; without it the pack is checked and described",
    ),
    _works(
        MODEL,
        "--plan",
        "off",
        switch,
        "print what lies where with these options, without loading anything; what does not fit comes with the options "
        "that change it. With --vram-limit-mib no card is needed",
    ),
    _works(MODEL, "--json", "off", switch, "with --plan: print it as JSON"),
    _works(
        MODEL,
        "--eos-ids A,B,.. or none",
        "the pack's",
        ids,
        "token ids that end an answer; none: every answer runs to its length (for measurements)",
    ),
    _works(
        PROMPTS,
        "--max-context N",
        str(DEFAULT_CONTEXT),
        whole(MIN_CONTEXT, MAX_CONTEXT),
        f"context in tokens, {MIN_CONTEXT} to {MAX_CONTEXT}, at most the model's; prompt + new tokens + 8 must fit",
    ),
    _works(
        PROMPTS,
        "--prefill N or auto",
        "auto",
        auto_or(whole(0, MAX_CHUNK)),
        f"tokens per prompt chunk, at most {MAX_CHUNK}; auto = {AUTO_CHUNK}, on a card the largest that its memory "
        "has room for. A STOP waits for one chunk. Never changes the text",
    ),
    _works(
        PROMPTS,
        "--kv FORMAT",
        "fp32",
        one_of("fp32", "fp16", "int8", "q4_0", "k8v4"),
        "how keys and values are kept: fp32, fp16, int8, q4_0, or k8v4 (keys int8, values q4_0): 4, 2, 1.06, 0.56 or "
        "0.81 bytes a number. The text changes with the format; all but fp32 need --device cuda",
    ),
    _works(
        PROMPTS,
        "--kv-resident N",
        "0",
        whole(0, MAX_CONTEXT),
        f"keys and values of N tokens of a conversation, the newest, stay in VRAM, at least {MIN_RESIDENT}; the others "
        "lie in page-locked RAM, where a window reads what it attends to and from where a prompt brings a layer's over "
        "for each chunk. 0: all stay. Counts where the context is longer. Never changes the text. Needs --device cuda",
    ),
    _works(
        MACHINE,
        "--device host or cuda",
        "host",
        one_of("host", "cuda"),
        "where the model is computed; cuda: the first card that CUDA_VISIBLE_DEVICES shows. Never changes the text",
    ),
    _works(
        MACHINE,
        "--vram-limit-mib N",
        "0",
        whole(0, MAX_VRAM_MIB),
        "use the card as if it had so much memory; 0: all that it has",
    ),
    _works(
        MACHINE,
        "--ram-limit-mib N",
        "0",
        whole(0, MAX_MIB),
        "with --plan: RAM that counts as free; 0: what is free now",
    ),
    _works(
        MACHINE,
        "--ple-io auto, vram, ram or mmap",
        "auto",
        one_of("auto", "vram", "ram", "mmap"),
        "where the n-gram table lies with --device cuda: in VRAM, in page-locked RAM that the card reads, or in the "
        "mapped file, of which the processor reads a token's rows for it; auto: in VRAM if there is room, else in RAM. "
        "The host reads the mapped file. Never changes the text",
    ),
    _works(
        MACHINE,
        "--threads N",
        "all usable cores",
        whole(1, MAX_THREADS),
        f"threads of the host kernels, 1 to {MAX_THREADS}",
    ),
    _works(
        CACHE,
        "--vram-reserve-mib N or auto",
        "auto",
        reserve(MAX_VRAM_MIB),
        "VRAM that planning leaves free where not all experts lie there; auto: 700 MiB, and less, down to 300, where a "
        "prompt could not be read",
    ),
    _works(
        CACHE,
        "--expert-cache N or auto",
        "auto",
        auto_or(whole(0, MAX_EXPERTS)),
        "experts kept in VRAM: the bytes of N of the largest; auto: as many as there is room for. The others lie in "
        "page-locked RAM, which the card reads. Never changes the text",
    ),
    _works(
        CACHE,
        "--expert-profile FILE",
        "none",
        file,
        "hot experts in order: the first ones lie in VRAM. none: the same share of every layer",
    ),
    _works(
        CACHE,
        "--expert-profile-save FILE",
        "none",
        file,
        "write the order in which windows have used experts, for --expert-profile of a later start; of the same file, "
        "which need not be there yet, if both name it. none: it is forgotten",
    ),
    _works(
        CACHE,
        "--expert-profile-save-every N",
        "10",
        whole(1, MAX_EXPERTS),
        "requests between two writes of that file; it is also written when the engine leaves",
    ),
    _works(
        CACHE,
        "--pcie-frac F or auto",
        "auto",
        share_or_auto,
        "of the experts that a window needs and VRAM does not hold, the share that the card reads over PCIe; the "
        "processor computes the others meanwhile. auto: by what both are measured at; 1 leaves the processor alone. "
        "Never changes the text",
    ),
    _works(
        TIER,
        "--adapt-every N",
        "4",
        whole(0, MAX_CONTEXT),
        "windows between two rounds in which experts that are used change places with some in VRAM that are not; "
        "0: none. Never changes the text",
    ),
    _works(TIER, "--adapt-swaps N", "96", whole(0, MAX_EXPERTS), "most experts of a round; 0: none"),
    _works(
        TIER,
        "--adapt-decay F or auto",
        "auto",
        share_or_auto,
        "factor on the counts after a round. auto: counts last until windows pick other experts, or 0.7 where only "
        "--adapt-min-gain is given",
    ),
    _works(
        TIER,
        "--adapt-min-gain F or auto",
        "auto",
        amount_or_auto(MAX_GAIN),
        "uses since the last rounds that a change must gain. auto: more than chance explains, at least 1.5; 1.5 where "
        "only --adapt-decay is given",
    ),
    _works(
        TIER,
        "--adapt-async B",
        "0",
        whole(0, 1),
        "1: experts change places beside windows, which do not wait for them; takes RAM for four more experts a layer. "
        "Never changes the text",
    ),
    _works(
        KEEP,
        "--prompt-cache N",
        "6",
        whole(0, MAX_CACHE),
        f"checkpoints kept, at most {MAX_CACHE}; a prompt that begins with what a checkpoint, a slot or the last "
        "conversation holds is read from there. 0: every prompt is read from its start. Never changes the text",
    ),
    _works(
        KEEP,
        "--prompt-cache-every N",
        "16384",
        whole(0, MAX_CONTEXT),
        "a checkpoint every N tokens of a read; 0: none",
    ),
    _works(
        KEEP,
        "--prompt-cache-root N",
        "2048",
        whole(0, MAX_CONTEXT),
        "of a prompt that is read from its start, a checkpoint at the first turn at or after N tokens; 0: none",
    ),
    _works(KEEP, "--turn-token ID", "248045", whole(0, MAX_TOKEN), "token that begins a turn"),
    _works(
        KEEP,
        "--conversation-cache-mib N",
        "0",
        whole(0, MAX_MIB),
        "RAM for conversations that others have pushed out, in MiB; 0: none is kept",
    ),
    _works(KEEP, "--conversation-cache-slots K", "4", whole(0, 4096), "most conversations in RAM; 0: none is kept"),
    _works(
        KEEP,
        "--conversation-cache-min-free-mib N",
        "2560",
        whole(0, MAX_MIB),
        "RAM in MiB that stays free beside them",
    ),
    _works(
        KEEP,
        "--conversation-cache-disk-mib N",
        "0",
        whole(0, MAX_MIB),
        "the same on disk; they outlive the engine. 0: none is kept",
    ),
    _works(KEEP, "--conversation-cache-dir DIR", "none", folder, "folder of the conversations on disk"),
    _works(
        KEEP,
        "--conversation-cache-similarity F",
        "0",
        share,
        "a kept conversation is taken back only for a prompt of which it is at least this share",
    ),
    _works(
        KEEP,
        "--conversation-cache-n-min N",
        "0",
        whole(0, MAX_CONTEXT),
        "conversations of fewer tokens are not kept",
    ),
    _works(
        BATCH,
        "--batch, --slots N",
        "0",
        whole(0, MAX_SLOTS),
        f"requests that are decoded together, at most {WINDOW_ROWS} and as many as the memory holds (the log says how "
        "many); below 2: one at a time. Never changes the text",
    ),
    _works(
        BATCH,
        "--prefill-beside N or auto",
        "auto",
        auto_or(whole(0, MAX_CHUNK)),
        f"tokens per prompt chunk while slots decode, who wait for it; auto = {AUTO_BESIDE}, and never more than "
        "--prefill. Never changes the text",
    ),
    _works(
        BATCH,
        "--short-read N",
        "64",
        whole(0, MAX_CONTEXT),
        "up to N tokens of a prompt are read through decode windows, as far as that is quicker on this card; a read "
        "that has no more left does not give way to another. 0: none. Never changes the text",
    ),
    _works(
        DRAFTS,
        "--mtp [FILE]",
        "none",
        file_or_own,
        "load the draft layer, from a file of its own or from the model's; it proposes tokens, the model decides. "
        "Never changes the text",
    ),
    _works(
        DRAFTS,
        "--spec T",
        "1",
        whole(1, WINDOW_ROWS),
        f"rows of a verify window, at most {WINDOW_ROWS}: a token and T - 1 drafts of it; 1: no drafts. Drafts that do "
        "not pay are left out. Never changes the text",
    ),
    _works(
        DRAFTS,
        "--spec-min-p P",
        "0",
        share,
        "the draft layer goes on after a proposal that is at least so likely; rounds of a card verify all they have",
    ),
    _works(
        DRAFTS,
        "--suffix-draft N",
        "3",
        whole(0, WINDOW_ROWS - 1),
        "tokens drafted from the text itself, where its last words have come before; 0: none. They come behind or "
        "instead of those of the draft layer and need a --spec above 1. Never changes the text",
    ),
    _works(
        DRAFTS,
        "--mtp-window N",
        "32768",
        whole(64, MAX_CONTEXT),
        "tokens of a sequence that the draft layer remembers, then it begins again",
    ),
    _works(
        DRAFTS,
        "--draft-vocab FILE",
        "none",
        file,
        "the draft layer proposes the tokens of this file only, an id a line, and reads a part of the output matrix; "
        "strata-bench draft-vocab makes one. Never changes the text",
    ),
    _works(
        BATCH,
        "--batch-mtp",
        "off",
        switch,
        "every slot verifies a draft in a window; needs --mtp, --spec of at least 2 and slots. Never changes the text",
    ),
    _works(
        CHECKS,
        "--kernels cpu or reference",
        "cpu",
        one_of("cpu", "reference"),
        "reference: the plain NumPy formulas, slow; last digits differ from cpu, so a text may differ",
    ),
    _works(CHECKS, "--verify-accounts", "off", switch, "check the books of pages and slots after every unit of work"),
    _works(
        CHECKS,
        "--log-states",
        "off",
        switch,
        "the digest of the state that each request leaves goes to the log: equal digests are equal states",
    ),
    _works(CHECKS, "--stats", "off", switch, "counters to the log at the end"),
    _works(
        READ,
        "--no-prefill-borrow",
        "off",
        switch,
        "prompts never lay buffers into slots of the expert cache; they have their own, beside a smaller cache. Never "
        "changes the text",
    ),
    _works(
        READ,
        "--prefill-head-alias",
        "off",
        switch,
        "long prompts lay buffers into the output head's VRAM and load it again behind; needs --serve, --mtp and "
        "--short-read 0",
    ),
    _works(
        RAM,
        "--resident-experts",
        "off",
        switch,
        "the experts that VRAM lacks lie in page-locked RAM as far as they fit, hottest first; the others are read "
        "from the mapped file, and computed by the processor while tokens are generated. Never changes the text",
    ),
    _works(RAM, "--resident-cpu-experts", "off", switch, "the same, and all of them must fit"),
    _works(
        RAM,
        "--resident-budget-gib N",
        "0",
        whole(0, MAX_GIB),
        "RAM for --resident-experts; 0: all that is free but 4 GiB (8 with --resident-cpu-experts)",
    ),
    _works(
        RAM,
        "--mmap-experts",
        "off",
        switch,
        "all experts that VRAM lacks are read from the mapped file, of which the system keeps what it can; so it is "
        "anyway where they do not fit RAM. Never changes the text",
    ),
)

_WHOLE = "keys and values of the whole context have their place from the start"
_ONE_CARD = "one device computes the model, with one cache of experts of a fixed size"
_POOL = "the host kernels have one pool of threads; use --threads"
_ONE_LAYER = "the draft layer is used as its file has it"
_NO_CHAIN = "the text is looked up once a window; use --suffix-draft"

# One block per group and reason; a row is: option[, other spelling..] [value] | default | meaning
_NOT_YET: Final[tuple[tuple[str, str, str], ...]] = (
    (PROMPTS, _WHOLE, """
        --kv-grow | off | pools of keys and values grow in steps"""),
    (CACHE, _ONE_CARD, """
        --vram-reserve-later-mib N | as the first | the same for later stages
        --expert-cache-device1, --expert-cache-device2, --expert-cache-device3 N or auto | off | caches on more cards
        --expert-cache-per-layer N | off | a fixed number of slots per layer
        --remote-expert-opt | off | compact transfers of helper caches
        --vram-elastic | off | the VRAM command may shrink the cache
        --vram-segment-mib N | 512 | segment of an elastic cache
        --pcie-mode M | auto | how they are sent: dma, kernel, direct"""),
    (RAM, _POOL, """
        --pool-workers N | physical cores - 1 | workers for experts on the CPU
        --pool-tasks N | none | tasks of that pool
        --pool-affinity M | all | its cores: all, auto, p-cores
        --host-core M | none | core of the host thread: first, last"""),
    (DRAFTS, _NO_CHAIN, """
        --lookup-chain N | 0 | chained lookup drafts
        --lookup-chain-min N | 3 | least match of a chained lookup"""),
    (DRAFTS, _ONE_LAYER, """
        --mtp-max-t N | spec | most draft rows
        --mtp-draft-vocab N | none | vocabulary of the draft head
        --mtp-q4 | off | draft layer in 4 bits
        --mtp-hnorm | off | another norm of the draft layer
        --coupled-draft | off | drafts sampled like the target"""),
    (KEEP, "checkpoints are taken where turns begin; the session itself holds the end of the prompt", """
        --prompt-cache-tail | off | checkpoint at the end of the prompt
        --tail-role-token ID | -1 | token of a trailing role marker"""),
    (KEEP, "a shared prefix is pinned in the prompt cache; there are no files of it, and none of sessions", """
        --system-prompt-cache-* .. | off | files of shared prefixes
        --session-min-free-mib N | 4096 | RAM that stays free at session files"""),
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


def _said(group: str, usage: str, default: str, read: Callable[[str], object], meaning: str, said: str) -> Flag:
    return replace(_works(group, usage, default, read, f"{meaning}. {said[0].upper()}{said[1:]}"), said=said)


_SAID: Final = (
    _said(
        BATCH,
        "--batch-groups G or auto",
        "auto",
        auto_or(whole(1, MAX_SLOTS)),
        "pipeline groups of the slots over several devices",
        "the model runs on one device, its slots are one group",
    ),
)

FLAGS: Final[tuple[Flag, ...]] = (
    *_WORKING,
    *_SAID,
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
  Four conversations at once, and RAM for those that others push out:
      strata-engine --serve --pack model.gguf --batch 4 --conversation-cache-mib 4096
  One greedy request by hand: 8 tokens after the ids 11, 12, 13, then leave:
      printf 'GEN 8 11,12,13\\nQUIT\\n' | strata-engine --serve --pack model.gguf
  The same on a graphics card, as if it had 24 GiB:
      strata-engine --serve --pack model.gguf --device cuda --vram-limit-mib 24576
  What would lie where on a card of 12 GiB and in 64 GiB of RAM, without either:
      strata-engine --plan --pack model.gguf --device cuda --vram-limit-mib 12288 --ram-limit-mib 65536
  With the draft layer of a file, four rows a window (the text stays the same):
      strata-engine --serve --pack model.gguf --mtp model-mtp.gguf --spec 4 --spec-min-p 0.5
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

"""The command line as one frozen struct, and every reason why the engine would not start with it.

Errors   Refused; its text is one line that names the option, the limit and the remedy. The process ends with code 2.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from strata.engine import flags

if TYPE_CHECKING:
    from strata.engine.pack import ModelSpec

REFUSED_EXIT = 2
SPARE_PLACES: Final = 4
"""Twice what a layer of 48 has of a round of 96 swaps."""


_FOR_A_CARD: Final = (("--vram-limit-mib", "0"), ("--ple-io", "auto"))
"""Options that the host does not have, and the values that ask for nothing."""
_FOR_A_CACHE: Final = (
    ("--kv-resident", "0"),
    ("--vram-reserve-mib", "auto"),
    ("--expert-cache", "auto"),
    ("--expert-profile", "none"),
    ("--expert-profile-save", "none"),
    ("--pcie-frac", "auto"),
    ("--prefill-head-alias", "off"),
    ("--resident-experts", "off"),
    ("--resident-cpu-experts", "off"),
    ("--resident-budget-gib", "0"),
    ("--no-prefill-borrow", "off"),
)
"""The same; a plan takes them for any device."""


class Refused(Exception):
    """The engine does not start. `str(error)` is the reason, in one line."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """One field per working option of `flags.FLAGS`, with the same name.

    max_context      tokens; 0 until `fitted` has seen the model, when none was given
    prefill          tokens per prompt chunk, 0 = auto
    prefill_beside   the same while slots decode
    batch            batch slots that were asked for
    vram_limit_mib   what the card counts as, 0 = all that it has
    threads          of the host kernels, 0 = all usable cores
    eos_ids          end tokens, None = the pack's
    mtp              file of the draft layer, "" = the pack's own, None = there is none
    spec             rows of a verify window, 1 = no drafts
    suffix_draft     tokens that are drafted from the text itself, 0 = none
    pcie_frac        of the experts that windows miss, the share that the card reads, -1 = auto
    """

    pack: str
    serve: bool = False
    plan: bool = False
    json: bool = False
    eos_ids: tuple[int, ...] | None = None
    max_context: int = 0
    prefill: int = 0
    prompt_cache: int = 6
    prompt_cache_every: int = 16384
    prompt_cache_root: int = 2048
    turn_token: int = 248045
    conversation_cache_mib: int = 0
    conversation_cache_slots: int = 4
    conversation_cache_min_free_mib: int = 2560
    conversation_cache_disk_mib: int = 0
    conversation_cache_dir: str = "none"
    conversation_cache_similarity: float = 0.0
    conversation_cache_n_min: int = 0
    batch: int = 0
    prefill_beside: int = 0
    short_read: int = 64
    kv: Literal["fp32", "fp16", "int8", "q4_0", "k8v4"] = "fp32"
    device: Literal["host", "cuda"] = "host"
    vram_limit_mib: int = 0
    ram_limit_mib: int = 0
    ple_io: Literal["auto", "vram", "ram", "mmap"] = "auto"
    threads: int = 0
    kernels: Literal["cpu", "reference"] = "cpu"
    mtp: str | None = None
    spec: int = 1
    spec_min_p: float = 0.0
    suffix_draft: int = 3
    mtp_window: int = 32768
    draft_vocab: str = "none"
    batch_mtp: bool = False
    verify_accounts: bool = False
    log_states: bool = False
    stats: bool = False
    kv_resident: int = 0
    vram_reserve_mib: int = -1
    expert_cache: int = 0
    expert_profile: str = "none"
    expert_profile_save: str = "none"
    expert_profile_save_every: int = 10
    pcie_frac: float = -1.0
    adapt_every: int = 4
    adapt_swaps: int = 96
    adapt_decay: float = -1.0
    adapt_min_gain: float = -1.0
    adapt_async: int = 0
    resident_experts: bool = False
    resident_cpu_experts: bool = False
    resident_budget_gib: int = 0
    mmap_experts: bool = False
    no_prefill_borrow: bool = False
    prefill_head_alias: bool = False

    @property
    def prefill_chunk(self) -> int:
        """Tokens per prompt chunk on the host, once the context is known."""
        return min(self.prefill or flags.AUTO_CHUNK, self.max_context)

    @property
    def batch_asked(self) -> int:
        """Batch slots that a window has room for."""
        return min(self.batch, flags.WINDOW_ROWS)

    @property
    def draft_context(self) -> int:
        """Rows that the draft layer holds of a sequence."""
        return min(self.max_context, self.mtp_window)

    def draft_slots(self, n_slots: int) -> int:
        """Pool slots that the draft layer follows: the solo one, and all with drafts in slots."""
        return 1 + n_slots if self.batch_mtp else 1

    @property
    def lookup(self) -> int:
        """Tokens that a window drafts from the text."""
        return self.suffix_draft if self.spec > 1 else 0

    @property
    def mtp_max(self) -> int:
        """Tokens that the draft layer proposes for a window."""
        return self.spec - 1 if self.mtp is not None else 0

    @property
    def resident(self) -> int:
        """Tokens of a conversation whose keys and values stay in VRAM, behind `fitted`; 0: all."""
        return self.kv_resident if self.device == "cuda" and self.kv_resident < self.max_context else 0

    @property
    def spare_places(self) -> int:
        """Places of a layer in RAM that hold no expert, for swaps beside windows."""
        return SPARE_PLACES if self.adapt_async and min(self.adapt_every, self.adapt_swaps) > 0 else 0

    @property
    def pcie_share(self) -> float | None:
        """Of the experts that windows miss, the share that a card reads; None: it is measured."""
        return None if self.pcie_frac < 0 else self.pcie_frac

    @property
    def helping_threads(self) -> int:
        """Threads that compute experts beside a card: one is left to what drives it."""
        return max(1, self.n_threads - 1)

    @property
    def n_threads(self) -> int:
        return self.threads or min(len(os.sched_getaffinity(0)), flags.MAX_THREADS)


def parse(argv: Sequence[str]) -> Options:
    """Options of a command line without the program's name. Raises Refused."""
    given = list(_given(argv))
    reason = refusal(given)
    if reason is not None:
        raise Refused(reason)
    values = {}
    for name, text in given:
        flag = flags.find(name)
        if flag is not None and flag.acts and flag.read is not None:
            values[flag.field] = flag.read(text or "")
    return msgspec.convert(values, Options)


def refusal(given: Sequence[tuple[str, str | None]]) -> str | None:
    """Why the engine does not start with these options, as (name, value or None), or None when it does.

    Each option by itself in the order given, then what they must be together.
    """
    for name, text in given:
        flag = flags.find(name)
        if flag is None:
            return f"{name}: unknown option; strata-engine --help lists all"
        if flag.read is None:
            return f"{name}: {flag.missing}; leave the option out"
        if not flag.value and text is not None:
            return f"{name}: takes no value, got {_shown(text)}"
        if flag.value and text is None and not flag.optional:
            return f"{name}: a value is missing; wants {flag.value}"
        try:
            flag.read(text or "")
        except ValueError as error:
            return f"{name}: wants {error}, got {_shown(text or '')}"
    last = {flag.name: text for name, text in given if (flag := flags.find(name)) is not None}
    if "--pack" not in last:
        return "--pack: no model given; name a GGUF file: --pack model.gguf"
    return _disk_refusal(last) or _plan_refusal(last) or _device_refusal(last) or _resident_refusal(last)


def notes(argv: Sequence[str]) -> list[str]:
    """The log lines about options that were given and change nothing, by name."""
    found = {flag.name: flag.said for name, _ in _given(argv) if (flag := flags.find(name)) is not None and flag.said}
    return [f"{name}: {said}" for name, said in found.items()]


def _disk_refusal(last: Mapping[str, str | None]) -> str | None:
    if int(last.get("--conversation-cache-disk-mib") or 0) and "--conversation-cache-dir" not in last:
        return "--conversation-cache-disk-mib: no folder given; name one: --conversation-cache-dir DIR"
    return None


def _plan_refusal(last: Mapping[str, str | None]) -> str | None:
    if "--plan" not in last:
        alone = next((name for name in ("--json", "--ram-limit-mib") if name in last), None)
        return alone and f"{alone}: is for --plan; add --plan, or leave it out"
    return None


def _resident_refusal(last: Mapping[str, str | None]) -> str | None:
    resident, context = int(last.get("--kv-resident") or 0), int(last.get("--max-context") or flags.DEFAULT_CONTEXT)
    if 0 < resident < flags.MIN_RESIDENT and resident < context:
        return f"--kv-resident {resident}: at least {flags.MIN_RESIDENT} tokens stay in VRAM; ask for more, or for 0"
    return None


def _device_refusal(last: Mapping[str, str | None]) -> str | None:
    """Why the options do not go together on the device that was chosen."""
    if last.get("--device") == "cuda":
        needed = "--plan" not in last or last.get("--vram-limit-mib", "0") == "0"
        if needed and find_spec("cupy") is None:
            return (
                "--device cuda: CuPy is not installed; install strata[cuda12] or strata[cuda13], or use --device host"
            )
        if last.get("--kernels") == "reference":
            return "--kernels reference: a card has its own kernels; leave it out, or use --device host"
        return None
    kv = last.get("--kv", "fp32")
    if kv != "fp32":
        return f"--kv {kv}: the host keeps keys and values in float32; leave it out, or use --device cuda"
    for name, plain in (*_FOR_A_CARD, *(() if "--plan" in last else _FOR_A_CACHE)):
        if last.get(name, plain) != plain:
            return f"{name}: there is no card on the host; leave it out, or use --device cuda"
    return None


def fitted(options: Options, spec: ModelSpec) -> Options:
    """The options with what the model decides: context and end tokens. Refuses what the model does not have."""
    context = options.max_context or min(flags.DEFAULT_CONTEXT, spec.context_length)
    if context > spec.context_length:
        raise Refused(f"--max-context {context}: the model's context is {spec.context_length}; ask for at most that")
    end_ids = spec.end_tokens if options.eos_ids is None else options.eos_ids
    for token in end_ids:
        if token >= spec.vocab:
            raise Refused(f"--eos-ids: {token} is outside the vocabulary; the model has {spec.vocab} tokens")
    return msgspec.structs.replace(options, max_context=context, eos_ids=end_ids)


def _given(argv: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """(name, value) per option. A value follows its option as the next word or after `=`; the word after a known
    option with a value belongs to it unless it starts with two dashes."""
    words = iter(range(len(argv)))
    for at in words:
        name, equals, text = argv[at].partition("=")
        flag = flags.find(name)
        if equals:
            yield name, text
        elif flag is not None and flag.value and at + 1 < len(argv) and not argv[at + 1].startswith("--"):
            yield name, argv[next(words)]
        else:
            yield name, None


def _shown(text: str) -> str:
    return ascii(text if len(text) <= 60 else text[:57] + "...")

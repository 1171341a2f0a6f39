"""What an engine says about itself: the INFO line, and the page that a pack is described with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from strata.engine.flags import WINDOW_ROWS
from strata.engine.options import Options
from strata.engine.pack import ModelSpec, Pack
from strata.engine.state.slots import estimate_bytes
from strata.protocol.lines import Done, Info, InfoValue, rate
from strata.protocol.version import VERSION

_AS_ASKED = (
    "conversation_cache_mib",
    "conversation_cache_slots",
    "conversation_cache_min_free_mib",
    "conversation_cache_disk_mib",
    "conversation_cache_similarity",
    "conversation_cache_n_min",
)
"""Keys whose value is that of the option of the same name."""
_NOTHING_HERE = (
    "kv_resident",
    "expert_slots",
    "expert_cache_mib",
    "expert_slots_primary",
    "expert_cache_primary_mib",
    "vram_free_mib",
    "arena_mib",
    "vram_elastic",
    "head_alias",
)
"""Figures of parts that a host engine does not have: 0 is their true value."""


def engine_info(options: Options, vocab: int, n_slots: int, device: Mapping[str, InfoValue]) -> Info:
    """Every key that INFO always has, with what is true on the host, and a few of our own. `device`: what differs."""
    values: dict[str, InfoValue] = {"context": options.max_context, "kv": options.kv}
    values.update(dict.fromkeys(_NOTHING_HERE, 0))
    values.update({name: getattr(options, name) for name in _AS_ASKED})
    values.update(
        kv_resident=options.resident,
        spec=options.spec,
        mtp_max=options.mtp_max,
        lookup=options.lookup,
        cvec="0",
        pool_workers=options.n_threads,
        pcie_frac=0.0,
        spec_min_p=options.spec_min_p,
        tail_role_token=-1,
        vocab=vocab,
        window_rows=WINDOW_ROWS,
        prefill_chunk=options.prefill_chunk,
        device=options.device,
        kernels=options.kernels,
    )
    if n_slots:
        values.update(batch_slots=n_slots, slot_cache=int(options.prompt_cache > 0), batch_groups=1)
    values.update(device)
    values["engine"] = VERSION
    return Info(values)


def cache_info(counts: Mapping[str, int]) -> dict[str, InfoValue]:
    """Counts of parking as INFO names them, beside its limits."""
    return {f"conversation_cache_{name}": n for name, n in counts.items()}


def request_line(done: Done) -> str:
    """A finished request, for the log."""
    read, made = rate(done.prompt_read, done.prompt_ms), rate(done.generated, done.decode_ms)
    parts = [
        f"request: {done.prompt} prompt tokens = {done.reused} reused + {done.prompt_read} read in "
        f"{done.prompt_ms:.0f} ms ({read:.0f} tok/s), {done.generated} generated in {done.decode_ms:.0f} ms "
        f"({made:.1f} tok/s), {done.finish}"
    ]
    if done.drafts_offered:
        parts.append(f"{done.drafts_accepted} of {done.drafts_offered} drafts kept")
    if (done.ram_blobs or done.file_blobs) and done.hit_rate is not None:
        parts.append(f"{done.hit_rate:.1%} of the experts in VRAM")
    if done.file_blobs:
        parts.append(f"{done.file_blobs} of {done.file_mb:.0f} MB read in the file")
    return "; ".join(parts)


def describe(pack: Pack, options: Options) -> str:
    """A checked pack in a few lines, for a person."""
    spec = pack.spec
    types = Counter(pack[name].type.name for name in pack)
    rows = {
        "file": f"{pack.path} ({len(pack.paths)} shards)" if len(pack.paths) > 1 else str(pack.path),
        "tensors": f"{len(pack)}, {pack.n_bytes / 2**20:.1f} MiB; "
        + ", ".join(f"{n} {t}" for t, n in types.most_common()),
        "layers": f"{spec.layers}, of which attention {_count(spec)}",
        "experts": f"{spec.experts} a layer, {spec.experts_used} used by a token",
        "width": f"{spec.hidden} x {spec.streams} streams",
        "vocabulary": f"{spec.vocab}; end tokens {', '.join(map(str, spec.end_tokens)) or 'none'}",
        "context": f"{spec.context_length} at most; {options.max_context} tokens take "
        f"{estimate_bytes(spec, 1, options.max_context) / 2**20:.1f} MiB of state",
    }
    lines = [f"{name:<12}{text}" for name, text in rows.items()]
    return "\n".join([*lines, *(f"{'note':<12}{text}" for text in spec.warnings)])


def _count(spec: ModelSpec) -> int:
    return len(spec.attention_layers)

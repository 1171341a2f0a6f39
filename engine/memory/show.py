"""A plan for people and for programs.

table(...)   aligned columns, MiB
as_json(...) the same and the details, bytes
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from strata.engine.device.arena import MIB
from strata.engine.memory.advice import Advice
from strata.engine.memory.figures import Figures, MemoryPlan, Shortfall
from strata.engine.options import Options

Advised = Mapping[Shortfall, Sequence[Advice]]


def table(figures: Figures, options: Options, plan: MemoryPlan, advised: Advised) -> str:
    """The plan in one table, then what did not fit."""
    rows = [("where", "what", "MiB", "")]
    for place, memory in (("VRAM", figures.vram), ("RAM", figures.ram)):
        if memory is None:
            continue
        rows.append((place, "to be planned", _mib(memory.free), f"of {_mib(memory.total)}"))
        rows += [("", line.what, _mib(line.n_bytes), line.note) for line in plan.lines if line.place == place]
    lines = _aligned(rows)
    lines += ["", *plan.said] if plan.said else []
    if plan.shortfalls:
        lines += ["", *_aligned([("less than could be", "have", "of", "changed by"), *_shorts(plan, advised)])]
    return "\n".join(lines)


def _shorts(plan: MemoryPlan, advised: Advised) -> list[tuple[str, str, str, str]]:
    rows = []
    for short in plan.shortfalls:
        advice = advised.get(short, ())
        first, *rest = [f"{one.option}: {one.got}" for one in advice] or ["more memory alone"]
        rows.append((short.what, str(short.got), f"{short.wanted} {short.unit}", first))
        rows += [("", "", "", text) for text in rest]
    return rows


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / MIB:,.0f}"


def _aligned(rows: Sequence[tuple[str, str, str, str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = []
    for where, what, number, note in rows:
        line = f"{where:<{widths[0]}}  {what:<{widths[1]}}  {number:>{widths[2]}}  {note}"
        lines.append(line.rstrip())
    return lines


def as_json(figures: Figures, options: Options, plan: MemoryPlan, advised: Advised) -> str:
    """One object; sizes in bytes."""
    found: dict[str, Any] = {
        "device": options.device,
        "max_context": options.max_context,
        "kv": options.kv,
        "vram": _memory(figures.vram),
        "ram": _memory(figures.ram),
        "lines": [
            {"what": line.what, "place": line.place, "bytes": line.n_bytes, "note": line.note} for line in plan.lines
        ],
        "batch_slots": plan.slots.n_slots,
        "checkpoints": plan.slots.n_checkpoints,
        "experts": {
            "pairs": figures.sizes.pairs,
            "bytes": figures.sizes.expert_bytes,
            "source": plan.homes.source,
            "in_ram": plan.homes.copies,
            "from_file_bytes": plan.homes.mapped_bytes,
        },
        "shortfalls": [
            {
                "what": short.what,
                "got": short.got,
                "wanted": short.wanted,
                "unit": short.unit,
                "advice": [{"option": one.option, "got": one.got} for one in advised.get(short, ())],
            }
            for short in plan.shortfalls
        ],
        "said": list(plan.said),
    }
    if plan.card is not None:
        layout = plan.card.layout
        found["expert_cache"] = {
            "slots": len(plan.card.slots),
            "bytes": plan.card.slots.n_bytes,
            "budget": plan.card.budget,
        }
        found["reserve"] = plan.card.reserve
        found["free_decoding"] = plan.card.free
        found["prompt"] = {
            "way": plan.card.way,
            "head": plan.card.alias,
            "kind": layout.kind,
            "chunk": layout.chunk,
            "lent_slots": layout.lent,
            "lent_bytes": layout.lent_bytes,
            "own_bytes": plan.card.windows or layout.own_bytes,
            "head_bytes": layout.head_bytes,
            "ring_bytes": plan.card.ring,
        }
    return json.dumps(found, indent=2)


def _memory(memory: Any) -> dict[str, int] | None:
    return None if memory is None else {"total": memory.total, "free": memory.free}

"""A plan against a real start: what a card is said to hold is what it then holds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from strata.engine.device.arena import GIB, MIB
from strata.engine.device.base import Memory
from strata.engine.device.cuda import CudaDevice
from strata.engine.experts.plan import Asked
from strata.engine.memory.command import gather
from strata.engine.memory.figures import MemoryPlan, Switches
from strata.engine.memory.homes import source_of
from strata.engine.memory.plan import STAGING, plan_memory
from strata.engine.model import resident
from strata.engine.model.card_drafter import CardDrafts
from strata.engine.model.resident import Resident
from strata.engine.options import Options, fitted
from strata.engine.pack import DraftPack, Pack, open_draft, open_pack
from strata.engine.pack.spec import NGRAM_TABLE
from strata.engine.state.plan import StatePlan

MARGIN = 8 * MIB
"""What a plan allows for tables and settings, and for the price of a window."""


def start(driver: object, options: Options, taken: MemoryPlan, draft: DraftPack | None = None) -> int:
    """Bytes of a card after a start as planned."""
    state = StatePlan(taken.slots.n_slots, taken.slots.n_checkpoints, 0, 0, ())
    device = CudaDevice(driver=driver)
    Resident(
        open_pack(options.pack),
        device,
        max_context=options.max_context,
        plan=lambda free: state,
        table="vram",
        chunks=[taken.card.layout.chunk],
        drafts=CardDrafts(options.spec, draft, options.draft_slots, options.draft_context),
    )
    return device.account.held


def planned(options: Options) -> tuple[MemoryPlan, int]:
    """The plan, and the bytes that it takes of a card."""
    figures = replace(gather(open_pack(options.pack), options), vram=Memory(3 * GIB, 3 * GIB))
    plan = plan_memory(figures, options, Switches())
    assert plan.card.layout.kind == "own"
    return plan, sum(line.n_bytes for line in plan.lines if line.place == "VRAM" and line.what != "free")


def options_of(pack: Pack, **more: object) -> Options:
    common = {"device": "cuda", "vram_limit_mib": 3072, "max_context": 512, "prefill": 64, "prompt_cache": 2}
    return fitted(Options(pack=str(pack.path), ple_io="vram", **common, **more), pack.spec)


@pytest.mark.whole_card
@pytest.mark.parametrize("name", ["tiny-q2_0", "odd-q8_0"])
def test_a_start_takes_no_more_than_its_plan_and_not_much_less(counting_or_card, packs, name):
    options = options_of(open_pack(packs[name]))
    plan, taken = planned(options)
    assert taken - MARGIN <= start(counting_or_card, options, plan) <= taken


@pytest.mark.whole_card
def test_a_start_with_drafts_takes_no_more_than_its_plan_and_not_much_less(counting_or_card, packs):
    pack, file = open_pack(packs["tiny-q8_0"]), str(packs["mtp-tiny-q8_0"])
    options = options_of(pack, mtp=file, spec=4, mtp_window=256)
    plan, taken = planned(options)
    assert any(line.what == "draft layer" for line in plan.lines)
    assert taken - MARGIN <= start(counting_or_card, options, plan, open_draft(pack, file)) <= taken


SMALL = {"device": "cuda", "vram_limit_mib": 12_288, "max_context": 4096, "kv": "int8", "no_prefill_borrow": True}


@pytest.mark.parametrize(
    ("ram_gib", "more", "source"),
    [
        (32, {}, "mapped"),
        (32, {"mmap_experts": True}, "mapped"),
        (32, {"resident_experts": True}, "resident"),
        (32, {"resident_experts": True, "resident_budget_gib": 9}, "resident"),
        (4, {"resident_experts": True}, "mapped"),
        (80, {}, "arena"),
    ],
)
def test_a_machine_with_less_ram_than_the_file_starts_and_locks_what_the_plan_said(
    counting, full_pack, monkeypatch, ram_gib, more, source
):
    """61.8 GB of model, a card of 12 GiB. Nothing is loaded: all that is taken and said is looked at."""
    pack = open_pack(full_pack)
    options = fitted(Options(pack=str(full_pack), ram_limit_mib=ram_gib << 10, **SMALL, **more), pack.spec)
    plan = plan_memory(gather(pack, options), options, Switches())
    assert plan.homes.source == source
    monkeypatch.setattr(resident, "ram", lambda: Memory(ram_gib * GIB, ram_gib * GIB))
    monkeypatch.setattr(CudaDevice, "load", lambda device: None)
    found = Resident(
        pack,
        CudaDevice(12_288, counting),
        max_context=options.max_context,
        kv=options.kv,
        chunks=[1024],
        experts=Asked(prefill=1024, source=source_of(options, Switches())),
    )
    placement, table = found.store.placement, pack[NGRAM_TABLE].data.size
    assert placement.in_cache + int(placement.in_ram.sum()) + int(placement.filed.sum()) == placement.pairs == 24_576
    assert placement.in_ram.any() == (source != "mapped") and placement.filed.any() == (source != "arena")
    free = ram_gib * GIB - table - placement.locked_bytes
    assert free >= source_of(options, Switches()).kept or source == "mapped"
    assert 0 <= counting.locked - placement.locked_bytes - table < STAGING, "buffers beside the experts"
    if source == "resident":
        wanted = options.resident_budget_gib * GIB or plan.homes.copy_bytes
        assert abs(wanted - placement.locked_bytes) < 3 * MIB, "but for a part of an expert"

"""A plan against a real start: what a card is said to hold is what it then holds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from strata.engine.device.arena import GIB, MIB
from strata.engine.device.base import Memory
from strata.engine.device.cuda import CudaDevice
from strata.engine.memory.command import gather
from strata.engine.memory.figures import MemoryPlan, Switches
from strata.engine.memory.plan import plan_memory
from strata.engine.model.card_drafter import CardDrafts
from strata.engine.model.resident import Resident
from strata.engine.options import Options, fitted
from strata.engine.pack import DraftPack, Pack, open_draft, open_pack
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

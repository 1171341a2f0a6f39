"""The start of the full-size model on an 8 GB card whose head is lent: longer chunks, and no byte of the reserve."""

from __future__ import annotations

import pytest

from strata.engine.capacity import state_plan
from strata.engine.device.arena import MIB
from strata.engine.device.cuda import CudaDevice
from strata.engine.experts.plan import Asked
from strata.engine.memory.loan import plan_loan
from strata.engine.model.card_drafter import CardDrafts
from strata.engine.model.resident import Resident
from strata.engine.options import Options, fitted
from strata.engine.pack import open_draft, open_pack

LIMIT_MIB, RESERVE_MIB, CONTEXT = 8151, 590, 29_880


@pytest.fixture
def start(counting, full_pack, full_draft, headers_only):
    """The model with a loan on a card that only counts; nothing is read from the file."""
    pack = open_pack(full_pack)
    options = Options(
        pack=str(full_pack), device="cuda", kv="int8", max_context=CONTEXT, prompt_cache=3, mtp="", spec=4
    )
    options = fitted(options, pack.spec)
    return Resident(
        pack,
        CudaDevice(LIMIT_MIB, counting),
        max_context=CONTEXT,
        plan=lambda free: state_plan(options, pack.spec, free, 2),
        kv=options.kv,
        table="ram",
        drafts=CardDrafts(options.spec, open_draft(pack, full_draft), options.draft_slots, options.draft_context),
        experts=Asked(0, None, RESERVE_MIB * MIB, True),
        loan=plan_loan,
    )


def test_an_8_gb_card_reads_in_longer_chunks_and_keeps_its_reserve(start):
    loan, free = start.loan, start.device.memory().free
    plan, largest = loan.plan, start.store.placement.sizes[0].n_bytes
    assert plan.chunk == start.chunk >= max(3 << 10, 1.25 * plan.plain)
    assert loan.stays == 512 and plan.lent_bytes > 400 * MIB
    assert plan.ring.n_bytes > 150 * largest, "mixers of a chunk are not waited for"
    assert RESERVE_MIB <= free / MIB < RESERVE_MIB + 100, "pieces lie there whole, so a step's worth may stay"
    assert start.experts_in_vram == 0, "a few dozen would cost prompts more than they give windows"

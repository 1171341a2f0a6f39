"""The start of the full-size model on an 8 GB card whose head is lent: longer chunks, and no byte of the reserve. On a
larger card, or without RAM for a copy of the head, it stays."""

from __future__ import annotations

import logging
import re

import pytest

from strata.engine.capacity import state_plan
from strata.engine.device.arena import MIB
from strata.engine.device.base import Memory
from strata.engine.device.cuda import CudaDevice
from strata.engine.experts.placement import by_number
from strata.engine.experts.plan import Asked
from strata.engine.memory.homes import STAGING
from strata.engine.memory.loan import plan_loan
from strata.engine.model import resident
from strata.engine.model.card_drafter import CardDrafts
from strata.engine.model.head_loan import HeadLoan
from strata.engine.model.resident import Resident
from strata.engine.model.slot_loan import SlotLoan
from strata.engine.options import Options, fitted
from strata.engine.pack import open_draft, open_pack

LIMIT_MIB, RESERVE_MIB, CONTEXT = 8151, 590, 29_880


@pytest.fixture
def start(counting, full_pack, full_draft, headers_only):
    """start(limit, order, loan): the model on a card that only counts; nothing is read from the file."""
    pack = open_pack(full_pack)
    options = Options(
        pack=str(full_pack), device="cuda", kv="int8", max_context=CONTEXT, prompt_cache=3, mtp="", spec=4
    )
    options = fitted(options, pack.spec)

    def make(limit: int = LIMIT_MIB, order=None, loan=plan_loan) -> Resident:
        return Resident(
            pack,
            CudaDevice(limit, counting),
            max_context=CONTEXT,
            plan=lambda free: state_plan(options, pack.spec, free, 2),
            kv=options.kv,
            table="ram",
            drafts=CardDrafts(options.spec, open_draft(pack, full_draft), options.draft_slots, options.draft_context),
            experts=Asked(0, order, RESERVE_MIB * MIB, True, borrow=True),
            loan=loan,
        )

    return make


def test_an_8_gb_card_reads_in_longer_chunks_and_keeps_its_reserve(start):
    made = start()
    loan, free = made.loan, made.device.memory().free
    plan, largest = loan.plan, made.store.placement.sizes[0].n_bytes
    assert plan.chunk == made.chunk >= max(3 << 10, 1.25 * plan.plain)
    assert loan.stays == 512 and plan.lent_bytes > 400 * MIB
    assert plan.ring.n_bytes > 150 * largest, "mixers of a chunk are not waited for"
    assert RESERVE_MIB <= free / MIB < RESERVE_MIB + 100, "pieces lie there whole, so a step's worth may stay"
    assert made.experts_in_vram == 0, "a few dozen would cost prompts more than they give windows"


HOT = by_number(48, 512)


def test_the_head_stays_where_borrowed_slots_give_longer_chunks_and_more_experts(start, caplog):
    with caplog.at_level(logging.INFO, "strata.engine"):
        made = start(12_288, HOT)
    assert isinstance(made.loan, SlotLoan) and made.chunk == 8192 and made.experts_in_vram > 2000
    assert re.search("chunks of 8192 fit slots that prompts borrow, [0-9]+ the head, so it stays", caplog.text)


def test_the_head_is_lent_where_borrowed_slots_give_short_chunks(start):
    made = start(LIMIT_MIB, HOT)
    assert isinstance(made.loan, HeadLoan) and made.chunk >= 3 << 10


@pytest.mark.parametrize("left", [0, *(pytest.param(left, marks=pytest.mark.soak) for left in (200, 400)), 700])
def test_the_heads_copy_in_ram_never_takes_what_must_stay_free(start, counting, monkeypatch, caplog, left):
    """left: MiB of RAM beside what a start without the copy takes."""
    start(loan=None)
    ram = counting.locked + STAGING + 256 * MIB + left * MIB
    monkeypatch.setattr(resident, "ram", lambda: Memory(ram, ram))
    counting.locked = 0
    with caplog.at_level(logging.INFO, "strata.engine"):
        made = start()
    assert not made.store.placement.filed.any(), "experts do not leave RAM for it"
    assert counting.locked <= ram - 256 * MIB
    assert isinstance(made.loan, HeadLoan) == (left >= 700) != ("RAM has no room" in caplog.text)

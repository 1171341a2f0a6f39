"""The start of the full-size model on an 8 GB card whose prompts borrow slots: as planned, its reserve untouched."""

from __future__ import annotations

from dataclasses import replace

import pytest

from strata.engine.capacity import state_plan
from strata.engine.device.arena import MIB
from strata.engine.device.base import Memory
from strata.engine.device.cuda import CudaDevice
from strata.engine.experts.placement import by_number
from strata.engine.experts.plan import Asked
from strata.engine.memory.command import gather
from strata.engine.memory.figures import Switches
from strata.engine.memory.plan import plan_memory
from strata.engine.model.resident import Resident
from strata.engine.model.slot_loan import SlotLoan
from strata.engine.options import Options, fitted
from strata.engine.pack import open_pack

LIMIT_MIB, RESERVE_MIB, CONTEXT, PCT = 8151, 590, 29_880, 85


@pytest.fixture
def options(full_pack):
    options = Options(
        pack=str(full_pack),
        device="cuda",
        kv="int8",
        max_context=CONTEXT,
        prompt_cache=3,
        vram_limit_mib=LIMIT_MIB,
        vram_reserve_mib=RESERVE_MIB,
    )
    return fitted(options, open_pack(full_pack).spec)


@pytest.fixture
def start(counting, options, headers_only):
    """The model on a card that only counts, with an order of its experts; nothing is read from the file."""
    pack = open_pack(options.pack)
    order = by_number(pack.spec.layers, pack.spec.experts)
    return Resident(
        pack,
        CudaDevice(LIMIT_MIB, counting),
        max_context=CONTEXT,
        plan=lambda free: state_plan(options, pack.spec, free, 2),
        kv=options.kv,
        table="ram",
        experts=Asked(0, order, RESERVE_MIB * MIB, True, borrow=True, pct=PCT),
    )


def test_an_8_gb_card_lends_what_was_planned_and_keeps_its_reserve(start, options):
    loan, free = start.loan, start.device.memory().free
    assert isinstance(loan, SlotLoan) and start.chunk == loan.most
    loan.lend(start.chunk)
    lent, slots = loan.lending.slots, loan.lending.of
    assert 0 < lent <= PCT * slots // 100 and slots - lent >= 128
    assert RESERVE_MIB <= free / MIB < RESERVE_MIB + 24
    pack = open_pack(options.pack)
    figures = replace(gather(pack, options), profile=by_number(pack.spec.layers, pack.spec.experts))
    plan = plan_memory(replace(figures, ram=Memory(1 << 40, 1 << 40)), options, Switches(lend_pct=PCT))
    assert plan.card.way == "borrowed"
    assert abs(len(plan.card.slots) - slots) <= 12, "what --plan says of small buffers differs by some MiB"
    assert plan.card.layout.chunk == start.chunk

"""A plan against a real start: what a card is said to hold is what it then holds."""

from __future__ import annotations

import pytest

from strata.engine.device.arena import GIB, MIB
from strata.engine.device.base import Memory
from strata.engine.device.cuda import CudaDevice
from strata.engine.memory.figures import Figures, Switches
from strata.engine.memory.plan import plan_memory
from strata.engine.memory.sizes import model_sizes
from strata.engine.model.resident import Resident
from strata.engine.options import Options, fitted
from strata.engine.pack import open_pack
from strata.engine.state.plan import StatePlan

MARGIN = 8 * MIB
"""What a plan allows for tables and settings, and for the price of a window."""


@pytest.mark.parametrize("name", ["tiny-q2_0", "odd-q8_0"])
def test_a_start_takes_no_more_than_its_plan_and_not_much_less(any_card, packs, name):
    pack = open_pack(packs[name])
    options = fitted(
        Options(pack=str(pack.path), device="cuda", max_context=512, prefill=64, prompt_cache=2, ple_io="vram"),
        pack.spec,
    )
    figures = Figures(
        spec=pack.spec,
        sizes=model_sizes(pack.spec, pack),
        types={name: tensor.type for name, tensor in pack.items()},
        vram=Memory(3 * GIB, 3 * GIB),
        ram=Memory(GIB, GIB),
    )
    plan = plan_memory(figures, options, Switches())
    assert plan.card.layout.kind == "own"
    planned = sum(line.n_bytes for line in plan.lines if line.place == "VRAM" and line.what != "free")
    state = StatePlan(plan.slots.n_slots, plan.slots.n_checkpoints, 0, 0, ())
    device = CudaDevice(driver=any_card())
    Resident(pack, device, max_context=512, plan=lambda free: state, table="vram", chunks=[plan.card.layout.chunk])
    assert planned - MARGIN <= device.account.held <= planned

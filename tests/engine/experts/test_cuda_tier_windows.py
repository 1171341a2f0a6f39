"""Windows whose experts do not lie in VRAM, timed by shares: what the tool counts is what the card asked for."""

from __future__ import annotations

import pytest

from strata.bench import tier_windows_cuda
from strata.bench.tier_windows_cuda import Case
from strata.engine.device.cuda import CudaDevice
from strata.engine.experts.plan import Asked
from strata.engine.model.resident import Resident
from strata.engine.pack import open_pack

STEPS = 3


@pytest.mark.soak  # the emulated card
def test_a_share_of_all_asks_for_nothing_and_one_of_none_at_every_layer(emulated_card, packs, monkeypatch):
    monkeypatch.setattr(tier_windows_cuda, "WARM", 1)
    monkeypatch.setattr(tier_windows_cuda, "LOOK_EVERY", 2)
    pack = open_pack(packs["odd-q8_0"])
    with emulated_card.plugged_in() as card:
        asked = Asked(1, pcie=None, threads=2, prefill=18)
        device = CudaDevice(driver=card.driver())
        resident = Resident(pack, device, max_context=72, n_slots=1, chunks=[18], experts=asked)
        helpers = resident.store.helpers
        case = Case(resident, helpers, STEPS)
        (rate,) = case.measure("all", 1.0)
        assert rate.median > 0
        before, _ = helpers.waits()
        _, waits = case.measure("none", 0.0)
        asked_for = helpers.waits()[0] - before
        assert asked_for >= pack.spec.layers * STEPS - 1 and 0 <= waits.median <= 100
        assert 0 <= case.correct(3) <= 1

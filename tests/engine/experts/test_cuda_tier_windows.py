"""Windows whose experts do not lie in VRAM: what is counted is what the card asked for, and the share follows it."""

from __future__ import annotations

import pytest

from strata.bench import tier_windows_cuda
from strata.bench.tier_windows_cuda import Case
from strata.engine.device.cuda import CudaDevice
from strata.engine.experts import balance, helpers
from strata.engine.experts.plan import Asked
from strata.engine.model.resident import Resident
from strata.engine.pack import open_pack
from strata.kernels.cuda.handover import SHARE

STEPS = 3


@pytest.fixture
def case(emulated_card, packs, monkeypatch):
    """A sequence of a model none of whose experts lies in VRAM, but one."""
    monkeypatch.setattr(tier_windows_cuda, "WARM", 1)
    monkeypatch.setattr(tier_windows_cuda, "LOOK_EVERY", 2)
    pack = open_pack(packs["odd-q8_0"])
    with emulated_card.plugged_in() as card:
        asked = Asked(1, pcie=None, threads=2, prefill=18)
        device = CudaDevice(driver=card.driver())
        resident = Resident(pack, device, max_context=72, n_slots=1, chunks=[18], experts=asked)
        yield Case(resident, resident.store.helpers, STEPS)


@pytest.mark.soak  # the emulated card
def test_a_share_of_all_asks_for_nothing_and_one_of_none_at_every_layer(case):
    (rate,) = case.measure("all", 1.0)
    assert rate.median > 0
    before, _ = case.helpers.waits()
    _, waits = case.measure("none", 0.0)
    asked_for = case.helpers.waits()[0] - before
    assert asked_for >= case.resident.model.spec.layers * STEPS - 1 and 0 <= waits.median <= 100
    assert 0 <= case.correct(3) <= 1


@pytest.mark.soak  # the emulated card
def test_windows_correct_the_share_on_the_card(case, monkeypatch):
    monkeypatch.setattr(helpers, "LOOK_EVERY", 2)
    monkeypatch.setattr(balance, "LEAST_REQUESTS", 1)
    case.helpers.set_share(0.5)
    looks = []
    monkeypatch.setattr(balance.Balance, "look", lambda self, *came: looks.append(came) or 100 + len(looks))
    for _ in range(7):
        case.decode.run(1)
        case.helpers.window_over()
    requests, waits = case.helpers.waits()
    assert (
        len(looks) == 3 and 0 < sum(came[0] for came in looks) <= requests and sum(came[1] for came in looks) <= waits
    )
    own = case.resident.device.read(case.helpers._own)
    assert own[SHARE] == 103 and case.helpers.share == 103 / 256

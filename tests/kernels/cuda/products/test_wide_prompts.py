"""Prompt tiles of four warps together (product_wgmma.cu): every cut gives the bits of the written order."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from strata.kernels.cuda import card, prompt_plans
from strata.kernels.cuda.card import Card
from strata.kernels.cuda.plans import DENSE, GATE_UP, PAIRS
from strata.kernels.cuda.product_variants import CARDS
from strata.kernels.cuda.prompt_plans import NOT_WIDE, WIDE_CUTS, WideCut, fitted, prompt_plan
from strata.kernels.formats import BY_NAME
from strata.kernels.reference.linear import ordered_linear

TYPES = [t for t in BY_NAME.values() if not t.is_float and t.name not in NOT_WIDE]
SMALL = WideCut(1, 2, 2, 1)


@pytest.fixture
def only(monkeypatch):
    """Makes a cut the one that plans may take."""

    def take(cut: WideCut) -> WideCut:
        monkeypatch.setattr(prompt_plans, "CUTS", (cut,))
        prompt_plan.cache_clear()
        return cut

    yield take
    prompt_plan.cache_clear()


@pytest.fixture
def wide(host, monkeypatch):
    """The emulator, as a card with such steps."""
    monkeypatch.setattr(card, "card", lambda: Card(90, 3, 227 << 10, 228 << 10))
    return host


@pytest.mark.parametrize("cut", WIDE_CUTS, ids=str)
def test_no_wide_cut_of_a_prompt_changes_a_bit(wide, only, random_weight, cut):
    only(replace(cut, blocks=1))
    name, cols = (("Q6_K", 512), ("IQ4_NL", 320))[WIDE_CUTS.index(cut) % 2]
    wide.check_linear([random_weight(name, 70, cols)], cut.columns + 9)


@pytest.mark.parametrize("kind", TYPES, ids=lambda t: t.name)
def test_a_wide_tile_of_any_type_has_the_bits_of_the_written_order(wide, only, random_weight, kind):
    only(SMALL)
    wide.check_linear([random_weight(kind.name, 30, 512 if kind.block == 256 else 192)], 40)


def test_the_largest_sums_are_below_the_bias(wide, only, random_weight):
    """Codes and activations at their limits: Q8_0 with -128 and Q6_K with -32, all inputs of a block alike."""
    only(SMALL)
    for name, cols in (("Q8_0", 64), ("Q6_K", 256)):
        w = random_weight(name, 20, cols)
        if name == "Q8_0":
            w.data.reshape(20, cols // 32, 34)[:, :, 2:] = 0x80
        else:
            w.data[:, :192] = 0
        x = np.repeat(np.float32([[1.0], [-1.0]]), 20, 0).repeat(cols, 1)
        (got,), (want,) = wide.linear([w], x), ordered_linear([w], x)
        np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))


@pytest.mark.parametrize("run", [1, 3])
@pytest.mark.parametrize("name, cols", [("Q8_0", 64), ("Q8_0", 192), ("Q6_K", 256), ("IQ4_NL", 640)])
def test_a_run_of_wide_tiles_has_the_bits_of_single_tiles(wide, only, random_weight, monkeypatch, run, name, cols):
    only(SMALL)
    monkeypatch.setattr(prompt_plans, "RUNS", (run,))
    wide.check_linear([random_weight(name, 300, cols), random_weight(name, 40, cols, seed=1)], 40)


EXPERTS = (("IQ3_S", "IQ3_S", "IQ4_NL"), ("Q8_0", "Q8_0", "F16"), ("Q6_K", "Q8_0", "Q4_0"), ("Q4_K", "Q4_K", "Q5_1"))


@pytest.mark.parametrize("kinds", EXPERTS)
@pytest.mark.parametrize("cut", [WideCut(1, 8, 1, 1), WideCut(1, 4, 2, 1), WideCut(2, 6, 4, 1)], ids=str)
def test_no_wide_cut_of_the_experts_changes_a_bit(wide, only, random_weight, cut, kinds):
    """Tiles of several widths: 57 rows with 2 of 3 experts, and one expert that few rows use."""
    only(cut)
    shapes = ((64, 256), (64, 256), (256, 64))
    stacks = [random_weight(t, *s, experts=3, seed=i) for i, (t, s) in enumerate(zip(kinds, shapes, strict=True))]
    for n in (57, 17):
        wide.check_mixture(tuple(stacks), n, 2)


def test_the_order_in_which_threads_run_changes_no_wide_tile(wide, host_loader, only, random_weight):
    only(WideCut(2, 4, 2, 1))
    for order in (1, 2):
        host_loader.emulator.order = order
        wide.check_linear([random_weight("Q6_K", 140, 768)], 70)


def test_only_cards_with_such_steps_take_wide_tiles():
    for arch, each in CARDS.items():
        plans = [fitted(each, BY_NAME["Q6_K"], cut, 2560) for cut in WIDE_CUTS]
        assert any(plans) == (arch == prompt_plans.WIDE_ARCH)
    for kind in TYPES:
        for cut in WIDE_CUTS:
            plan = fitted(CARDS[90], kind, cut, 2560)
            if plan:
                assert plan.cut.blocks * (plan.shared + 1024) <= CARDS[90].shared_multiprocessor
                assert all(plan.constants(kind, mode)["TYPE"] == kind.name for mode in (DENSE, GATE_UP, PAIRS))
    assert fitted(CARDS[90], BY_NAME["Q8_0"], SMALL, 96) is None


@pytest.mark.gpu
@pytest.mark.parametrize("kind", TYPES, ids=lambda t: t.name)
def test_wide_tiles_have_the_bits_of_the_written_order_on_a_card(device, only, random_weight, kind):
    if card.card().arch != prompt_plans.WIDE_ARCH:
        pytest.skip("this card has no such steps")
    cols = 1280 if kind.block == 256 else 576
    for cut in WIDE_CUTS:
        if fitted(card.card(), kind, cut, cols):
            only(cut)
            device.check_linear([random_weight(kind.name, 300, cols), random_weight(kind.name, 40, cols, seed=1)], 270)

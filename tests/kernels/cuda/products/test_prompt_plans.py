"""Prompt tiles: every cut gives the bits of the written order; the chosen one fits the card."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.kernels.cuda import arguments, prompt_plans
from strata.kernels.cuda.plans import DENSE, GATE_UP, PAIRS
from strata.kernels.cuda.product_variants import CARDS
from strata.kernels.cuda.prompt_plans import CUTS, RUNS, Cut, cost, expected, fitted, prompt_plan
from strata.kernels.formats import BY_NAME

pytestmark = pytest.mark.usefixtures("tiles_only")
TYPES = [t for t in BY_NAME.values() if not t.is_float]


SOME = [cut if i % 3 == 0 else pytest.param(cut, marks=pytest.mark.soak) for i, cut in enumerate(CUTS)]
"""Each cut is compiled for the emulator: a third of them; all are a soak."""


@pytest.fixture(params=SOME, ids=lambda c: f"{c.rows}x{c.columns}")
def only_cut(request, monkeypatch) -> Cut:
    """The one cut that a plan may take."""
    monkeypatch.setattr(prompt_plans, "CUTS", (request.param,))
    prompt_plan.cache_clear()
    yield request.param
    prompt_plan.cache_clear()


@pytest.mark.parametrize("name, rows, cols", [("Q6_K", 70, 512), ("Q4_1", 130, 160)])
def test_no_way_to_cut_a_prompt_changes_a_bit(host, random_weight, only_cut, name, rows, cols):
    host.check_linear([random_weight(name, rows, cols)], only_cut.columns + 9)


@pytest.mark.parametrize("chunks, lifts, parts", [(1, 0, 2), (2, 0, 1), (2, 1, 4)])
@pytest.mark.parametrize("name, cols", [("Q8_0", 32), ("Q8_0", 160), ("Q6_K", 256), ("IQ4_NL", 640)])
def test_a_run_of_tiles_has_the_bits_of_single_tiles(
    host, random_weight, monkeypatch, chunks, lifts, parts, name, cols
):
    """An odd and an even number of steps and of chunks in a tile; a last run that is shorter, a last tile too."""
    monkeypatch.setattr(prompt_plans, "CHUNKS", (chunks,))
    monkeypatch.setattr(prompt_plans, "LIFTS", (lifts,))
    monkeypatch.setattr(prompt_plans, "PARTS", {16: parts, 32: parts})
    monkeypatch.setattr(prompt_plans, "RUNS", (3,))
    monkeypatch.setattr(prompt_plans, "CUTS", (Cut(64, 2, 4, 1),))
    prompt_plan.cache_clear()
    host.check_linear([random_weight(name, 300, cols), random_weight(name, 40, cols, seed=1)], 40)
    prompt_plan.cache_clear()


@pytest.mark.parametrize("cut, lifts", [(Cut(64, 2, 4, 1), 1), (Cut(64, 4, 5, 2), 0), (Cut(128, 4, 6, 1), 1)])
@pytest.mark.parametrize("name, cols", [("Q8_0", 32), ("Q6_K", 768), ("IQ4_NL", 640), ("IQ3_S", 256), ("Q4_1", 160)])
def test_weights_that_are_unpacked_once_have_the_same_products(
    host, random_weight, monkeypatch, unpacked_once, cut, lifts, name, cols
):
    """Runs of two tiles, a shorter one, tiles that end outside of a matrix."""
    monkeypatch.setattr(prompt_plans, "LIFTS", (lifts,))
    monkeypatch.setattr(prompt_plans, "RUNS", (2,))
    monkeypatch.setattr(prompt_plans, "CUTS", (cut,))
    prompt_plan.cache_clear()
    weights = [random_weight(name, 300, cols), random_weight(name, 40, cols, seed=1)]
    launched = []
    run = arguments.run
    monkeypatch.setattr(arguments, "run", lambda source, *rest: (launched.append(source), run(source, *rest)))
    host.check_linear(weights, cut.columns + 9)
    assert "prompt_unpack" in launched
    prompt_plan.cache_clear()


EXPERTS = (("IQ3_S", "IQ3_S", "Q4_1"), ("Q8_0", "Q8_0", "F16"), ("Q6_K", "Q8_0", "Q4_0"))


def test_no_way_to_cut_the_experts_of_a_prompt_changes_a_bit(host, random_weight, only_cut):
    """Each cut with the types of one kind of experts in turn; all of them with all: the soak."""
    check_experts(host, random_weight, EXPERTS[CUTS.index(only_cut) % len(EXPERTS)])


@pytest.mark.soak
@pytest.mark.parametrize("kinds", EXPERTS)
def test_no_way_to_cut_the_experts_of_any_types_changes_a_bit(host, random_weight, only_cut, kinds):
    check_experts(host, random_weight, kinds)


def check_experts(host, random_weight, kinds) -> None:
    shapes = ((96, 256), (96, 256), (256, 96))
    stacks = [random_weight(t, *s, experts=3, seed=i) for i, (t, s) in enumerate(zip(kinds, shapes, strict=True))]
    host.check_mixture(tuple(stacks), 57, 2)


@pytest.mark.gpu
def test_no_way_to_cut_a_prompt_changes_a_bit_on_a_card(device, random_weight, only_cut):
    for name, cols in (("Q6_K", 1280), ("IQ3_S", 512), ("IQ4_NL", 96), ("Q2_K", 768)):
        device.check_linear([random_weight(name, 700, cols), random_weight(name, 40, cols, seed=1)], 270)
    for kinds in (("IQ3_S", "IQ3_S", "IQ4_NL"), ("Q8_0", "Q8_0", "Q5_1")):
        shapes = ((160, 512), (160, 512), (512, 160))
        stacks = [random_weight(t, *s, experts=5, seed=i) for i, (t, s) in enumerate(zip(kinds, shapes, strict=True))]
        device.check_mixture(tuple(stacks), 300, 2)


@pytest.mark.parametrize("arch", CARDS)
def test_a_prompt_of_any_type_fits_every_card(arch):
    for kind in TYPES:
        for mode in (DENSE, GATE_UP, PAIRS):
            for n in (17, 100, 8192):
                plan = prompt_plan(CARDS[arch], kind, mode, (320, 4096), 2560, n)
                assert plan.shared <= CARDS[arch].shared_block
                assert plan.cut.blocks * (plan.shared + 1024) <= CARDS[arch].shared_multiprocessor


@settings(max_examples=200, deadline=None)
@given(
    rows=st.lists(st.integers(1, 20000), min_size=1, max_size=8),
    cols=st.integers(1, 40).map(lambda blocks: 256 * blocks),
    n=st.integers(17, 10000),
)
def test_no_other_cut_leaves_less_to_the_multiprocessor_with_the_most_blocks(rows, cols, n):
    card, kind, sizes = CARDS[90], BY_NAME["Q6_K"], (tuple(rows), cols, n)
    chosen = cost(prompt_plan(card, kind, DENSE, *sizes), card, *sizes)
    for cut in CUTS:
        plan = fitted(card, kind, cut)
        for run in RUNS if plan else ():
            assert chosen <= cost(replace(plan, run=run), card, *sizes)


@pytest.mark.parametrize("pairs, experts", [(81920, 512), (20480, 512), (34, 2), (1, 512)])
def test_an_evenly_used_expert_has_the_rows_that_are_expected(pairs, experts):
    assert pairs / experts <= expected(pairs, experts) <= pairs / experts + 2 * (pairs / experts) ** 0.5 + 1

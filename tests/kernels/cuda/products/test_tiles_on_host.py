"""Experts of a window by matrix steps (tile_job.cuh) on the host's emulator of a card: bits of the written order."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from strata.kernels.cuda import arguments, card, product, tile_plans
from strata.kernels.cuda.card import Card
from strata.kernels.cuda.plans import DOWN, GATE_UP, PAIRS


@pytest.fixture
def launched(monkeypatch, host_loader):
    """Every mixture goes by tiles, on a card that no other test has: plans are kept. The constants of its launches."""
    monkeypatch.setattr(tile_plans, "FEWEST_PAIRS", dict.fromkeys((GATE_UP, DOWN, PAIRS), 1))
    seen = []

    def use(arch: int, multiprocessors: int = 5) -> list[dict[str, int | str]]:
        monkeypatch.setattr(card, "card", lambda: Card(arch, multiprocessors, 227 << 10, 229 << 10))
        monkeypatch.setattr(
            arguments, "load_kernel", lambda *given, **more: seen.append(more) or host_loader(*given, **more)
        )
        return seen

    return use


MIXTURES = [
    (("IQ3_S_CARD", "IQ3_S_CARD", "IQ4_NL_CARD"), 128, 2304, 8, 4, 24, (3, 17)),
    (("IQ3_S_CARD", "IQ3_S_CARD", "IQ4_NL_CARD"), 640, 256, 2, 3, 6, ()),
    (("IQ3_S_CARD", "IQ3_S_CARD", "IQ4_NL_CARD"), 128, 256, 1, 5, 8, (2, 7)),
    (("IQ3_S", "IQ3_S", "IQ4_NL"), 96, 512, 1, 5, 8, (2, 7)),
    (("IQ3_XXS", "IQ3_XXS", "IQ4_NL"), 32, 512, 3, 2, 4, ()),
    (("Q8_0", "Q4_0", "Q8_0"), 64, 320, 12, 10, 20, (0,)),
    (("MXFP4", "MXFP4", "Q5_0"), 75 * 32, 96, 2, 2, 3, ()),
    (("Q2_0", "Q2_0", "IQ4_XS"), 256, 320, 4, 3, 9, (1, 2, 3)),
    (("IQ2_XXS", "IQ1_S", "Q8_0"), 32, 512, 2, 2, 5, ()),
]


def each_on_a_card() -> Iterator[object]:
    """Mixtures on cards without and with bulk copies, in turn; in the soak on both."""
    for i, mixture in enumerate(MIXTURES):
        for arch in (80, 90):
            own = arch == (90 if i % 2 == 0 else 80)
            yield pytest.param(*mixture, arch, id=f"{mixture}-{arch}", marks=() if own else pytest.mark.soak)


@pytest.mark.parametrize("types, inner, width, n, used, experts, missing, arch", list(each_on_a_card()))
def test_experts_by_tiles_have_the_bits_of_the_written_order(
    host, launched, random_weight, types, inner, width, n, used, experts, missing, arch
):
    seen = launched(arch)
    shapes = ((inner, width), (inner, width), (width, inner))
    stacks = [random_weight(t, *s, experts=experts, seed=i) for i, (t, s) in enumerate(zip(types, shapes, strict=True))]
    host.check_mixture(tuple(stacks), n, used, missing)
    assert {more["MODE"] for more in seen if more.get("TILED")} == (
        {GATE_UP, DOWN} if types[0] == types[1] else {PAIRS, DOWN}
    )


@pytest.mark.parametrize("order", [pytest.param(0, marks=pytest.mark.soak), 1, 2])
@pytest.mark.parametrize("n", [1, 3, 8])
def test_the_shared_expert_beside_tiles_changes_no_bit(host, host_loader, launched, random_weight, order, n):
    host_loader.emulator.order = order
    seen = launched(90, 15)
    width, inner = 512, 256
    shapes = ((inner, width), (inner, width), (width, inner))
    kinds = ("IQ3_S_CARD", "IQ3_S_CARD", "IQ4_NL_CARD")
    stacks = tuple(random_weight(k, *s, experts=6, seed=i) for i, (k, s) in enumerate(zip(kinds, shapes, strict=True)))
    own = tuple(random_weight("Q8_0", *s, seed=3 + i) for i, s in enumerate(shapes))
    host.check_mixture(stacks, n, 4, missing=(1, 3), shared=own)
    assert [more["SIDE_TYPE"] for more in seen if more.get("TILED")] == ["Q8_0", "Q8_0"]


def test_a_warp_with_more_tiles_than_lanes_does_all_of_them(host, launched, random_weight):
    launched(90, 1)
    shapes = ((640, 256), (640, 256), (256, 640))
    kinds = ("IQ3_S_CARD", "IQ3_S_CARD", "IQ4_NL_CARD")
    stacks = [random_weight(k, *s, experts=5, seed=i) for i, (k, s) in enumerate(zip(kinds, shapes, strict=True))]
    host.check_mixture(tuple(stacks), 2, 4)


def test_activations_that_are_quantised_already_give_the_same_bits(host, launched, random_weight, monkeypatch):
    seen = launched(90)
    monkeypatch.setattr(product, "QUANTIZE_APART", 1)
    for kinds in (("IQ3_S_CARD", "IQ3_S_CARD", "IQ4_NL_CARD"), ("IQ3_S", "IQ3_S", "Q2_0")):
        shapes = ((128, 512), (128, 512), (512, 128))
        stacks = [random_weight(k, *s, experts=5, seed=i) for i, (k, s) in enumerate(zip(kinds, shapes, strict=True))]
        host.check_mixture(tuple(stacks), 7, 3)
    assert sum(bool(more.get("TILED")) for more in seen) == 4

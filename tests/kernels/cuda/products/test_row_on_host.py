"""Products by product_row.cu on the host's emulator of a card: the bits of the written order."""

from __future__ import annotations

import numpy as np
import pytest

from strata.kernels.cuda import arguments, card, product, row_plans, row_product
from strata.kernels.cuda.arguments import address
from strata.kernels.cuda.card import Card
from strata.kernels.cuda.plans import DENSE, GATE_UP, RowTuning
from strata.kernels.formats import BY_NAME
from strata.kernels.reference.linear import ordered_linear

from .conftest import activations, same_bits


def dense(host, weights, n, tuning, quantised=False):
    x = activations(n, weights[0].cols)
    placed = [host.weight(w) for w in weights]
    outs = [host.upload(np.full((n, w.rows), np.nan, np.float32)) for w in weights]
    matrices = [(address(w.data), o, w.rows) for w, o in zip(placed, outs, strict=True)]
    kind, cols = weights[0].type, weights[0].cols
    plan = row_product.plan(kind, matrices, n, cols, tuning)
    given = {"x": host.upload(x)}
    if quantised:
        made = product.quantize(host.workspace(), given["x"], kind)
        given = {"x": None, "q": made.q, "d": made.d}
    row_product.dense(plan, kind, matrices, DENSE, **given, n=n, cols=cols)
    for got, want in zip(outs, ordered_linear(weights, x), strict=True):
        same_bits(host.download(got), want)


ROWS = [
    ("Q6_K", 21, 768, RowTuning()),
    ("Q6_K", 3, 2560, RowTuning(depth=1)),
    ("Q8_0", 19, 320, RowTuning()),
    ("Q8_0", 5, 352, RowTuning()),
    ("Q5_K", 40, 512, RowTuning(piece_room=4096, terms_room=8192)),
    ("Q4_K", 40, 512, RowTuning()),
    ("IQ4_NL", 33, 640, RowTuning(terms_room=512, piece_room=256)),
    ("IQ3_S", 40, 1280, RowTuning(table_room=1)),
    ("IQ3_S", 75, 2560, RowTuning(lanes=1, bulk=True)),
    ("IQ3_S_CARD", 40, 1280, RowTuning()),
    ("IQ3_S_CARD", 75, 2560, RowTuning(lanes=1, bulk=True)),
    ("IQ4_NL_CARD", 33, 640, RowTuning(terms_room=512, piece_room=256)),
    ("IQ4_NL_CARD", 70, 1152, RowTuning()),
    ("Q6_K_CARD", 21, 768, RowTuning()),
    ("Q6_K_CARD", 40, 2304, RowTuning(bulk=True, depth=3)),
    ("Q6_K", 40, 2304, RowTuning(bulk=True, depth=3)),
    ("IQ2_XS", 10, 512, RowTuning()),
    ("IQ2_XXS", 10, 512, RowTuning()),
    ("IQ1_M", 10, 512, RowTuning()),
    ("Q2_K", 33, 512, RowTuning()),
    ("Q2_0", 33, 320, RowTuning()),
    ("MXFP4", 9, 192, RowTuning()),
    ("Q4_1", 40, 1120, RowTuning(warps=4)),
    ("Q5_1", 4, 96, RowTuning(spans=1)),
]


@pytest.mark.parametrize("bulk", [False, True])
def test_warps_that_are_ahead_do_not_overwrite_terms_that_are_not_added_yet(host, host_loader, random_weight, bulk):
    weights = [random_weight(name, 190, 512) for name in ("Q6_K", "Q6_K")]
    for order in (3, 4):
        host_loader.emulator.order = order
        for n, rooms in ((1, (700, 1400)), (8, (2400, 2400))):
            dense(host, weights, n, RowTuning(warps=8, piece_room=rooms[0], terms_room=rooms[1], bulk=bulk))


@pytest.mark.parametrize("name, rows, cols, tuning", ROWS, ids=str)
def test_a_row_has_the_bits_of_the_written_order(host, random_weight, name, rows, cols, tuning):
    dense(host, [random_weight(name, rows, cols)], 1, tuning)


WINDOWS = [
    ("Q6_K", 75, 768, 8, RowTuning()),
    ("Q6_K", 21, 2560, 3, RowTuning(piece_room=3072)),
    ("Q6_K", 5, 2560, 8, RowTuning(piece_room=8192, terms_room=8192)),
    ("Q8_0", 79, 320, 5, RowTuning()),
    ("Q8_0", 19, 352, 2, RowTuning()),
    ("Q5_K", 40, 1280, 7, RowTuning(piece_room=4096, terms_room=8192)),
    ("IQ4_NL", 33, 640, 4, RowTuning(terms_room=512, piece_room=256)),
    ("IQ3_S", 40, 1280, 8, RowTuning(depth=1)),
    ("IQ3_S_CARD", 40, 1280, 8, RowTuning(bulk=True)),
    ("IQ4_NL_CARD", 33, 640, 4, RowTuning(terms_room=512, piece_room=256)),
    ("Q6_K_CARD", 75, 768, 8, RowTuning()),
    ("Q2_K", 33, 512, 8, RowTuning(bulk=True)),
    ("Q2_0", 33, 320, 6, RowTuning()),
    ("MXFP4", 9, 192, 2, RowTuning()),
]


@pytest.mark.parametrize("name, rows, cols, n, tuning", WINDOWS, ids=str)
def test_rows_of_a_window_have_the_bits_of_the_written_order(host, random_weight, name, rows, cols, n, tuning):
    dense(host, [random_weight(name, rows, cols)], n, tuning)


@pytest.mark.parametrize(
    "name, cols, n", [("Q6_K", 2304, 1), ("IQ4_NL", 640, 1), ("Q5_K", 2304, 3), ("IQ3_S", 1280, 8)]
)
def test_inputs_that_are_quantised_already_give_the_same_bits(host, random_weight, name, cols, n):
    dense(host, [random_weight(name, 20, cols)], n, RowTuning(), quantised=True)


ORDERS = [pytest.param(0, marks=pytest.mark.soak), 1, 2, pytest.param(3, marks=pytest.mark.soak)]
"""Of the emulator's threads: shuffled ones, copies early and late, in every run."""
SHARED = [
    (("IQ3_S", "IQ4_NL", "Q8_0"), 80, {3: False, 1: True}),
    (("IQ3_S_CARD", "IQ4_NL_CARD", "Q8_0"), 90, {1: False, 8: False, 3: True}),
    (("Q6_K", "Q6_K", "Q4_K"), 90, {1: False, 3: True}),
]
"""Types, an architecture, numbers of rows and whether they are left to the soak."""


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("experts", "down", "shared", "arch", "n"),
    [
        pytest.param(*kinds, arch, n, marks=pytest.mark.soak if late else ())
        for kinds, arch, rows in SHARED
        for n, late in rows.items()
    ],
)
def test_the_shared_expert_in_the_launches_of_the_others_changes_no_bit_of_theirs(
    host, host_loader, random_weight, monkeypatch, experts, down, shared, arch, n, order
):
    host_loader.emulator.order = order
    monkeypatch.setattr(card, "card", lambda: Card(arch, 14, 227 << 10, 228 << 10))
    names = []
    monkeypatch.setattr(
        arguments, "load_kernel", lambda *given, **more: names.append(given[1]) or host_loader(*given, **more)
    )
    width, inner = 512, 256
    shapes = ((inner, width), (inner, width), (width, inner))
    kinds = (experts, experts, down)
    stacks = tuple(random_weight(k, *s, experts=6, seed=i) for i, (k, s) in enumerate(zip(kinds, shapes, strict=True)))
    own = tuple(random_weight(shared, *s, seed=3 + i) for i, s in enumerate(shapes))
    host.check_mixture(stacks, n, 4, shared=own)
    host.check_mixture(stacks, n, 4, missing=(1, 3), shared=own)
    assert names.count("product_row_beside") == 4


def test_a_warp_with_more_turns_than_it_plans_at_once_has_the_same_bits(host, host_loader, random_weight, monkeypatch):
    """32 turns of some warps: a later plan is made of addresses, which are not there before the picks are known."""
    monkeypatch.setattr(card, "card", lambda: Card(90, 1, 227 << 10, 228 << 10))
    width, inner, used = 512, 672, 3
    plan = row_plans.row_plan(card.card(), BY_NAME["Q8_0"], GATE_UP, (inner,), width, 1, used)
    assert 31 * plan.warps < used * plan.strip_turns * inner // plan.strip < 32 * plan.warps
    shapes = ((inner, width), (inner, width), (width, inner))
    stacks = tuple(random_weight("Q8_0", *shape, experts=4, seed=i) for i, shape in enumerate(shapes))
    own = tuple(random_weight("Q8_0", *shape, seed=3 + i) for i, shape in enumerate(shapes))
    host.check_mixture(stacks, 1, used, shared=own)

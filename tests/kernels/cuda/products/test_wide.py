"""Long products by matrix steps of four warps: the bits of the written order, operands where they are looked for."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.kernels.cuda import card, product, wide, wide_plans
from strata.kernels.cuda.arguments import address
from strata.kernels.cuda.product_variants import CARDS
from strata.kernels.cuda.wide_plans import COLUMNS, ROWS, STEP, wide_plan
from strata.kernels.cuda.workspace import Workspace
from strata.kernels.formats import BY_NAME, TensorType, Weight
from strata.kernels.reference.linear import ordered_linear

from .conftest import Place, activations, same_bits
from .test_on_card import columns

TYPES = [t for t in BY_NAME.values() if wide_plans.possible(CARDS[90], t, 256)]
LAYOUT = {"pitch": 320, "cols": 320, "apart": 0}


ANYWHERE = [pytest.param("hopper", id="host"), pytest.param("device", marks=pytest.mark.gpu, id="card")]


@pytest.fixture
def hopper(host: Place, monkeypatch: pytest.MonkeyPatch) -> Place:
    """The emulator as a card that has such steps, with three multiprocessors."""
    monkeypatch.setattr(card, "card", lambda: replace(CARDS[90], multiprocessors=3))
    return host


@pytest.fixture
def place(request: pytest.FixtureRequest, where: str) -> Place:
    return request.getfixturevalue(where)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", TYPES, ids=lambda t: t.name)
def test_steps_of_four_warps_have_the_bits_of_the_written_order(device, random_weight, tiles_only, four_warps, kind):
    """Tiles that end outside of the matrix and of the rows, one tile and several, an odd number of steps."""
    w = random_weight(kind.name, 203, columns(kind))
    for n in (17, 192, 401):
        device.check_linear([w], n)
    assert len(four_warps) == 3


@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize(
    ("name", "rows", "cols", "n"), [("Q6_K", 140, 256, 200), ("Q8_0", 40, 320, 17), ("IQ3_S", 20, 512, 40)]
)
def test_the_order_of_threads_and_of_copies_does_not_matter(
    hopper, host_loader, random_weight, tiles_only, four_warps, name, rows, cols, n, order
):
    host_loader.emulator.order = order
    hopper.check_linear([random_weight(name, rows, cols)], n)
    assert four_warps


@pytest.mark.parametrize("where", ANYWHERE)
@pytest.mark.parametrize("name", ["Q6_K", "Q8_0"])
def test_blocks_that_go_from_tile_to_tile_keep_the_bits(
    place, random_weight, written, tiles_only, four_warps, monkeypatch, name
):
    """Three matrices of one type, rows that are joined, two blocks for all tiles in bands of two."""
    monkeypatch.setattr(wide_plans, "BAND", 2)
    few = replace(card.card(), multiprocessors=2)
    monkeypatch.setattr(card, "card", lambda: few)
    weights = [random_weight(name, rows, 256, seed=rows) for rows in (140, 16, 129)]
    place.check_linear(weights, 400)
    x, join = activations(200, 256), np.linspace(-3, 3, 200).astype(np.float32)
    (y,) = ordered_linear(weights[:1], x)
    out, placed = place.upload(before := activations(200, 160)[:, :140].copy()), place.weight(weights[0])
    product.linear(place.workspace(), [placed], place.upload(x), join=place.upload(join), out=[out])
    same_bits(place.download(out), written.fma(written.sigmoid(join)[:, None], y, before))
    assert len(four_warps) == 2


@pytest.mark.parametrize("where", ANYWHERE)
@pytest.mark.parametrize("name", ["Q8_0", "Q6_K"])
def test_the_largest_sums_keep_their_last_bit(place, random_weight, tiles_only, four_warps, name):
    """Inputs of 127 and 1, codes at both ends of their range and next to nothing, in every mixture."""
    w = random_weight(name, 64, 256)
    rng = np.random.default_rng(5)
    if name == "Q8_0":
        codes = w.data.reshape(64, 8, 34)[:, :, 2:].view(np.int8)
        codes[...] = rng.choice(np.array([127, -128, 1], np.int8), codes.shape, p=(0.8, 0.1, 0.1))
        codes[:3] = np.array([[127], [-128], [1]], np.int8)[:, None]
    else:
        w.data[:, :192] = rng.choice(np.array([0, 255, 0x77], np.uint8), (64, 192))
    x = rng.choice(np.array([127, -127, 1], np.float32), (40, 256), p=(0.8, 0.1, 0.1))
    x[:3] = np.array([[127], [-127], [127]], np.float32)
    x[2, ::16] = 1
    (got,) = place.linear([w], x)
    same_bits(got, ordered_linear([w], x)[0])
    assert four_warps


@pytest.mark.parametrize("where", ANYWHERE)
def test_parts_of_columns_have_inputs_of_their_own(place, random_weight, tiles_only, four_warps):
    w, x = random_weight("Q6_K", 40, 1024), activations(210, 1024)
    placed = place.weight(w)
    made = product.quantize(workspace := place.workspace(), place.upload(x), w.type)
    got = place.download(product.linear_of_parts(workspace, placed, made, 4))
    for part in range(4):
        own = np.ascontiguousarray(w.data.reshape(40, 4, -1)[:, part])
        cut = np.ascontiguousarray(x[:, 256 * part : 256 * part + 256])
        same_bits(got[part], ordered_linear([Weight(w.type, (40, 256), own)], cut)[0])
    assert four_warps


@pytest.mark.parametrize("where", ANYWHERE)
def test_without_room_for_halves_a_product_goes_another_way(place, random_weight, tiles_only, four_warps):
    w, x = random_weight("Q8_0", 120, 1024), activations(210, 1024)
    workspace = Workspace(place.upload(np.full(1 << 20, 0xFF, np.uint8)))
    made = product.quantize(workspace, place.upload(x), w.type)
    out = workspace.array((210, 120))
    placed = place.weight(w)
    product.linear_quantized(workspace, placed, made, out=out)
    same_bits(place.download(out), ordered_linear([w], x)[0])
    assert not four_warps


def numbers(halves: np.ndarray, rows: int, cols: int) -> np.ndarray:
    """Halves of a tile, step after step, as (rows, cols): octets of rows, eights of columns."""
    steps = halves.view(np.float16).reshape(cols // STEP, rows // 8, STEP // 8, 8, 8)
    return steps.transpose(1, 3, 0, 2, 4).reshape(rows, cols)


def test_halves_of_inputs_lie_where_their_weights_do(host, random_weight, monkeypatch):
    """The sum of a group's products, from what both kernels wrote, is that of the codes; so are the scales."""
    n, rows, cols = 200, 130, 320
    w, x = random_weight("Q8_0", rows, cols), activations(n, cols)
    workspace = host.workspace()
    made = product.quantize(workspace, host.upload(x), w.type)
    monkeypatch.setattr(wide_plans, "pays", lambda *_: True)
    way = wide.wide(CARDS[90], w.type, (rows,), cols, n, LAYOUT)
    written: list[np.ndarray] = []
    monkeypatch.setattr(way.product.__class__, "__call__", seen(way, written, way.product.__class__.__call__))
    placed = host.weight(w)
    way(workspace, [(address(placed.data), workspace.array((n, rows)), rows)], made, None)
    weights, inputs = written
    weights = weights.reshape(2, cols // STEP, wide_plans.step_of_weights(w.type))
    inputs = inputs.reshape(2, cols // STEP, wide_plans.step_of_inputs())
    codes = np.concatenate([numbers(t[:, : 2 * STEP * ROWS].copy(), ROWS, cols) for t in weights])[:rows]
    given_codes = np.concatenate([numbers(t[:, : 2 * STEP * COLUMNS].copy(), COLUMNS, cols) for t in inputs])[:n]
    blocks = w.data.reshape(rows, cols // 32, 34)
    sums = np.einsum("nbi,rbi->nrb", *(c.astype(np.int64).reshape(-1, cols // 32, 32) for c in (given_codes, codes)))
    q = host.download(made.q).view(np.int8).reshape(n, cols // 32, 32).astype(np.int64)
    place = np.array([16 * (i // 4 % 2) + 4 * (i // 8) + i % 4 for i in range(32)])  # of the order NATIVE
    natural = np.empty_like(q)
    natural[..., place] = q
    want = np.einsum("nbi,rbi->nrb", natural, blocks[:, :, 2:].view(np.int8).astype(np.int64))
    np.testing.assert_array_equal(sums, want)
    scales = weights[:, :, 2 * STEP * ROWS :].copy().view(np.float32).reshape(2, cols // STEP, 2, ROWS // 16, 8, 2)
    found = scales.transpose(0, 3, 5, 4, 1, 2).reshape(2 * ROWS, cols // 32)[:rows]
    np.testing.assert_array_equal(found, blocks[:, :, :2].copy().view(np.float16)[..., 0].astype(np.float32))
    d = inputs[:, :, 2 * STEP * COLUMNS :].copy().view(np.float32).reshape(2, cols // STEP, 2, COLUMNS // 16, 4, 2, 2)
    found = d.transpose(0, 3, 5, 4, 6, 1, 2).reshape(2 * COLUMNS, cols // 32)[:n]
    np.testing.assert_array_equal(found, host.download(made.d))


def seen(way: wide.Wide, written: list[np.ndarray], call):
    """A launch of the product is not made: what it would read is kept."""

    def launch(self, matrices, pointers):
        if self is way.product:
            written.extend([memory(matrices[0][0], way.sizes[0]), pointers[0].copy()])
        else:
            call(self, matrices, pointers)

    return launch


def memory(at: int, n: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint8 * n).from_address(at)).copy()


@pytest.mark.parametrize("arch", CARDS)
def test_only_cards_with_such_steps_have_a_plan_and_it_fits_them(arch):
    for kind in BY_NAME.values():
        plan = wide_plan(CARDS[arch], kind, (16384,), 2560, 8192)
        assert (plan is not None) == (arch == 90 and not kind.is_float and not kind.has_offset)
        if plan is not None:
            assert plan.shared <= CARDS[arch].shared_block


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(st.integers(1, 20000), min_size=1, max_size=8).map(tuple),
    steps=st.integers(1, 160),
    n=st.integers(17, 10000),
    kind=st.sampled_from(TYPES),
)
def test_a_plan_has_a_tile_for_most_multiprocessors_and_room_for_all_rows(
    rows: tuple[int, ...], steps: int, n: int, kind: TensorType
):
    cols = steps * STEP
    if wide_plans.pays(CARDS[90], rows, cols, n):
        assert sum(rows) * n >= wide_plans.LEAST_BUSY * CARDS[90].multiprocessors * ROWS * COLUMNS
    each = wide_plans.step_of_weights(kind) // ROWS
    assert wide_plans.bytes_of_weights(kind, rows[0], cols) >= rows[0] * steps * each
    assert wide_plans.bytes_of_inputs(n, cols) >= n * steps * (2 * STEP + 8)

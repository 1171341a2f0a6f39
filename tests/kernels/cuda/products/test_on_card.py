"""The product kernels on a card: every tensor type, odd sizes, windows and prompts, bit for bit the written order."""

from __future__ import annotations

import numpy as np
import pytest

from strata.kernels.cuda import product
from strata.kernels.cuda.plans import Tuning
from strata.kernels.formats import BY_NAME, TensorType
from strata.kernels.reference.linear import dequantize

pytestmark = pytest.mark.gpu

TYPES = list(BY_NAME.values())


def columns(kind: TensorType) -> int:
    """An odd number of blocks, no whole number of chunks where the type allows it."""
    return 5 * 256 if kind.block == 256 else 1152 if kind.block == 128 else 1216 if kind.block > 1 else 1213


@pytest.mark.parametrize("together", [False, True], ids=["row", "tiles"])
@pytest.mark.parametrize("kind", TYPES, ids=lambda t: t.name)
def test_windows_of_any_size_have_the_bits_of_the_written_order(device, random_weight, kind, together):
    w = random_weight(kind.name, 531, columns(kind))
    for n in (1, 2, 3, 5, 8, 9, 13, 16):
        device.check_linear([w], n, tuning=Tuning(together=together))


@pytest.mark.parametrize("way", ["warps", "tiles"])
@pytest.mark.parametrize("kind", TYPES, ids=lambda t: t.name)
def test_prompts_of_any_size_have_the_bits_of_the_written_order(request, device, random_weight, kind, way):
    if way == "tiles":
        request.getfixturevalue("tiles_only")
    w = random_weight(kind.name, 203, columns(kind))
    for n in (17, 64, 129, 300):
        device.check_linear([w], n)


@pytest.mark.parametrize("kind", TYPES, ids=lambda t: t.name)
def test_a_row_of_a_window_is_the_same_row_of_a_prompt(device, random_weight, kind):
    w = random_weight(kind.name, 150, columns(kind))
    x = np.random.default_rng(3).standard_normal((40, w.cols)).astype(np.float32)
    (whole,) = device.linear([w], x)
    for begin, end in ((0, 1), (1, 9), (9, 25), (39, 40)):
        (part,) = device.linear([w], x[begin:end])
        np.testing.assert_array_equal(part.view(np.uint32), whole[begin:end].view(np.uint32))


@pytest.mark.parametrize("ring", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("rows", [8, 16])
def test_no_way_to_cut_a_window_changes_a_bit(device, random_weight, ring, rows):
    for name in ("Q6_K", "IQ3_S", "Q4_K"):
        for stages in (2, 4):
            device.check_linear(
                [random_weight(name, 1000, 2560)], 3, tuning=Tuning(together=True, rows=rows, ring=ring, stages=stages)
            )


def test_long_rows_and_many_matrices_have_the_bits_of_the_written_order(device, random_weight):
    device.check_linear([random_weight("Q6_K", 320, 10240)], 8)
    device.check_linear([random_weight("Q6_K", 72, 10240)], 16)
    weights = [random_weight(name, 48 * (i + 1), 512, seed=i) for i, name in enumerate(("Q8_0", "F32", "Q8_0") * 4)]
    for n in (4, 33):
        device.check_linear(weights, n)


TRIPLES = [
    ("IQ3_S", "IQ3_S", "IQ4_NL"),
    ("IQ3_S_CARD", "IQ3_S_CARD", "IQ4_NL_CARD"),
    ("IQ2_XS", "IQ2_XS", "Q2_0"),
    ("Q4_K", "Q6_K", "Q5_1"),
    ("Q2_0", "Q2_0", "Q2_0"),
    ("Q8_0", "Q8_0", "Q8_0"),
    ("BF16", "BF16", "BF16"),
]


@pytest.mark.parametrize("types", TRIPLES, ids="-".join)
def test_mixtures_have_the_bits_of_their_experts_joined_in_rank_order(device, random_weight, types):
    shapes = ((256, 512), (256, 512), (512, 256))
    stacks = tuple(random_weight(t, *s, experts=24, seed=i) for i, (t, s) in enumerate(zip(types, shapes, strict=True)))
    for n in (1, 3, 8, 12, 17, 150):
        device.check_mixture(stacks, n, 6)
    device.check_mixture(stacks, 20, 3)  # experts of a few rows
    device.check_mixture(stacks, 5, 6, missing=(0, 7, 8))


@pytest.mark.parametrize("n", [1, 4, 8])
def test_experts_of_the_models_size_beside_the_shared_one_have_the_bits_of_the_written_order(device, random_weight, n):
    shapes, kinds = ((640, 2560), (640, 2560), (2560, 640)), ("IQ3_S_CARD", "IQ3_S_CARD", "IQ4_NL_CARD")
    stacks = tuple(random_weight(k, *s, experts=30, seed=i) for i, (k, s) in enumerate(zip(kinds, shapes, strict=True)))
    own = tuple(random_weight("Q8_0", *s, seed=3 + i) for i, s in enumerate(shapes))
    device.check_mixture(stacks, n, 10, shared=own)
    device.check_mixture(stacks, n, 10, missing=(2, 11), shared=own)


@pytest.mark.parametrize("kind", TYPES, ids=lambda t: t.name)
def test_dequantised_rows_have_the_bits_of_the_reference(device, random_weight, kind):
    w = random_weight(kind.name, 40, columns(kind))
    rows = np.array([39, 0, 17, 17], np.int64)
    got = product.dequantize(device.workspace(), device.weight(w), device.upload(rows))
    np.testing.assert_array_equal(device.download(got), dequantize(w, rows))

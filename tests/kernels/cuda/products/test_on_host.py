"""The product kernels on the host's emulator of a card: the bits of the written order, whatever the launch."""

from __future__ import annotations

import numpy as np
import pytest

from strata.kernels.cuda import few_plans, product
from strata.kernels.cuda.plans import Tuning, together
from strata.kernels.formats import BY_NAME
from strata.kernels.reference.linear import dequantize

WINDOWS = [
    ("Q6_K", 21, 768, 3, Tuning(together=True, ring=2)),
    ("Q8_0", 19, 352, 1, Tuning(together=True, ring=1)),
    ("Q4_1", 40, 1120, 1, Tuning(together=True, ring=4)),
    ("Q6_K", 75, 1280, 1, Tuning(together=True, ring=8)),
    ("IQ3_S", 40, 512, 9, Tuning(together=True, ring=4)),
    ("IQ3_S_CARD", 40, 512, 9, Tuning(together=True, ring=4)),
    ("Q6_K_CARD", 21, 1280, 5, Tuning(together=True, ring=2)),
    ("Q6_K_CARD", 40, 512, 11, Tuning(together=True, rows=16)),
    ("Q2_K", 33, 512, 8, Tuning(together=True, rows=16, ring=2, stages=2)),
    ("Q6_K", 21, 1024, 5, Tuning(together=True, rows=16, ring=2)),
    ("Q6_K", 40, 512, 11, Tuning(together=True, rows=8)),
    ("Q5_K", 17, 768, 8, Tuning(together=True)),
]


@pytest.mark.parametrize("name, rows, cols, n, tuning", WINDOWS, ids=str)
def test_a_window_has_the_bits_of_the_written_order(host, random_weight, name, rows, cols, n, tuning):
    host.check_linear([random_weight(name, rows, cols)], n, tuning=tuning)


@pytest.mark.parametrize("name", ["Q6_K", "Q5_K", "IQ3_S", "Q6_K_CARD", "IQ4_NL_CARD", "Q8_0"])
def test_inputs_that_another_kernel_quantised_lie_where_the_weights_want_them(host, random_weight, monkeypatch, name):
    monkeypatch.setattr(product, "QUANTIZE_APART", 1)
    for cols in (768, 1024):
        host.check_linear([random_weight(name, 24, cols)], 6, tuning=Tuning(together=True))
        host.check_linear([random_weight(name, 24, cols)], 11, tuning=Tuning(together=True, ring=2))


def test_large_matrices_go_through_tiles_and_small_ones_do_not():
    assert together(13 << 20, 8) and not together(2 << 20, 8)
    assert not together(400 << 20, 1)
    assert not together(13 << 20, 8, Tuning(together=False)) and together(1, 1, Tuning(together=True))


PROMPTS = [
    ("Q5_1", 140, 288, 17),
    ("IQ2_S", 20, 512, 19),
    ("IQ3_S_CARD", 20, 512, 19),
    ("IQ4_NL_CARD", 20, 640, 19),
    ("Q6_K_CARD", 20, 768, 19),
]


@pytest.mark.parametrize("name, rows, cols, n", PROMPTS)
def test_a_prompt_has_the_bits_of_the_written_order(host, random_weight, tiles_only, name, rows, cols, n):
    host.check_linear([random_weight(name, rows, cols)], n)


FEW = [
    ("Q2_K", 33, 256, 40),
    ("Q8_0", 15, 352, 33),
    ("IQ3_S", 48, 512, 25),
    ("IQ1_M", 16, 256, 18),
    ("Q2_0", 40, 320, 64),
]


@pytest.mark.parametrize("name, rows, cols, n", [*PROMPTS, *FEW])
def test_a_few_rows_of_a_prompt_have_the_bits_of_the_written_order(host, random_weight, name, rows, cols, n):
    host.check_linear([random_weight(name, rows, cols), random_weight(name, rows + 9, cols, seed=1)], n)


@pytest.mark.parametrize("eights", [1, 2, 4])
def test_however_many_columns_a_warp_has_its_sums_are_the_same(host, random_weight, monkeypatch, eights):
    monkeypatch.setattr(few_plans, "EIGHTS", (eights,))
    few_plans.cut.cache_clear()
    host.check_linear([random_weight("Q6_K", 40, 512)], 37)
    few_plans.cut.cache_clear()


@pytest.mark.parametrize("cols, n", [(260, 1), (261, 3), (1100, 9), (516, 18), (131, 17)])
def test_float_weights_are_summed_in_lanes(host, random_weight, cols, n):
    host.check_linear([random_weight("BF16", 9, cols), random_weight("F32", 20, cols)], n)


def test_matrices_of_several_types_with_one_input_do_not_mix_up_their_outputs(host, random_weight):
    names = ("Q8_0", "F32", "Q8_0", "Q4_K", "F32")
    weights = [random_weight(name, 5 + 6 * i, 256, seed=i) for i, name in enumerate(names)]
    for n in (2, 17):
        host.check_linear(weights, n)


def test_the_order_in_which_threads_run_changes_nothing(host, host_loader, random_weight):
    w = random_weight("Q6_K", 40, 1280)
    for order in (1, 2):
        host_loader.emulator.order = order
        host.check_linear([w], 2, tuning=Tuning(together=True, ring=4, stages=2))
        host.check_linear([w], 17)


def test_rows_that_do_not_fit_shared_memory_are_computed_in_parts(host, random_weight, monkeypatch):
    from strata.kernels.cuda import card

    small = card.Card(75, 2, 32 << 10, 32 << 10)
    monkeypatch.setattr(card, "card", lambda: small)
    host.check_linear([random_weight("Q8_0", 17, 2048)], 15, tuning=Tuning(together=True, warps=4, stages=2))


MIXTURES = [
    (("IQ3_S", "IQ3_S", "IQ4_NL"), 96, 512, 5, 3, 6, (2,)),
    (("Q4_K", "Q6_K", "Q8_0"), 64, 256, 3, 2, 4, ()),
    (("IQ3_S", "IQ3_S", "IQ4_NL"), 96, 512, 1, 5, 8, (2, 7)),
    (("IQ3_S_CARD", "IQ3_S_CARD", "IQ4_NL_CARD"), 128, 512, 5, 3, 6, (2,)),
    (("IQ3_S_CARD", "IQ3_S_CARD", "IQ4_NL_CARD"), 128, 512, 1, 5, 8, (2, 7)),
    (("IQ3_S_CARD", "IQ3_S_CARD", "IQ4_NL_CARD"), 128, 512, 21, 3, 6, ()),
    (("IQ3_S_CARD", "IQ3_S_CARD", "IQ4_NL_CARD"), 128, 256, 8, 10, 24, (3, 17)),
    (("Q8_0", "Q4_0", "Q8_0"), 64, 64, 12, 10, 20, (0,)),
    (("Q4_K", "Q6_K", "Q8_0"), 64, 256, 1, 4, 5, ()),
    (("BF16", "BF16", "BF16"), 40, 132, 4, 3, 5, (1, 3)),
    (("IQ3_S", "IQ3_S", "IQ4_NL"), 96, 512, 21, 3, 6, ()),
    (("Q4_K", "Q6_K", "Q8_0"), 64, 256, 19, 2, 4, ()),
    (("BF16", "BF16", "BF16"), 40, 132, 18, 3, 5, ()),
    (("F32", "F32", "F16"), 256, 512, 18, 3, 5, ()),
]


@pytest.mark.parametrize("types, inner, width, n, used, experts, missing", MIXTURES, ids=str)
def test_a_mixture_has_the_bits_of_its_experts_joined_in_rank_order(
    host, random_weight, types, inner, width, n, used, experts, missing
):
    shapes = ((inner, width), (inner, width), (width, inner))
    stacks = [random_weight(t, *s, experts=experts, seed=i) for i, (t, s) in enumerate(zip(types, shapes, strict=True))]
    host.check_mixture(tuple(stacks), n, used, missing)


@pytest.mark.parametrize("types, inner, width, n, used, experts, missing", [m for m in MIXTURES if m[3] > 16], ids=str)
def test_a_mixture_of_a_prompt_has_the_same_bits_by_tiles(
    host, random_weight, tiles_only, types, inner, width, n, used, experts, missing
):
    shapes = ((inner, width), (inner, width), (width, inner))
    stacks = [random_weight(t, *s, experts=experts, seed=i) for i, (t, s) in enumerate(zip(types, shapes, strict=True))]
    host.check_mixture(tuple(stacks), n, used, missing)


def test_experts_of_many_rows_have_the_same_bits_by_warps(host, random_weight, monkeypatch):
    """Of 32 columns a warp, and in two parts where an expert has more rows."""
    monkeypatch.setattr(few_plans, "MOST_EACH", 32)
    types, shapes = ("IQ3_S_CARD", "IQ3_S_CARD", "IQ4_NL_CARD"), ((128, 512), (128, 512), (512, 128))
    stacks = [random_weight(t, *s, experts=3, seed=i) for i, (t, s) in enumerate(zip(types, shapes, strict=True))]
    host.check_mixture(tuple(stacks), 30, 2)


@pytest.mark.parametrize("n", [3, 18])
def test_a_joined_result_is_added_behind_its_gate(host, written, random_weight, n):
    rng = np.random.default_rng(n)
    w = random_weight("Q8_0", 20, 64)
    x, before, gate = (rng.standard_normal(s).astype(np.float32) for s in ((n, 64), (n, 20), (n,)))
    (y,) = host.linear([w], x)
    out, arrays = host.upload(before), [host.upload(a) for a in (x, gate)]
    product.linear(host.workspace(), [host.weight(w)], arrays[0], join=arrays[1], out=[out])
    want = written.fma(written.sigmoid(gate)[:, None], y, before)
    np.testing.assert_array_equal(host.download(out), want)


@pytest.mark.parametrize("name", ["Q2_0", "IQ1_M", "IQ3_S_CARD", "IQ4_NL_CARD", "Q5_K", "F16"])
def test_dequantised_rows_have_the_bits_of_the_reference(host, random_weight, name):
    w = random_weight(name, 12, 512 if BY_NAME[name].block == 256 else 640)
    rows = np.array([3, 0, 11, 3], np.int64)
    got = product.dequantize(host.workspace(), host.weight(w), host.upload(rows))
    np.testing.assert_array_equal(host.download(got), dequantize(w, rows))


def test_arguments_that_do_not_fit_are_refused_before_a_launch(host, random_weight):
    w = host.weight(random_weight("Q8_0", 4, 64))
    with pytest.raises(ValueError, match=r"must be \(rows, 96\), got \(4, 64\)"):
        product.linear(host.workspace(), [w], host.upload(np.zeros((2, 96), np.float32)))
    with pytest.raises(ValueError, match="join needs out"):
        product.linear(host.workspace(), [w], host.upload(np.zeros((2, 64), np.float32)), join=np.zeros(2, np.float32))
    with pytest.raises(ValueError, match="x must begin at a multiple of 16 bytes"):
        product.linear(host.workspace(), [w], host.upload(np.zeros(132, np.float32))[1:129].reshape(2, 64))

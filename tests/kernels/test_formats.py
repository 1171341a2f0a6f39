"""The table of tensor types and their unpacking, against the `gguf` package and against the definitions."""

from __future__ import annotations

from fractions import Fraction

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.kernels.formats import BY_ID, BY_NAME, TensorType, Weight
from strata.kernels.reference.fma import fma
from strata.kernels.reference.linear import dequantize, lanes, linear, ordered_linear
from strata.kernels.reference.quant import MXFP4_VALUES, quantize, unpack

QUANTISED = [t for t in BY_NAME.values() if not t.is_float]
KNOWN_TO_GGUF = [t for t in QUANTISED if t.name != "Q2_0" and not t.is_card_form]


def round_to_float32(x: Fraction) -> np.float32:
    """The float32 nearest to an exact number, halves to even; overflow gives infinity."""
    if x == 0:
        return np.float32(0)
    sign, x = (-1 if x < 0 else 1), abs(x)
    e = x.numerator.bit_length() - x.denominator.bit_length()
    e += (x >= Fraction(2) ** (e + 1)) - (x < Fraction(2) ** e)
    step = Fraction(2) ** (max(e, -126) - 23)
    value = round(x / step) * step
    return np.float32(sign * np.inf) if value >= Fraction(2) ** 128 else np.float32(sign * float(value))


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def test_the_table_agrees_with_the_file_formats_own_sizes():
    for t in BY_ID.values():
        if t.name == "Q2_0":
            assert (t.block, t.block_bytes) == (64, 18)
        else:
            kind = gguf.GGMLQuantizationType(t.ggml_id)
            assert kind.name == t.name and gguf.GGML_QUANT_SIZES[kind] == (t.block, t.block_bytes)


def test_a_row_that_is_no_whole_number_of_blocks_is_refused():
    with pytest.raises(ValueError, match="a row of 320 values is no whole number of Q4_K blocks of 256"):
        BY_NAME["Q4_K"].row_bytes(320)


def test_a_weight_whose_bytes_do_not_fit_its_shape_is_refused():
    with pytest.raises(ValueError, match="needs uint8"):
        Weight(BY_NAME["Q8_0"], (4, 64), np.zeros((4, 67), np.uint8))
    with pytest.raises(ValueError, match="2 or 3 dimensions"):
        Weight(BY_NAME["Q8_0"], (64,), np.zeros(68, np.uint8))
    with pytest.raises(ValueError, match="not a stack"):
        Weight(BY_NAME["Q8_0"], (4, 64), np.zeros((4, 68), np.uint8)).expert(0)


@pytest.mark.parametrize("kind", KNOWN_TO_GGUF, ids=lambda t: t.name)
def test_dequantised_rows_agree_with_the_gguf_package(kind: TensorType, random_weight):
    w = random_weight(kind.name, 64, 3 * kind.block, scale=0.5)
    got = dequantize(w, np.arange(64))
    want = gguf.dequantize(w.data, gguf.GGMLQuantizationType(kind.ggml_id))
    assert np.isfinite(want).all() and want.std() > 0
    if kind.has_offset:  # ours is one fma, theirs rounds the product first
        largest = np.abs(unpack(kind, w.data)[1]).max() * 256
        np.testing.assert_allclose(got, want, rtol=0, atol=largest * 2**-23)
    else:
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda t: t.name)
def test_any_bytes_unpack_to_int8_codes_whatever_their_scales_hold(kind: TensorType):
    rng = np.random.default_rng(5)
    data = rng.integers(0, 256, (3, 2, 2 * kind.block_bytes), dtype=np.uint8)
    codes, scales, offsets = unpack(kind, data)
    assert codes.dtype == np.int8 and codes.shape == (3, 2, 2 * kind.block)
    assert scales.dtype == np.float32 and scales.shape == (3, 2, 2 * kind.block // kind.group)
    assert (offsets is not None) == kind.has_offset
    assert offsets is None or offsets.shape == scales.shape


def test_q2_0_codes_stand_for_minus_one_to_two_lowest_bits_first():
    block = np.zeros((1, 18), np.uint8)
    block[0, :2] = np.frombuffer(np.float16(0.5).tobytes(), np.uint8)
    block[0, 2:] = 0b11_10_01_00
    codes, scales, offsets = unpack(BY_NAME["Q2_0"], block)
    np.testing.assert_array_equal(codes[0], np.tile([-1, 0, 1, 2], 16))
    np.testing.assert_array_equal(scales[0], np.float32([0.5, 0.5]))
    assert offsets is None


def test_mxfp4_scales_are_powers_of_two_down_to_the_smallest_exponent():
    block = np.zeros((256, 17), np.uint8)
    block[:, 0] = np.arange(256)
    block[:, 1:] = np.arange(16) | (15 - np.arange(16)) << 4
    codes, scales, _ = unpack(BY_NAME["MXFP4"], block)
    np.testing.assert_array_equal(codes[7], np.concatenate([MXFP4_VALUES, MXFP4_VALUES[::-1]]))
    np.testing.assert_array_equal(scales[:, 0].astype(np.float64), 2.0 ** (np.arange(256.0) - 128))


def test_unpacking_a_float_type_or_a_torn_row_is_refused():
    with pytest.raises(ValueError, match="no quantised blocks of F16"):
        unpack(BY_NAME["F16"], np.zeros((1, 64), np.uint8))
    with pytest.raises(ValueError, match="rows of 33 bytes"):
        unpack(BY_NAME["Q8_0"], np.zeros((1, 33), np.uint8))


HARD_FMA = [
    (1 + 2**-23, 1 + 2**-23, -1.0),  # the product's last bit survives
    (1 + 2**-12, 1 + 2**-12, 2**-60),  # a tie that the third operand breaks upwards
    (1 + 2**-12, 1 + 2**-12, -(2**-60)),  # and downwards
    (2**12 + 1, 2**12 + 1, 2**-40),
    (2**-75, 2**-75, 2**-149),  # a product below the smallest subnormal
    (2**-70, 1.5 * 2**-79, 2**-126),
    (3e38, 2.0, -3e38),  # overflows only without fusing
    (3e38, 2.0, 3e38),
    (0.0, -1.0, 0.0),
    (-0.0, 1.0, -0.0),
]


@pytest.mark.parametrize("a, b, c", HARD_FMA)
def test_fma_rounds_once_where_a_detour_over_float64_would_round_twice(a: float, b: float, c: float):
    a, b, c = np.float32(a), np.float32(b), np.float32(c)
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    assert float(fma(a, b, c)) == float(round_to_float32(exact))


def test_the_hard_cases_contain_one_that_plain_float64_gets_wrong():
    a, b, c = (np.array([case[i] for case in HARD_FMA], np.float32).astype(np.float64) for i in range(3))
    with np.errstate(over="ignore"):
        plain = (a * b + c).astype(np.float32)
    assert (plain != fma(a, b, c)).any()


bits32 = st.integers(0, 2**32 - 1).map(lambda u: np.uint32(u).view(np.float32)).filter(np.isfinite)


@settings(max_examples=300, deadline=None)
@given(bits32, bits32, bits32, st.integers(-60, 60))
def test_fma_of_any_floats_is_the_exact_result_rounded(a, b, c, shift):
    for third in (c, np.float32(-np.clip(float(a) * float(b) * (1 + 2.0**shift), -3e38, 3e38))):
        exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(third))
        assert float(fma(a, b, third)) == float(round_to_float32(exact))


def test_fma_passes_infinities_and_nan():
    inf = np.float32(np.inf)
    assert fma(inf, 1, 2) == inf and fma(1, 2, -inf) == -inf
    assert np.isnan(fma(inf, 1, -inf)) and np.isnan(fma(inf, 0, 1)) and np.isnan(fma(np.nan, 1, 1))


def test_quantised_activations_are_zero_for_a_tiny_block_and_halves_go_to_even():
    x = np.zeros((1, 96), np.float32)
    x[0, :32] = 9e-31
    x[0, 32:64] = np.r_[127, np.arange(31) + 0.5]
    q, d = quantize(x)
    assert d[0, 0] == 0 and not q[0, :32].any() and not q[0, 64:].any()
    assert d[0, 1] == 1
    np.testing.assert_array_equal(q[0, 33:64], np.rint(np.arange(31) + 0.5))


def test_lanes_sums_a_chain_per_lane_then_folds_by_halves():
    rng = np.random.default_rng(1)
    v = rng.standard_normal(300).astype(np.float32)
    chains = [np.float32(0)] * 128
    for i, x in enumerate(v):
        chains[i % 128] = chains[i % 128] + x
    for s in (64, 32, 16, 8, 4, 2, 1):
        chains = [chains[j] + chains[j + s] for j in range(s)]
    assert lanes(v) == chains[0]


@pytest.mark.parametrize("name", ["Q8_0", "Q6_K", "Q5_K", "IQ3_S", "F32", "BF16"])
def test_the_written_order_computes_the_product(name: str, random_weight):
    w = random_weight(name, 17, 512, scale=0.04)
    x = np.random.default_rng(3).standard_normal((5, 512)).astype(np.float32)
    (plain,), (ordered,) = linear([w], x), ordered_linear([w], x)
    error = np.abs(ordered - plain).max() / np.abs(plain).max()
    assert error < (2e-6 if w.type.is_float else 2e-2)


def test_a_weight_with_other_columns_or_experts_is_refused(random_weight):
    x = np.zeros((2, 64), np.float32)
    with pytest.raises(ValueError, match=r"must be \(rows, 64\), got \(4, 32\)"):
        linear([random_weight("Q8_0", 4, 32)], x)
    with pytest.raises(ValueError, match="rows must be in 0 to 3"):
        dequantize(random_weight("Q8_0", 4, 32), np.array([4]))

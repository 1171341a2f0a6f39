"""Formats of keys and values: what a row keeps of a vector, and what it never does to it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from strata.kernels.kv import BLOCK, FORMATS, FP32, INT8, KV, Q4_0, format_of
from strata.kernels.reference.kv import decode, encode

VECTORS = arrays(
    np.float32, st.sampled_from([(1, 64), (3, 128)]), elements=st.floats(-1e5, 1e5, width=32, allow_subnormal=True)
)
STEPS = {INT8: 127, Q4_0: 8}


@given(VECTORS)
@pytest.mark.parametrize("form", [INT8, Q4_0], ids=lambda f: f.name)
def test_no_element_is_further_off_than_its_blocks_step_allows(form, x):
    got = decode(form, encode(form, x), x.shape[-1])
    blocks, back = x.reshape(-1, BLOCK), got.reshape(-1, BLOCK)
    step = np.abs(blocks).max(1, keepdims=True).astype(np.float64) / STEPS[form]
    off = np.abs(blocks.astype(np.float64) - back)
    inside = off <= 0.51 * step + 2.0**-24 * STEPS[form]
    clipped = np.abs(blocks) > (7 if form is Q4_0 else 127) * step * 0.99
    assert (inside | (clipped & (off <= 1.01 * step + 2.0**-24 * STEPS[form]))).all()


@given(VECTORS)
@pytest.mark.parametrize("form", FORMATS, ids=lambda f: f.name)
def test_a_row_has_the_size_that_the_pages_give_it(form, x):
    x = np.clip(x, -6e4, 6e4)
    rows = encode(form, x)
    assert rows.shape == (*x.shape[:-1], form.row(x.shape[-1])) and rows.dtype == form.dtype
    assert rows.shape[-1] * rows.itemsize % 16 == 0
    assert format_of("pages.k", rows, x.shape[-1]) is form


@pytest.mark.parametrize("form", FORMATS, ids=lambda f: f.name)
def test_zeros_and_float32_come_back_as_they_were(form):
    zeros = np.zeros((2, 64), np.float32)
    np.testing.assert_array_equal(decode(form, encode(form, zeros), 64), zeros)
    x = np.random.default_rng(1).standard_normal((5, 64)).astype(np.float32)
    np.testing.assert_array_equal(decode(FP32, encode(FP32, x), 64), x)


def test_values_beyond_a_scale_saturate_instead_of_becoming_infinite():
    x = np.full((1, 64), 3e38, np.float32)
    for form in (INT8, Q4_0):
        assert np.isfinite(decode(form, encode(form, x), 64)).all()


def test_a_token_takes_the_bytes_that_the_documents_say():
    taken = {name: sum(2 * f.row(256) * f.dtype.itemsize for f in kv) for name, kv in KV.items()}
    assert taken == {"fp32": 4096, "fp16": 2048, "int8": 1088, "q4_0": 576, "k8v4": 832}


def test_an_array_of_no_format_is_refused_with_what_there_is():
    with pytest.raises(
        ValueError, match=r"pages.k must hold vectors of 64 as one of fp32: 64 float32, .* got 65 uint8"
    ):
        format_of("pages.k", np.zeros((1, 65), np.uint8), 64)

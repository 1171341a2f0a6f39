"""Card forms: the same codes, scales and products as the bytes of the file, whatever these are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.kernels.cuda import repack as cuda
from strata.kernels.formats import BY_NAME, CARD_FORMS, Weight
from strata.kernels.reference.quant import unpack
from strata.kernels.reference.repack import repack

from .conftest import Place, activations, same_bits

KINDS = [BY_NAME[name] for name in CARD_FORMS]


def formed(w: Weight) -> Weight:
    form = CARD_FORMS[w.type.name]
    return Weight(form, w.shape, repack(w.type, w.data))


def on_card(place: Place, w: Weight) -> np.ndarray:
    source = place.upload(np.ascontiguousarray(w.data).reshape(-1))
    form = CARD_FORMS[w.type.name]
    shape = (*w.shape[:-1], form.row_bytes(w.cols))
    target = place.upload(np.full(int(np.prod(shape)), 0xA5, np.uint8))
    cuda.repack(source, target, w.type)
    return place.download(target).reshape(shape)


@pytest.mark.parametrize("kind", KINDS, ids=lambda t: t.name)
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1 << 30))
def test_a_card_form_has_the_codes_and_scales_of_any_bytes(kind, seed):
    data = np.random.default_rng(seed).integers(0, 256, (3, 4 * cuda.file_bytes(kind)), np.uint8)
    for got, want in zip(unpack(CARD_FORMS[kind.name], repack(kind, data))[:2], unpack(kind, data)[:2], strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("kind", KINDS, ids=lambda t: t.name)
def test_the_kernel_makes_the_bytes_of_the_reference(host, random_weight, kind):
    w = random_weight(kind.name, 7, 5 * CARD_FORMS[kind.name].block)
    np.testing.assert_array_equal(on_card(host, w), formed(w).data)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS, ids=lambda t: t.name)
def test_the_kernel_makes_the_bytes_of_the_reference_on_a_card(device, random_weight, kind):
    w = random_weight(kind.name, 531, 5 * CARD_FORMS[kind.name].block)
    np.testing.assert_array_equal(on_card(device, w), formed(w).data)


@pytest.mark.parametrize("n", [1, 3, 18])
@pytest.mark.parametrize("kind", KINDS, ids=lambda t: t.name)
def test_a_product_of_a_card_form_has_the_bits_of_the_files_type(host, random_weight, kind, n):
    w = random_weight(kind.name, 40, 1280)
    x = activations(n, w.cols)
    same_bits(host.linear([formed(w)], x)[0], host.linear([w], x)[0])


def test_bytes_that_are_no_whole_blocks_are_refused(host):
    source, target = host.upload(np.zeros(165, np.uint8)), host.upload(np.zeros(136, np.uint8))
    with pytest.raises(ValueError, match="165 bytes of IQ3_S are no 136 bytes of IQ3_S_CARD"):
        cuda.repack(source, target, BY_NAME["IQ3_S"])


def test_types_and_widths_without_a_card_form_keep_the_bytes_of_the_file():
    assert cuda.card_form(BY_NAME["Q8_0"], 2560) is None and cuda.card_form(BY_NAME["IQ4_NL"], 96) is None
    assert cuda.card_form(BY_NAME["IQ3_S"], 2560) is CARD_FORMS["IQ3_S"]

"""Keys and values in other formats than float32: within a format the bits of a token are the same for every cut."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from strata.engine.device.cuda import CudaDevice
from strata.engine.model import Rows
from strata.engine.model.resident import Resident
from strata.kernels.kv import KV

LAYERS, PACK, CONTEXT, CHUNK, TOKENS = 4, "odd-q8_0", 96, 24, 41


@pytest.fixture(scope="module")
def read(any_card, pack_of, altered):
    """read(kv, *cuts): the logits of all tokens of a text read in parts, and the pool of pages. Read once."""
    spec = pack_of(PACK).spec
    few = replace(spec, layers=LAYERS, recurrent=spec.recurrent[:LAYERS], ratios=spec.ratios[:LAYERS])
    ids = np.random.default_rng(5).integers(0, 900, TOKENS).astype(np.int32)

    @cache
    def run(kv: str, *cuts: int):
        device, pack = CudaDevice(driver=any_card()), altered(pack_of(PACK), spec=few)
        made = Resident(pack, device, max_context=CONTEXT, kv=kv, chunks=[CHUNK], logits=CHUNK)
        parts, at = [], 0
        for n in cuts:
            rows = Rows.of([(0, at, ids[at : at + n])])
            parts.append(device.read(made.model.forward(rows, made.state, range(n))))
            at += n
        made.state.check()
        return np.concatenate(parts), made.state.pages

    return run


@pytest.mark.parametrize(
    "kv",
    ["fp16", "k8v4", pytest.param("int8", marks=pytest.mark.soak), pytest.param("q4_0", marks=pytest.mark.soak)],
)
def test_rounded_keys_and_values_give_the_same_bits_for_any_cut_and_another_text_than_float32(read, kv):
    whole, pages = read(kv, CHUNK, TOKENS - CHUNK)
    parts, _ = read(kv, 17, 2, 1, 20, 1)
    np.testing.assert_array_equal(whole, parts)
    plain, _ = read("fp32", CHUNK, TOKENS - CHUNK)
    assert 0 < np.abs(whole - plain).max() < 0.5 * np.abs(plain).max()
    assert [pages.layers[0].k.dtype, pages.layers[0].v.dtype] == [form.dtype for form in KV[kv]]
    arrays = (a for layer in pages.layers for a in (layer.k, layer.v, layer.raw, layer.block))
    assert sum(a.nbytes for a in arrays) == pages.n_pages * pages.page_bytes

"""Weights in forms of the card's own: the same bits as with the bytes of the file."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from strata.engine.device.cuda import CudaDevice
from strata.engine.environment import CARD_FORMS
from strata.engine.model import Rows
from strata.engine.model.resident import Resident

LAYERS, CONTEXT, CHUNK = 2, 96, 24


@pytest.mark.soak  # the emulated card takes half a minute for each
@pytest.mark.parametrize("name", ["IQ3_S", "Q6_K"])
def test_weights_in_forms_of_the_card_give_the_bits_of_those_of_the_file(any_card, pack_of, altered, monkeypatch, name):
    pack = pack_of(f"tiny-{name.lower()}")
    spec = pack.spec
    few = replace(spec, layers=LAYERS, recurrent=spec.recurrent[:LAYERS], ratios=spec.ratios[:LAYERS])
    ids = np.random.default_rng(6).integers(0, 200, CHUNK + 4).astype(np.int32)
    found, took = [], []
    for switch in ("0", ""):
        monkeypatch.setenv(CARD_FORMS, switch)
        device = CudaDevice(driver=any_card())
        made = Resident(altered(pack, spec=few), device, max_context=CONTEXT, chunks=[CHUNK], logits=CHUNK)
        parts, at = [], 0
        for n in (CHUNK, 3, 1):
            rows = Rows.of([(0, at, ids[at : at + n])])
            parts.append(device.read(made.model.forward(rows, made.state, range(n))))
            at += n
        found.append(np.concatenate(parts))
        layer = made.model.stages[0].layers[0]
        took.append([layer.moe.gate.type.name, layer.mixer.weights.out[0].type.name])
    np.testing.assert_array_equal(found[0].view(np.uint32), found[1].view(np.uint32))
    assert took == [[name] * 2, [f"{name}_CARD"] * 2]

"""The fingerprint: the same for the same model, another one for everything that changes the bits of a state."""

from __future__ import annotations

import shutil

import numpy as np

from strata.engine.pack import open_pack
from strata.engine.state.fingerprint import SIZE, fingerprint


def test_a_model_has_one_fingerprint_wherever_its_file_lies(packs, tmp_path):
    own = fingerprint(open_pack(packs["odd-q8_0"]), "fp32", "exact")
    copied = shutil.copy(packs["odd-q8_0"], tmp_path / "other-name.gguf")
    assert fingerprint(open_pack(copied), "fp32", "exact") == own and len(own) == SIZE


def test_model_quantisation_format_and_arithmetic_each_change_it(packs):
    seen = {
        fingerprint(open_pack(packs[name]), kv, arithmetic)
        for name, kv, arithmetic in [
            ("odd-q8_0", "fp32", "exact"),
            ("odd-q2_0", "fp32", "exact"),
            ("tiny-q2_0", "fp32", "exact"),
            ("tiny-q2_0-split", "fp32", "exact"),
            ("odd-q8_0", "fp16", "exact"),
            ("odd-q8_0", "fp32", "reference"),
        ]
    }
    assert len(seen) == 6


def test_other_weights_under_the_same_head_change_it(packs, tmp_path):
    own = fingerprint(open_pack(packs["odd-q8_0"]), "fp32", "exact")
    copied = tmp_path / "trained-on.gguf"
    shutil.copy(packs["odd-q8_0"], copied)
    pack = open_pack(copied)
    data = np.memmap(copied, np.uint8, "r+")
    tensor = pack["output_norm.weight"].data if "output_norm.weight" in pack else next(iter(pack.values())).data
    begin = bytes(data).index(tensor[:256].tobytes())
    data[begin] ^= 1
    data.flush()
    assert fingerprint(open_pack(copied), "fp32", "exact") != own

"""Bytes of a window's kernels: those of the matrices that their labels name."""

from __future__ import annotations

import pytest

from strata.bench.window_limits import Limits
from strata.engine.pack import open_pack


@pytest.fixture(scope="module")
def pack(packs):
    return open_pack(packs["odd-q8_0"])


def test_a_product_reads_the_matrices_of_its_label(pack):
    qkv, gate = pack["blk.0.attn_qkv.weight"], pack["blk.0.attn_gate.weight"]
    label = f"product_row {qkv.shape[0]}+{gate.shape[0]} x {qkv.shape[1]}"
    assert Limits.of(pack, 1, 1000.0).n_bytes(label) == qkv.data.nbytes + gate.data.nbytes


def test_experts_of_several_rows_are_read_once_when_they_are_the_same(pack):
    spec, down = pack.spec, pack["blk.0.ffn_down_exps.weight"]
    label = f"product_row {spec.hidden} x {spec.expert_width} of {spec.experts_used} experts"
    one, many = (Limits.of(pack, n, 1000.0).n_bytes(label) for n in (1, 1000))
    assert one == pytest.approx(down.data.nbytes * spec.experts_used / spec.experts, abs=1)
    assert many == down.data.nbytes


def test_a_kernel_that_is_not_about_bytes_has_no_limit(pack):
    limits = Limits.of(pack, 1, 1000.0)
    assert limits.n_bytes("sample_pick") is None and limits.share("sample_pick", 5.0) == ""
    assert limits.share("hyper_down", 1e-3) and limits.n_bytes("product_row 7 x 9") is None

"""The geometry that comes out of a pack's metadata, and what is tolerated in it."""

from __future__ import annotations

import itertools
import time

import pytest

from strata.engine.pack import open_pack
from strata.kernels.formats import BY_NAME


def test_tiny_geometry(packs):
    spec = open_pack(packs["tiny-q8_0"]).spec
    assert (spec.hidden, spec.layers, spec.streams, spec.rank, spec.wide) == (256, 8, 4, 32, 1024)
    assert (spec.heads, spec.kv_heads, spec.head_dim) == (4, 2, 128)
    assert (spec.rope_dims, spec.rope_base, spec.rope_sections) == (32, 1e7, (6, 5, 5, 0))
    assert (spec.index_heads, spec.index_dim, spec.index_budget) == (4, 64, 64)
    assert spec.attention_layers == (3, 7) and spec.gdn_layers == (0, 1, 2, 4, 5, 6)
    assert spec.ratios == (0, 0, 0, 4, 0, 0, 0, 4)
    assert (spec.gdn_key_heads, spec.gdn_value_heads, spec.gdn_head_dim, spec.gdn_kernel) == (4, 12, 64, 4)
    assert (spec.gdn_inner, spec.gdn_channels) == (768, 1280)
    assert (spec.experts, spec.experts_used, spec.expert_width, spec.shared_width) == (16, 4, 256, 320)
    assert spec.eps == pytest.approx(1e-6) and (spec.context_length, spec.vocab, spec.n_tokens) == (4096, 1024, 1024)
    assert spec.warnings == ()


def test_the_ngram_constants_are_the_recorded_integers(packs, golden_index):
    for family, pack in (("tiny", packs["tiny-q8_0"]), ("odd", packs["odd-q8_0"])):
        ple, recorded = open_pack(pack).spec.ple, golden_index["hf"][family]["ple"]
        assert list(ple.multipliers) == recorded["layer_multipliers"]
        assert list(ple.offsets) == recorded["head_offsets"]
        assert list(ple.sizes) == recorded["head_vocab_sizes"]
        assert (ple.eos, ple.table_rows) == (recorded["eos_token_id"], recorded["table_rows"])
    assert (ple.layer, ple.order, ple.heads_per_order, ple.heads, ple.kernel) == (3, 4, 2, 6, 3)
    assert (ple.row_width, ple.width) == (32, 192)


def test_the_end_of_a_turn_and_the_end_of_text_both_end_an_answer(packs):
    spec = open_pack(packs["tiny-q8_0"]).spec
    assert spec.end_tokens == (1000, 998) and spec.ple.eos == 998


@pytest.mark.parametrize("name", ["tiny-f32", "tiny-bf16", "tiny-iq2_xs", "tiny-q2_0"])
def test_every_file_of_a_model_has_one_geometry(name, packs):
    assert open_pack(packs[name]).spec == open_pack(packs["tiny-q8_0"]).spec


def test_a_draft_file_is_no_pack(packs, refused):
    refused(packs["mtp-tiny-q8_0"], "qwen4exp.nextn_predict_layers", "draft layer")


@pytest.mark.parametrize("kind", ["u32", "i64", "u64", "u16"])
def test_integers_of_any_width_are_read(kind, header, packs, tmp_path):
    header.set("qwen4exp.rope.dimension_sections", "array", (kind, [6, 5, 5, 0]))
    header.set("qwen4exp.attention.compress_ratios", "array", (kind, [0, 0, 8, 0, 0, 8]))
    header.set("qwen4exp.ple.layers", "array", (kind, [3]))
    header.set("qwen4exp.ple.head_vocab_sizes", "array", (kind, [401, 409, 419, 421, 431, 433]))
    header.set("qwen4exp.ple.head_offsets", "array", (kind, [0, 401, 810, 1229, 1650, 2081]))
    header.set("qwen4exp.block_count", kind, 6)
    assert open_pack(header.write(tmp_path / "w.gguf")).spec == open_pack(packs["odd-q2_0"]).spec


def test_an_attention_layer_without_blocks_is_dense_and_said(header, tmp_path):
    header.set("qwen4exp.attention.compress_ratios", "array", ("i32", [0, 0, 0, 0, 0, 8]))
    spec = open_pack(header.write(tmp_path / "dense.gguf")).spec
    assert spec.ratios == (0, 0, 0, 0, 0, 8)
    (warning,) = spec.warnings
    assert "qwen4exp.attention.compress_ratios is 0 for attention layer 2:" in warning


def test_layer_kinds_come_from_the_interval_when_the_list_is_missing(header, packs, tmp_path):
    header.metadata.pop("qwen4exp.attention.recurrent_layers")
    assert open_pack(header.write(tmp_path / "i.gguf")).spec == open_pack(packs["odd-q2_0"]).spec


def test_a_model_without_ngrams_has_no_ple(header, tmp_path):
    header.set("qwen4exp.ple.layers", "array", ("i32", []))
    pack = open_pack(header.write(tmp_path / "p.gguf"))
    assert pack.spec.ple is None and pack.spec.end_tokens == (1000, 998)
    assert "per_layer_token_embd.weight" in pack.extra and len(pack.extra) == 7


def test_tensors_that_the_model_does_not_use_are_listed(header, tmp_path):
    header.add("rope_freqs.weight", (16,), "F32")
    header.add("blk.9.ffn_up_exps.weight", (2, 2), "F32")
    assert open_pack(header.write(tmp_path / "e.gguf")).extra == ("blk.9.ffn_up_exps.weight", "rope_freqs.weight")


def test_norms_and_convolutions_may_be_half_precision(header, tmp_path):
    for t in header.tensors:
        if BY_NAME["F32"].ggml_id == t.type_id:
            t.type_id = BY_NAME["BF16"].ggml_id
    pack = open_pack(header.write(tmp_path / "b.gguf"))
    assert pack.array("blk.0.ssm_conv1d.weight").shape == (320, 4)


def is_prime(n: int) -> bool:
    return all(n % d for d in range(2, int(n**0.5) + 1))


REAL = {
    "token_embd.weight": ((248320, 2560), "Q4_K"),
    "output.weight": ((248320, 2560), "Q5_K"),
    "output_hc_norm.weight": ((10240,), "F32"),
    "output_hc_down.weight": ((320, 10240), "Q8_0"),
    "output_hc_up.weight": ((10240, 320), "Q8_0"),
}
REAL_EVERY = {
    "ffn_gate_inp.weight": ((512, 2560), "F32"),
    "ffn_gate_exps.weight": ((512, 640, 2560), "IQ3_S"),
    "ffn_up_exps.weight": ((512, 640, 2560), "IQ3_S"),
    "ffn_down_exps.weight": ((512, 2560, 640), "IQ4_NL"),
    "ffn_gate_inp_shexp.weight": ((2560,), "F32"),
    "ffn_gate_shexp.weight": ((640, 2560), "Q8_0"),
    "ffn_up_shexp.weight": ((640, 2560), "Q8_0"),
    "ffn_down_shexp.weight": ((2560, 640), "Q8_0"),
} | {
    f"hc_{part}_{name}.weight": shape
    for part in ("attn", "ffn")
    for name, shape in {
        "norm": ((10240,), "F32"),
        "down": ((320, 10240), "Q8_0"),
        "up": ((10240, 320), "Q8_0"),
        "inject": ((4, 10240), "Q8_0"),
    }.items()
}
REAL_GDN = {
    "attn_qkv.weight": ((10240, 2560), "Q8_0"),
    "attn_gate.weight": ((6144, 2560), "Q8_0"),
    "ssm_beta.weight": ((48, 2560), "Q8_0"),
    "ssm_alpha.weight": ((48, 2560), "Q8_0"),
    "ssm_a": ((48,), "F32"),
    "ssm_dt.bias": ((48,), "F32"),
    "ssm_conv1d.weight": ((10240, 4), "F32"),
    "ssm_norm.weight": ((128,), "F32"),
    "ssm_out.weight": ((2560, 6144), "Q8_0"),
}
REAL_ATTENTION = {
    "attn_q.weight": ((12288, 2560), "Q8_0"),
    "attn_k.weight": ((512, 2560), "Q8_0"),
    "attn_v.weight": ((512, 2560), "Q8_0"),
    "attn_output.weight": ((2560, 6144), "Q8_0"),
    "attn_q_norm.weight": ((256,), "F32"),
    "attn_k_norm.weight": ((256,), "F32"),
    "indexer.q_proj.weight": ((512, 2560), "BF16"),
    "indexer.k_proj.weight": ((128, 2560), "BF16"),
    "indexer.q_norm.weight": ((128,), "F32"),
    "indexer.k_norm.weight": ((128,), "F32"),
}
REAL_PLE = {
    "ple_key.weight": ((10240, 2560), "Q8_0"),
    "ple_value.weight": ((2560, 2560), "Q8_0"),
    "ple_norm_key.weight": ((10240,), "F32"),
    "ple_norm_query.weight": ((10240,), "F32"),
    "ple_norm_conv.weight": ((10240,), "F32"),
    "ple_conv1d.weight": ((10240, 4), "F16"),
}
REAL_INTEGERS = {
    "block_count": 48, "context_length": 262144, "embedding_length": 2560, "attention.head_count": 24,
    "attention.head_count_kv": 2, "attention.key_length": 256, "attention.value_length": 256,
    "rope.dimension_count": 64, "expert_count": 512, "expert_used_count": 10, "expert_feed_forward_length": 640,
    "expert_shared_feed_forward_length": 640, "ssm.conv_kernel": 4, "ssm.state_size": 128, "ssm.group_count": 16,
    "ssm.time_step_rank": 48, "ssm.inner_size": 6144, "full_attention_interval": 4, "hyper_connection.count": 4,
    "hyper_connection.low_rank": 320, "attention.indexer.head_count": 4, "attention.indexer.key_length": 128,
    "attention.indexer.top_k": 2048, "ple.ngram_size": 3, "ple.heads_per_ngram": 8, "ple.conv_kernel": 4,
    "ple.eos_token_id": 248044, "ple.image_token_id": 248056, "embedding_length_per_layer_input": 160,
}  # fmt: skip


@pytest.fixture
def real_header(new_header):
    """The geometry of the real model, 95 GB of tensors and a vocabulary of its size, all of it a hole."""
    header = new_header()
    header.set("general.architecture", "string", "qwen4exp")
    for key, number in REAL_INTEGERS.items():
        header.set("qwen4exp." + key, "u32", number)
    header.set("qwen4exp.rope.freq_base", "f32", 1e7)
    header.set("qwen4exp.attention.layer_norm_rms_epsilon", "f32", 1e-6)
    header.set("qwen4exp.rope.dimension_sections", "array", ("i32", [11, 11, 10, 0]))
    header.set("qwen4exp.attention.recurrent_layers", "array", ("bool", [i % 4 != 3 for i in range(48)]))
    header.set("qwen4exp.attention.compress_ratios", "array", ("i32", [0, 0, 0, 4] * 12))
    sizes = list(itertools.islice(filter(is_prime, itertools.count(20_000_000)), 16))
    header.set("qwen4exp.ple.layers", "array", ("i32", [1]))
    header.set("qwen4exp.ple.layer_multipliers", "array", ("u64", [23703573157769, 20109073645365, 8052911324071]))
    header.set("qwen4exp.ple.head_vocab_sizes", "array", ("u64", sizes))
    header.set("qwen4exp.ple.head_offsets", "array", ("u64", [sum(sizes[:i]) for i in range(16)]))
    header.set("tokenizer.ggml.tokens", "array", ("string", [f"token {i}" for i in range(248320)]))
    header.set("tokenizer.ggml.token_type", "array", ("i32", [1] * 248320))
    header.set("tokenizer.ggml.merges", "array", ("string", [f"{i} {i}" for i in range(247587)]))
    header.set("tokenizer.ggml.eos_token_id", "u32", 248046)
    header.set("tokenizer.ggml.padding_token_id", "u32", 248044)
    tensors = dict(REAL)
    for layer in range(48):
        part = REAL_EVERY | (REAL_ATTENTION if layer % 4 == 3 else REAL_GDN) | (REAL_PLE if layer == 1 else {})
        tensors |= {f"blk.{layer}.{name}": tensor for name, tensor in part.items()}
    tensors["per_layer_token_embd.weight"] = ((320_001_536, 160), "IQ4_NL")
    for name, (shape, kind) in tensors.items():
        header.add(name, shape, kind)
    return header


def test_the_real_model_opens_at_once_and_every_tensor_is_expected(real_header, tmp_path):
    path = real_header.write(tmp_path / "real.gguf")
    began = time.perf_counter()
    pack = open_pack(path)
    assert time.perf_counter() - began < 1
    spec = pack.spec
    assert pack.extra == () and spec.warnings == () and len(pack) == 48 * 16 + 36 * 9 + 12 * 10 + 6 + 6
    assert pack.n_bytes > 90e9
    assert spec.attention_layers == tuple(range(3, 48, 4)) and len(spec.gdn_layers) == 36
    assert (spec.gdn_channels, spec.gdn_inner, spec.wide) == (10240, 6144, 10240)
    assert (spec.vocab, spec.end_tokens) == (248320, (248046, 248044))
    assert (spec.ple.sizes[0], spec.ple.sizes[-1], spec.ple.heads) == (20_000_003, 20_000_171, 16)
    assert spec.ple.offsets[-1] + spec.ple.sizes[-1] == 320_001_446
    down = pack.weight("blk.47.ffn_down_exps.weight")
    assert (down.shape, down.expert(511).data.shape) == ((512, 2560, 640), (2560, 360))

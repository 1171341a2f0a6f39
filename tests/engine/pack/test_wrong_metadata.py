"""Metadata that no qwen4exp model can have, and keys that are missing: refused by the name of the key."""

from __future__ import annotations

import pytest

HUGE = (1 << 64) - 1


def full(key: str) -> str:
    return key if key.startswith(("general.", "tokenizer.")) else "qwen4exp." + key


WRONG_SPEC = {
    "another architecture": ("general.architecture", "string", "llama", "is llama; only qwen4exp"),
    "architecture a number": ("general.architecture", "u32", 4, "not a string"),
    "float for a count": ("block_count", "f32", 6.0, "is 6.0, not an integer"),
    "truth value for a count": ("block_count", "bool", True, "is True, not an integer"),
    "negative count": ("embedding_length", "i32", -192, "is -192, outside 1 to"),
    "no layers": ("block_count", "u32", 0, "is 0, outside 1 to"),
    "absurd layers": ("block_count", "u64", 1 << 60, "outside 1 to"),
    "absurd width": ("embedding_length", "u32", 1 << 31, "outside 1 to"),
    "absurd experts": ("expert_count", "u32", 1 << 31, "outside 1 to"),
    "more used than there are": ("expert_used_count", "u32", 25, "is 25, outside 1 to 24"),
    "value size differs": ("attention.value_length", "u32", 32, "is 32, but keys have 64"),
    "odd rotation": ("rope.dimension_count", "u32", 31, "is 31; it must be even"),
    "rotation wider than the indexer": (
        "rope.dimension_count",
        "u32",
        48,
        "at most 64 .head. and 32 .indexer.",
    ),
    "rotation sections": (
        "rope.dimension_sections",
        "array",
        ("i32", [6, 5, 4, 0]),
        "add up to 15, not to half of 32",
    ),
    "negative section": ("rope.dimension_sections", "array", ("i32", [-6, 11, 11, 0]), "element 0 is -6"),
    "rotation base": ("rope.freq_base", "f32", float("nan"), "is nan, outside"),
    "base an integer": ("rope.freq_base", "u32", 10_000_000, "not a float"),
    "epsilon 0": ("attention.layer_norm_rms_epsilon", "f32", 0.0, "is 0, outside"),
    "delta-net heads": ("ssm.time_step_rank", "u32", 7, "is 7, no multiple of the 2 key heads"),
    "delta-net size": ("ssm.state_size", "u32", 48, "is 48, no multiple of 32"),
    "delta-net inner size": ("ssm.inner_size", "u32", 224, "is 224, not 6 value heads of 32"),
    "no convolution": ("ssm.conv_kernel", "u32", 1, "is 1, outside 2"),
    "one stream": ("hyper_connection.count", "u32", 1, "is 1, outside 2"),
    "layer kinds short": (
        "attention.recurrent_layers",
        "array",
        ("bool", [True] * 5),
        "has 5 elements, not 6",
    ),
    "layer kinds of text": (
        "attention.recurrent_layers",
        "array",
        ("string", ["x"] * 6),
        "6 string, not of truth",
    ),
    "layer kinds of 2": ("attention.recurrent_layers", "array", ("u8", [2] * 6), "no truth value"),
    "block across pages": (
        "attention.compress_ratios",
        "array",
        ("i32", [0, 0, 12, 0, 0, 8]),
        "layer 2 has blocks of 12",
    ),
    "budget of part blocks": (
        "attention.indexer.top_k",
        "u32",
        50,
        "is 50, no multiple of layer 2's blocks of 8",
    ),
    "ratios of floats": ("attention.compress_ratios", "array", ("f32", [8.0] * 6), "not of integers"),
    "ratios too many": ("attention.compress_ratios", "array", ("i32", [8] * 7), "has 7 elements, not 6"),
    "two n-gram layers": ("ple.layers", "array", ("i32", [1, 3]), "has 2 elements, not 0 to 1"),
    "n-gram layer outside": ("ple.layers", "array", ("i32", [6]), "element 0 is 6, outside 0 to 5"),
    "n-gram order 1": ("ple.ngram_size", "u32", 1, "outside 2"),
    "multipliers short": ("ple.layer_multipliers", "array", ("u64", [3, 5, 7]), "has 3 elements, not 4"),
    "multiplier past 63 bits": (
        "ple.layer_multipliers",
        "array",
        ("u64", [3, 1 << 54, 5, 7]),
        "passes 63 bits",
    ),
    "multiplier 0": ("ple.layer_multipliers", "array", ("u64", [3, 0, 5, 7]), "element 1 is 0, outside 1"),
    "offsets no running sum": (
        "ple.head_offsets",
        "array",
        ("u64", [0, 401, 810, 1229, 1650, 2082]),
        "element 5 is 2082, the heads before it take 2081",
    ),
    "end of n-grams outside": ("ple.eos_token_id", "u32", 1024, "is 1024, outside 0 to 1023"),
    "end token outside": ("tokenizer.ggml.eos_token_id", "u32", 5000, "is 5000, outside 0 to 1023"),
    "tokens are numbers": ("tokenizer.ggml.tokens", "array", ("i32", [1, 2]), "holds i32, not strings"),
    "more tokens than rows": (
        "tokenizer.ggml.tokens",
        "array",
        ("string", ["t"] * 1025),
        "has 1025 elements, not 1 to 1024",
    ),
    "absurd context": ("context_length", "u64", HUGE, "outside 1 to"),
    "a draft layer that is not there": (
        "nextn_predict_layers",
        "u32",
        1,
        "block 5 is no draft layer",
    ),
}


@pytest.mark.parametrize("case", WRONG_SPEC)
def test_metadata_outside_the_architecture_are_refused_by_key(case, header, refused, tmp_path):
    key, kind, content, reason = WRONG_SPEC[case]
    header.set(full(key), kind, content)
    refused(header.write(tmp_path / "wrong.gguf"), full(key), reason)


def test_query_heads_that_do_not_share_key_heads_evenly_are_refused(header, refused, tmp_path):
    header.set("qwen4exp.attention.head_count_kv", "u32", 2)
    refused(header.write(tmp_path / "wrong.gguf"), "qwen4exp.attention.head_count", "is 3, no multiple of the 2")


def test_an_interval_of_no_layers_is_refused(header, refused, tmp_path):
    header.metadata.pop("qwen4exp.attention.recurrent_layers")
    header.set("qwen4exp.full_attention_interval", "u32", 0)
    refused(header.write(tmp_path / "wrong.gguf"), "qwen4exp.full_attention_interval", "is 0, outside 1")


NEEDED = (
    "general.architecture",
    "tokenizer.ggml.eos_token_id",
    "block_count",
    "context_length",
    "embedding_length",
    "attention.head_count",
    "attention.head_count_kv",
    "rope.dimension_sections",
    "rope.freq_base",
    "attention.layer_norm_rms_epsilon",
    "expert_count",
    "expert_used_count",
    "attention.key_length",
    "attention.value_length",
    "expert_feed_forward_length",
    "expert_shared_feed_forward_length",
    "ssm.conv_kernel",
    "ssm.state_size",
    "ssm.group_count",
    "ssm.time_step_rank",
    "ssm.inner_size",
    "rope.dimension_count",
    "hyper_connection.count",
    "hyper_connection.low_rank",
    "attention.indexer.head_count",
    "attention.indexer.key_length",
    "attention.indexer.top_k",
    "ple.ngram_size",
    "ple.heads_per_ngram",
    "ple.conv_kernel",
    "ple.eos_token_id",
    "embedding_length_per_layer_input",
    "ple.layer_multipliers",
    "ple.head_offsets",
    "ple.head_vocab_sizes",
)


@pytest.mark.parametrize("key", NEEDED)
def test_a_missing_key_is_named(key, header, refused, tmp_path):
    header.metadata.pop(full(key))
    refused(header.write(tmp_path / "short.gguf"), full(key), "the key is missing")

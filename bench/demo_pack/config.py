"""Geometry of the demo pack: every tensor's shape, its type in each file, and the metadata that describe it.

Shapes   numpy order, slowest axis first; a matrix is [out, in]; value heads in the tiled order of the file
Units    budget, block and context in tokens; layers count from zero
Source   the qwen4exp keys and names of the GGUF converter
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

ARCHITECTURE: Final = "qwen4exp"
HASH_SEED: Final = 1234
TABLE_ROWS_MULTIPLE: Final = 128
_U64: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Geometry:
    """The numbers of a qwen4exp model; the defaults are the demo pack.

    interval     every interval-th layer is attention, the others are gated delta net
    ngram_base   the n-gram tables have the first primes from here on as sizes
    ngram_eos    the token that cuts n-grams
    """

    vocab: int = 4096
    ngram_eos: int = 4070
    hidden: int = 256
    layers: int = 8
    interval: int = 4
    streams: int = 4
    rank: int = 32
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    rope_dims: int = 32
    rope_sections: tuple[int, ...] = (6, 5, 5, 0)
    rope_base: float = 1e5
    index_heads: int = 4
    index_dim: int = 64
    budget: int = 512
    block: int = 4
    key_heads: int = 4
    value_heads: int = 8
    gdn_dim: int = 64
    kernel: int = 4
    experts: int = 32
    experts_used: int = 4
    expert_width: int = 64
    shared_width: int = 64
    ple_layer: int = 1
    ngram: int = 3
    heads_per_ngram: int = 4
    ngram_base: int = 2039
    ple_kernel: int = 4
    eps: float = 1e-6
    context: int = 8192

    @property
    def wide(self) -> int:
        return self.streams * self.hidden

    @property
    def inner(self) -> int:
        return self.value_heads * self.gdn_dim

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.gdn_dim + self.inner

    @property
    def recurrent(self) -> tuple[bool, ...]:
        return tuple((layer + 1) % self.interval != 0 for layer in range(self.layers))

    @property
    def row_width(self) -> int:
        """Values of a row of the n-gram table: all rows of a token together are as wide as the hidden state."""
        return self.hidden // self.n_tables

    @property
    def n_tables(self) -> int:
        return (self.ngram - 1) * self.heads_per_ngram

    @cached_property
    def table_sizes(self) -> tuple[int, ...]:
        sizes: list[int] = []
        n = self.ngram_base
        while len(sizes) < self.n_tables:
            if n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1)):
                sizes.append(n)
            n += 1
        return tuple(sizes)

    @property
    def table_offsets(self) -> tuple[int, ...]:
        return tuple(sum(self.table_sizes[:i]) for i in range(self.n_tables))

    @property
    def table_rows(self) -> int:
        return -(-sum(self.table_sizes) // TABLE_ROWS_MULTIPLE) * TABLE_ROWS_MULTIPLE

    @cached_property
    def multipliers(self) -> tuple[int, ...]:
        half = max(1, ((1 << 63) - 1) // self.vocab // 2)
        return tuple(2 * (_splitmix64((HASH_SEED + _GOLDEN * (i + 1)) & _U64) % half) + 1 for i in range(self.ngram))

    def shapes(self) -> dict[str, Shape]:
        """Every tensor of the model itself, by its name in the file."""
        found: dict[str, Shape] = {
            "token_embd.weight": (self.vocab, self.hidden),
            "output.weight": (self.vocab, self.hidden),
        }
        found |= _mixer("output_hc", self, inject=False)
        found["per_layer_token_embd.weight"] = (self.table_rows, self.row_width)
        for layer, recurrent in enumerate(self.recurrent):
            block = (_delta_net(self) if recurrent else _attention(self)) | _common(self)
            if layer == self.ple_layer:
                block |= _ple(self)
            found |= {f"blk.{layer}.{name}": shape for name, shape in block.items()}
        return found

    def draft_shapes(self) -> dict[str, Shape]:
        """Every tensor of the draft layer, which is block `layers` in a file of its own."""
        h = self.hidden
        block = _attention(self) | _common(self) | _mixer("nextn.hc_head", self, inject=False)
        block |= {"nextn.eh_proj.weight": (h, 2 * h), "nextn.enorm.weight": (h,), "nextn.hnorm.weight": (self.wide,)}
        return {f"blk.{self.layers}.{name}": shape for name, shape in block.items()}

    def metadata(self, *, draft: bool = False) -> list[tuple[str, str, Any]]:
        """(key, GGUF type, value) in the converter's order; an array's type is "[element]"."""
        recurrent = [*self.recurrent, *([False] if draft else [])]
        keys: list[tuple[str, str, Any]] = [
            ("block_count", "u32", len(recurrent)),
            ("context_length", "u32", self.context),
            ("embedding_length", "u32", self.hidden),
            ("attention.head_count", "u32", self.heads),
            ("attention.head_count_kv", "u32", self.kv_heads),
            ("rope.dimension_sections", "[i32]", list(self.rope_sections)),
            ("rope.freq_base", "f32", self.rope_base),
            ("attention.layer_norm_rms_epsilon", "f32", self.eps),
            ("expert_count", "u32", self.experts),
            ("expert_used_count", "u32", self.experts_used),
            ("attention.key_length", "u32", self.head_dim),
            ("attention.value_length", "u32", self.head_dim),
            ("expert_feed_forward_length", "u32", self.expert_width),
            ("expert_shared_feed_forward_length", "u32", self.shared_width),
            ("ssm.conv_kernel", "u32", self.kernel),
            ("ssm.state_size", "u32", self.gdn_dim),
            ("ssm.group_count", "u32", self.key_heads),
            ("ssm.time_step_rank", "u32", self.value_heads),
            ("ssm.inner_size", "u32", self.inner),
            ("attention.recurrent_layers", "[bool]", recurrent),
            ("full_attention_interval", "u32", self.interval),
            ("rope.dimension_count", "u32", self.rope_dims),
            ("hyper_connection.count", "u32", self.streams),
            ("hyper_connection.low_rank", "u32", self.rank),
            ("attention.indexer.head_count", "u32", self.index_heads),
            ("attention.indexer.key_length", "u32", self.index_dim),
            ("attention.indexer.top_k", "u32", self.budget),
            ("attention.compress_ratios", "[i32]", [0 if is_recurrent else self.block for is_recurrent in recurrent]),
            ("ple.layers", "[i32]", [self.ple_layer]),
            ("ple.ngram_size", "u32", self.ngram),
            ("ple.heads_per_ngram", "u32", self.heads_per_ngram),
            ("ple.conv_kernel", "u32", self.ple_kernel),
            ("ple.eos_token_id", "u32", self.ngram_eos),
            ("embedding_length_per_layer_input", "u32", self.row_width),
            ("ple.layer_multipliers", "[u64]", list(self.multipliers)),
            ("ple.head_offsets", "[u64]", list(self.table_offsets)),
            ("ple.head_vocab_sizes", "[u64]", list(self.table_sizes)),
        ]
        if draft:
            keys += [("nextn_predict_layers", "u32", 1), ("nextn_shared_target_tensors", "bool", True)]
        return [(f"{ARCHITECTURE}.{key}", kind, value) for key, kind, value in keys]


def _splitmix64(v: int) -> int:
    v = (v + _GOLDEN) & _U64
    v = ((v ^ (v >> 30)) * 0xBF58476D1CE4E5B9) & _U64
    v = ((v ^ (v >> 27)) * 0x94D049BB133111EB) & _U64
    return v ^ (v >> 31)


def _mixer(prefix: str, g: Geometry, *, inject: bool = True) -> dict[str, Shape]:
    found: dict[str, Shape] = {
        f"{prefix}_norm.weight": (g.wide,),
        f"{prefix}_down.weight": (g.rank, g.wide),
        f"{prefix}_up.weight": (g.wide, g.rank),
    }
    if inject:
        found[f"{prefix}_inject.weight"] = (g.streams, g.wide)
    return found


def _delta_net(g: Geometry) -> dict[str, Shape]:
    return {
        "attn_qkv.weight": (g.channels, g.hidden),
        "attn_gate.weight": (g.inner, g.hidden),
        "ssm_beta.weight": (g.value_heads, g.hidden),
        "ssm_alpha.weight": (g.value_heads, g.hidden),
        "ssm_a": (g.value_heads,),
        "ssm_dt.bias": (g.value_heads,),
        "ssm_conv1d.weight": (g.channels, g.kernel),
        "ssm_norm.weight": (g.gdn_dim,),
        "ssm_out.weight": (g.hidden, g.inner),
    }


def _attention(g: Geometry) -> dict[str, Shape]:
    h, d, kv = g.hidden, g.head_dim, g.kv_heads * g.head_dim
    return {
        "attn_q.weight": (2 * g.heads * d, h),
        "attn_k.weight": (kv, h),
        "attn_v.weight": (kv, h),
        "attn_output.weight": (h, g.heads * d),
        "attn_q_norm.weight": (d,),
        "attn_k_norm.weight": (d,),
        "indexer.q_proj.weight": (g.index_heads * g.index_dim, h),
        "indexer.k_proj.weight": (g.index_dim, h),
        "indexer.q_norm.weight": (g.index_dim,),
        "indexer.k_norm.weight": (g.index_dim,),
    }


def _common(g: Geometry) -> dict[str, Shape]:
    h, e, w, s = g.hidden, g.experts, g.expert_width, g.shared_width
    return (
        _mixer("hc_attn", g)
        | _mixer("hc_ffn", g)
        | {
            "ffn_gate_inp.weight": (e, h),
            "ffn_gate_exps.weight": (e, w, h),
            "ffn_up_exps.weight": (e, w, h),
            "ffn_down_exps.weight": (e, h, w),
            "ffn_gate_inp_shexp.weight": (1, h),
            "ffn_gate_shexp.weight": (s, h),
            "ffn_up_shexp.weight": (s, h),
            "ffn_down_shexp.weight": (h, s),
        }
    )


def _ple(g: Geometry) -> dict[str, Shape]:
    return {
        "ple_key.weight": (g.wide, g.hidden),
        "ple_value.weight": (g.hidden, g.hidden),
        "ple_norm_key.weight": (g.wide,),
        "ple_norm_query.weight": (g.wide,),
        "ple_norm_conv.weight": (g.wide,),
        "ple_conv1d.weight": (g.wide, g.ple_kernel),
    }


_FLOAT: Final = ("ssm_a", "ssm_dt", "ssm_alpha", "ssm_beta", "conv1d", "ffn_gate_inp", "norm", "_norm")
_FOUR_BITS: Final = (
    "token_embd", "per_layer_token_embd", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps", "attn_qkv", "attn_gate",
    "ssm_out", "attn_q", "attn_output",
)  # fmt: skip
FILES: Final = ("F32", "Q8_0", "Q4_0")


def tensor_type(name: str, file: str) -> str:
    """GGUF type of a tensor in a file: "F32", "Q8_0" or "Q4_0", one of FILES as `file`.

    The four-bit file keeps at Q8_0 what is small and steers much: mixers of the streams, keys and values, indexer,
    shared
    experts, output head. Norms, gates and convolutions are F32 everywhere.
    """
    if file not in FILES:
        raise ValueError(f"file must be one of {', '.join(FILES)}, got {file!r}")
    leaf = name.removesuffix(".weight").removesuffix(".bias")
    leaf = leaf.split(".", 2)[2] if leaf.startswith("blk.") else leaf
    if file == "F32" or any(part in leaf for part in _FLOAT):
        return "F32"
    return "Q4_0" if file == "Q4_0" and leaf in _FOUR_BITS else "Q8_0"


BLOCK_VALUES: Final = 32
BLOCK_BYTES: Final = {"F32": 4 * BLOCK_VALUES, "Q8_0": 34, "Q4_0": 18}


def tensor_bytes(shapes: dict[str, Shape], file: str) -> int:
    """Bytes of these tensors in a file, without its metadata and padding."""
    return sum(math.prod(s) * BLOCK_BYTES[tensor_type(name, file)] // BLOCK_VALUES for name, s in shapes.items())


SMOKE: Final = Geometry(
    hidden=64, layers=2, interval=2, rank=32, heads=2, kv_heads=1, head_dim=64,
    index_heads=2, index_dim=32, budget=32, key_heads=2, value_heads=4, gdn_dim=32, experts=8, experts_used=2,
    expert_width=32, shared_width=32, ngram_base=211, heads_per_ngram=1, context=1024,
)  # fmt: skip
"""Two layers for tests: every part is there."""

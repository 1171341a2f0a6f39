"""ModelSpec: the geometry of a qwen4exp model, read from metadata with every invariant of the architecture checked.

Units    positions, budgets and block sizes in tokens; layers count from zero
Errors   PackError naming the key, what it says and what would fit
Source   the qwen4exp keys of the GGUF converter; the forward pass that they describe is engine/model
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from strata.engine.pack.errors import PackError, shown
from strata.engine.pack.metadata import Metadata
from strata.kernels.ops import MAX_TOP_K, PAGE

ARCHITECTURE: Final = "qwen4exp"
MAX_LAYERS: Final = 1024
MAX_WIDTH: Final = 1 << 16
MAX_EXPERTS: Final = 1 << 13
MAX_HEADS: Final = 1 << 10
MAX_HEAD_DIM: Final = 1 << 10
MAX_CONTEXT: Final = 1 << 24
MAX_VOCAB: Final = 1 << 22
MAX_TABLE_ROWS: Final = 1 << 40

TOKEN_EMBD: Final = "token_embd.weight"
FIRST_BLOCK: Final = "blk.0.hc_attn_norm.weight"
"""What every model has and a file of the draft layer alone has not."""
NGRAM_TABLE: Final = "per_layer_token_embd.weight"


@dataclass(frozen=True, slots=True)
class PleSpec:
    """The n-gram embedding: its layer, its hash and its table.

    order           longest n-gram, also the dilation of the convolution
    heads_per_order table heads for each of the orders 2 … order
    row_width       values of a table row
    multipliers     (order,) · offsets, sizes (heads,): exact integers below 2^63
    eos             the token that cuts n-grams
    table_rows      rows that the table has; the heads may use fewer
    """

    layer: int
    order: int
    heads_per_order: int
    row_width: int
    kernel: int
    eos: int
    multipliers: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    table_rows: int

    @property
    def heads(self) -> int:
        """Rows that one token reads."""
        return (self.order - 1) * self.heads_per_order

    @property
    def width(self) -> int:
        """Values of all rows of a token together."""
        return self.heads * self.row_width


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Geometry of the model.

    recurrent    per layer: gated delta net (True) or attention (False)
    ratios       per layer: tokens of an indexer block; 0 on delta-net layers and on attention layers that run dense
    vocab        rows of embedding and head · n_tokens: tokens that have a name, at most `vocab`
    end_tokens   ids that end an answer: end of turn, then end of text
    warnings     what is odd about the file but can be run, one line each
    """

    hidden: int
    layers: int
    streams: int
    rank: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_dims: int
    rope_base: float
    rope_sections: tuple[int, ...]
    index_heads: int
    index_dim: int
    index_budget: int
    recurrent: tuple[bool, ...]
    ratios: tuple[int, ...]
    gdn_key_heads: int
    gdn_value_heads: int
    gdn_head_dim: int
    gdn_kernel: int
    experts: int
    experts_used: int
    expert_width: int
    shared_width: int
    ple: PleSpec | None
    eps: float
    context_length: int
    vocab: int
    n_tokens: int
    end_tokens: tuple[int, ...]
    warnings: tuple[str, ...]

    @property
    def wide(self) -> int:
        """Width of the residual, all streams."""
        return self.streams * self.hidden

    @property
    def gdn_inner(self) -> int:
        """Width of all delta-net value heads."""
        return self.gdn_value_heads * self.gdn_head_dim

    @property
    def gdn_channels(self) -> int:
        """Channels of the delta net's convolution: q, k and v heads."""
        return 2 * self.gdn_key_heads * self.gdn_head_dim + self.gdn_inner

    @property
    def gdn_layers(self) -> tuple[int, ...]:
        return tuple(layer for layer, recurrent in enumerate(self.recurrent) if recurrent)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        return tuple(layer for layer, recurrent in enumerate(self.recurrent) if not recurrent)


def read_spec(meta: Metadata, shapes: Mapping[str, tuple[int, ...]]) -> ModelSpec:
    """The spec of a trunk. `shapes`: of its tensors; the vocabulary and the rows of the n-gram table come from there.

    Raises PackError, also for another architecture and for a file that holds a draft layer.
    """
    architecture = meta.text("general.architecture")
    if architecture != ARCHITECTURE:
        raise meta.fail("general.architecture", f"is {shown(architecture)}; only {ARCHITECTURE} is run")
    reader = _Reader(meta, shapes)
    if reader.draft_layers and FIRST_BLOCK not in shapes:
        raise reader.fail("nextn_predict_layers", "this file holds a draft layer; give the model itself as pack")
    spec = reader.spec()
    if reader.draft_layers and f"blk.{spec.layers}.nextn.eh_proj.weight" not in shapes:
        raise reader.fail("nextn_predict_layers", f"is 1, but block {spec.layers} is no draft layer")
    return spec


@dataclass(frozen=True, slots=True)
class DraftSpec:
    """The draft layer of a model, which is its attention layer once more. block: its number, behind the model's last ·
    ratio: tokens of an indexer block, 0 = dense · shared: embedding and output matrix are the model's"""

    block: int
    ratio: int
    shared: bool


def read_draft(meta: Metadata, shapes: Mapping[str, tuple[int, ...]], trunk: ModelSpec) -> DraftSpec:
    """The draft layer that a file holds for a model. Raises PackError when it has none, or one for another model."""
    architecture = meta.text("general.architecture")
    if architecture != ARCHITECTURE:
        raise meta.fail("general.architecture", f"is {shown(architecture)}; only {ARCHITECTURE} is run")
    return _Reader(meta, shapes).draft(trunk)


class _Reader:
    """Reads the keys under the architecture's prefix; one method per block of the model."""

    def __init__(self, meta: Metadata, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.meta = meta
        self.shapes = shapes

    def key(self, name: str) -> str:
        return f"{ARCHITECTURE}.{name}"

    def fail(self, name: str, reason: str) -> PackError:
        return self.meta.fail(self.key(name), reason)

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int:
        return self.meta.integer(self.key(name), low, high, default)

    @property
    def draft_layers(self) -> int:
        """Blocks behind those of the model."""
        return self.integer("nextn_predict_layers", 0, 1, default=0)

    def draft(self, trunk: ModelSpec) -> DraftSpec:
        """The draft layer, which must have the model's geometry."""
        if not self.draft_layers:
            raise self.fail("nextn_predict_layers", "there is no draft layer in this file")
        block = self.integer("block_count", 2, MAX_LAYERS) - 1
        ratios = self.ratios(block + 1)
        heads, kv_heads, head_dim = self.attention()
        index_dim = self.integer("attention.indexer.key_length", 1, MAX_HEAD_DIM)
        own: dict[str, tuple[object, object]] = {
            "block_count": (block, trunk.layers),
            "embedding_length": (self.integer("embedding_length", 1, MAX_WIDTH), trunk.hidden),
            "hyper_connection.count": (self.integer("hyper_connection.count", 2, 64), trunk.streams),
            "attention.head_count": ((heads, kv_heads, head_dim), (trunk.heads, trunk.kv_heads, trunk.head_dim)),
            "attention.indexer.key_length": (index_dim, trunk.index_dim),
            "attention.indexer.head_count": (
                self.integer("attention.indexer.head_count", 1, MAX_HEADS),
                trunk.index_heads,
            ),
            "attention.indexer.top_k": (self.integer("attention.indexer.top_k", 1, MAX_CONTEXT), trunk.index_budget),
            "rope.dimension_count": (self.rope(head_dim, index_dim)[0], trunk.rope_dims),
            "expert_used_count": (self.integer("expert_used_count", 1, MAX_TOP_K), trunk.experts_used),
        }
        for name, (given, wanted) in own.items():
            if given != wanted:
                raise self.fail(name, f"is {given} for the draft layer, the model has {wanted}")
        sizes, _ = self.block_sizes((False,), trunk.index_budget, ratios[block:])
        shared = self.meta.truth(self.key("nextn_shared_target_tensors"), TOKEN_EMBD not in self.shapes)
        return DraftSpec(block, sizes[0], shared or TOKEN_EMBD not in self.shapes)

    def ratios(self, n: int) -> tuple[int, ...]:
        """Block sizes as the file has them, for n blocks."""
        name = "attention.compress_ratios"
        if self.key(name) not in self.meta:
            return (0,) * n
        return self.meta.integers(self.key(name), n, n, 0, 1 << 31)

    def spec(self) -> ModelSpec:
        hidden = self.integer("embedding_length", 1, MAX_WIDTH)
        blocks = self.integer("block_count", 1 + self.draft_layers, MAX_LAYERS)
        layers = blocks - self.draft_layers
        recurrent = self.layer_kinds(layers)
        budget = self.integer("attention.indexer.top_k", 1, MAX_CONTEXT)
        ratios, warnings = self.block_sizes(recurrent, budget, self.ratios(blocks)[:layers])
        heads, kv_heads, head_dim = self.attention()
        index_dim = self.integer("attention.indexer.key_length", 1, MAX_HEAD_DIM)
        rope_dims, rope_sections = self.rope(head_dim, index_dim)
        key_heads, value_heads, gdn_head_dim = self.delta_net()
        experts = self.integer("expert_count", 1, MAX_EXPERTS)
        vocab, n_tokens = self.vocabulary(hidden)
        ple = self.ple(layers, vocab)
        return ModelSpec(
            hidden=hidden,
            layers=layers,
            streams=self.integer("hyper_connection.count", 2, 64),
            rank=self.integer("hyper_connection.low_rank", 1, MAX_WIDTH),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            rope_dims=rope_dims,
            rope_base=self.meta.real(self.key("rope.freq_base"), 1.0, 1e12),
            rope_sections=rope_sections,
            index_heads=self.integer("attention.indexer.head_count", 1, MAX_HEADS),
            index_dim=index_dim,
            index_budget=budget,
            recurrent=recurrent,
            ratios=ratios,
            gdn_key_heads=key_heads,
            gdn_value_heads=value_heads,
            gdn_head_dim=gdn_head_dim,
            gdn_kernel=self.integer("ssm.conv_kernel", 2, 64),
            experts=experts,
            experts_used=self.integer("expert_used_count", 1, min(experts, MAX_TOP_K)),
            expert_width=self.integer("expert_feed_forward_length", 1, MAX_WIDTH),
            shared_width=self.integer("expert_shared_feed_forward_length", 1, MAX_WIDTH),
            ple=ple,
            eps=self.meta.real(self.key("attention.layer_norm_rms_epsilon"), 1e-12, 1e-2),
            context_length=self.integer("context_length", 1, MAX_CONTEXT),
            vocab=vocab,
            n_tokens=n_tokens,
            end_tokens=self.end_tokens(vocab, ple),
            warnings=warnings,
        )

    def layer_kinds(self, layers: int) -> tuple[bool, ...]:
        if self.key("attention.recurrent_layers") in self.meta:
            blocks = layers + self.draft_layers
            return self.meta.truths(self.key("attention.recurrent_layers"), blocks)[:layers]
        interval = self.integer("full_attention_interval", 1, MAX_LAYERS)
        return tuple((layer + 1) % interval != 0 for layer in range(layers))

    def block_sizes(
        self, recurrent: tuple[bool, ...], budget: int, ratios: tuple[int, ...]
    ) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Block size of every layer, and the warning about attention layers that have none."""
        name = "attention.compress_ratios"
        sizes = tuple(0 if is_recurrent else r for is_recurrent, r in zip(recurrent, ratios, strict=True))
        for layer, r in enumerate(sizes):
            if r and PAGE % r:
                raise self.fail(name, f"layer {layer} has blocks of {r} tokens, which do not divide a page of {PAGE}")
            if r and budget % r:
                raise self.fail("attention.indexer.top_k", f"is {budget}, no multiple of layer {layer}'s blocks of {r}")
        dense = [str(i) for i, r in enumerate(sizes) if not recurrent[i] and not r]
        if not dense:
            return sizes, ()
        warning = (
            f"{self.key(name)} is 0 for attention layer {', '.join(dense)}: there every token is attended to, which is "
            "slow in long contexts and not what the model was trained for; the file was probably converted wrongly"
        )
        return sizes, (warning,)

    def attention(self) -> tuple[int, int, int]:
        heads = self.integer("attention.head_count", 1, MAX_HEADS)
        kv_heads = self.integer("attention.head_count_kv", 1, MAX_HEADS)
        if heads % kv_heads:
            raise self.fail("attention.head_count", f"is {heads}, no multiple of the {kv_heads} key-value heads")
        head_dim = self.integer("attention.key_length", 2, MAX_HEAD_DIM)
        value_dim = self.integer("attention.value_length", 2, MAX_HEAD_DIM)
        if value_dim != head_dim:
            raise self.fail("attention.value_length", f"is {value_dim}, but keys have {head_dim}; they must be equal")
        return heads, kv_heads, head_dim

    def rope(self, head_dim: int, index_dim: int) -> tuple[int, tuple[int, ...]]:
        dims = self.integer("rope.dimension_count", 2, MAX_HEAD_DIM)
        if dims % 2 or dims > min(head_dim, index_dim):
            raise self.fail(
                "rope.dimension_count",
                f"is {dims}; it must be even and at most {head_dim} (head) and {index_dim} (indexer)",
            )
        sections = self.meta.integers(self.key("rope.dimension_sections"), 1, 4, 0, MAX_HEAD_DIM)
        if sum(sections) != dims // 2:
            raise self.fail(
                "rope.dimension_sections", f"{list(sections)} add up to {sum(sections)}, not to half of {dims}"
            )
        return dims, sections

    def delta_net(self) -> tuple[int, int, int]:
        key_heads = self.integer("ssm.group_count", 1, MAX_HEADS)
        value_heads = self.integer("ssm.time_step_rank", 1, MAX_HEADS)
        if value_heads % key_heads:
            raise self.fail("ssm.time_step_rank", f"is {value_heads}, no multiple of the {key_heads} key heads")
        dim = self.integer("ssm.state_size", 32, MAX_HEAD_DIM)
        if dim % 32:
            raise self.fail("ssm.state_size", f"is {dim}, no multiple of 32")
        inner = self.integer("ssm.inner_size", 1, MAX_HEADS * MAX_HEAD_DIM)
        if inner != value_heads * dim:
            raise self.fail("ssm.inner_size", f"is {inner}, not {value_heads} value heads of {dim}")
        return key_heads, value_heads, dim

    def vocabulary(self, hidden: int) -> tuple[int, int]:
        """Rows of the embedding and named tokens."""
        shape = self.shapes.get(TOKEN_EMBD)
        if shape is None:
            raise self.meta.fail(TOKEN_EMBD, "the tensor is missing")
        if len(shape) != 2 or shape[1] != hidden or shape[0] > MAX_VOCAB:
            raise self.meta.fail(TOKEN_EMBD, f"has shape {list(shape)}, not [at most {MAX_VOCAB}, {hidden}]")
        vocab = shape[0]
        if "tokenizer.ggml.tokens" not in self.meta:
            return vocab, vocab
        tokens = self.meta.array("tokenizer.ggml.tokens", 1, vocab)
        if tokens.kind != "string":
            raise self.meta.fail("tokenizer.ggml.tokens", f"holds {tokens.kind}, not strings")
        return vocab, tokens.count

    def ple(self, layers: int, vocab: int) -> PleSpec | None:
        if self.key("ple.layers") not in self.meta:
            return None
        at = self.meta.integers(self.key("ple.layers"), 0, 1, 0, layers - 1)
        if not at:
            return None
        order = self.integer("ple.ngram_size", 2, 16)
        per_order = self.integer("ple.heads_per_ngram", 1, 256)
        heads = (order - 1) * per_order
        multipliers = self.meta.integers(self.key("ple.layer_multipliers"), order, order, 1, (1 << 63) - 1)
        for i, m in enumerate(multipliers):
            if m * (vocab - 1) >= 1 << 63:
                raise self.fail("ple.layer_multipliers", f"element {i} is {m}: its product with a token passes 63 bits")
        offsets = self.meta.integers(self.key("ple.head_offsets"), heads, heads, 0, MAX_TABLE_ROWS)
        sizes = self.meta.integers(self.key("ple.head_vocab_sizes"), heads, heads, 1, MAX_TABLE_ROWS)
        starts = tuple(itertools.accumulate(sizes, initial=0))
        for i, (offset, start) in enumerate(zip(offsets, starts, strict=False)):
            if offset != start:
                raise self.fail("ple.head_offsets", f"element {i} is {offset}, the heads before it take {start}")
        width = self.integer("embedding_length_per_layer_input", 1, MAX_WIDTH)
        return PleSpec(
            layer=at[0],
            order=order,
            heads_per_order=per_order,
            row_width=width,
            kernel=self.integer("ple.conv_kernel", 2, 64),
            eos=self.integer("ple.eos_token_id", 0, vocab - 1),
            multipliers=multipliers,
            offsets=offsets,
            sizes=sizes,
            table_rows=self.table_rows(starts[-1], width),
        )

    def table_rows(self, used: int, width: int) -> int:
        shape = self.shapes.get(NGRAM_TABLE)
        if shape is None:
            raise self.meta.fail(NGRAM_TABLE, "the tensor is missing")
        if len(shape) != 2 or shape[1] != width or shape[0] < used:
            raise self.meta.fail(NGRAM_TABLE, f"has shape {list(shape)}, not [at least {used}, {width}]")
        return shape[0]

    def end_tokens(self, vocab: int, ple: PleSpec | None) -> tuple[int, ...]:
        ids = [self.meta.integer("tokenizer.ggml.eos_token_id", 0, vocab - 1)]
        if ple is not None:
            ids.append(ple.eos)
        if "tokenizer.ggml.padding_token_id" in self.meta:
            ids.append(self.meta.integer("tokenizer.ggml.padding_token_id", 0, vocab - 1))
        return tuple(dict.fromkeys(ids))

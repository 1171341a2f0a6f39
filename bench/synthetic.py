"""`strata-bench synth`: a pack of the full geometry with random but valid blocks, to measure with.

    strata-bench synth /dev/shm/full.gguf                                  # 48 layers of 512 experts, some 62 GB
    strata-bench synth cut.gguf --layers 4 --experts 32 --vocab 4096       # a small one
    strata-bench synth full.gguf --draft draft.gguf                        # and a draft layer in a file beside it

Weights have the standard deviation 1 / sqrt(row length), those that write into the residual streams a tenth of it, so
that activations stay finite. A type's blocks come from one pool of random blocks, entered at a random block for every
matrix. Nothing is trained: the text is noise, and routing is nearly uniform, the worst case for a cache of experts;
--router-skew 1.2 makes it about as uneven as that of trained models (skew_router.py).
The file appears under its name when it is whole.
"""

from __future__ import annotations

import argparse
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from strata.bench.demo_pack.config import ARCHITECTURE, Geometry, Shape
from strata.bench.demo_pack.export import add_key
from strata.bench.skew_router import ROUTER, SYNTHETIC, lengths, skewed
from strata.kernels.formats import BY_NAME, TensorType
from strata.kernels.reference.quant import unpack

U8 = npt.NDArray[np.uint8]

FULL: Final = Geometry(
    vocab=248_320, ngram_eos=248_044, hidden=2560, layers=48, interval=4, streams=4, rank=320, heads=24, kv_heads=2,
    head_dim=256, rope_dims=64, rope_sections=(11, 11, 10, 0), rope_base=1e7, index_heads=4, index_dim=128,
    budget=2048, block=4, key_heads=16, value_heads=48, gdn_dim=128, kernel=4, experts=512, experts_used=10,
    expert_width=640, shared_width=640, ple_layer=1, ngram=3, heads_per_ngram=8, ngram_base=20_011, ple_kernel=4,
    context=262_144,
)  # fmt: skip
"""The 125-billion-parameter model, with a small n-gram table."""
SCALES_AT: Final = {
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q4_1": (0, 2), "Q5_1": (0, 2),
}  # fmt: skip
"""Byte offsets of a block's half-precision scales where they are not one at the beginning."""
NARROWER: Final = {
    "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q2_0": "Q4_0",
    "IQ1_S": "IQ4_NL", "IQ2_XXS": "IQ4_NL", "IQ2_XS": "IQ4_NL", "IQ2_S": "IQ4_NL", "IQ3_XXS": "IQ4_NL",
    "IQ3_S": "IQ4_NL", "IQ4_XS": "IQ4_NL",
}  # fmt: skip
"""What a quantiser takes for rows that are no whole blocks of a type."""
TYPES: Final = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL", *NARROWER)
QUIET: Final = ("attn_output", "ssm_out", "ffn_down", "ple_value")
"""Matrices that write into the residual streams."""
BUFFER_BYTES = 1 << 22
POOL_BYTES: Final = 16 << 20
ALIGNMENT: Final = gguf.GGUF_DEFAULT_ALIGNMENT
SPECIAL: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE: Final = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


@dataclass(frozen=True, slots=True)
class Types:
    """GGUF types by class of tensor; vectors, router and gates of the delta net are F32, the indexer BF16."""

    experts: str = "IQ3_S"
    dense: str = "Q6_K"
    hyper: str = "Q6_K"
    shared: str = "Q8_0"
    embedding: str = "Q8_0"
    head: str = "Q5_K"
    table: str = "IQ4_NL"

    def of(self, name: str, shape: Shape) -> TensorType:
        """The type of a tensor, one that its rows are whole blocks of."""
        leaf = name.split(".", 2)[2] if name.startswith("blk.") else name
        kind = BY_NAME[self._wanted(leaf, shape)]
        while shape[-1] % kind.block:
            kind = BY_NAME[NARROWER.get(kind.name, "F16")]
        return kind

    def _wanted(self, leaf: str, shape: Shape) -> str:
        if len(shape) == 1 or leaf.startswith(("ssm_conv", "ffn_gate_inp")):
            return "F32"
        if leaf.startswith("indexer"):
            return "BF16"
        if leaf.startswith("ple_conv"):
            return "F16"
        for word, kind in (("_exps", self.experts), ("_shexp", self.shared), ("hc_", self.hyper)):
            if word in leaf:
                return kind
        ends = {"token_embd": self.embedding, "output": self.head, "per_layer_token_embd": self.table}
        return ends.get(leaf.removesuffix(".weight"), self.dense)


@dataclass(slots=True)
class Pools:
    """Random blocks by type and standard deviation of their weights. used, skew: of a token's experts, and the exponent
    of the law that its picks follow; 0: none."""

    seed: int = 1
    used: int = 0
    skew: float = 0.0
    rng: np.random.Generator = field(init=False)
    _pools: dict[tuple[str, float], U8] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = np.random.Generator(np.random.SFC64(self.seed))

    def bytes(self, kind: TensorType, n_bytes: int, deviation: float) -> Iterator[U8]:
        """`n_bytes` of whole blocks in parts, from a random block of the pool on."""
        key = (kind.name, deviation)
        if key not in self._pools:
            self._pools[key] = blocks(kind, POOL_BYTES // kind.block_bytes, deviation, self.rng).reshape(-1)
        pool = self._pools[key]
        at = int(self.rng.integers(0, len(pool) // kind.block_bytes)) * kind.block_bytes
        while n_bytes:
            part = pool[at : at + n_bytes]
            yield part
            n_bytes, at = n_bytes - len(part), 0


def blocks(kind: TensorType, n: int, deviation: float, rng: np.random.Generator) -> U8:
    """(n, block_bytes): random blocks whose weights have mean 0 and this standard deviation."""
    if kind.is_float:
        x = (rng.standard_normal(n, np.float32) * np.float32(deviation)).astype(np.float32)
        if kind.name == "BF16":
            return (x.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(n, 2)
        return x.astype(np.float16 if kind.name == "F16" else np.float32).view(np.uint8).reshape(n, kind.block_bytes)
    data = np.frombuffer(rng.bytes(n * kind.block_bytes), np.uint8).reshape(n, kind.block_bytes).copy()
    if kind.name == "Q2_0":  # codes -1, 0, 1, 2: with a 0 for each 2 their mean is 0
        fields = data[:, 2:, None] >> np.arange(0, 8, 2, dtype=np.uint8) & 3
        data[:, 2:] = (np.where(fields == 3, 1, fields) << np.arange(0, 8, 2, dtype=np.uint8)).sum(-1, dtype=np.uint8)
    places = SCALES_AT.get(kind.name, (0,))
    sample = data[: min(n, 2048)].copy()
    _put(sample, places[0], np.ones(len(sample)))
    for at in places[1:]:
        _put(sample, at, np.zeros(len(sample)))
    first = _weights(kind, sample)
    if len(places) == 1:
        ratio, spread = 0.0, first.std()
    else:
        _put(sample, places[0], np.zeros(len(sample)))
        _put(sample, places[1], np.ones(len(sample)))
        second = _weights(kind, sample)
        ratio = -first.mean() / second.mean()
        spread = (first + ratio * second).std()
    scale = deviation / spread * rng.uniform(0.7, 1.3, n)
    for at, factor in zip(places, (1.0, ratio), strict=False):
        _put(data, at, scale * factor)
    return data


def _put(data: U8, at: int, values: npt.NDArray[Any]) -> None:
    data[:, at : at + 2] = values.astype(np.float16).view(np.uint8).reshape(-1, 2)


def _weights(kind: TensorType, data: U8) -> npt.NDArray[np.float64]:
    codes, scales, offsets = unpack(kind, data)
    values = codes.reshape(*scales.shape, kind.group).astype(np.float64) * scales[..., None]
    return values if offsets is None else values + offsets[..., None]


def deviation(name: str, shape: Shape) -> float:
    """Standard deviation of a matrix' weights."""
    if name.startswith(("token_embd", "per_layer")):
        return 1.0
    gain = 0.1 if name.split(".", 2)[-1].startswith(QUIET) else 1.0
    return round(gain / math.sqrt(shape[-1]), 9)


def vector(name: str, shape: Shape, rng: np.random.Generator) -> U8:
    """A float32 tensor that is no product: norms about 1, decays below 0, the rest about 0."""
    if name.endswith("ssm_a"):
        values = rng.uniform(-3.0, -0.02, shape)
    elif "norm" in name:
        values = rng.normal(1.0, 0.05, shape)
    else:
        values = rng.normal(-1.0 if "ssm_dt" in name else 0.0, 1.0 if "ssm_dt" in name else 0.5, shape)
    return values.astype(np.float32).view(np.uint8).reshape(-1)


def vocabulary(g: Geometry) -> list[tuple[str, str, Any]]:
    """A stand-in: the 256 bytes, one merge, numbered names, and the words of a turn's ends from `ngram_eos` on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [chr(b) for b in plain] + [chr(256 + i) for i in range(256 - len(plain))]
    tokens = [*letters, "!!", *(f"t{i}" for i in range(257, g.vocab))]
    kinds = [1] * g.vocab
    for i, word in enumerate(SPECIAL):
        tokens[g.ngram_eos + i], kinds[g.ngram_eos + i] = word, 3
    return [
        ("tokenizer.ggml.model", "str", "gpt2"),
        ("tokenizer.ggml.pre", "str", "qwen35"),
        ("tokenizer.ggml.tokens", "[str]", tokens),
        ("tokenizer.ggml.token_type", "[i32]", kinds),
        ("tokenizer.ggml.merges", "[str]", ["! !"]),
        ("tokenizer.ggml.eos_token_id", "u32", g.ngram_eos + SPECIAL.index("<|im_end|>")),
        ("tokenizer.ggml.padding_token_id", "u32", g.ngram_eos),
        ("tokenizer.ggml.add_bos_token", "bool", False),
        ("tokenizer.chat_template", "str", TEMPLATE),
    ]


@dataclass(frozen=True, slots=True)
class Tensor:
    name: str
    shape: Shape
    type: TensorType

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.type.row_bytes(self.shape[-1])


def tensors(g: Geometry, types: Types, *, draft: bool = False) -> list[Tensor]:
    """What a file holds, in its order."""
    shapes = g.draft_shapes() if draft else g.shapes()
    return [Tensor(name, shape, types.of(name, shape)) for name, shape in shapes.items()]


def header(path: Path, g: Geometry, held: list[Tensor], draft: bool) -> None:
    """The file with its metadata and directory, ending where the first tensor begins."""
    writer = gguf.GGUFWriter(str(path), ARCHITECTURE)
    words = [] if draft else vocabulary(g)
    named = [("general.type", "str", "model"), ("general.name", "str", SYNTHETIC)]
    for key, kind, value in [*named, *g.metadata(draft=draft), *words]:
        add_key(writer, key, kind, value)
    for t in held:
        shape = (*t.shape[:-1], t.type.row_bytes(t.shape[-1]))
        raw = gguf.GGMLQuantizationType(t.type.ggml_id)
        writer.add_tensor_info(t.name, shape, np.dtype(np.uint8), t.n_bytes, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()


def content(t: Tensor, pools: Pools) -> Iterator[U8]:
    """The bytes of a tensor in parts; the matrices of a stack begin at blocks of their own."""
    if len(t.shape) == 1 or t.name.endswith("ssm_conv1d.weight"):
        yield vector(t.name, t.shape, pools.rng)
        return
    router = ROUTER.fullmatch(t.name) if pools.skew else None
    if router is not None:
        parts = list(pools.bytes(t.type, t.n_bytes, deviation(t.name, t.shape)))
        rows = np.concatenate(parts).view(np.float32).reshape(t.shape)
        yield skewed(rows, pools.used, pools.skew, pools.seed, int(router[1])).view(np.uint8).reshape(-1)
        return
    count = t.shape[0] if len(t.shape) == 3 else 1
    for _ in range(count):
        yield from pools.bytes(t.type, t.n_bytes // count, deviation(t.name, t.shape))


def write(path: Path, g: Geometry, types: Types, pools: Pools, console: Console, *, draft: bool = False) -> int:
    """One file; returns its bytes. Raises OSError when there is no room for it."""
    held = tensors(g, types, draft=draft)
    total = sum(t.n_bytes for t in held)
    free = shutil.disk_usage(path.parent).free
    if total > free:
        raise OSError(f"{path} takes {total / 1e9:,.1f} GB and {path.parent} has {free / 1e9:,.1f} GB free")
    part = path.with_name(path.name + ".part")
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    try:
        header(part, g, held, draft)
        with part.open("ab", BUFFER_BYTES) as file, Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(path.name, total=total)
            file.write(b"\0" * (-file.tell() % ALIGNMENT))
            for t in held:
                for piece in content(t, pools):
                    file.write(piece.data)
                file.write(b"\0" * (-t.n_bytes % ALIGNMENT))
                bar.advance(task, t.n_bytes)
            size = file.tell()
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", type=Path, help="the file to write")
    parser.add_argument("--layers", type=int, default=FULL.layers, help="a multiple of 4 (48)")
    parser.add_argument("--experts", type=int, default=FULL.experts, help="of a layer (512)")
    parser.add_argument("--used", type=int, default=FULL.experts_used, help="experts of a token (10)")
    parser.add_argument("--vocab", type=int, default=FULL.vocab, help="tokens (248320)")
    parser.add_argument("--ngram-base", type=int, default=FULL.ngram_base, help="the n-gram tables' least size (20011)")
    parser.add_argument("--context", type=int, default=FULL.context, help="tokens (262144)")
    for name, what in (("experts", "experts"), ("dense", "projections"), ("hyper", "hyper-connections"),
                       ("shared", "the shared expert"), ("embedding", "token embedding"), ("head", "output head"),
                       ("table", "n-gram table")):  # fmt: skip
        default = getattr(Types(), name)
        parser.add_argument(
            f"--{name}-type", default=default, choices=TYPES, metavar="TYPE", help=f"{what} ({default})"
        )
    parser.add_argument(
        "--router-skew",
        type=float,
        default=0.0,
        metavar="A",
        help="picks by rank ** -A, 1.2 as trained (0: even)",
    )
    parser.add_argument("--draft", type=Path, metavar="FILE", help="write a draft layer there too")
    parser.add_argument("--seed", type=int, default=1)


def geometry(args: argparse.Namespace) -> Geometry:
    """Raises ValueError, naming the option, for what no model can be."""
    if args.layers < 4 or args.layers % 4:
        raise ValueError(f"--layers: a multiple of 4 from 4 on, got {args.layers}")
    if not 1 <= args.used <= args.experts:
        raise ValueError(f"--used: 1 to the number of experts, {args.experts}, got {args.used}")
    if args.vocab < 512:
        raise ValueError(f"--vocab: at least 512, got {args.vocab}")
    if args.router_skew:
        lengths(args.experts, args.used, args.router_skew)
    end = FULL.ngram_eos if args.vocab == FULL.vocab else args.vocab - 8
    return replace(FULL, layers=args.layers, experts=args.experts, experts_used=args.used, vocab=args.vocab,
                   ngram_eos=end, ngram_base=args.ngram_base, context=args.context)  # fmt: skip


def run(args: argparse.Namespace, console: Console) -> int:
    try:
        g = geometry(args)
    except ValueError as error:
        console.print(str(error))
        return 2
    types = Types(**{name: getattr(args, f"{name}_type") for name in Types.__slots__})
    pools = Pools(args.seed, args.used, args.router_skew)
    for path, draft in ((args.out, False), (args.draft, True)):
        if path is not None:
            size = write(path, g, types, pools, console, draft=draft)
            console.print(f"{path}: {size:,} bytes, {len(tensors(g, types, draft=draft))} tensors")
    return 0

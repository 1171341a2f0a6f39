"""What a prompt chunk and a decode window take of a card beside weights and state: the workspace, counted without one.

    price = Price(prompt_shape(spec, types, max_context))
    price(2048)                      # bytes of the workspace of passes of up to 2,048 rows
    price.windows                    # of decode windows
    Price(.., MIXER_ROWS)            # where experts do not all lie in VRAM: memory counts more than a few launches

The passes' own allocations are replayed on a tally, in their order and with their alignment, for whatever card takes
the most (attention cuts its rows by the card); a test compares it with what the kernels' wrappers take. Up to FEW_ROWS
rows go other ways, which take more than those of some longer passes: a price is for a pass and for all shorter ones.
What lies where is in engine/device/cuda.py: what lives for the whole pass, and what mixers and experts work in.

Cost     microseconds a chunk; a price never falls when the chunk grows
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Final

from strata.engine.device.arena import padded
from strata.engine.flags import WINDOW_ROWS
from strata.engine.memory.prompt import GRID
from strata.engine.memory.sizes import EXPERTS
from strata.engine.pack import ModelSpec
from strata.kernels.cuda.backend import ATTENTION_BYTES, ROWS_AT_ONCE
from strata.kernels.cuda.mixture import MAX_EXPERTS
from strata.kernels.cuda.plans import WINDOW_ROWS as FEW_ROWS
from strata.kernels.cuda.qsa import value_chunks
from strata.kernels.formats import TensorType
from strata.kernels.ops import ACT_BLOCK, ATTENTION_PART, PAGE

MIXER_ROWS: Final = 1024
"""Rows that mixers of tokens take at once where experts stream: what is left to them then counts for the experts, whose
bytes come once a chunk. Products of so many rows are as fast as longer ones within a tenth (H200, 2026-11-30)."""
_FLOAT: Final = 4
_LINE: Final = 32
"""Elements of a row of scores are whole lines."""
_TILE: Final = 16
"""Rows of an expert's smallest tile: the longest lists of tiles."""
_ORDERS: Final = 3
"""Orders of int8 values."""
_SLICE: Final = 32
"""Elements of a head whose sums of few rows a block has, with two more numbers."""


@dataclass(frozen=True, slots=True)
class PromptShape:
    """What of a model its workspace depends on.

    dense, hyper   types of the block-quantised matrices that read a block's input, and a mixer's
    experts        types of gate, up and down of each layer, each triple once
    """

    spec: ModelSpec
    max_context: int
    hyper: frozenset[TensorType]
    dense: frozenset[TensorType]
    experts: frozenset[tuple[TensorType, TensorType, TensorType]]


def prompt_shape(spec: ModelSpec, types: Mapping[str, TensorType], max_context: int) -> PromptShape:
    """The shape of a pack's passes; types: of its tensors by name."""

    def triple(layer: int) -> tuple[TensorType, TensorType, TensorType]:
        gate, up, down = (types[f"blk.{layer}.{name}"] for name in EXPERTS)
        return gate, up, down

    blocks = {name: kind for name, kind in types.items() if name.startswith("blk.") and not kind.is_float}
    hyper = frozenset(kind for name, kind in blocks.items() if "hc_" in name)
    dense = frozenset(kind for name, kind in blocks.items() if "hc_" not in name and "_exps" not in name)
    return PromptShape(spec, max_context, hyper, dense, frozenset(map(triple, range(spec.layers))))


class Tally:
    """Counts arrays as a workspace hands them out."""

    def __init__(self) -> None:
        self.used = self.peak = 0

    def take(self, *sizes: int) -> None:
        """Arrays of so many bytes."""
        self.used += sum(map(padded, sizes))
        self.peak = max(self.peak, self.used)

    @contextmanager
    def scratch(self) -> Iterator[None]:
        mark = self.used
        yield
        self.used = mark


class Price:
    """Bytes of a workspace for chunks and windows of a model. mixer_rows: as of `Device`."""

    def __init__(self, shape: PromptShape, mixer_rows: int = 0) -> None:
        self.shape = shape
        self.mixer_rows = mixer_rows

    def __call__(self, chunk: int) -> int:
        """For passes of up to `chunk` rows; what windows take is in it."""
        steps = [chunk] if chunk <= GRID else [*range(GRID, chunk, GRID), chunk]
        return max(self.windows, *(sum(self.parts(n)) for n in steps))

    @cached_property
    def windows(self) -> int:
        """For decode windows alone: logits and the sampler's lists of all rows, and small change."""
        g, n = self.shape.spec, WINDOW_ROWS
        half = Tally()
        _attention_few(half, self.shape, n)
        logits = n * (g.vocab + g.vocab // 8) * _FLOAT
        streams = 6 * n * g.wide * _FLOAT + n * (g.gdn_channels + 6 * g.gdn_inner) * _FLOAT
        experts = n * (g.experts_used + 4) * (g.hidden + 2 * g.expert_width) * _FLOAT
        blocks = _blocks(self.shape, self.mixer_rows, n)
        return padded(logits + streams + experts) + 2 * max(half.peak, blocks) + (1 << 20)

    def parts(self, n: int) -> tuple[int, int]:
        """Of passes of up to n rows: what lives for all of one, what a block of a layer works in."""
        return _parts(self.shape, self.mixer_rows, n)


@lru_cache(maxsize=4096)  # every plan of a start, and of advice, asks for the same lengths
def _parts(shape: PromptShape, mixer_rows: int, n: int) -> tuple[int, int]:
    whole = Tally()
    _ends(whole, shape, n)
    few = 2 * _blocks(shape, mixer_rows, min(n, FEW_ROWS))  # blocks of a window take turns in two halves
    return whole.peak, max(few, _blocks(shape, mixer_rows, n) if n > FEW_ROWS else 0)


@lru_cache(maxsize=4096)
def _blocks(shape: PromptShape, mixer_rows: int, n: int) -> int:
    """What a mixer or the experts of just n rows take."""
    t, at_once = Tally(), min(n, mixer_rows or n)
    for part in (_delta_net, _attention):
        with t.scratch():
            part(t, shape, at_once)
    with t.scratch():
        _ngrams(t, shape, n)
    for kinds in shape.experts:
        with t.scratch():
            _hyper(t, shape, n)
            (_experts if n > FEW_ROWS else _experts_few)(t, shape, n, kinds)
    return t.peak


def _quantized(t: Tally, n: int, cols: int, kinds: frozenset[TensorType]) -> None:
    """The int8 forms of n rows that matrices of these types read, at most one for each way of summing and order."""
    for sums in sorted({kind.sums for kind in kinds if not kind.is_float}):
        orders = len({kind.name for kind in kinds if kind.sums == sums and not kind.is_float})
        for _ in range(min(orders, 2)):
            t.take(n * cols, n * cols // ACT_BLOCK * _FLOAT, *([n * cols // sums * _FLOAT] if sums else []))


def _left(t: Tally, n: int, cols: int) -> None:
    """The int8 form that the maker of n rows leaves beside them; of few rows all forms."""
    if n > FEW_ROWS:
        t.take(n * cols, n * cols // ACT_BLOCK * _FLOAT)
    else:
        t.take(_ORDERS * n * cols, *(n * cols // group * _FLOAT for group in (ACT_BLOCK, 16, 32)))


def _leave(t: Tally, n: int, width: int) -> None:
    """A block's output; of more rows than those of a window there is a place for it (`_ends`)."""
    if n <= FEW_ROWS:
        t.take(n * width * _FLOAT)


def _ends(t: Tally, shape: PromptShape, n: int) -> None:
    """Embedding, what blocks leave for the next ones, and the head for one row."""
    g = shape.spec
    t.take(n * g.wide * _FLOAT)
    with t.scratch():
        t.take(n * 8, n * g.hidden * _FLOAT)
    if n > FEW_ROWS:
        t.take(2 * n * g.streams * _FLOAT, n * g.hidden * _FLOAT)
    t.take(g.wide * _FLOAT, 8 * g.wide * _FLOAT, 2 * g.vocab * _FLOAT)


def _hyper(t: Tally, shape: PromptShape, n: int) -> None:
    g = shape.spec
    t.take(n * g.hidden * _FLOAT)
    _leave(t, n, g.streams)
    _left(t, n, g.hidden)
    rows = min(n, ROWS_AT_ONCE)
    with t.scratch():
        t.take(rows * g.wide * _FLOAT, rows * g.rank * _FLOAT, rows * g.streams * _FLOAT)
        with t.scratch():
            _quantized(t, rows, g.wide, shape.hyper)
        t.take(rows * g.wide * _FLOAT)
        _quantized(t, rows, g.rank, shape.hyper)


def _delta_net(t: Tally, shape: PromptShape, n: int) -> None:
    g = shape.spec
    if not g.gdn_layers:
        return
    inner, heads = g.gdn_inner, g.gdn_value_heads
    _hyper(t, shape, n)
    t.take(n * g.gdn_channels * _FLOAT, n * inner * _FLOAT, n * heads * _FLOAT, n * heads * _FLOAT)
    with t.scratch():
        _quantized(t, n, g.hidden, shape.dense)
    t.take(n * inner * _FLOAT)
    _left(t, n, inner)
    with t.scratch():
        t.take(n * inner * _FLOAT, n * g.gdn_channels * _FLOAT, n * heads * _FLOAT, n * heads * _FLOAT)
    _leave(t, n, g.hidden)
    _quantized(t, n, inner, shape.dense)


def _attention(t: Tally, shape: PromptShape, n: int) -> None:
    g = shape.spec
    if not g.attention_layers:
        return
    _hyper(t, shape, n)
    wide = g.heads * g.head_dim
    for width in (2 * wide, g.kv_heads * g.head_dim, g.kv_heads * g.head_dim, g.index_heads * g.index_dim, g.index_dim):
        t.take(n * width * _FLOAT)
    with t.scratch():
        _quantized(t, n, g.hidden, shape.dense)
    t.take(n * wide * _FLOAT)
    for ratio in sorted({g.ratios[layer] for layer in g.attention_layers}):
        with t.scratch():
            (_scores if n > FEW_ROWS else _scores_few)(t, shape, n, ratio)
    _leave(t, n, g.hidden)
    _quantized(t, n, wide, shape.dense)


def _seen(shape: PromptShape, ratio: int) -> tuple[int, int, int]:
    """Of a query: tokens that it keeps at most, blocks that it picks, blocks that compete (0: they never do)."""
    room, budget = -(-shape.max_context // PAGE) * PAGE, shape.spec.index_budget
    if not ratio:
        return room, 0, 0
    picked, blocks = budget // ratio, room // ratio
    return min(room, picked * ratio + ratio - 1), picked, blocks if blocks > picked else 0


def _scores(t: Tally, shape: PromptShape, n: int, ratio: int) -> None:
    """Queries and scores of as many rows as the scratch holds."""
    g, (kept, picked, blocks) = shape.spec, _seen(shape, ratio)
    lines, of_blocks, parts = _lines(kept), _lines(blocks), -(-kept // ATTENTION_PART)
    floats = g.heads * (g.head_dim + lines + parts) + g.index_heads * g.index_dim + of_blocks
    rows = min(n, max(1, ATTENTION_BYTES // (_FLOAT * (floats + picked + lines))))
    t.take(rows * g.heads * g.head_dim * _FLOAT, rows * g.index_heads * g.index_dim * _FLOAT)
    if blocks:
        t.take(rows * of_blocks * _FLOAT, rows * picked * _FLOAT)
    t.take(rows * g.heads * lines * _FLOAT, rows * g.heads * parts * _FLOAT, rows * lines * _FLOAT)


def _scores_few(t: Tally, shape: PromptShape, n: int, ratio: int) -> None:
    """The same of few rows: all at once, and partial sums."""
    g, (kept, picked, blocks) = shape.spec, _seen(shape, ratio)
    group, parts = g.heads // g.kv_heads, -(-kept // ATTENTION_PART)
    heads = max(value_chunks(rows, group) * -(-group // value_chunks(rows, group)) for rows in range(1, n + 1))
    t.take(n * g.heads * g.head_dim * _FLOAT, n * g.index_heads * g.index_dim * _FLOAT)
    if blocks:
        t.take(n * _lines(blocks) * _FLOAT, n * picked * _FLOAT)
    units = g.kv_heads * g.head_dim // _SLICE
    t.take(n * g.heads * _lines(kept) * _FLOAT, n * heads * units * parts * (_SLICE + 2) * _FLOAT)


def _attention_few(t: Tally, shape: PromptShape, n: int) -> None:
    """Queries, scores and partial sums of a window."""
    g = shape.spec
    for ratio in sorted({g.ratios[layer] for layer in g.attention_layers}):
        kept, picked, blocks = _seen(shape, ratio)
        parts = -(-kept // ATTENTION_PART)
        wide = g.heads * g.head_dim
        with t.scratch():
            t.take(n * 4 * wide * _FLOAT, n * _lines(blocks) * _FLOAT, n * picked * _FLOAT)
            t.take(n * g.heads * _lines(kept) * _FLOAT, n * parts * (wide + wide // 16) * _FLOAT)


def _lines(n: int) -> int:
    return -(-n // _LINE) * _LINE


def _ngrams(t: Tally, shape: PromptShape, n: int) -> None:
    g = shape.spec
    if g.ple is None:
        return
    t.take(n * g.ple.heads * 8, n * g.wide * _FLOAT, n * g.hidden * _FLOAT, n * g.streams * _FLOAT)
    rows = min(n, ROWS_AT_ONCE)
    t.take(rows * g.ple.width * _FLOAT, rows * g.wide * _FLOAT)
    _quantized(t, rows, g.ple.width, shape.dense)


def _experts_few(t: Tally, shape: PromptShape, n: int, kinds: tuple[TensorType, TensorType, TensorType]) -> None:
    """The same of few rows, where some experts come from RAM and the processor computes others."""
    g, pairs, (gate, up, _) = shape.spec, n * shape.spec.experts_used, kinds
    t.take(n * g.experts * _FLOAT, n * _FLOAT, pairs * _FLOAT, pairs * _FLOAT, n * g.hidden * _FLOAT)
    with t.scratch():
        t.take(pairs * g.hidden * _FLOAT, pairs * 4, pairs * 4, 3 * pairs * 8)
        t.take(n * g.shared_width * _FLOAT, n * g.hidden * _FLOAT)
        t.take(*(pairs * g.expert_width * _FLOAT for _ in {gate, up}))
        _quantized(t, max(n * g.hidden, pairs * g.expert_width, n * g.shared_width), 1, shape.dense | set(kinds))


def _experts(t: Tally, shape: PromptShape, n: int, kinds: tuple[TensorType, TensorType, TensorType]) -> None:
    """Router, then the pairs sorted by expert, their hidden values and their outputs; then the shared expert."""
    g, (gate, up, down) = shape.spec, kinds
    pairs = n * g.experts_used
    t.take(n * g.experts * _FLOAT, n * _FLOAT, pairs * _FLOAT, pairs * _FLOAT)
    with t.scratch():
        if gate is up and not gate.is_float and not down.is_float:
            _quantized(t, pairs, g.expert_width, frozenset({down}))
        else:
            t.take(pairs * g.expert_width * _FLOAT, pairs * g.expert_width * _FLOAT)
            _quantized(t, pairs, g.expert_width, frozenset({down}))
        _quantized(t, n, g.hidden, frozenset({gate, up}))
        for _ in {gate, down}:
            t.take(pairs * _FLOAT, 16 * (pairs // _TILE + min(MAX_EXPERTS, g.experts, pairs)), _FLOAT)
        t.take(pairs * g.hidden * _FLOAT)
    with t.scratch():
        t.take(n * g.shared_width * _FLOAT, n * g.shared_width * _FLOAT)
        _quantized(t, n, max(g.hidden, g.shared_width), shape.dense)

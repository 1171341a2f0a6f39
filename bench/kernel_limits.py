"""What a kernel must read, write and multiply in a pass of the model, and so the least time that it can take.

    limits = Limits.of(pack, ceilings, Pass(positions, sequences))
    limits.work(launches)          # of all launches of one kernel: bytes, multiply-adds, microseconds

Products    weights as they are in the file, once a launch; of experts as many different ones as rows pick when they
            draw; inputs (a byte an element where they are quantised) and outputs; multiply-adds
Attention, delta net    keys, values, scored blocks and states that the rows need, whatever the kernels do instead
All others  the arrays that a launch is given, each once, twice where it is read and written
The limit   bytes at the rate at which the card reads its memory, or multiply-adds at that of a loop of nothing else:
            what takes longer

Errors      none: None where a matrix is not of the pack
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from strata.bench.ceilings import Ceilings, Work
from strata.bench.report import Limit
from strata.bench.window_launches import Launch
from strata.engine.pack import Pack
from strata.engine.pack.spec import TOKEN_EMBD, ModelSpec
from strata.kernels.cuda.arguments import address
from strata.kernels.formats import TensorType
from strata.kernels.kv import KV

FLOAT: Final = 4
QUANTISED: Final = 1 + FLOAT / 32
"""Bytes of an input of a product of integers: a code, and its part of a scale."""
DELTA_MACS: Final = 3
"""Multiply-adds of a token for each number of the delta net's state: what the key finds, its change, the query."""
LOOKED_UP: Final = {"sample_pick": (0,), "sample_recent": (0,), "dequantize": (0,), "float_rows": (0,)}
"""Arguments of which a kernel reads a few rows."""
HALF: Final = 2
UNPACKING: Final = ("prompt_unpack", "prompt_wide_weights")
"""Launches with the struct of a product that multiply nothing."""
OF_FLOATS: Final = ("lanes_", "chains_", "route")
"""What the names of kernels begin with whose matrices are floats: a matrix of blocks can have the shape of one."""
WRITTEN_BACK: Final = {"hyper_rows": 0, "hyper_norm": 0, "hyper_add": 0, "gate_times_up": 0}
"""Which argument a kernel reads and writes."""
ADDS: Final = ("hyper_rows", "hyper_norm")
"""Of these only where they are given something to add."""

Positions = npt.NDArray[np.int64]


def kept(positions: Positions, ratio: int, budget: int) -> Positions:
    """Tokens that rows at these positions attend to; ratio: tokens of an indexer block, 0 without an indexer."""
    seen = positions + 1
    if not ratio:
        return seen
    complete = seen // ratio
    return np.where(complete > budget // ratio, budget + seen - complete * ratio, seen)


def scored(positions: Positions, ratio: int, budget: int) -> Positions:
    """Blocks that compete for the rows."""
    complete = (positions + 1) // ratio if ratio else np.zeros_like(positions)
    return np.where(complete > budget // ratio if ratio else False, complete, 0)


def different(experts: int, used: int, rows: float) -> float:
    """Different experts of so many rows that draw `used` each."""
    return float(experts * (1 - (1 - used / experts) ** rows))


@dataclass(frozen=True, slots=True)
class Pass:
    """Rows at these positions, of so many sequences: each of its own (a window), or all of one (a prompt)."""

    positions: Positions
    sequences: int

    @classmethod
    def window(cls, rows: int, depth: int) -> Pass:
        return cls(np.full(rows, depth, np.int64), rows)

    @classmethod
    def prompt(cls, rows: int, depth: int = 0) -> Pass:
        return cls(np.arange(depth, depth + rows, dtype=np.int64), 1)

    def __len__(self) -> int:
        return len(self.positions)

    def once(self, per_row: Positions) -> float:
        """What the sequences read of something of which each row needs so much, and the last row of a sequence has all
        but what it does not keep."""
        return float(per_row.sum() if self.sequences == len(self) else per_row.max())


class Attention(NamedTuple):
    """Of one layer's rows: tokens that they attend to, those that are read, and the same of index blocks."""

    kept: float
    tokens: float
    scored: float
    blocks: float


@dataclass(frozen=True, slots=True)
class Limits:
    """Of a pass of a model. types: of its matrices by (rows, columns, whether they are stacks of experts, floats)."""

    spec: ModelSpec
    types: Mapping[tuple[int, int, bool, bool], TensorType]
    ceilings: Ceilings
    rows: Pass
    kv: str = "fp32"
    gates_bytes: int = 0
    """Of the delta net's two small matrices, which its kernel of windows reads."""

    @classmethod
    def of(cls, pack: Pack, ceilings: Ceilings, rows: Pass, kv: str = "fp32") -> Limits:
        types: dict[tuple[int, int, bool, bool], TensorType] = {}
        for name in sorted(pack, key=lambda name: name == TOKEN_EMBD):  # the head has its shape
            tensor = pack[name]
            if len(tensor.shape) > 1:
                *stack, n, cols = map(int, tensor.shape)
                types.setdefault((n, cols, bool(stack), tensor.type.is_float), tensor.type)
        gates = [
            next((pack[name].data.nbytes for name in pack if name.endswith(f"{end}.weight")), 0)
            for end in ("ssm_alpha", "ssm_beta")
        ]
        return cls(pack.spec, types, ceilings, rows, kv, sum(gates))

    def label(self, launch: Launch) -> str:
        """The kernel, and of a product the matrices and their type."""
        parts = _products(launch)
        if not parts:
            return launch.kernel.name
        own, *beside = parts
        text = f"{launch.kernel.name} {own.shape} {self._type(own)}"
        if own.experts:
            text += ", gate and up of experts" if own.twice else ", experts"
        return text + "".join(f" beside {each.shape} {self._type(each)}" for each in beside)

    def work(self, launches: Sequence[Launch]) -> Work | None:
        """Of all launches of one kernel in the pass; None where it is not known."""
        first = launches[0]
        if _products(first):
            name = first.kernel.name
            of = partial(self._unpacking, name) if name in UNPACKING else self._product
            works = [of(each) for launch in launches for each in _products(launch)]
            known = [work for work in works if work is not None]
            return Work.total(known) if len(known) == len(works) else None
        name = first.kernel.name
        if name.startswith("gdn_"):
            return _times(self._delta(name), len(self.spec.gdn_layers))
        if name.startswith("qsa_"):
            return Work.total(self._attention(name, self.spec.ratios[i]) for i in self.spec.attention_layers)
        if name in ("ple_window", "ple_convolve", "ple_keep"):
            return self._ngrams(name)
        return Work(float(sum(given(launch) for launch in launches)))

    def limit(self, launches: Sequence[Launch]) -> Limit:
        """For a record."""
        work = self.work(launches)
        if work is None:
            return Limit(launches=len(launches))
        us = self.ceilings.us(work)
        return Limit(launches=len(launches), bytes=work.n_bytes, macs=work.macs, us=us)

    # ---------------------------------------------------------------------------------------------------------- parts

    def _kinds(self, part: _Product) -> list[TensorType | None]:
        """Of its matrices; a matrix of blocks may have become floats when it was loaded."""
        keys = [(rows, part.cols, part.experts) for rows in part.rows]
        blocks = [self.types.get((*key, False)) for key in keys]
        return [self.types.get((*key, True), b) for key, b in zip(keys, blocks, strict=True)] if part.floats else blocks

    def _type(self, part: _Product) -> str:
        kinds = self._kinds(part)
        return "+".join(dict.fromkeys("?" if kind is None else kind.name for kind in kinds))

    def _product(self, part: _Product) -> Work | None:
        """Of one launch with matrices of the pack."""
        s, out = self.spec, Work()
        stacks = different(s.experts, s.experts_used, part.n / max(s.experts_used, 1)) if part.experts else 1.0
        times, inputs = 2 if part.twice else 1, QUANTISED
        for rows, kind in zip(part.rows, self._kinds(part), strict=True):
            if kind is None:
                return None
            inputs = FLOAT if kind.is_float else QUANTISED
            n_bytes = stacks * times * rows * kind.row_bytes(part.cols) + FLOAT * part.n * rows
            out = out.plus(self.ceilings.product(kind, float(part.n * rows * part.cols * times)))
            out = out.plus(Work(n_bytes))
        return out.plus(Work(inputs * part.n / part.divide * part.cols))

    def _unpacking(self, name: str, part: _Product) -> Work | None:
        """Of matrices of the pack that are read, and written: as int8, a group's scale and lift, and its offset; or as
        halves and a group's scale."""
        kinds = self._kinds(part)
        if None in kinds:
            return None
        code, floats = (1, 2) if name == UNPACKING[0] else (HALF, 1)
        each = [
            kind.row_bytes(part.cols) + part.cols * (code + (floats + kind.has_offset) * FLOAT / kind.group)
            for kind in kinds
            if kind
        ]
        return Work(float(sum(rows * n for rows, n in zip(part.rows, each, strict=True))))

    def _floats(self, n_bytes: float, macs: float = 0.0) -> Work:
        return self.ceilings.float32(macs).plus(Work(n_bytes))

    def _delta(self, name: str) -> Work:
        """Of one layer."""
        s, n = self.spec, len(self.rows)
        numbers = s.gdn_value_heads * s.gdn_head_dim**2
        if name == "gdn_inputs":
            return self._floats(FLOAT * n * 2 * s.gdn_channels)
        if name == "gdn_output":
            return self._floats(FLOAT * n * 3 * s.gdn_inner)
        n_bytes = FLOAT * (2 * numbers * self.rows.sequences + n * (s.gdn_channels + s.gdn_inner))
        gates = self.gates_bytes if name == "gdn_slots" else 0
        return self._floats(n_bytes + gates, float(DELTA_MACS * n * numbers))

    def seen(self, ratio: int) -> Attention:
        """Of one layer whose indexer has blocks of so many tokens."""
        at, budget = self.rows.positions, self.spec.index_budget
        own, blocks = kept(at, ratio, budget), scored(at, ratio, budget)
        tokens = self.rows.once(own if self.rows.sequences == len(self.rows) else at + 1)
        return Attention(float(own.sum()), tokens, float(blocks.sum()), self.rows.once(blocks))

    def _attention(self, name: str, ratio: int) -> Work:
        """Of one layer."""
        s, n, seen = self.spec, len(self.rows), self.seen(ratio)
        keys, values = (form.row(s.head_dim) * form.dtype.itemsize * s.kv_heads for form in KV[self.kv])
        heads, macs = s.heads * s.head_dim, seen.kept * s.heads * s.head_dim
        if name.endswith("keys"):
            return self._floats(seen.tokens * keys + FLOAT * n * heads, macs)
        if name.endswith("values"):
            return self._floats(seen.tokens * values + FLOAT * n * 2 * heads, macs)
        if name.startswith("qsa_score"):
            return self._floats(FLOAT * seen.blocks * s.index_dim, seen.scored * s.index_heads * s.index_dim)
        if name == "qsa_select":
            return self._floats(FLOAT * seen.scored)
        index = FLOAT * (2 * s.index_heads + 2) * s.index_dim  # qsa_prepare: queries and keys, read and written
        return self._floats(n * (FLOAT * 2 * (heads + s.kv_heads * s.head_dim) + keys + values + index))

    def _ngrams(self, name: str) -> Work:
        """The convolution of the n-gram layer: inputs, the sequences' earlier ones, taps; or what it keeps."""
        s, n = self.spec, len(self.rows)
        if s.ple is None:
            return Work()
        before, gap = s.ple.kernel - 1, s.ple.order
        if name == "ple_keep":
            return self._floats(FLOAT * 2 * self.rows.sequences * min(before * gap, n) * s.wide)
        return self._floats(FLOAT * s.wide * (3 * n + s.ple.kernel + self.rows.sequences * before))


class _Product(NamedTuple):
    """Matrices of a launch. n: rows of activations, of experts pairs; divide: pairs that share an input; twice: gate
    and up of experts, of which only one is listed; floats: whether they are of float types."""

    rows: tuple[int, ...]
    cols: int
    n: int
    experts: bool
    twice: bool
    divide: int
    floats: bool

    @property
    def shape(self) -> str:
        return f"{'+'.join(map(str, self.rows))} x {self.cols}"


def _products(launch: Launch) -> list[_Product]:
    """The products of a launch, from its structs; none where it is no product."""
    floats = launch.kernel.name.startswith(OF_FLOATS)
    return [_read(each, floats) for each in launch.arguments if _is_product(each)]


def _is_product(argument: Any) -> bool:
    return isinstance(argument, np.ndarray) and {"matrix", "cols"} <= set(argument.dtype.names or ())


def _read(struct: np.ndarray, floats: bool) -> _Product:
    names = struct.dtype.names or ()

    def of(name: str) -> int:
        return int(struct[name]) if name in names else 0

    rows = tuple(int(n) for n in struct["matrix"]["rows"] if n)
    used, twice = of("used"), bool(of("second"))
    if used:  # a window: pairs of gate and up share their row
        return _Product(rows, of("cols"), of("n") * used, True, twice, used if twice else 1, floats)
    if of("apart"):  # the matrices are parts of the columns of one
        return _Product(rows[:1], of("pitch"), of("n"), False, False, 1, floats)
    return _Product(rows, of("cols"), of("n"), bool(of("first")), twice, max(of("divide"), 1), floats)


def given(launch: Launch) -> int:
    """Bytes of the arrays that a launch is given."""
    name, found = launch.kernel.name, {}
    for i, argument in enumerate(launch.arguments):
        if len(getattr(argument, "shape", ())) and i not in LOOKED_UP.get(name, ()):
            found[address(argument)] = int(argument.nbytes)
    back = WRITTEN_BACK.get(name)
    if back is None or (name in ADDS and launch.arguments[1] is None):
        return sum(found.values())
    return sum(found.values()) + int(launch.arguments[back].nbytes)


def _times(work: Work, n: int) -> Work:
    return Work(*(n * each for each in work))

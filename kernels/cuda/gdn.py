"""Gated delta net: short causal convolution, decay and write strength, the delta rule, the gated norm.

Contract: `ops.Kernels.gdn`. Segments are read on the device: their number is fixed for a captured graph, their
contents are not.

Shapes   D of 32, 64 or 128; 2 to 8 taps
Cost     a token costs the recurrence a fifth of a microsecond a layer whatever the number of heads that fit the card
         at once; scratch is V*D floats a row, and 2*K*D + V*D + 2*V more in a prompt
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from strata.kernels.check import check, require
from strata.kernels.cuda import card as cards
from strata.kernels.cuda import forms
from strata.kernels.cuda.arguments import address
from strata.kernels.cuda.card import Card
from strata.kernels.cuda.chains import MOST_STEPS
from strata.kernels.cuda.launch import F32, I32, launch
from strata.kernels.cuda.workspace import DeviceArray, Workspace
from strata.kernels.formats import Weight
from strata.kernels.ops import LANES, Gdn

_SOURCE: Final = "gdn.cu"
WINDOW_ROWS: Final = 16
"""Rows up to which the scan convolves for itself."""
HEAD_SIZES: Final = (32, 64, 128)
MOST_TAPS: Final = 8
COLUMNS: Final = 16
"""State columns of a block of a window's scan, as in the source."""
_SCAN_THREADS: Final = 8 * COLUMNS
_FEW: Final = 1
_MANY: Final = 16
"""Tokens of a segment at most: with few the blocks are so small that they come beside the kernel before."""
_WARPS: Final = 4
_RUN: Final = 8
"""Rows of a warp that convolves a prompt."""
_OUTPUT_RUN: Final = 2
"""Rows of a warp that makes a prompt's output."""
_GROUPS: Final = 8
"""Groups of state rows, as in the sources."""
_FLOAT: Final = 4
_THIRD: Final = 3
BULK_ARCH: Final = 90
"""The first cards with the copies of bulk.cuh."""
_FEW_SEQUENCES: Final = 2
OUTPUT: Final = np.dtype(
    [(name, np.uint64) for name in ("z", "w", "y", "ended")] + [("forms", forms.FORMS), ("n", I32), ("eps", F32)],
    align=True,
)
"""Output of gdn_slots.cu."""


GATES: Final = np.dtype([(name, np.uint64) for name in ("b", "a", "x")] + [("cols", I32)], align=True)
"""GateProducts of gdn_slots.cu."""
NO_GATES: Final = np.zeros((), GATES)


@dataclass(frozen=True, slots=True, eq=False)
class Gates:
    """What write strengths and decays of a window are made of: float weights (V, H) of one type, and rows x (n, H) that
    were there before the kernel that made p was launched."""

    b: Weight
    a: Weight
    x: DeviceArray

    def check(self, heads: int) -> None:
        """Raises ValueError unless both are matrices of `heads` rows for x, of one type."""
        for name, weight in (("gates.b", self.b), ("gates.a", self.a)):
            wanted = (heads, self.x.shape[-1])
            fits = weight.shape == wanted and weight.type is self.b.type
            require(fits, f"{name} must be {wanted} of {self.b.type.name}, got {weight.shape} of {weight.type.name}")

    def argument(self) -> np.ndarray:
        return np.array((*(address(array) for array in (self.b.data, self.a.data, self.x)), self.b.cols), GATES)

    def constants(self) -> dict[str, Any]:
        """Macros of gdn_slots.cu."""
        return {"GATES": 1, "TYPE": self.b.type.name, "STEPS": max(1, min(MOST_STEPS, self.b.cols // LANES))}


def takes_gates(b: Weight, a: Weight, n: int, segments: int, d: int, ended: DeviceArray) -> bool:
    """Whether `gdn` makes these products of a window itself; `ended` as there."""
    fits = b.type.is_float and b.type is a.type and 1 <= n <= WINDOW_ROWS and segments * b.rows <= ended.size
    return fits and slots_columns(cards.card(), segments, b.rows, d, _FEW if n == segments else _MANY, True) > 0


def slots_bytes(columns: int, d: int, tokens: int) -> int:
    """Shared memory of a block of gdn_slots.cu."""
    return _FLOAT * (columns * d + 2 * _GROUPS * columns + tokens * (2 * d + columns + 4))


def slots_columns(card: Card, segments: int, heads: int, d: int, tokens: int, whole: bool) -> int:
    """State columns of a block of gdn_slots.cu: whole heads save a launch, halves keep the memory busier: 5.3 and
    6.5 us for one sequence, 24.5 and 21.6 for eight (H200, 2026-11-29). 0: there are too few states for a block for
    every third multiprocessor. `whole`: a block may have a head."""
    for columns in (128, 64) if segments <= _FEW_SEQUENCES else (64,):
        fits = columns < d + whole and slots_bytes(columns, d, tokens) <= card.shared_block
        if fits and _THIRD * segments * heads * (d // columns) >= card.multiprocessors:
            return columns
    return 0


def scan_plan(heads: int, key_heads: int, d: int, segments: int) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """A prompt's scan: its blocks, the threads of one, and HEADS of gdn_scan.cu, the value heads of a block."""
    of_block = next(n for n in (3, 2, 1) if heads // key_heads % n == 0)
    columns = _SCAN_THREADS // _GROUPS * (2 if of_block == 1 else 1)
    return (d // columns, heads // of_block, segments), (_SCAN_THREADS,), of_block


def in_registers(segments: int) -> bool:
    """Whether a block of gdn_slots.cu keeps its state in registers: few sequences leave room for them."""
    return segments <= _FEW_SEQUENCES


def gdn(
    workspace: Workspace,
    w: Gdn,
    p: DeviceArray,
    z: DeviceArray,
    b: DeviceArray | None,
    a: DeviceArray | None,
    segments: DeviceArray,
    conv: DeviceArray,
    state: DeviceArray,
    eps: float,
    ended: DeviceArray | None = None,
    gates: Gates | None = None,
) -> DeviceArray:
    """p (n, 2*K*D + V*D), z (n, V*D), b and a (n, V) -> (n, V*D); `conv` and `state` advance in place.

    `ended`: uint32 zeros, and zeros again afterwards; with one for every segment and key head, a window of many
    sequences is one launch. `gates`: instead of b and a, where `takes_gates`.
    """
    job = _Job.of(w, p, z, b, a, segments, conv, state, gates)
    y = workspace.array((job.n, job.heads * job.d))
    if not job.n:
        return y
    left = forms.leave(workspace, y) if job.is_window else forms.leave_native(workspace, y)
    with workspace.scratch():
        o = workspace.array((job.n, job.heads * job.d))
        whole = ended is not None and ended.size >= job.segments * job.key_heads
        columns = job.slots_columns(whole)
        if columns:
            output = np.array((*map(address, (z, w.norm, y, ended)), left, job.n, eps), OUTPUT)
            job.of_slots(o, columns, output)
            if columns == job.d:
                return y
        elif gates is not None:
            raise ValueError("gates: this window takes b and a")
        elif job.is_window:
            job.of_window(o)
        else:
            job.of_prompt(workspace, o)
        job.output(o, y, left, eps)
    return y


@dataclass(slots=True, eq=False)
class _Job:
    """Checked arguments of `gdn`, and its launches. `arrays`: p, z, segments, conv, state; `weights`: as the kernels
    take them, with b and a."""

    w: Gdn
    arrays: tuple[DeviceArray, ...]
    weights: tuple[DeviceArray | None, ...]
    gates: Gates | None
    n: int
    segments: int
    heads: int
    key_heads: int
    d: int
    taps: int
    channels: int

    @classmethod
    def of(
        cls,
        w: Gdn,
        p: DeviceArray,
        z: DeviceArray,
        b: DeviceArray | None,
        a: DeviceArray | None,
        segments: DeviceArray,
        conv: DeviceArray,
        state: DeviceArray,
        gates: Gates | None,
    ) -> _Job:
        """Raises ValueError for what does not fit the contract."""
        asked: dict[str, tuple[Any, str, Any]] = {"b": (b, "n V", F32), "a": (a, "n V", F32)}
        if gates is not None:
            asked = {"x": (gates.x, f"n {gates.b.cols}", F32)}
            gates.check(len(w.a))
        size = check(
            w_a=(w.a, "V", F32),
            w_dt=(w.dt, "V", F32),
            w_norm=(w.norm, "D", F32),
            p=(p, "n channels", F32),
            w_conv=(w.conv, "channels kernel", F32),
            z=(z, "n V*D", F32),
            **asked,
            segments=(segments, "s 3", I32),
            conv=(conv, "slots kept channels", F32),
            state=(state, "slots V D D", F32),
        )
        n, heads, d, channels, taps = (size[name] for name in ("n", "V", "D", "channels", "kernel"))
        key_heads, rest = divmod(channels - heads * d, 2 * d)
        if d not in HEAD_SIZES:
            raise ValueError(f"D must be one of {HEAD_SIZES}, got {d}")
        if rest or key_heads < 1 or heads % key_heads:
            raise ValueError(
                f"p must have 2*K*D + V*D channels with V a multiple of K, got {channels} for V = {heads}, D = {d}"
            )
        if not 2 <= taps <= MOST_TAPS:
            raise ValueError(f"w.conv must have 2 to {MOST_TAPS} taps, got {taps}")
        if size["kept"] != taps - 1:
            raise ValueError(f"conv must keep {taps - 1} inputs, got {conv.shape}")
        weights = (w.conv, conv, b, a, w.a, w.dt)
        return cls(w, (p, z, segments, conv, state), weights, gates, n, size["s"], heads, key_heads, d, taps, channels)

    @property
    def is_window(self) -> bool:
        return self.n <= WINDOW_ROWS

    @property
    def tokens(self) -> int:
        """Of a segment of a window, at most."""
        return _FEW if self.n == self.segments else _MANY

    @property
    def _constants(self) -> dict[str, Any]:
        return {"HEAD_SIZE": self.d, "TAPS": self.taps}

    @property
    def _heads(self) -> tuple[int, int]:
        return self.key_heads, self.heads

    def slots_columns(self, whole: bool) -> int:
        """`slots_columns` of this call: 0 for a prompt."""
        if not self.is_window:
            return 0
        return slots_columns(cards.card(), self.segments, self.heads, self.d, self.tokens, whole)

    def of_slots(self, o: DeviceArray, columns: int, output: np.ndarray) -> None:
        """The delta rule a block for some columns of a head; whole heads go on to the output."""
        p, _, segments, _, state = self.arrays
        more = {} if self.gates is None else self.gates.constants()
        products = NO_GATES if self.gates is None else self.gates.argument()
        shared, card = slots_bytes(columns, self.d, self.tokens), cards.card()
        blocks = self.d // columns * self.heads * self.segments
        launch(
            "gdn_slots.cu", "gdn_slots", (self.d // columns, self.heads, self.segments), (_GROUPS * columns // 4,),
            p, *self.weights, state, segments, o, *self._heads, output, products,
            shared=card.apart(shared, blocks), TOKENS=self.tokens, COLUMNS=columns,
            BULK=int(card.arch >= BULK_ARCH), IN_REGISTERS=int(in_registers(self.segments)),
            **self._constants, **more,
        )  # fmt: skip

    @property
    def _window_grid(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (self.d // COLUMNS, self.heads, self.segments), (_SCAN_THREADS,)

    def of_window(self, o: DeviceArray) -> None:
        p, _, segments, _, state = self.arrays
        launch(
            "gdn_window.cu", "gdn_window", *self._window_grid, p, *self.weights, state, segments, o, *self._heads,
            TOKENS=self.tokens, **self._constants,
        )  # fmt: skip

    def of_prompt(self, workspace: Workspace, o: DeviceArray) -> None:
        p, _, segments, conv, state = self.arrays
        c = workspace.array((self.n, self.channels))
        decay, beta = workspace.array((self.n, self.heads)), workspace.array((self.n, self.heads))
        units = -(-(2 * self.key_heads + self.heads) // _WARPS)
        launch(
            "gdn_inputs.cu", "gdn_inputs", (units, -(-self.n // _RUN)), (32 * _WARPS,),
            p, *self.weights, segments, c, decay, beta, *self._heads, self.n, **self._constants,
        )  # fmt: skip
        grid, block, of_block = scan_plan(self.heads, self.key_heads, self.d, self.segments)
        launch(
            "gdn_scan.cu", "gdn_scan", grid, block,
            c, decay, beta, p, conv, state, segments, o, *self._heads, HEADS=of_block, **self._constants,
        )  # fmt: skip

    def output(self, o: DeviceArray, y: DeviceArray, left: np.ndarray, eps: float) -> None:
        """The gated norm; of a window also the inputs that the convolution keeps."""
        p, z, segments, conv, _ = self.arrays
        moved, run = ((p, conv, segments), 1) if self.is_window else ((None, None, None), _OUTPUT_RUN)
        launch(
            _SOURCE, "gdn_output", (-(-self.heads // _WARPS), -(-self.n // run)), (32 * _WARPS,),
            o, z, self.w.norm, y, *moved, left, self.n, *self._heads, eps, MOVES=int(self.is_window),
            **self._constants,
        )  # fmt: skip

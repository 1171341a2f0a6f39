"""What the model asks of a device: where arrays lie, which kernels compute on them, how much memory there is.

One model code serves every device. On the host arrays are NumPy arrays and most of this is the identity; on a card they
are device arrays at fixed addresses, and what a forward pass makes is valid until the next one begins.

Units    bytes
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from strata.kernels.formats import Weight
from strata.kernels.ops import AttentionPages, Gdn, Hyper, Kernels, Moe, Norms, Rope

Array = Any
"""An array on the device: NumPy on the host, CuPy on a card."""
Bytes = npt.NDArray[np.uint8]

MAX_ROWS: Final = 8192
"""Most rows of one forward pass: bounds the memory of its activations."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of a device: all of it, and what can be had now."""

    total: int
    free: int


class Mirror(Protocol):
    """A small host array and what kernels see of it: `update` after writing to `host`."""

    @property
    def host(self) -> npt.NDArray[np.int32]: ...

    @property
    def array(self) -> Array: ...

    def update(self) -> None: ...


class StateMemory(Protocol):
    """Where the state of sequences lies.

    sides    rows of recurrent state that a slot has. 1: it advances in place. 2: a forward pass reads one and writes
             the other, so the state before it is still there
    """

    sides: int

    def zeros(self, shape: tuple[int, ...], dtype: npt.DTypeLike = np.float32) -> Array:
        """An array of state, for good."""

    def far(self, shape: tuple[int, ...], dtype: npt.DTypeLike = np.float32) -> Array:
        """The same in RAM that kernels read and write, undefined at first; also for `copy`, `download`, `upload`."""

    def fill(self, array: Array, value: float) -> None:
        """Set all elements of a C-contiguous array of state."""

    def mirror(self, shape: tuple[int, ...], value: int) -> Mirror:
        """A host array of int32 filled with a value, and what kernels see of it."""

    def copy(self, target: Array, source: Array) -> None:
        """Copy between C-contiguous arrays of state of the same bytes, behind all work before it."""

    def read(self, array: Array) -> npt.NDArray[Any]:
        """A copy of a C-contiguous array on the host; waits for all work before it."""

    def download(self, target: Bytes, source: Array) -> None:
        """The bytes of a C-contiguous array of state, into as many on the host; waits for all work before it."""

    def upload(self, target: Array, source: Bytes) -> None:
        """Set a C-contiguous array of state to bytes of the host, which may change when this returns."""


class Device(StateMemory, Protocol):
    """Where a stage runs."""

    @property
    def name(self) -> str: ...

    @property
    def kernels(self) -> Kernels: ...

    def memory(self) -> Memory: ...

    def put(self, array: npt.NDArray[Any]) -> Array:
        """A small array where kernels read it, for good."""

    def weight(self, w: Weight) -> Weight:
        """A matrix where kernels read it, for good."""

    def output(self, w: Weight) -> Weight:
        """The output matrix, for good."""

    def matrix(self, w: Weight) -> Weight:
        """The same for one that only products read: it may be laid out anew, with the same codes and scales."""

    def experts(self, layer: int, stacks: Sequence[Weight]) -> Sequence[Weight]:
        """Gate, up and down of a layer's experts, called for one layer after the other."""

    def table(self, w: Weight) -> Weight:
        """A large matrix of which a token reads a few rows."""

    def place(self, arrays: Sequence[npt.NDArray[np.int32]]) -> Sequence[Array]:
        """What describes the rows of a pass, where kernels read it until the next `place`."""

    def expect(self, bound: int | None) -> None:
        """The positions of the next pass are below the bound; None: they may be anything."""

    @property
    def mixer_rows(self) -> int:
        """Rows of a pass that a mixer of tokens takes at once, a multiple of 64; 0: all of them."""

    def begin(self) -> None:
        """A forward pass begins: what the one before made is no longer valid."""

    def turn(self, rows: int = 0) -> None:
        """A block of a layer begins: what the block before the last one made is no longer valid, and of more rows than
        those of windows nor what the last one made, but for what lies where `kept` says."""

    def kept(self, x: Array) -> tuple[Array, Array] | None:
        """Where a block of a layer leaves its beta (n, C) and output (n, H) until the next one has added them to the
        residual x (n, C, H); None: wherever it makes them."""

    def rest(self) -> None:
        """The layers are over: what comes is valid for the rest of the pass."""

    def rewind(self) -> None:
        """What `project` has made is no longer valid."""

    def project(self, weights: Sequence[Weight], x: Array) -> Sequence[Array]:
        """`Kernels.linear`, valid until the next `rewind`."""

    def embed(self, table: Weight, tokens: Array, streams: int) -> Array:
        """Token ids (n,) -> residual (n, streams, H), all streams alike."""

    def mix(
        self, x: Array, hc: Hyper, eps: float, added: tuple[Array, Array] | None, out: Array | None = None
    ) -> tuple[Array, Array | None]:
        """`Kernels.hyper_add` of the (beta, y) that the block before left, when there is one; then `hyper_mix`. out:
        where beta goes, as of `kept`."""

    def leave(self, w: tuple[Weight], x: Array, out: Array | None = None) -> Array:
        """`Kernels.linear` with one matrix, the last one of a block. out: as of `kept`."""

    def moe(self, w: Moe, x: Array, used: int, out: Array | None = None) -> Array:
        """`Kernels.moe`. out: as of `kept`."""

    def delta_net(
        self,
        project: Sequence[Weight],
        w: Gdn,
        u: Array,
        segments: Array,
        conv: Array,
        state: Array,
        eps: float,
    ) -> Array:
        """`Kernels.linear` of u, with the weights of p, z, b and a, then `Kernels.gdn`."""

    def attention(
        self,
        project: Sequence[Weight],
        u: Array,
        pages: AttentionPages,
        where: tuple[Array, Array, Array],
        heads: tuple[int, int, int],
        norms: Norms,
        rope: Rope,
        budget: int,
        eps: float,
    ) -> Array:
        """`Kernels.linear` of u with the weights of q_gate, k, v, index_q and index_k, then `Kernels.qsa_store` and
        `Kernels.qsa_attend`.

        where: tables, slots, positions · heads: of queries, of keys, of the indexer
        """

    def take(self, x: Array, rows: npt.NDArray[np.int64]) -> Array:
        """Rows of an array."""

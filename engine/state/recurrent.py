"""The part of a sequence's state that does not grow: delta net, convolutions, the ids before the next token.

One block per slot, all float32 but the ids:
    gdn       per delta net layer: conv (slots, kernel - 1, channels), the last inputs; state (slots, V, D, D)
    ple_conv  (slots, (kernel - 1) * N, C*H), the last inputs of the dilated convolution
    history   int32 (slots, N - 1): eos where the sequence had not begun
A model without an n-gram embedding has no ple_conv and no history: arrays of size 0.

Where the memory has two sides, a slot has two rows, 2 * slot and the next: a pass reads the one that is current and
writes the other, and `advance` makes that one current. Passes that nobody advanced to leave no trace. Checkpoints come
after the slots and have one row each: no pass reads or writes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from strata.engine.device.base import Array, Bytes, StateMemory
from strata.engine.device.host import HostMemory
from strata.engine.pack import ModelSpec
from strata.kernels.ops import F32, I32

MAX_STATE_ROWS: Final = 1 << 15
"""A segment names a row and, in its upper half, where the state goes."""


@dataclass(frozen=True, slots=True, eq=False)
class GdnState:
    """State of one delta net layer, all slots."""

    conv: F32
    state: F32


def recurrent_bytes(spec: ModelSpec) -> int:
    """Bytes of one row: of a checkpoint, and of a slot on the host."""
    gdn = sum(int(np.prod(shape)) for shape in _gdn_shapes(spec)) * len(spec.gdn_layers)
    return 4 * (gdn + int(np.prod(_ple_shape(spec))) + _n_history(spec))


class Recurrent:
    """The blocks of `n_slots` slots and `n_checkpoints`; `gdn` in the order of the model's delta net layers."""

    def __init__(
        self, spec: ModelSpec, n_slots: int, memory: StateMemory | None = None, n_checkpoints: int = 0
    ) -> None:
        self._memory = memory or HostMemory()
        self._sides = self._memory.sides
        self._n_slots = n_slots
        self.n_bytes = recurrent_bytes(spec)
        rows = n_slots * self._sides + n_checkpoints
        if rows > MAX_STATE_ROWS:
            raise ValueError(f"a state has at most {MAX_STATE_ROWS} rows, got {rows}; use fewer slots")
        conv, state = _gdn_shapes(spec)
        zeros = self._memory.zeros
        self.gdn = tuple(GdnState(zeros((rows, *conv)), zeros((rows, *state))) for _ in spec.gdn_layers)
        self.ple_conv: F32 = zeros((rows, *_ple_shape(spec)))
        self.history: I32 = zeros((rows, _n_history(spec)), np.int32)
        self._eos = spec.ple.eos if spec.ple else 0
        self._current = [0] * n_slots
        for slot in range(n_slots + n_checkpoints):
            self._forget_history(slot)

    def row(self, slot: int) -> int:
        """The row that holds the slot's state."""
        beyond = slot - self._n_slots
        return self._sides * self._n_slots + beyond if beyond >= 0 else self._sides * slot + self._current[slot]

    def name(self, slot: int) -> int:
        """What a segment calls the slot: its row, and in the upper half the bits in which the row to write differs."""
        return self.row(slot) | (self._sides - 1) << 16

    def advance(self, slot: int) -> None:
        """The row that the last pass wrote is the slot's state now."""
        self._current[slot] ^= self._sides - 1

    def reset(self, slot: int) -> None:
        """The state before the first token."""
        row = self.row(slot)
        for layer in self.gdn:
            self._memory.fill(layer.conv[row], 0)
            self._memory.fill(layer.state[row], 0)
        if self.ple_conv.size:
            self._memory.fill(self.ple_conv[row], 0)
        self._forget_history(slot)

    def _forget_history(self, slot: int) -> None:
        if self.history.size:
            self._memory.fill(self.history[self.row(slot)], self._eos)

    @property
    def arrays(self) -> list[Array]:
        """All arrays, (rows, ..), in one fixed order, without those of size 0."""
        layers: list[Array] = [array for layer in self.gdn for array in (layer.conv, layer.state)]
        return [array for array in (*layers, self.ple_conv, self.history) if array.size]

    def copy(self, source: int, target: int) -> None:
        """Make the target's block equal to the source's."""
        for array in self.arrays:
            self._memory.copy(array[self.row(target)], array[self.row(source)])

    def read(self, slot: int) -> Bytes:
        """All bytes of a slot's block, in the order of `arrays`."""
        block = np.empty(self.n_bytes, np.uint8)
        for part, array in self._parts(slot, block):
            self._memory.download(part, array)
        return block

    def write(self, slot: int, block: Bytes) -> None:
        """Set a slot's block to what `read` gave."""
        if len(block) != self.n_bytes:
            raise ValueError(f"a block has {self.n_bytes} bytes here, got {len(block)}")
        for part, array in self._parts(slot, block):
            self._memory.upload(array, part)

    def _parts(self, slot: int, block: Bytes) -> Iterator[tuple[Bytes, Array]]:
        """The pieces of a block, and where they lie in the state."""
        begin = 0
        for array in self.arrays:
            own = array[self.row(slot)]
            yield block[begin : begin + own.nbytes], own
            begin += own.nbytes


def _gdn_shapes(spec: ModelSpec) -> tuple[tuple[int, int], tuple[int, int, int]]:
    return (spec.gdn_kernel - 1, spec.gdn_channels), (spec.gdn_value_heads, spec.gdn_head_dim, spec.gdn_head_dim)


def _ple_shape(spec: ModelSpec) -> tuple[int, int]:
    return ((spec.ple.kernel - 1) * spec.ple.order, spec.wide) if spec.ple else (0, 0)


def _n_history(spec: ModelSpec) -> int:
    return spec.ple.order - 1 if spec.ple else 0

"""The part of a sequence's state that does not grow: delta net, convolutions, the ids before the next token.

One block per slot, all float32 but the ids:
    gdn       per delta net layer: conv (slots, kernel - 1, channels), the last inputs; state (slots, V, D, D)
    ple_conv  (slots, (kernel - 1) * N, C*H), the last inputs of the dilated convolution
    history   int32 (slots, N - 1): eos where the sequence had not begun
A model without an n-gram embedding has no ple_conv and no history: arrays of size 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from strata.engine.pack import ModelSpec
from strata.kernels.ops import F32


@dataclass(frozen=True, slots=True, eq=False)
class GdnState:
    """State of one delta net layer, all slots."""

    conv: F32
    state: F32


def recurrent_bytes(spec: ModelSpec) -> int:
    """Bytes of one slot's block."""
    gdn = sum(int(np.prod(shape)) for shape in _gdn_shapes(spec)) * len(spec.gdn_layers)
    return 4 * (gdn + int(np.prod(_ple_shape(spec))) + _n_history(spec))


class Recurrent:
    """The blocks of `n_slots` slots; `gdn` in the order of the model's delta net layers."""

    def __init__(self, spec: ModelSpec, n_slots: int) -> None:
        conv, state = _gdn_shapes(spec)
        self.gdn = tuple(
            GdnState(np.zeros((n_slots, *conv), np.float32), np.zeros((n_slots, *state), np.float32))
            for _ in spec.gdn_layers
        )
        self.ple_conv = np.zeros((n_slots, *_ple_shape(spec)), np.float32)
        self._eos = spec.ple.eos if spec.ple else 0
        self.history = np.full((n_slots, _n_history(spec)), self._eos, np.int32)

    def reset(self, slot: int) -> None:
        """The state before the first token."""
        for layer in self.gdn:
            layer.conv[slot] = 0
            layer.state[slot] = 0
        self.ple_conv[slot] = 0
        self.history[slot] = self._eos

    def block(self, slot: int) -> bytes:
        """All bytes of a slot's block, in one fixed order."""
        layers = [array[slot].tobytes() for layer in self.gdn for array in (layer.conv, layer.state)]
        return b"".join([*layers, self.ple_conv[slot].tobytes(), self.history[slot].tobytes()])


def _gdn_shapes(spec: ModelSpec) -> tuple[tuple[int, int], tuple[int, int, int]]:
    return (spec.gdn_kernel - 1, spec.gdn_channels), (spec.gdn_value_heads, spec.gdn_head_dim, spec.gdn_head_dim)


def _ple_shape(spec: ModelSpec) -> tuple[int, int]:
    return ((spec.ple.kernel - 1) * spec.ple.order, spec.wide) if spec.ple else (0, 0)


def _n_history(spec: ModelSpec) -> int:
    return spec.ple.order - 1 if spec.ple else 0

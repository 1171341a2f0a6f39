"""What the kernels of windows read and write at fixed addresses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from strata.engine.device.cuda import CudaDevice
from strata.engine.device.driver import Array
from strata.engine.model.rows import Rows
from strata.kernels.cuda.sample import MAX_RECENT, SETTINGS
from strata.kernels.ops import I32

if TYPE_CHECKING:
    from strata.engine.model.window import Layout


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """How the rows of a window are sampled, and where their ids go."""

    settings: Array
    seeds: Array
    recent: Array
    ids: Array


class Buffers:
    """What the kernels of all layouts read and write at fixed addresses."""

    def __init__(self, device: CudaDevice, n: int) -> None:
        self._most = n
        self.inputs = device.fixed(4 * 6 * n).view(np.int32)
        self.said = device.fixed(4 * (3 * n + 1)).view(np.int32)
        self.ids = self.said[:n]
        self.moduli, self.drawn = (device.fixed(4 * n).view(np.int32) for _ in range(2))
        self.replayed = device.fixed(4 * 3).view(np.int32)
        self.recent = device.fixed(4 * n * MAX_RECENT).view(np.int32)
        self.settings = device.fixed(8 * n * len(SETTINGS)).view(np.float64)
        self.seeds = device.fixed(8 * n).view(np.uint64)

    @property
    def most(self) -> int:
        """Rows of a window at most."""
        return self._most

    @property
    def kept(self) -> Array:
        """Where a round leaves how many of its rows stay."""
        return self.said[3 * self._most :]

    @property
    def segment(self) -> Array:
        """The first segment."""
        return self.inputs[3 * self._most : 3 * self._most + 3]

    @property
    def all(self) -> tuple[Array, ...]:
        return self.inputs, self.ids, self.moduli, self.drawn, self.recent, self.settings, self.seeds

    @staticmethod
    def packed(rows: Rows, most: int) -> I32:
        """Rows as `inputs` holds them."""
        packed = np.zeros(3 * most + rows.segments.size, np.int32)
        for i, part in enumerate((rows.tokens, rows.positions, rows.slots)):
            packed[i * most : i * most + len(part)] = part
        packed[3 * most :] = rows.segments.reshape(-1)
        return packed

    def rows(self, n: int, segments: int) -> Rows:
        tokens, positions, slots = (self.inputs[i * self._most : i * self._most + n] for i in range(3))
        first = 3 * self._most
        return Rows(tokens, positions, slots, self.inputs[first : first + 3 * segments].reshape(segments, 3))

    def drafts(self, n: int) -> tuple[Array, Array]:
        """Where a window leaves its drafts, or a round its chain, and how likely they are."""
        most = self._most
        return self.said[most : most + n], self.said[2 * most : 2 * most + n].view(np.float32)

    def sampling(self, layout: Layout) -> Sampled:
        n, width = layout.wanted, layout.recent
        return Sampled(
            self.settings[: n * len(SETTINGS)].reshape(n, len(SETTINGS)),
            self.seeds[:n],
            self.recent[: n * width].reshape(n, width),
            self.ids[:n],
        )

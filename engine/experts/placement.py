"""Where every expert lies: in a slot of the expert cache, or in RAM that the card reads. Pure.

Order    the first experts of an order get slots, one after the other: that of a profile, or by number, so that every
         layer has about as many
Units    bytes; a matrix begins at a multiple of ALIGNMENT, in a slot as in RAM
Cost     a walk over the pairs
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from strata.engine.device.arena import padded

Pair = tuple[int, int]
"""(layer, expert)."""


@dataclass(frozen=True, slots=True)
class ExpertSize:
    """Bytes of one expert's matrices in a layer."""

    gate: int
    up: int
    down: int

    @property
    def begins(self) -> tuple[int, int, int]:
        """Where gate, up and down begin in a slot."""
        return 0, padded(self.gate), padded(self.gate) + padded(self.up)

    @property
    def n_bytes(self) -> int:
        return self.begins[2] + padded(self.down)


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """sizes: of each layer's experts · begins (layers, experts): of an expert's slot in the cache, -1: it lies in RAM ·
    cache_bytes: of all slots · spare: free places of a layer in RAM, where some of its experts lie there."""

    sizes: tuple[ExpertSize, ...]
    begins: npt.NDArray[np.int64]
    cache_bytes: int
    spare: int = 0

    @property
    def pairs(self) -> int:
        return int(self.begins.size)

    @property
    def in_cache(self) -> int:
        """Pairs that have a slot."""
        return int((self.begins >= 0).sum())

    def missing(self, layer: int) -> list[int]:
        """Experts of a layer that lie in RAM, in the order in which they lie there."""
        found: list[int] = np.flatnonzero(self.begins[layer] < 0).tolist()
        return found

    def spare_of(self, layer: int) -> int:
        """Free places of a layer: none where it misses no expert, or holds none."""
        n = len(self.missing(layer))
        return min(self.spare, self.begins.shape[1] - n) if n else 0

    def ram_bytes(self, layer: int) -> int:
        """Of the places of a layer."""
        return (len(self.missing(layer)) + self.spare_of(layer)) * self.sizes[layer].n_bytes

    @property
    def missing_bytes(self) -> int:
        """Of all experts that lie in RAM, and of spare places."""
        return sum(map(self.ram_bytes, range(len(self.sizes))))


def by_number(layers: int, experts: int) -> list[Pair]:
    """The first expert of every layer, then the second of every layer, and so on."""
    return [(layer, expert) for expert in range(experts) for layer in range(layers)]


def place(
    sizes: Sequence[ExpertSize], experts: int, slots: Sequence[int], order: Iterable[Pair], spare: int = 0
) -> Placement:
    """The pairs of the order in slots of these bytes, which lie one behind the other; the rest in RAM.

    A pair that is larger than its slot ends it: slots are as large as the largest expert, or made for this order.
    """
    begins = np.full((len(sizes), experts), -1, np.int64)
    at = 0
    for (layer, expert), slot in zip(order, slots, strict=False):
        if sizes[layer].n_bytes > slot:
            break
        begins[layer, expert] = at
        at += slot
    return Placement(tuple(sizes), begins, sum(slots), spare)

"""Where every expert lies: in a slot of the expert cache, in RAM that the card reads, or in the file only. Pure.

Order    the first experts of an order get slots, one after the other: that of a profile, or by number, so that every
         layer has about as many; the next ones lie in RAM
Units    bytes; a matrix begins at a multiple of ALIGNMENT, in a slot as in RAM
Cost     a walk over the pairs
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import chain, compress

import numpy as np
import numpy.typing as npt

from strata.engine.device.arena import padded

Pair = tuple[int, int]
"""(layer, expert)."""


@dataclass(frozen=True)
class ExpertSize:
    """Bytes of one expert's matrices in a layer. What follows from them is kept: a plan asks for it of every pair."""

    gate: int
    up: int
    down: int

    @cached_property
    def begins(self) -> tuple[int, int, int]:
        """Where gate, up and down begin in a slot."""
        return 0, padded(self.gate), padded(self.gate) + padded(self.up)

    @cached_property
    def n_bytes(self) -> int:
        return self.begins[2] + padded(self.down)


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """sizes: of each layer's experts · begins (layers, experts): of an expert's slot in the cache, -1: it has none ·
    in_ram (layers, experts): whether it lies in RAM; it has a slot, or it does, or neither: then it is read from the
    file · cache_bytes: of all slots · spare: free places of a layer in RAM, where some of its experts have no slot ·
    lendable: bytes at the end of the cache, whose slots have twins in RAM."""

    sizes: tuple[ExpertSize, ...]
    begins: npt.NDArray[np.int64]
    in_ram: npt.NDArray[np.bool_]
    cache_bytes: int
    spare: int = 0
    lendable: int = 0

    @property
    def pairs(self) -> int:
        return int(self.begins.size)

    @property
    def in_cache(self) -> int:
        """Pairs that have a slot."""
        return int((self.begins >= 0).sum())

    @property
    def missing(self) -> int:
        """Pairs that have none."""
        return self.pairs - self.in_cache

    @property
    def filed(self) -> npt.NDArray[np.bool_]:
        """Which pairs lie in the file only, (layers, experts)."""
        return (self.begins < 0) & ~self.in_ram

    def spare_of(self, layer: int) -> int:
        """Free places of a layer: none where it misses no expert, or holds none."""
        held = int((self.begins[layer] >= 0).sum())
        return min(self.spare, held) if held < self.begins.shape[1] else 0

    def twins(self, layer: int) -> list[int]:
        """Begins of the slots of a layer that may be lent, ascending."""
        begins, edge = self.begins[layer], self.cache_bytes - self.lendable
        lent = (begins >= 0) & (begins + self.sizes[layer].n_bytes > edge)
        return sorted(begins[lent].tolist())

    def locked_of(self, layer: int) -> int:
        """Bytes of the places of a layer in RAM."""
        n = int(self.in_ram[layer].sum()) + self.spare_of(layer) + len(self.twins(layer))
        return n * self.sizes[layer].n_bytes

    @property
    def locked_bytes(self) -> int:
        """Of all experts that lie in RAM, of spare places, and of twins."""
        return sum(map(self.locked_of, range(len(self.sizes))))

    @property
    def spare_bytes(self) -> int:
        """Of spare places."""
        return sum(self.spare_of(layer) * size.n_bytes for layer, size in enumerate(self.sizes))

    @property
    def twin_bytes(self) -> int:
        """Of twins of slots."""
        return sum(len(self.twins(layer)) * size.n_bytes for layer, size in enumerate(self.sizes))

    @property
    def filed_bytes(self) -> int:
        """Of all experts that lie in the file only."""
        of_layers = self.filed.sum(1).tolist()
        return sum(n * size.n_bytes for n, size in zip(of_layers, self.sizes, strict=True))


@cache
def by_number(layers: int, experts: int) -> tuple[Pair, ...]:
    """The first expert of every layer, then the second of every layer, and so on."""
    return tuple((layer, expert) for expert in range(experts) for layer in range(layers))


def bytes_of(sizes: Sequence[ExpertSize], pairs: Iterable[Pair]) -> list[int]:
    """Of the expert of each pair."""
    of_layers = [size.n_bytes for size in sizes]
    return [of_layers[layer] for layer, _ in pairs]


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
    return Placement(tuple(sizes), begins, begins < 0, sum(slots), spare)


def missing_order(placement: Placement, order: Sequence[Pair]) -> list[Pair]:
    """The pairs that have no slot: those of the order, which names none twice, then the others by number."""
    if len(order) < placement.pairs:
        known = set(order)
        order = [*order, *(pair for pair in by_number(*placement.begins.shape) if pair not in known)]
    places = np.fromiter(chain.from_iterable(order), np.int64, 2 * len(order)).reshape(-1, 2)
    return list(compress(order, placement.begins[places[:, 0], places[:, 1]] < 0))


def with_copies(placement: Placement, in_ram: Iterable[Pair]) -> Placement:
    """The same with only these of the others in RAM."""
    held = np.zeros(placement.begins.shape, bool)
    for pair in in_ram:
        held[pair] = True
    return replace(placement, in_ram=held)

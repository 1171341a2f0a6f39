"""Which experts change places: those that windows use and the cache lacks, for those that it holds and nobody uses.

    for each layer: experts without a slot by use, those of at least LEAST_USE; those in the cache by use, least first;
    paired in this order, and a pair is kept when the first was used `min_gain` more often, or, where counts last
    (use.py), more than chance explains. Of all layers those with most gain. Where one comes from the file, the one that
    leaves takes the place in RAM of the least used one there, if that is used less

Errors   none
Cost     a sort of all pairs, some milliseconds, while a window runs
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

LEAST_USE: Final = 2.0
DECAY: Final = 0.7
MIN_GAIN: Final = 1.5
NOISE: Final = 1.3
"""Standard deviations of the difference of two counts, by which lasting ones must differ."""
F64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class AdaptRules:
    """every: windows between two rounds · swaps: most of a round · decay: of the counts after a round · min_gain: picks
    that a swap must gain. Below 0: not given; neither: counts last as long as the subject. every or swaps 0: nothing
    moves."""

    every: int = 4
    swaps: int = 96
    decay: float = -1.0
    min_gain: float = -1.0

    @property
    def on(self) -> bool:
        return min(self.every, self.swaps) > 0

    @property
    def lasts(self) -> bool:
        return max(self.decay, self.min_gain) < 0

    @property
    def factor(self) -> float:
        """On counts that do not last, after a round."""
        return DECAY if self.decay < 0 else self.decay

    def bar(self, gets: F64, leaves: F64) -> F64:
        """What a swap must gain, by the counts of both."""
        least = MIN_GAIN if self.min_gain < 0 else self.min_gain
        return np.maximum(least, NOISE * np.sqrt(gets + leaves)) if self.lasts else np.full(gets.shape, least)


@dataclass(frozen=True, slots=True)
class Swap:
    """An expert gets the slot of another one of its layer, which takes its place. Where that is in the file, the other
    one takes the place in RAM of a third, which is in the file from then on; drops -1: there is none that is colder."""

    layer: int
    gets: int
    leaves: int
    drops: int = -1


def choose(use: F64, resident: npt.NDArray[np.bool_], rules: AdaptRules) -> list[Swap]:
    """The swaps of a round, those with most gain first; use, resident (layers, experts)."""
    wanted = np.where(~resident & (use >= LEAST_USE), use, -np.inf)
    held = np.where(resident, use, np.inf)
    gets, leaves = (-wanted).argsort(1, kind="stable"), held.argsort(1, kind="stable")
    of_gets, of_leaves = np.take_along_axis(wanted, gets, 1), np.take_along_axis(held, leaves, 1)
    layers, ranks = np.nonzero(of_gets >= of_leaves)
    more, less = of_gets[layers, ranks], of_leaves[layers, ranks]
    pays = more >= less + rules.bar(more, less)
    layers, ranks, gain = layers[pays], ranks[pays], (more - less)[pays]
    best = (-gain).argsort(kind="stable")[: rules.swaps]
    return [
        Swap(int(layer), int(gets[layer, rank]), int(leaves[layer, rank]))
        for layer, rank in zip(layers[best], ranks[best], strict=True)
    ]


def dropping(swaps: list[Swap], use: F64, in_ram: npt.NDArray[np.bool_]) -> list[Swap]:
    """The same with what is dropped for those that come from the file; in_ram (layers, experts)."""
    gets = {(each.layer, each.gets) for each in swaps}
    coldest: dict[int, list[int]] = {}
    found = []
    for each in swaps:
        if in_ram[each.layer, each.gets]:
            found.append(each)
            continue
        of_layer = use[each.layer]
        if each.layer not in coldest:
            held = np.flatnonzero(in_ram[each.layer]).tolist()
            coldest[each.layer] = sorted((e for e in held if (each.layer, e) not in gets), key=lambda e: -of_layer[e])
        left = coldest[each.layer]
        drops = left.pop() if left and of_layer[left[-1]] < of_layer[each.leaves] else -1
        found.append(replace(each, drops=drops))
    return found

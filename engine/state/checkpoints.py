"""Checkpoints: where a read takes one, and which one goes when there is no room. Decisions only; nothing is copied.

Kinds    root      the first turn boundary at or after `root` tokens of a prompt that is read from its start
         pin       the end of a prefix that a request says is shared
         turn      the last turn boundary of a prompt: what is left when the client drops the answer's reasoning
         periodic  every `every` tokens, where a chunk ends
Units    positions in tokens: a checkpoint at p holds the first p tokens; a boundary is the position of a turn token
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from strata.kernels.ops import I32

Kind = Literal["periodic", "turn", "root", "pin"]
KINDS: Final[tuple[Kind, ...]] = ("periodic", "turn", "root", "pin")
"""The kinds from the plainest on. Parked files name them by their places here."""
MIN_FOR_PINS: Final = 3
"""Checkpoints below which nothing is pinned: two stay for what is not."""


@dataclass(frozen=True, slots=True)
class CacheRules:
    """`--prompt-cache`: checkpoints kept, 0 = no reuse at all; `--prompt-cache-every` and `-root`, 0 = none."""

    checkpoints: int = 6
    every: int = 16384
    root: int = 2048

    @property
    def reuse(self) -> bool:
        return self.checkpoints > 0

    def pins(self, pin: int, n: int) -> bool:
        """Whether the first `pin` of n prompt tokens can be pinned: places stay for others, two tokens are read."""
        return self.checkpoints >= MIN_FOR_PINS and 0 < pin < n - 1


@dataclass(slots=True, eq=False)
class Checkpoint:
    """tokens int32 (position,): what the state has read; used: when it was taken or last continued from."""

    tokens: I32
    kind: Kind
    used: int

    def again(self, kind: Kind, now: int) -> None:
        """It was asked for once more: it keeps the better of both reasons."""
        self.kind, self.used = max(self.kind, kind, key=KINDS.index), now


def is_prefix(tokens: I32, prompt: I32) -> bool:
    """Whether the prompt begins with the tokens."""
    return len(tokens) <= len(prompt) and np.array_equal(tokens, prompt[: len(tokens)])


def longest_prefix(positions: Iterable[int], tokens: I32, prompt: I32) -> int:
    """The largest of the positions up to which the tokens begin the prompt, leaving one to read; 0 = none."""
    n = min(len(tokens), len(prompt) - 1)
    differing = np.flatnonzero(tokens[:n] != prompt[:n])
    common = int(differing[0]) if len(differing) else n
    return max((p for p in positions if p <= common), default=0)


def due(
    rules: CacheRules, turn_token: int, prompt: I32, begin: int, pin: int, keep: bool, chunk: int = 0
) -> dict[int, Kind]:
    """Where in (begin, len(prompt)) a read from `begin` takes which checkpoint, in ascending order.

    pin     tokens of the shared prefix, 0 = none; ignored unless `rules` can pin it
    keep    False: none but the root
    chunk   tokens that the read takes at a time, 0 = any: periodic ones have no place of their own then
    """
    n, found = len(prompt), dict[int, Kind]()
    if not rules.reuse:
        return found
    boundaries = np.flatnonzero(prompt == turn_token)
    if keep:
        found.update(dict.fromkeys(boundaries[-1:].tolist(), "turn"))
    if rules.root and not begin:
        found.update(dict.fromkeys(boundaries[boundaries >= rules.root][:1].tolist(), "root"))
    if keep and rules.pins(pin, n):
        found[pin] = "pin"
    found = {position: kind for position, kind in found.items() if begin < position < n}
    if keep and rules.every:
        for position in _periodic(rules.every, begin, n, found, chunk):
            found.setdefault(position, "periodic")
    return {position: found[position] for position in sorted(found)}


def _periodic(every: int, begin: int, n: int, stops: Collection[int], chunk: int) -> Iterator[int]:
    """Where in (begin, n) periodic checkpoints lie: `every` tokens apart. Where chunks are short beside that, each at
    the last end of one: a read that stops at `stops` anyway has no chunk more, and the experts that it streams for one
    come no further time."""
    wanted = range((begin // every + 1) * every, n, every)
    if not 0 < 2 * chunk <= every:
        yield from wanted
        return
    at, ahead = begin, sorted(stops)
    for position in wanted:
        while (end := min(at + chunk, next((stop for stop in ahead if stop > at), n), n)) <= position:
            at = end
        if at > begin:
            yield at


def victim(kept: Mapping[int, Checkpoint], of_slots: Collection[int], spared: Collection[int]) -> int | None:
    """The key of the checkpoint that goes next, None when all that there are is `spared`.

    The least recently used of the plain ones; then of those that belong to slots (`of_slots`); then the root that was
    used last; then pins. Pins beyond what leaves two places for others, and older roots, are plain.
    """
    pins = sorted((k for k, c in kept.items() if c.kind == "pin"), key=lambda k: kept[k].used)
    pins = pins[max(0, len(pins) - (len(kept) - MIN_FOR_PINS + 1)) :]
    root = max((k for k, c in kept.items() if c.kind == "root"), key=lambda k: kept[k].used, default=None)

    def worth(key: int) -> tuple[int, int]:
        level = 3 if key in pins else 2 if key == root else 1 if key in of_slots else 0
        return level, kept[key].used

    return min((key for key in kept if key not in spared), key=worth, default=None)

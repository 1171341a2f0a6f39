"""Conversations parked in RAM, and behind it on disk, until a prompt begins with one.

Admission  what the new one supersedes goes (it begins with its tokens); then the least recently used, while the budget,
           the number or the RAM that must stay free is exceeded. What does not fit is not parked: a log line
Restore    only what is intact. Bytes that changed are dropped and counted, and the prompt is read instead
Disk       what is parked is also written there (`disk.py`), so that it outlives a place in RAM, and the engine
Units      bytes; lengths in tokens
Errors     none: a request never fails because of parking
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Final

from strata.engine.log import log
from strata.engine.state.checkpoints import Checkpoint, is_prefix, longest_prefix
from strata.engine.state.disk import ParkingDisk, Shelved
from strata.engine.state.pages import AccountsError
from strata.engine.state.parked import Parked, capture, marks_of
from strata.engine.state.slots import StatePool
from strata.kernels.ops import I32

MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class ParkingRules:
    """`--conversation-cache-*`: bytes of all parked ones, how many, bytes of RAM that stay free; the fewest tokens
    worth parking; the least share of a prompt that a parked one must cover."""

    budget: int
    most: int = 4
    min_free: int = 2560 * MIB
    min_tokens: int = 0
    similarity: float = 0.0


@dataclass(slots=True)
class ParkingCounts:
    """Since the start: conversations captured, not parked, continued, dropped for others, and found damaged."""

    captured: int = 0
    skipped: int = 0
    hits: int = 0
    dropped: int = 0
    damaged: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """A parked conversation of which `length` tokens begin a prompt."""

    length: int
    where: Parked | Shelved


@dataclass(slots=True)
class Parking:
    """`free_ram`: bytes that can be had now without pushing anything out."""

    rules: ParkingRules
    free_ram: Callable[[], int]
    disk: ParkingDisk | None = None
    counts: ParkingCounts = field(default_factory=ParkingCounts)
    _parked: list[Parked] = field(default_factory=list)
    """The least recently used first."""

    @property
    def n_parked(self) -> int:
        return len(self._parked)

    @property
    def n_bytes(self) -> int:
        """Bytes of all that is parked in RAM."""
        return sum(parked.n_bytes for parked in self._parked)

    # -------------------------------------------------------------------------------------------------------- parking

    def park(
        self,
        state: StatePool,
        slot: int,
        tokens: I32,
        checkpoints: dict[int, Checkpoint],
        spared: Parked | None = None,
    ) -> None:
        """Keep the conversation in a slot, which is about to be lost. `spared`: one that is to stay meanwhile."""
        if len(tokens) < max(1, self.rules.min_tokens) or self._has(tokens):
            return
        marks = marks_of(checkpoints, tokens)
        need = tokens.nbytes + state.image_bytes(len(tokens), 1 + len(marks))
        ram = need <= self.rules.budget and self.rules.most > 0
        disk = self.disk if self.disk is not None and self.disk.admits(need) else None
        if disk is not None and not ram and disk.has(tokens):
            return
        if disk is None and not ram:
            self._skip(tokens, f"it takes {need // MIB} MiB, the budget is {self.rules.budget // MIB}")
            return
        if ram:
            self._supersede(tokens)
        if not self._make_room(need if ram else 0, need, spared):
            self._skip(tokens, f"{self.free_ram() // MIB} MiB of RAM are free, {self.rules.min_free // MIB} must stay")
            return
        try:
            parked = capture(state, slot, tokens, marks)
        except MemoryError:
            self._skip(tokens, f"there are no {need // MIB} MiB of RAM")
            return
        self.counts.captured += 1
        log(f"parked: {len(tokens)} tokens, {need // MIB} MiB; {self.free_ram() // MIB} MiB of RAM are free")
        if disk is not None:
            disk.keep(parked)
        if ram:
            self._parked.append(parked)
            if self.free_ram() < self.rules.min_free:
                self._drop(parked, "RAM is short")

    def _has(self, tokens: I32) -> bool:
        """Whether just this is parked in RAM; then it counts as used now."""
        same = next((p for p in self._parked if len(p.tokens) == len(tokens) and is_prefix(p.tokens, tokens)), None)
        if same is not None:
            self._use(same)
        return same is not None

    def _supersede(self, tokens: I32) -> None:
        self._parked = [parked for parked in self._parked if not is_prefix(parked.tokens, tokens)]

    def _make_room(self, in_budget: int, need: int, spared: Parked | None) -> bool:
        """Drop what must go; False when it does not help."""
        rules = self.rules

        def over() -> bool:
            budget = in_budget > 0 and (self.n_bytes + in_budget > rules.budget or self.n_parked >= rules.most)
            return budget or self.free_ram() < need + rules.min_free

        while over():
            oldest = next((parked for parked in self._parked if parked is not spared), None)
            if oldest is None:
                return False
            self._drop(oldest, "for a newer one")
        return True

    def _drop(self, parked: Parked, why: str) -> None:
        """Take it out of RAM; where there is a disk, once it is there."""
        if self.disk is not None:
            self.disk.settle(parked)
        self._remove(parked)
        self.counts.dropped += 1
        log(f"parked: {len(parked.tokens)} tokens dropped from RAM, {why}")

    def _remove(self, parked: Parked) -> None:
        self._parked = [each for each in self._parked if each is not parked]

    def _skip(self, tokens: I32, why: str) -> None:
        self.counts.skipped += 1
        log(f"not parked: {len(tokens)} tokens, {why}")

    def _use(self, parked: Parked) -> None:
        self._remove(parked)
        self._parked.append(parked)

    # ------------------------------------------------------------------------------------------------------- continue

    def find(self, prompt: I32, longer_than: int) -> Found | None:
        """The parked conversation, or checkpoint of one, that is the longest beginning of the prompt and leaves a token
        to read; in RAM rather than on disk. None unless it is longer than that."""
        least = math.ceil(self.rules.similarity * len(prompt)) - 1
        best, most = None, max(longer_than, least)
        held: list[Parked | Shelved] = [*self._parked]
        held += () if self.disk is None else self.disk.shelved
        for where in held:
            length = longest_prefix(where.positions, where.tokens, prompt)
            if length > most:
                best, most = Found(length, where), length
        return best

    def fetch(self, found: Found) -> Parked | None:
        """What was found, every byte of it as it was. None, and it is not found again, when it is not."""
        where = found.where
        if isinstance(where, Shelved):
            parked = None if self.disk is None else self.disk.load(where)
        elif where.is_intact:
            parked = where
            self._use(where)
        else:
            parked = None
            self._remove(where)
            self.counts.damaged += 1
            log(f"parked: {len(where.tokens)} tokens dropped, their checksum is wrong")
        self.counts.hits += parked is not None
        return parked

    def close(self) -> None:
        """Until everything that goes to the disk is there."""
        if self.disk is not None:
            self.disk.settle()

    def figures(self) -> dict[str, int]:
        """Counts for the log and the metrics: of RAM, and of the disk as disk_.."""
        found = {"parked": self.n_parked, "parked_mib": self.n_bytes // MIB, **asdict(self.counts)}
        if self.disk is not None:
            found |= {f"disk_{name}": n for name, n in asdict(self.disk.counts).items()}
            found["disk_parked"] = len(self.disk.shelved)
        return found

    def check(self) -> None:
        """AccountsError when more is parked than may be."""
        if self._parked and (self.n_bytes > self.rules.budget or self.n_parked > self.rules.most):
            raise AccountsError(
                f"{self.n_parked} conversations of {self.n_bytes} bytes are parked, "
                f"{self.rules.most} of {self.rules.budget} may be"
            )

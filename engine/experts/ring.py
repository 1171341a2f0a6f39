"""How a prompt gets at the experts that VRAM lacks: a ring of two buffers in the card's memory, filled ahead.

A layer's missing experts come in *rounds* of as many as a buffer holds. While the products of one round read one
buffer, the next round's experts are copied into the other, on a stream of their own, also while attention is computed.
Rounds are numbered through all layers, and a round always uses the same buffer, so tables of addresses are made once.

A round's experts lie in RAM, or in the file only: then the host brings them to the copies' stream itself (reader.py).
Long prompts take all rounds; of shorter ones those of the file come as far as somebody picked their experts.

Where another pass follows that takes all rounds, its first ones come behind the last ones of this pass, beside all that
lies between: then copies may be under way when a pass is over, and whoever wants the memory says `forget` first.

Order    a copy waits for the products that read its buffer last, products wait for the copy of their round
Cost     a copy and two events a round; the last rounds of a pass stay, and are not copied again when they come next
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy.typing as npt

from strata.engine.device.driver import Array, Driver
from strata.engine.experts.homes import Mask
from strata.engine.experts.reader import FileRound
from strata.kernels.cuda.mixture import Bank

BUFFERS: Final = 2
FEW: Final = 8
"""A round of less than this part of a buffer is no round of its own."""
Banks = tuple[Bank, Bank, Bank]
"""Gate, up, down."""


@dataclass(frozen=True, slots=True, eq=False)
class Round:
    """source: bytes in RAM (page-locked) of some experts of a layer, as they are to lie in the buffer, or those of the
    file · banks: with the addresses that these have there. Of a layer's first round also those of the experts in the
    cache."""

    source: npt.NDArray[Any] | FileRound
    banks: Banks


class Ring:
    """memory uint8 (2 * n,): two buffers of n bytes. sent: bytes that were copied there from RAM so far · live: whether
    anything is copied; what passes compute without means nothing · goes_on: whether another pass follows this one."""

    def __init__(self, driver: Driver, memory: Array) -> None:
        self._driver = driver
        half = int(memory.size) // BUFFERS
        self.buffers = [memory[i * half : (i + 1) * half] for i in range(BUFFERS)]
        self._copies = driver.uploader()
        self._landed = [self._copies.event() for _ in range(BUFFERS)]
        self._read = [driver.event() for _ in range(BUFFERS)]
        self._holds = [-1] * BUFFERS  # the round whose experts a buffer holds, or will when its copy has landed
        self._rounds: list[Round] = []
        self.sent = 0
        self.live = True
        self.goes_on = False

    def __len__(self) -> int:
        return len(self._rounds)

    @property
    def room(self) -> int:
        """Bytes of a buffer."""
        return int(self.buffers[0].size)

    def buffer_of(self, number: int) -> Array:
        """The buffer of a round."""
        return self.buffers[number % BUFFERS]

    def add(self, rounds: Sequence[Round]) -> range:
        """The rounds of a layer; their numbers."""
        first = len(self._rounds)
        self._rounds += rounds
        return range(first, len(self._rounds))

    def forget(self) -> None:
        """What RAM holds has changed, or will by what is queued, or the memory is to be something else's: that comes
        behind the copies under way, and the next ones behind all that is queued, and of everything."""
        for landed, number in zip(self._landed, self._holds, strict=True):
            if number >= 0:
                self._driver.wait_for(landed)
        self._holds = [-1] * BUFFERS
        for event in self._read:
            event.record()

    def take(self, numbers: range) -> Iterator[Banks]:
        """The banks of these rounds, one after the other. Products queued until the next one is asked for read it."""
        for number in numbers:
            for ahead in range(number, min(number + BUFFERS, len(self._rounds))):
                self._bring(ahead)
            yield from self._given(number)
            if number + BUFFERS < len(self._rounds):
                self._bring(number + BUFFERS)
            elif self.goes_on:
                self._bring(number % BUFFERS)  # the first one of this buffer

    def take_picked(self, numbers: range, picked: Mask) -> Iterator[Banks]:
        """The same of rounds of the file, with only the experts that were picked, (experts,)."""
        for number in numbers:
            if self._bring(number, picked):
                yield from self._given(number)

    def _given(self, number: int) -> Iterator[Banks]:
        """The banks of a round whose copy was queued."""
        if not self.live:
            yield self._rounds[number].banks
            return
        buffer = number % BUFFERS
        self._driver.wait_for(self._landed[buffer])
        yield self._rounds[number].banks
        self._read[buffer].record()

    def _bring(self, number: int, picked: Mask | None = None) -> bool:
        """Queue the copy of a round behind the products that were queued on its buffer so far. False: nothing of it was
        picked."""
        buffer, source = number % BUFFERS, self._rounds[number].source
        if self._holds[buffer] == number or not self.live:
            return True
        if not isinstance(source, FileRound):
            self._copies.wait_for(self._read[buffer])
            self._copies.upload(self.buffers[buffer][: source.size], source)
            self.sent += source.size
        elif experts := source.experts(picked):
            self._copies.wait_for(self._read[buffer])
            source.bring(self._copies, self.buffers[buffer], experts)
        elif picked is not None:
            return False
        self._landed[buffer].record()
        self._holds[buffer] = number if picked is None else -1
        following = self._rounds[(number + 1) % len(self._rounds)].source
        if picked is None and isinstance(following, FileRound):
            following.ask()
        return True


def pieces(missing: Sequence[int], size: int, room: int) -> list[list[int]]:
    """A layer's missing experts of `size` bytes each, in rounds of as many as `room` bytes hold.

    A last one of hardly any would be there before products have read the other buffer, and the link would rest until
    then: it shares with the one before.
    """
    each = room // size
    ends = [*range(each, len(missing), each), len(missing)] if missing else []
    if len(ends) > 1 and FEW * (rest := len(missing) - ends[-2]) < each:
        ends[-2] -= (each - rest) // 2
    return [list(missing[begin:end]) for begin, end in pairwise([0, *ends])]


def ring_bytes(experts: int, largest: int) -> int:
    """Bytes of a ring of so many experts in all its buffers, at least one each."""
    return BUFFERS * max(1, experts // BUFFERS) * largest

"""The state of all slots of a model: pages, recurrent blocks and lengths, under one owner.

Format   keys and values are float32 (`fp32`) or, on a card, of another format (kernels/kv.py)
Units    tokens; bytes where the name says so
Errors   OutOfPages when tokens do not fit; StateTooLarge before an allocation that the machine cannot hold
Cost     `estimate_bytes` is arithmetic; `digest` and `state_bytes` copy a slot's whole state (tests, checks)
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from strata.engine.device.base import Bytes, StateMemory
from strata.engine.device.host import HostMemory
from strata.engine.pack import ModelSpec
from strata.engine.state.pages import (
    AccountsError,
    OutOfPages,
    PagePool,
    frame_bytes,
    page_bytes,
    pages_for,
    staged_bytes,
)
from strata.engine.state.recurrent import Recurrent, recurrent_bytes
from strata.kernels.ops import PAGE

if TYPE_CHECKING:
    from strata.engine.model.rows import Rows


class StateTooLarge(Exception):
    """The state that was asked for does not fit the memory there is. One line."""


@dataclass(frozen=True, slots=True, eq=False)
class StateImage:
    """A slot's state on the host: tokens, bytes of its pages (`PagePool.read`) and of its recurrent block."""

    length: int
    pages: Bytes
    block: Bytes


def pages_of(n_slots: int, max_context: int, n_checkpoints: int = 0) -> int:
    """Pages with which every slot can grow to the whole context while each checkpoint keeps its unfinished page."""
    return n_slots * pages_for(max_context) + n_checkpoints


def frames_of(n_slots: int, max_context: int, n_checkpoints: int, resident: int) -> int | None:
    """Pages whose keys and values are in device memory, of slots with so many resident tokens; None: all."""
    return pages_of(n_slots, resident, n_checkpoints) if 0 < resident < max_context else None


def estimate_bytes(
    spec: ModelSpec,
    n_slots: int,
    max_context: int,
    n_pages: int | None = None,
    kv: str = "fp32",
    sides: int = 1,
    n_checkpoints: int = 0,
    resident: int = 0,
) -> int:
    """Bytes of the arrays of a StatePool of these figures in device memory, without its page tables."""
    pages = pages_of(n_slots, max_context, n_checkpoints) if n_pages is None else n_pages
    frames, staged = frames_of(n_slots, max_context, n_checkpoints, resident), 0
    if frames is not None and frames < pages:
        staged = staged_bytes(spec, pages_for(max_context), kv) - (pages - frames) * frame_bytes(spec, kv)
    return pages * page_bytes(spec, kv) + staged + (sides * n_slots + n_checkpoints) * recurrent_bytes(spec)


def far_bytes(spec: ModelSpec, n_slots: int, max_context: int, n_checkpoints: int, kv: str, resident: int) -> int:
    """Bytes of RAM of such a StatePool."""
    frames, pages = (
        frames_of(n_slots, max_context, n_checkpoints, resident),
        pages_of(n_slots, max_context, n_checkpoints),
    )
    return 0 if frames is None or frames >= pages else pages * frame_bytes(spec, kv)


def require_memory(
    spec: ModelSpec,
    n_slots: int,
    max_context: int,
    free_bytes: int,
    n_checkpoints: int = 0,
    n_pages: int | None = None,
    kv: str = "fp32",
    sides: int = 1,
    resident: int = 0,
) -> None:
    """StateTooLarge unless a StatePool of these figures fits `free_bytes`."""
    needed = estimate_bytes(spec, n_slots, max_context, n_pages, kv, sides, n_checkpoints, resident)
    if needed > free_bytes:
        raise StateTooLarge(
            f"the state of {n_slots} slots of {max_context} tokens takes {needed / 2**30:.2f} GiB, "
            f"{free_bytes / 2**30:.2f} GiB are free; use a smaller context"
        )


class StatePool:
    """`n_slots` slots of up to `max_context` tokens; `n_pages` below the sum of both lets slots compete for pages.

    After the slots come `n_checkpoints` more that no forward pass may name: states are copied there and back.
    `relieve`   asked when pages are short: frees some of what can be spared, or says that there is nothing
    resident    tokens of a slot whose keys and values are in device memory, the rest in RAM; 0: all of them
    """

    def __init__(
        self,
        spec: ModelSpec,
        n_slots: int,
        max_context: int,
        n_pages: int | None = None,
        kv: str = "fp32",
        memory: StateMemory | None = None,
        n_checkpoints: int = 0,
        resident: int = 0,
    ) -> None:
        if n_slots < 1 or max_context < 1 or (n_pages is not None and n_pages < 1):
            raise ValueError(f"a state of {n_slots} slots of {max_context} tokens in {n_pages} pages is empty")
        per_slot = pages_for(max_context)
        self.n_slots = n_slots
        self.n_checkpoints = n_checkpoints
        self.max_context = max_context
        self.relieve: Callable[[], bool] = lambda: False
        self.copied: Callable[[int, int], None] = lambda source, target: None
        """Told when a slot has become a copy of another one."""
        self._epochs = [0] * (n_slots + n_checkpoints)
        self._memory = memory or HostMemory()
        most = pages_of(n_slots, max_context, n_checkpoints) if n_pages is None else n_pages
        frames = frames_of(n_slots, max_context, n_checkpoints, resident)
        self.pages = PagePool(spec, n_slots, per_slot, most, kv, self._memory, n_checkpoints, frames)
        self.recurrent = Recurrent(spec, n_slots, self._memory, n_checkpoints)
        self._lengths = [0] * (n_slots + n_checkpoints)

    def length(self, slot: int) -> int:
        """Tokens in the slot's state: the position of the next one."""
        return self._lengths[slot]

    def epoch(self, slot: int) -> int:
        """Another number whenever the slot holds another sequence; growing is none."""
        return self._epochs[slot]

    def reserve(self, slot: int, n_tokens: int) -> None:
        """Make room for n_tokens more. Raises OutOfPages and leaves everything as it was when there is none."""
        self.reserve_all([(slot, n_tokens)])

    def reserve_all(self, more: Sequence[tuple[int, int]]) -> None:
        """Make room for several slots at once, (slot, tokens more) each: for all of them or for none."""
        totals = [(slot, self._lengths[slot] + n_tokens) for slot, n_tokens in more]
        growing = [(slot, total) for slot, total in totals if total > self.pages.room(slot)]  # seldom any
        for slot, total in totals:
            if total > self.max_context:
                raise OutOfPages(f"slot {slot}: {total} tokens do not fit the context of {self.max_context}")
        if growing:
            self._require(sum(self.pages.missing(slot, total) for slot, total in growing))
            for slot, total in growing:
                self.pages.grow(slot, total)
        self.pages.update()

    def _require(self, pages: int) -> None:
        """OutOfPages unless so many are free, or can be freed."""
        while pages > self.pages.n_free and self.relieve():
            pass
        self.pages.require(pages)

    def copy(self, source: int, target: int) -> None:
        """Make `target` equal to `source`: whole pages by reference, the unfinished one and the recurrent block copied
        on the device. OutOfPages, with everything as it was, when there is no page for the unfinished one."""
        if source != target:
            self._share(source, target, self._lengths[source])
            self.recurrent.copy(source, target)
            self.copied(source, target)

    def branch(self, source: int, target: int, length: int, block: Bytes) -> None:
        """Let `target` hold the first `length` tokens of `source`: pages as in `copy`, the recurrent block, which the
        source has left behind, from the host. OutOfPages, with everything as it was."""
        self._share(source, target, length)
        self.recurrent.write(target, block)

    def _share(self, source: int, target: int, length: int) -> None:
        if length % PAGE and not self.pages.lost_with(target):
            self._require(1)
        self.pages.release(target)
        self.pages.copy(source, target, length)
        self._lengths[target] = length
        self._epochs[target] += 1
        self.pages.update()

    def image(self, slot: int) -> StateImage:
        """A copy of the slot's state on the host. Waits for the device."""
        n = self._lengths[slot]
        return StateImage(n, self.pages.read(slot, pages_for(n)), self.recurrent.read(slot))

    def image_bytes(self, length: int, blocks: int = 1) -> int:
        """Bytes of an image of so many tokens, with the recurrent blocks of several positions."""
        return pages_for(length) * self.pages.page_bytes + blocks * self.recurrent.n_bytes

    def restore(self, slot: int, image: StateImage, length: int | None = None, block: Bytes | None = None) -> None:
        """Make the slot what the image was taken of, or its first `length` tokens with the block of that position.

        OutOfPages, with everything as it was, when there are no pages for it; ValueError for an image of another size.
        """
        n, block = image.length if length is None else length, image.block if block is None else block
        sizes = len(image.pages) + len(block), self.image_bytes(image.length)
        if not 0 <= n <= min(self.max_context, image.length) or sizes[0] != sizes[1]:
            raise ValueError(f"{n} of {image.length} tokens and {sizes[0]} bytes of an image, {sizes[1]} are wanted")
        self._require(max(0, pages_for(n) - self.pages.lost_with(slot)))
        self.pages.release(slot)
        self.pages.grow(slot, n)
        self.pages.write(slot, pages_for(n), image.pages)
        self.recurrent.write(slot, block)
        self._lengths[slot] = n
        self._epochs[slot] += 1
        self.pages.update()

    def located(self, rows: Rows) -> Rows:
        """The rows with segments that name rows of the recurrent state."""
        segments = rows.segments.copy()
        segments[:, 0] = [self.recurrent.name(slot) for slot in rows.segments[:, 0].tolist()]
        return replace(rows, segments=segments)

    def advance(self, slot: int, n_tokens: int) -> None:
        """Count n_tokens whose state the last pass has written into reserved room."""
        self._lengths[slot] += n_tokens
        self.recurrent.advance(slot)

    def reset(self, slot: int) -> None:
        """Empty the slot: nothing of its sequence survives."""
        self.pages.release(slot)
        self.recurrent.reset(slot)
        self._lengths[slot] = 0
        self._epochs[slot] += 1

    def drop(self, slot: int) -> None:
        """Give the slot's pages back. Its recurrent block means nothing until a reset, or a copy to it."""
        self.pages.release(slot)
        self._lengths[slot] = 0
        self._epochs[slot] += 1

    def state_bytes(self, slot: int) -> bytes:
        """All that the next token depends on: length, recurrent block, keys, values, index keys; no page numbers."""
        n = self._lengths[slot]
        table = self.pages.tables[slot, : pages_for(n)]
        parts = [n.to_bytes(8, "little"), self.recurrent.read(slot).tobytes()]
        for i, layer in enumerate(self.pages.layers):
            for name in ("k", "v", "raw", "block"):
                valid = n * getattr(layer, name).shape[1] // PAGE
                if valid:
                    each = (self.pages.part(i, name, page)[0] for page in table.tolist())
                    parts.append(np.concatenate([self._memory.read(array) for array in each])[:valid].tobytes())
        return b"".join(parts)

    def digest(self, slot: int) -> str:
        """A short name for `state_bytes`: equal states have equal digests."""
        return hashlib.blake2b(self.state_bytes(slot), digest_size=16).hexdigest()

    def check(self) -> None:
        """AccountsError unless pages balance and every slot's tokens lie in pages that it holds."""
        self.pages.check()
        for slot, n in enumerate(self._lengths):
            if pages_for(n) > self.pages.held(slot) or n > self.max_context:
                raise AccountsError(f"slot {slot} has {n} tokens in {self.pages.held(slot)} pages of {PAGE}")

"""Keys, values and indexer keys of all attention layers, in pages of 64 tokens from one pool.

A slot holds a page table; one table serves every attention layer, since all layers have as many tokens. Whole pages
can be held by several slots (a shared prefix): a page returns to the free list with its last reference.

With fewer frames than pages, the pages that came last are in device memory, and the others in RAM, where each page has
a home (engine/state/frames.py). Blocks of indexer keys are all in device memory.

Shapes   tables int32 (slots, pages of a slot), -1 = none; layers: `ops.AttentionPages`, keys and values as `kv` says
         (kernels/kv.py), indexer keys always float32
Errors   OutOfPages before anything is taken; AccountsError from `check`
Cost     growing by a page is a pop from a list; the arrays are allocated once
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Final

import numpy as np

from strata.engine.device.base import Bytes, StateMemory
from strata.engine.device.host import HostMemory
from strata.engine.pack import ModelSpec
from strata.engine.state.frames import Frames
from strata.kernels.kv import KV
from strata.kernels.ops import I32, PAGE, AttentionPages, FarPages

_FLOAT: Final = np.dtype(np.float32)
_FRAMED: Final = ("k", "v", "raw")
"""Arrays of a page that may be in RAM."""
_ARRAYS: Final = (*_FRAMED, "block")


class OutOfPages(Exception):
    """No free page, or no room in a slot's table, for the tokens that are to come. One line."""


class AccountsError(Exception):
    """Free and held pages do not add up: a fault of the engine, never of a request."""


def pages_for(tokens: int) -> int:
    """Pages that hold `tokens` tokens."""
    return -(-tokens // PAGE)


Shaped = tuple[tuple[int, ...], np.dtype[Any]]
"""Shape and type of an array."""


def page_shapes(spec: ModelSpec, kv: str = "fp32") -> Iterator[dict[str, Shaped]]:
    """The arrays of one page of each attention layer, by the names of `AttentionPages`."""
    for layer in spec.attention_layers:
        r = spec.ratios[layer]
        keys, values = (((PAGE, spec.kv_heads, form.row(spec.head_dim)), form.dtype) for form in KV[kv])
        yield {
            "k": keys,
            "v": values,
            "raw": ((PAGE, spec.index_dim), _FLOAT),
            "block": ((PAGE // r if r else 0, spec.index_dim), _FLOAT),
        }


def _bytes(array: Shaped) -> int:
    shape, kind = array
    return int(np.prod(shape)) * kind.itemsize


def page_bytes(spec: ModelSpec, kv: str = "fp32") -> int:
    """Bytes of one page over all attention layers."""
    return sum(_bytes(array) for layer in page_shapes(spec, kv) for array in layer.values())


def frame_bytes(spec: ModelSpec, kv: str = "fp32") -> int:
    """Of these, what may be in RAM: all but blocks of indexer keys."""
    return sum(_bytes(layer[name]) for layer in page_shapes(spec, kv) for name in _FRAMED)


def staged_bytes(spec: ModelSpec, pages: int, kv: str = "fp32") -> int:
    """Of device memory where some pages are in RAM: what a prompt brings of a layer's keys and values."""
    return pages * max((_bytes(layer["k"]) + _bytes(layer["v"]) for layer in page_shapes(spec, kv)), default=0)


class PagePool:
    """The pages of `n_slots` slots of at most `pages_per_slot` pages each; `layers` in the order of the model.

    After the slots come `n_checkpoints` more, which hold pages but are not shown to kernels.
    n_frames    pages that device memory holds at once, None: all
    """

    def __init__(
        self,
        spec: ModelSpec,
        n_slots: int,
        pages_per_slot: int,
        n_pages: int,
        kv: str = "fp32",
        memory: StateMemory | None = None,
        n_checkpoints: int = 0,
        n_frames: int | None = None,
    ) -> None:
        self._memory = memory = memory or HostMemory()
        self.n_pages = n_pages
        self.page_bytes = page_bytes(spec, kv)
        self.tables: I32 = np.full((n_slots + n_checkpoints, pages_per_slot), -1, np.int32)
        """The page tables of slots and checkpoints, for reading."""
        self._mirror = memory.mirror((n_slots, pages_per_slot), -1)
        self._changed = False
        self._frames = None if n_frames is None or n_frames >= n_pages else Frames(n_frames, n_pages)
        self._numbers = None if self._frames is None else memory.mirror((n_slots, pages_per_slot), -1)
        self.layers = self._layers(spec, kv)
        self._free = list(range(n_pages - 1, -1, -1))
        self._references = [0] * n_pages
        self._held = [0] * (n_slots + n_checkpoints)

    def _layers(self, spec: ModelSpec, kv: str) -> tuple[AttentionPages, ...]:
        memory, shapes = self._memory, list(page_shapes(spec, kv))
        if self._frames is None or self._numbers is None:
            return tuple(
                AttentionPages(
                    **{name: memory.zeros((self.n_pages, *shape), of) for name, (shape, of) in arrays.items()}
                )
                for arrays in shapes
            )
        order = memory.mirror(self._numbers.host.shape, 0)
        order.host[...] = np.arange(order.host.shape[1])
        order.update()
        staged: dict[tuple[str, Shaped], Any] = {}

        def stage(name: str, array: Shaped) -> Any:
            if (name, array) not in staged:
                staged[name, array] = memory.zeros((order.host.shape[1], *array[0]), array[1])
            return staged[name, array]

        layers = []
        for arrays in shapes:
            near = {
                name: memory.zeros((self._frames.n if name in _FRAMED else self.n_pages, *shape), of)
                for name, (shape, of) in arrays.items()
            }
            homes = {name: memory.far((self.n_pages, *arrays[name][0]), arrays[name][1]) for name in _FRAMED}
            stages = {f"staged_{name}": stage(name, arrays[name]) for name in ("k", "v")}
            far = FarPages(**homes, **stages, numbers=self._numbers.array, order=order.array)
            layers.append(AttentionPages(**near, far=far))
        return tuple(layers)

    @property
    def kernel_tables(self) -> Any:
        """The page tables of the slots as kernels see them: at one address, and as of the last `update`."""
        return self._mirror.array

    def update(self) -> None:
        """Show the kernels what has changed in the tables."""
        if self._changed:
            tables = self.tables[: len(self._mirror.host)]
            if self._frames is None or self._numbers is None:
                self._mirror.host[...] = tables
            else:
                self._numbers.host[...] = tables
                self._numbers.update()
                self._mirror.host[...] = self._frames.named(tables)
            self._mirror.update()
        self._changed = False

    @property
    def arrays(self) -> Iterator[Any]:
        """All arrays of pages in device memory, (pages, ..), without those of size 0."""
        for layer in self.layers:
            yield from (array for name in _ARRAYS if (array := getattr(layer, name)).size)

    @property
    def n_far(self) -> int:
        """Pages in use whose keys and values are in RAM."""
        return 0 if self._frames is None else sum(map(bool, self._references)) - self._frames.used

    def part(self, layer: int, name: str, page: int, n: int = 1) -> Any:
        """Where an array of n pages lies that are `together`."""
        pages = self.layers[layer]
        if name not in _FRAMED or self._frames is None or pages.far is None:
            return getattr(pages, name)[page : page + n]
        at = self._frames.place[page]
        return getattr(pages, name)[at : at + n] if at >= 0 else getattr(pages.far, name)[page : page + n]

    def _enter(self, page: int) -> None:
        """A page comes into use: its keys and values get a frame, and those of the page that has had one for longest go
        to RAM if there is no other."""
        if self._frames is None:
            return
        leaving = self._frames.enter(page)
        if leaving is None:
            return
        left, frame = leaving
        for layer in self.layers:
            for name in _FRAMED:
                self._memory.copy(getattr(layer.far, name)[left], getattr(layer, name)[frame])

    @property
    def n_free(self) -> int:
        return len(self._free)

    def held(self, slot: int) -> int:
        """Pages in the slot's table."""
        return self._held[slot]

    def room(self, slot: int) -> int:
        """Tokens that the slot's pages hold."""
        return self._held[slot] * PAGE

    def missing(self, slot: int, tokens: int) -> int:
        """Pages that the slot lacks to hold `tokens` tokens in total. OutOfPages when its table is too short."""
        wanted, most = pages_for(tokens), self.tables.shape[1]
        if wanted > most:
            raise OutOfPages(f"slot {slot}: {tokens} tokens do not fit its {most * PAGE}; use a larger context")
        return max(0, wanted - self._held[slot])

    def require(self, n: int) -> None:
        """OutOfPages unless n pages are free."""
        if n > len(self._free):
            raise OutOfPages(
                f"{n} more pages of {PAGE} tokens are needed, {len(self._free)} of {self.n_pages} are free; "
                "end a conversation or use a larger pool"
            )

    def grow(self, slot: int, tokens: int) -> None:
        """Give the slot the pages it lacks to hold `tokens` tokens in total."""
        n = self.missing(slot, tokens)
        self.require(n)
        self._changed |= n > 0
        for _ in range(n):
            page = self._free.pop()
            self._enter(page)
            self._references[page] = 1
            self.tables[slot, self._held[slot]] = page
            self._held[slot] += 1

    def share(self, source: int, target: int, n: int) -> None:
        """Let the empty slot `target` hold the first n pages of `source`; full ones, which nobody writes again."""
        if self._held[target] or n > self._held[source]:
            raise AccountsError(f"{n} of {self._held[source]} pages to a slot with {self._held[target]}")
        self._changed = True
        for i, page in enumerate(self.tables[source, :n]):
            self._references[page] += 1
            self.tables[target, i] = page
        self._held[target] = n

    def lost_with(self, slot: int) -> int:
        """Pages that nobody else holds: what releasing the slot would free."""
        return sum(self._references[page] == 1 for page in self.tables[slot, : self._held[slot]].tolist())

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Let the empty slot `target` hold the first `tokens` tokens of `source`: whole pages are shared, of the last,
        unfinished one there is a copy. OutOfPages when there is no page for it."""
        whole, unfinished = divmod(tokens, PAGE)
        self.require(unfinished > 0)
        self.share(source, target, whole)
        if unfinished:
            self.grow(target, tokens)
            page, given = int(self.tables[target, whole]), int(self.tables[source, whole])
            for i, name in self._names():
                self._memory.copy(self.part(i, name, page)[0], self.part(i, name, given)[0])

    def read(self, slot: int, n: int) -> Bytes:
        """The first n pages of the slot, array by array."""
        image = np.empty(n * self.page_bytes, np.uint8)
        for part, pages in self._parts(slot, n, image, n):
            self._memory.download(part, pages)
        return image

    def write(self, slot: int, n: int, image: Bytes) -> None:
        """Set the first n pages of the slot to the first n of what `read` gave."""
        whole, rest = divmod(len(image), self.page_bytes)
        if rest or n > whole:
            raise ValueError(f"{n} pages of {self.page_bytes} bytes from an image of {len(image)}")
        for part, pages in self._parts(slot, n, image, whole):
            self._memory.upload(pages, part)

    def _parts(self, slot: int, n: int, image: Bytes, n_image: int) -> Iterator[tuple[Bytes, Any]]:
        """The pieces of an image of n_image pages that belong to the slot's first n, neighbours in one piece."""
        table = self.tables[slot, :n]
        apart = np.diff(table) != 1
        if self._frames is not None:
            place = self._frames.place[table]
            near = place >= 0
            apart |= (near[1:] != near[:-1]) | (near[1:] & (np.diff(place) != 1))
        edges = [0, *(np.flatnonzero(apart) + 1).tolist(), n] if n else [0]
        begin = 0
        for i, name in self._names():
            size = getattr(self.layers[i], name)[0].nbytes
            for first, end in pairwise(edges):
                yield (
                    image[begin + first * size : begin + end * size],
                    self.part(i, name, int(table[first]), end - first),
                )
            begin += n_image * size

    def _names(self) -> Iterator[tuple[int, str]]:
        """Layers and arrays of a page that are not empty."""
        for i, layer in enumerate(self.layers):
            yield from ((i, name) for name in _ARRAYS if getattr(layer, name).size)

    def release(self, slot: int) -> None:
        """Take all pages from the slot; those without another holder are free again."""
        for page in self.tables[slot, : self._held[slot]].tolist():
            self._references[page] -= 1
            if not self._references[page]:
                self._free.append(page)
                if self._frames is not None:
                    self._frames.leave(page)
        self.tables[slot] = -1
        self._changed = True
        self._held[slot] = 0

    def check(self) -> None:
        """AccountsError unless tables, references and the free list tell the same story."""
        counted = [0] * self.n_pages
        for slot, held in enumerate(self._held):
            table = self.tables[slot].tolist()
            if any(page != -1 for page in table[held:]) or any(not 0 <= page < self.n_pages for page in table[:held]):
                raise AccountsError(f"slot {slot} holds {held} pages, its table says {table}")
            for page in table[:held]:
                counted[page] += 1
        if counted != self._references:
            wrong = [p for p in range(self.n_pages) if counted[p] != self._references[p]]
            raise AccountsError(f"pages {wrong} have other references than tables that name them")
        if sorted(self._free) != [p for p in range(self.n_pages) if not counted[p]]:
            raise AccountsError(f"{len(self._free)} pages are listed free, {counted.count(0)} of {self.n_pages} are")
        fault = None if self._frames is None else self._frames.faults(counted)
        if fault is not None:
            raise AccountsError(fault)

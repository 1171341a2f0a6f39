"""The experts of a model on a card that does not hold them all.

An expert lies in a slot of the expert cache, in page-locked RAM, or in the mapped file only. Each layer has a table on
the card with the addresses of its experts' gate, up and down, wherever they are: windows bring missing ones over PCIe
to `staging` (kernels/cuda/fetch.py), short prompts read them in place, long prompts through the ring. Those in the file
are computed by the processor for windows (helpers.py), and come through the ring for all prompts. The products are the
same ones, so where an expert lies never changes a bit.

    store = ExpertStore(device, placement, cache, ring=...)
    stacks = store.bind(layer, stacks)        # for every layer in order
    device.load() ... device.loaded(); store.loaded()
    store.swap(swaps)                         # between windows and prompts

Swaps are queued on the stream of the work: what was queued before reads the old places, what comes later the new ones.
Slots at the end of the cache may be lent (lending.py): their bytes have twins in RAM, from which they are also loaded.

Memory   page-locked: experts in RAM, two buffers for those of the file, tables
Units    bytes
Errors   DeviceError: memory of the card or RAM that is not there, with the flag that helps
Cost     RAM is locked in pieces of a layer, and the log says how long that takes; the bytes come with the
         other weights, and those of slot 0 are read back. A swap: its bytes over PCIe both ways
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from strata.engine.device.arena import ALIGNMENT, GIB
from strata.engine.device.driver import Array, Driver
from strata.engine.device.loading import Copy, flat
from strata.engine.experts.adapt import Swap
from strata.engine.experts.helpers import HostExperts
from strata.engine.experts.homes import Homes
from strata.engine.experts.placement import Placement
from strata.engine.experts.plan import IN_PLACE
from strata.engine.experts.reader import FileReader, FileRound, Queue, matrices
from strata.engine.experts.ring import Banks, Ring, Round, pieces
from strata.engine.log import log
from strata.engine.memory.card import STREAM_MIN
from strata.kernels.cuda.arguments import address
from strata.kernels.cuda.fetch import Stage
from strata.kernels.cuda.mixture import Bank, Placed, Tally
from strata.kernels.cuda.plans import WINDOW_ROWS
from strata.kernels.formats import Weight

REPORT_S: Final = 5.0
Bytes = npt.NDArray[np.uint8]


class Card(Protocol):
    """What the store needs of a device."""

    driver: Driver

    def fixed(self, n_bytes: int) -> Array: ...
    def promise(self, copy: Copy) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    """stacks: of the file · ram: its experts in RAM · rounds: address of the buffer, first place and number of each ·
    host, card: the tables, uint64 (IN_PLACE + rounds, 3, experts), the first ones for reading in place: of windows, and
    of prompts; `host` is page-locked."""

    stacks: tuple[Weight, ...]
    homes: Homes
    ram: Bytes
    rounds: tuple[tuple[int, int, int], ...]
    host: npt.NDArray[np.uint64]
    card: Array


class ExpertStore:
    """cache: of the slots, uint8 of zeros · ring: memory of the ring, uint8; a number: it is the last so many bytes
    of the cache, which whoever streams has borrowed · stream_min: rows from which a chunk reads missing experts through
    the ring · helpers: who computes a share of those that windows miss · staging: memory that windows bring the others
    to, uint8.

    hits       of the rows of the last window: picks that lay in the cache, and those that the processor computed
    counters   int32 (layers, experts + 2): picks of windows so far; behind them the missing experts that they have
               read, and those that the processor has computed
    """

    def __init__(
        self,
        card: Card,
        placement: Placement,
        cache: Array,
        ring: Array | int,
        stream_min: int = STREAM_MIN,
        helpers: HostExperts | None = None,
        staging: Array | None = None,
    ) -> None:
        self.placement = placement
        self._card = card
        self._driver = card.driver
        self._stream_min = stream_min
        self.helpers = helpers
        self._staging = staging
        self._cache = cache
        self._ring = Ring(card.driver, self._cache[self._cache.size - ring :] if isinstance(ring, int) else ring)
        self._ring.live = False  # until there is something to copy
        largest = max(size.n_bytes for size in placement.sizes)
        self._reader = FileReader(card.driver, largest) if placement.filed.any() else None
        self.hits = card.fixed(4 * 2 * WINDOW_ROWS).view(np.int32).reshape(2, WINDOW_ROWS)
        layers, experts = placement.begins.shape
        self.counters = card.fixed(4 * layers * (experts + 2)).view(np.int32).reshape(layers, experts + 2)
        self._spare = card.fixed(largest)
        self._layers: list[_Layer] = []
        self._stale: set[int] = set()  # layers whose tables of rounds are not those of their homes
        self._swapped = card.driver.event()
        self._locked = 0
        self._locking = 0.0
        self._reported = time.perf_counter()

    @property
    def streamed(self) -> int:
        """Bytes that have been sent through the ring, from RAM and from the file."""
        return self._ring.sent + self.read_in_file

    @property
    def read_in_file(self) -> int:
        """Bytes of experts of the file that have been brought to the card."""
        return 0 if self._reader is None else self._reader.sent

    @property
    def reads_file(self) -> bool:
        """Whether some experts lie in the file only, so that every prompt needs the ring."""
        return self._reader is not None

    @property
    def in_ram(self) -> npt.NDArray[np.bool_]:
        """Which experts lie in RAM, (layers, experts)."""
        return np.stack([layer.homes.in_ram for layer in self._layers])

    @property
    def resident(self) -> npt.NDArray[np.bool_]:
        """Which experts lie in the cache, (layers, experts)."""
        return np.stack([layer.homes.begins >= 0 for layer in self._layers])

    def bind(self, layer: int, stacks: Sequence[Weight]) -> tuple[Weight, ...]:
        """Gate, up and down of a layer, as they lie from now on: their bytes are promised to `load`."""
        size = self.placement.sizes[layer]
        place = self.placement
        homes = Homes.of(size, place.begins[layer], place.spare_of(layer), place.in_ram[layer], place.twins(layer))
        ram = self._lock(layer)
        for expert in np.flatnonzero(~place.filed[layer]).tolist():
            begin = int(homes.begins[expert])
            at = int(homes.places[expert]) if begin < 0 else homes.twin(begin)
            if at is None:
                self._promise(stacks, expert, size.begins, self._cache[begin : begin + size.n_bytes], host=False)
            else:
                self._promise(stacks, expert, size.begins, ram[at * size.n_bytes : (at + 1) * size.n_bytes], host=True)
        return self._bound(layer, stacks, homes, ram)

    def _bound(self, layer: int, stacks: Sequence[Weight], homes: Homes, ram: Bytes) -> tuple[Weight, ...]:
        """The stacks with their banks, behind the layer's tables and rounds."""
        n_bytes, locked = homes.size.n_bytes, range(homes.locked)
        filed = range(homes.locked, homes.n_places)
        cut = [part for of in (locked, filed) for part in pieces(of, n_bytes, self._ring.room)]
        parts = [(part[0], len(part)) for part in cut]
        buffers = [address(self._ring.buffer_of(len(self._ring) + i)) for i in range(len(parts))]
        shape = IN_PLACE + len(parts), 3, stacks[0].experts
        host = self._driver.pinned(8 * int(np.prod(shape))).view(np.uint64).reshape(shape)
        card = self._card.fixed(host.nbytes).view(np.uint64).reshape(shape)
        rounds = tuple((buffer, first, n) for buffer, (first, n) in zip(buffers, parts, strict=True))
        self._layers.append(_Layer(tuple(stacks), homes, ram, rounds, host, card))
        self._write_places(self._layers[-1])
        self._stale.add(layer)
        banks, for_prompts, *of_rounds = (_banks(stacks, table) for table in card)
        sources = [self._source(self._layers[-1], *part) for part in parts]
        numbers = self._ring.add([Round(*each) for each in zip(sources, of_rounds, strict=True)])
        of_file = numbers[len(numbers) - sum(isinstance(source, FileRound) for source in sources) :]
        begin = address(self._cache)
        use, reads = self.counters[layer, :-2], self.counters[layer, -2:]
        tally = Tally(self.hits, use, reads, begin, begin + self._cache.size, layer == 0)
        helper = None if self.helpers is None else self.helpers.bind(layer, stacks, homes.size, ram, self._cache)
        take = partial(self._take, layer, for_prompts, numbers, of_file)
        stage = self._stage(layer, begin)
        gate = replace(banks[0], rounds=take, tally=tally, helper=helper, stage=stage)
        return tuple(Placed(w.type, w.shape, w.data, bank) for w, bank in zip(stacks, (gate, *banks[1:]), strict=True))

    def _source(self, layer: _Layer, first: int, n: int) -> Bytes | FileRound:
        """Of the round of n places."""
        if self._reader is not None and layer.homes.in_file(first):
            return FileRound(self._reader, layer.stacks, layer.homes, first, n)
        n_bytes = layer.homes.size.n_bytes
        return layer.ram[first * n_bytes : (first + n) * n_bytes]

    def _stage(self, layer: int, cache: int) -> Stage | None:
        """Where windows bring a layer's experts from RAM; None where they lack none, or read them in place."""
        if self._staging is None or (self.placement.begins[layer] >= 0).all():
            return None
        size = self.placement.sizes[layer]
        slots = int(self._staging.size) // size.n_bytes
        return Stage(self._staging, slots, size.n_bytes, size.begins, cache, cache + self._cache.size)

    def load(self) -> None:
        """All layers are bound: bytes come, and windows may."""
        if self.helpers is not None:
            self.helpers.start()

    def close(self) -> None:
        """Stop what runs beside the caller."""
        if self.helpers is not None:
            self.helpers.close()

    def loaded(self) -> None:
        """All bytes are there: prompts may bring experts over."""
        self._ring.live = True
        self._ring.forget()
        if self.helpers is not None and self.helpers.asks:
            self.helpers.measured(self._spare)

    def forget_streamed(self) -> None:
        """The ring's memory was something else's meanwhile, or will be: what is queued from now on comes behind all
        copies there, and the next of them behind all that is queued."""
        self._ring.forget()

    def goes_on(self, on: bool) -> None:
        """Whether the next pass is followed by one that streams as well, with nothing between them as a rule: it brings
        the first experts of that one."""
        self._ring.goes_on = on

    def homes(self, layer: int) -> Homes:
        """Where the experts of a layer lie. Who changes it calls `changing` before and `moved` behind it."""
        return self._layers[layer].homes

    @property
    def cache(self) -> Array:
        """The memory of all slots."""
        return self._cache

    def slot(self, layer: int, begin: int) -> Array:
        """The bytes of a slot of the cache that a layer's expert has."""
        return self._cache[begin : begin + self.placement.sizes[layer].n_bytes]

    def place(self, layer: int, place: int) -> Bytes:
        """The bytes of a place in RAM."""
        n = self.placement.sizes[layer].n_bytes
        return self._layers[layer].ram[place * n : (place + 1) * n]

    def bring(self, queue: Queue, layer: int, expert: int, begin: int) -> None:
        """Queue the copy of an expert that has a place to a slot of the cache, and to the slot's twin."""
        homes, slot = self.homes(layer), self.slot(layer, begin)
        place = int(homes.places[expert])
        if self._reader is not None and homes.in_file(place):
            self._reader.bring(queue, slot, homes.size, [(0, matrices(self._layers[layer].stacks, expert))])
        else:
            queue.upload(slot, self.place(layer, place))
        if (twin := homes.twin(begin)) is not None:
            queue.download(self.place(layer, twin), slot)

    def swap(self, swaps: Iterable[Swap]) -> None:
        """Exchange the bytes of experts that have places and in the cache, and the tables that say where they are."""
        self.changing()
        changed = set()
        for each in swaps:
            homes = self.homes(each.layer)
            slot, from_file = int(homes.begins[each.leaves]), homes.in_file(int(homes.places[each.gets]))
            leaves = self._spare[: homes.size.n_bytes]
            self._driver.copy(leaves, self.slot(each.layer, slot))
            self.bring(self._driver, each.layer, each.gets, slot)
            homes.swap(each.gets, each.leaves)
            if from_file and each.drops >= 0:
                homes.trade(each.leaves, each.drops)
            place = int(homes.places[each.leaves])
            if not homes.in_file(place):
                self._driver.download(self.place(each.layer, place), leaves)
            changed.add(each.layer)
        self.moved(changed)

    def changing(self) -> None:
        """What was written to tables before is on the card."""
        self._swapped.wait()

    def moved(self, layers: Iterable[int]) -> None:
        """Bring the tables of layers whose homes have changed to the card, behind what is queued."""
        for number in sorted(layers):
            self._write_places(self._layers[number])
            self._stale.add(number)
        self._ring.forget()
        self._swapped.record()

    def _write_places(self, layer: _Layer) -> None:
        """Bring the table of a layer's experts in place to the card."""
        ram = address(self._driver.mapped(layer.ram)) if layer.ram.size else 0
        for i, card in enumerate((False, True)):
            layer.host[i] = layer.homes.table(address(self._cache), ram, card)
        self._driver.upload(layer.card[:IN_PLACE], layer.host[:IN_PLACE])

    def _write_rounds(self, layer: _Layer) -> None:
        """Bring the tables of a layer's rounds to the card."""
        for i, each in enumerate(layer.rounds):
            layer.host[IN_PLACE + i] = layer.homes.round_table(address(self._cache), *each, with_cache=i == 0)
        self._driver.upload(layer.card[IN_PLACE:], layer.host[IN_PLACE:])
        self._swapped.record()

    def _take(self, layer: int, banks: Banks, rounds: range, of_file: range, ids: Array) -> Iterable[Banks]:
        """The rounds of a prompt in a layer, whose rows have picked the experts ids (rows, used)."""
        streams = len(rounds) > 0 and len(ids) >= self._stream_min
        if not streams and not of_file:
            return (banks,)
        if layer in self._stale:
            self._stale.remove(layer)
            self._write_rounds(self._layers[layer])
        return self._ring.take(rounds) if streams else self._take_picked(banks, of_file, ids)

    def _take_picked(self, banks: Banks, of_file: range, ids: Array) -> Iterator[Banks]:
        """In place what can be read there, then what was picked of the file: the host waits for the router."""
        yield banks
        picked = np.zeros(self.placement.begins.shape[1], bool)
        if self._ring.live:
            picked[self._driver.fetch(ids).reshape(-1)] = True
        yield from self._ring.take_picked(of_file, picked)

    def _lock(self, layer: int) -> Bytes:
        """Page-locked RAM for the missing experts of a layer."""
        n, begun = self.placement.locked_of(layer), time.perf_counter()
        if not n:
            return np.empty(0, np.uint8)
        ram = self._driver.pinned(n + ALIGNMENT)  # kernels read whole lines
        now = time.perf_counter()
        self._locking += now - begun
        self._locked += n
        whole = self.placement.locked_bytes
        if now - self._reported >= REPORT_S or self._locked == whole:
            self._reported = now
            log(f"experts: {self._locked / GIB:.1f} of {whole / GIB:.1f} GiB of RAM locked in {self._locking:.1f} s")
        return ram[:n]

    def _promise(self, stacks: Sequence[Weight], expert: int, begins: Sequence[int], home: Array, host: bool) -> None:
        """Promise the matrices of an expert to the bytes where it lies. The first slot is read back."""
        checked = not host and address(home) == address(self._cache)
        for w, begin in zip(stacks, begins, strict=True):
            source = flat(w.data[expert])
            self._card.promise(Copy(source, home[begin : begin + source.size], host, checked=checked))


def _banks(stacks: Sequence[Weight], table: Array) -> Banks:
    """Gate, up and down by a table on the card."""
    gate, up, down = (Bank(w.type, w.rows, w.cols, row) for w, row in zip(stacks, table, strict=True))
    return gate, up, down

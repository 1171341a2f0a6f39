"""Experts of the file reach the buffer that products read, whole and in time, and only those that were picked."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.engine.experts.homes import Homes
from strata.engine.experts.placement import ExpertSize
from strata.engine.experts.reader import FileReader, FileRound
from strata.engine.experts.ring import Ring, Round, pieces, ring_bytes
from strata.kernels.formats import BY_NAME, Weight

EXPERTS, BYTES = 6, (340, 170, 34)
SIZE = ExpertSize(*BYTES)
WHERE = st.lists(st.lists(st.sampled_from("vrf"), min_size=EXPERTS, max_size=EXPERTS), min_size=1, max_size=4)
"""Of the experts of layers: in the cache, in RAM, in the file."""


class Layer:
    """A layer's experts in the file, which differ in every byte's place, and those of RAM."""

    def __init__(self, number: int, where: list[str]) -> None:
        every = np.random.default_rng(number).integers(0, 256, (EXPERTS, sum(BYTES)), np.uint8)
        parts = np.split(every, np.cumsum(BYTES)[:-1], axis=1)
        q8_0 = BY_NAME["Q8_0"]
        self.stacks = [
            Weight(q8_0, (EXPERTS, 1, part.shape[1] // 34 * 32), np.ascontiguousarray(part[:, None])) for part in parts
        ]
        begins = np.array([0 if at == "v" else -1 for at in where], np.int64)
        self.homes = Homes.of(SIZE, begins, 0, np.array(where) == "r")
        self.ram = np.zeros((self.homes.locked, SIZE.n_bytes), np.uint8)
        for place, expert in self.homes.within(0, self.homes.locked):
            self.ram[place] = self.whole(expert)
        self.numbers = self.of_file = range(0)

    def whole(self, expert: int) -> np.ndarray:
        """An expert as it lies on the card."""
        found = np.zeros(SIZE.n_bytes, np.uint8)
        for w, begin in zip(self.stacks, SIZE.begins, strict=True):
            found[begin : begin + w.data[expert].size] = w.data[expert].reshape(-1)
        return found

    def join(self, ring: Ring, reader: FileReader) -> None:
        """The layer's rounds; the experts of a round stand in for its banks."""
        rounds = []
        for begin, end in ((0, self.homes.locked), (self.homes.locked, self.homes.n_places)):
            for part in pieces(range(begin, end), SIZE.n_bytes, ring.room):
                source = FileRound(reader, self.stacks, self.homes, part[0], len(part))
                if not self.homes.in_file(part[0]):
                    source = self.ram[part[0] : part[0] + len(part)].reshape(-1)
                rounds.append(Round(source, [(p - part[0], e) for p, e in self.homes.within(part[0], len(part))]))
        self.numbers = ring.add(rounds)
        self.of_file = self.numbers[len(rounds) - sum(isinstance(r.source, FileRound) for r in rounds) :]


def parts_of(blob: np.ndarray) -> list[bytes]:
    """The matrices; what lies between them means nothing."""
    return [bytes(blob[begin : begin + n]) for begin, n in zip(SIZE.begins, BYTES, strict=True)]


def read(driver, ring: Ring, numbers: range, taken, seen: list, picked=None) -> None:
    """Queue a product a round that looks at its experts."""
    for banks in taken:
        number = next(n for n in numbers if ring._rounds[n].banks is banks)
        buffer = ring.buffer_of(number)
        for place, expert in banks:
            if picked is None or picked[expert]:
                at = buffer[place * SIZE.n_bytes : (place + 1) * SIZE.n_bytes]
                driver.add(lambda at=at, expert=expert: seen.append((expert, parts_of(at))))


@settings(deadline=None, max_examples=60)
@given(
    where=WHERE,
    ring_experts=st.integers(1, 8),
    stage=st.integers(1, 3),
    eager=st.booleans(),
    passes=st.lists(st.one_of(st.none(), st.integers(0, 63)), min_size=1, max_size=4),
)
def test_products_see_experts_of_the_file_however_late_or_early_copies_run(
    new_driver, where, ring_experts, stage, eager, passes
):
    driver = new_driver(eager)
    ring = Ring(driver, driver.allocate(ring_bytes(ring_experts, SIZE.n_bytes)))
    reader = FileReader(driver, SIZE.n_bytes, stage * SIZE.n_bytes)
    layers = [Layer(i, each) for i, each in enumerate(where)]
    for layer in layers:
        layer.join(ring, reader)
    for bits in passes:
        picked = None if bits is None else np.array([bits >> e & 1 for e in range(EXPERTS)], bool)
        for layer in layers:
            seen: list[tuple[int, list[bytes]]] = []
            rounds = layer.numbers if picked is None else layer.of_file
            taken = ring.take(rounds) if picked is None else ring.take_picked(rounds, picked)
            read(driver, ring, rounds, taken, seen, picked)
            driver.synchronize()
            here = layer.homes.places >= (0 if picked is None else layer.homes.locked)
            wanted = np.flatnonzero(here if picked is None else here & picked).tolist()
            assert sorted(expert for expert, _ in seen) == wanted
            assert all(found == parts_of(layer.whole(expert)) for expert, found in seen)


def test_what_nobody_picked_is_not_read(new_driver):
    driver = new_driver(True)
    ring, reader = Ring(driver, driver.allocate(ring_bytes(4, SIZE.n_bytes))), FileReader(driver, SIZE.n_bytes)
    layer = Layer(0, ["f"] * EXPERTS)
    layer.join(ring, reader)
    picked = np.zeros(EXPERTS, bool)
    assert list(ring.take_picked(layer.of_file, picked)) == [] and reader.sent == 0
    picked[5] = True
    assert len(list(ring.take_picked(layer.of_file, picked))) == 1 and reader.sent == SIZE.n_bytes


def test_a_ring_copies_nothing_before_there_is_anything_to_copy(new_driver):
    driver = new_driver(True)
    ring, reader = Ring(driver, driver.allocate(ring_bytes(4, SIZE.n_bytes))), FileReader(driver, SIZE.n_bytes)
    layer = Layer(0, ["r", "f"] * 3)
    layer.join(ring, reader)
    ring.live = False
    assert len(list(ring.take(layer.numbers))) == len(layer.numbers) and ring.sent == reader.sent == 0
    ring.live = True
    list(ring.take(layer.numbers))
    assert ring.sent > 0 < reader.sent

"""Experts that windows bring from RAM before their products: the bits of those that are read in place."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from strata.kernels.cuda.fetch import Stage
from strata.kernels.cuda.mixture import Bank, Shared, Tally, mixture
from strata.kernels.formats import Weight

TYPES = [("IQ3_S", "IQ3_S", "IQ4_NL"), ("Q4_K", "Q6_K", "Q8_0"), ("F16", "F16", "F16")]
EXPERTS, WIDTH, INNER = 12, 256, 64
CANARY = 0xA5


class Layer:
    """Experts one behind the other, gate, up and down of one together; those below `held` are the cache's, the one that
    is `gone` is nowhere. `plain`: banks without a stage."""

    def __init__(self, place, stacks: tuple[Weight, ...], held: int, slots: int, gone: int | None = None) -> None:
        sizes = [-(-w.data[0].nbytes // 256) * 256 for w in stacks]
        self.n_bytes, self.slots = sum(sizes), slots
        begins = 0, sizes[0], sizes[0] + sizes[1]
        memory = np.zeros((EXPERTS, self.n_bytes), np.uint8)
        for w, begin in zip(stacks, begins, strict=True):
            each = w.data.reshape(EXPERTS, -1).view(np.uint8)
            memory[:, begin : begin + each.shape[1]] = each
        self.memory = place.upload(memory)
        self.base, self.host = self.memory.ctypes.data, memory
        at = self.base + self.n_bytes * np.arange(EXPERTS)
        tables = [(at + begin).astype(np.uint64) for begin in begins]
        for table in tables if gone is not None else ():
            table[gone] = 0
        self.staging = place.upload(np.full(slots * self.n_bytes + 256, CANARY, np.uint8))
        self.end = self.base + held * self.n_bytes
        self.stage = Stage(self.staging, slots, self.n_bytes, begins, self.base, self.end)
        self.plain = [
            Bank(w.type, w.rows, w.cols, place.upload(table)) for w, table in zip(stacks, tables, strict=True)
        ]
        self.place = place

    @property
    def banks(self) -> list[Bank]:
        return [replace(self.plain[0], stage=self.stage), *self.plain[1:]]

    def mixture(self, banks, x, ids, weights, given=None, shared=None, logits=None) -> np.ndarray:
        arrays = [self.place.upload(a) for a in (x, ids, weights)]
        given = None if given is None else self.place.upload(given)
        own = None if shared is None else (Shared(*map(self.place.weight, shared)), self.place.upload(logits))
        return self.place.download(mixture(self.place.workspace(64), *banks, *arrays, given, own))


def stacks_of(random_weight, types, inner: int = INNER, width: int = WIDTH, experts: int = EXPERTS):
    shapes = ((inner, width), (inner, width), (width, inner))
    return tuple(
        random_weight(t, *s, experts=experts, seed=i) for i, (t, s) in enumerate(zip(types, shapes, strict=True))
    )


def drawn(n: int, used: int, seed: int):
    rng = np.random.default_rng([seed, n])
    ids = np.stack([rng.permutation(EXPERTS)[:used] for _ in range(n)]).astype(np.int32)
    return rng.standard_normal((n, WIDTH)).astype(np.float32), ids, rng.random((n, used)).astype(np.float32)


def different(ids: np.ndarray, held: int) -> list[int]:
    """Missing experts of a window in the order of their first pair."""
    return list(dict.fromkeys(e for e in ids.ravel().tolist() if e >= held))


PLACES = [(4, 12), (0, 3), (12, 4)]
SLOW = {("F16", place) for place in PLACES[1:]}
"""Products of floats take the emulator long."""


@pytest.mark.parametrize(
    ("types", "held", "slots"),
    [
        pytest.param(types, *place, marks=[pytest.mark.soak] * ((types[0], place) in SLOW), id=f"{types}-{place}")
        for types in TYPES
        for place in PLACES
    ],
)
def test_fetched_experts_have_the_same_bits_and_staging_holds_no_more_than_it_may(
    host, random_weight, types, held, slots
):
    layer = Layer(host, stacks_of(random_weight, types), held, slots)
    own = types[0] if types[0] == "F16" else "Q8_0"
    shared = stacks_of(random_weight, (own,) * 3, 32, experts=0) if own == "Q8_0" else None
    for seed, n in enumerate((1, 5, 8, 1)):
        x, ids, weights = drawn(n, 5, seed)
        logits = np.linspace(-1, 1, n).astype(np.float32)
        layer.staging[:] = CANARY
        got = layer.mixture(layer.banks, x, ids, weights, None, shared, logits)
        np.testing.assert_array_equal(got, layer.mixture(layer.plain, x, ids, weights, None, shared, logits))
        came = different(ids, held)[:slots]
        blobs = layer.staging[: slots * layer.n_bytes].reshape(slots, -1)
        np.testing.assert_array_equal(blobs[: len(came)], layer.host[came])
        assert (layer.staging[len(came) * layer.n_bytes :] == CANARY).all()


def test_products_read_the_copies(host, random_weight):
    """What lies in RAM afterwards is not asked for: a staged expert is read from its copy."""
    layer = Layer(host, stacks_of(random_weight, TYPES[0]), 0, EXPERTS)
    workspace, ids = host.workspace(), np.array([[3, 7], [7, 1]], np.int32)
    named, table = layer.stage.fetch(workspace, host.upload(ids), tuple(b.addresses for b in layer.plain))
    assert named.tolist() == [[0, 1], [1, 3]]
    begin = layer.staging.ctypes.data
    for row, at in zip(table, layer.stage.begins, strict=True):
        assert row.tolist() == [begin + at, begin + at + layer.n_bytes, 0, begin + at + 2 * layer.n_bytes]


def test_pairs_without_an_expert_are_still_given(host, random_weight):
    layer = Layer(host, stacks_of(random_weight, TYPES[0]), 3, 4, gone=5)
    ids = np.array([[5, 1, 9], [-1, 9, 5]], np.int32)
    x, _, weights = drawn(2, 3, 1)
    given = np.random.default_rng(3).standard_normal((6, WIDTH)).astype(np.float32)
    got = layer.mixture(layer.banks, x, ids, weights, given)
    np.testing.assert_array_equal(got, layer.mixture(layer.plain, x, ids, weights, given))


def test_hits_are_counted_by_where_experts_lie_and_not_by_their_copies(host, random_weight):
    layer, held = Layer(host, stacks_of(random_weight, TYPES[0]), 4, EXPERTS), 4
    counts = [host.upload(np.zeros(shape, np.int32)) for shape in ((2, 8), (EXPERTS,), (2,))]
    tally = Tally(*counts, layer.base, layer.end, True)
    gate, up, down = layer.banks
    x, ids, weights = drawn(3, 5, 2)
    layer.mixture((replace(gate, tally=tally), up, down), x, ids, weights)
    hits, use, reads = counts
    assert hits[0, :3].tolist() == (ids < held).sum(1).tolist()
    assert use.tolist() == np.bincount(ids.ravel(), minlength=EXPERTS).tolist()
    assert reads.tolist() == [len(different(ids, held)), 0]


def test_a_stage_that_its_memory_does_not_hold_is_refused(host):
    memory = host.upload(np.zeros(512, np.uint8))
    with pytest.raises(ValueError, match="no room for 3 experts"):
        Stage(memory, 3, 256, (0, 64, 128), 0, 0)
    with pytest.raises(ValueError, match="16 bytes"):
        Stage(memory, 1, 100, (0, 64, 128), 0, 0)
    assert not Stage(memory, 0, 256, (0, 64, 128), 0, 0).takes(10)

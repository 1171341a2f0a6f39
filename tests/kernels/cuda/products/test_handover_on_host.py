"""Experts that the processor computes while a window runs: the bits of the card's, whoever computes which."""

from __future__ import annotations

import gc
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from strata.kernels.cpu.handover import Server
from strata.kernels.cuda.handover import AHEAD, OWN_WORDS, REQUESTS, SHARE, WAITS, Helper
from strata.kernels.cuda.mixture import Bank, Shared, mixture
from strata.kernels.desk import ANSWERED, ASKED, IN_FILE, Desk
from strata.kernels.formats import Weight

ROWS, LIMIT_S = 8, 60.0


class Blobs:
    """Experts one behind the other, gate, up and down of one together; those below `held` are the cache's, those from
    `filed` on in the file. `whole`: banks that have all of them."""

    def __init__(self, place, stacks: tuple[Weight, ...], held: int, filed: int | None = None) -> None:
        self.stacks, experts = stacks, stacks[0].experts
        sizes = [-(-w.data[0].nbytes // 256) * 256 for w in stacks]
        self.begins = (0, sizes[0], sizes[0] + sizes[1])
        memory = np.zeros((experts, sum(sizes)), np.uint8)
        for w, begin in zip(stacks, self.begins, strict=True):
            each = w.data.reshape(experts, -1).view(np.uint8)
            memory[:, begin : begin + each.shape[1]] = each
        self.memory = place.upload(memory)
        base = self.memory.ctypes.data
        at = base + sum(sizes) * np.arange(experts)
        self.begin, self.end = base, base + held * sum(sizes)
        tables = [(at + begin).astype(np.uint64) for begin in self.begins]
        self.whole = self._banks(place, tables)
        for table in tables if filed is not None else ():
            table[filed:] = IN_FILE + np.arange(filed, experts, dtype=np.uint64)
        self.banks = self._banks(place, tables)

    def _banks(self, place, tables) -> list[Bank]:
        return [Bank(w.type, w.rows, w.cols, place.upload(table)) for w, table in zip(self.stacks, tables, strict=True)]


class Helped:
    """Mixtures of one layer with and without the processor."""

    def __init__(
        self,
        place,
        stacks,
        held: int,
        share: int,
        served: bool = True,
        limit_s: float = LIMIT_S,
        filed=None,
        ahead: int = 0,
    ) -> None:
        width, inner = stacks[0].cols, stacks[0].rows
        self.place, self.blobs = place, Blobs(place, stacks, held, filed)
        self.desk = Desk.within(place.upload(np.zeros(Desk.n_bytes(ROWS, width), np.uint8)), ROWS, width)
        own = np.zeros(OWN_WORDS, np.uint32)
        own[SHARE], own[AHEAD] = share, ahead
        self.helper = Helper(self.desk, place.upload(own), 1, self.blobs.begin, self.blobs.end, limit_s)
        self.server = Server(self.desk, 2, inner)
        self.server.layer(1, stacks, self.blobs.begins)
        if served:
            self.server.start()

    def mixture(self, x, ids, weights, helped: bool, shared=None, logits=None) -> np.ndarray:
        gate, up, down = self.blobs.banks if helped else self.blobs.whole
        gate = replace(gate, helper=self.helper) if helped else gate
        arrays = [self.place.upload(a) for a in (x, ids, weights)]
        own = None if shared is None else (Shared(*map(self.place.weight, shared)), self.place.upload(logits))
        return self.place.download(mixture(self.place.workspace(64), gate, up, down, *arrays, None, own))


def stacks_of(random_weight, types, inner: int, width: int, experts: int) -> tuple[Weight, ...]:
    shapes = ((inner, width), (inner, width), (width, inner))
    return tuple(
        random_weight(t, *s, experts=experts, seed=i) for i, (t, s) in enumerate(zip(types, shapes, strict=True))
    )


def drawn(n: int, used: int, experts: int, width: int, seed: int):
    rng = np.random.default_rng([seed, n])
    ids = np.stack([rng.permutation(experts)[:used] for _ in range(n)]).astype(np.int32)
    return rng.standard_normal((n, width)).astype(np.float32), ids, rng.random((n, used)).astype(np.float32)


TYPES = [("IQ3_S", "IQ3_S", "IQ4_NL"), ("Q4_K", "Q6_K", "Q8_0")]


@pytest.mark.parametrize("types", TYPES, ids=str)
@pytest.mark.parametrize(("share", "ahead"), [(0, 0), (100, 0), (100, 192), (256, 192)])
def test_experts_have_the_same_bits_from_the_processor(host, random_weight, types, share, ahead):
    stacks = stacks_of(random_weight, types, 64, 256, 12)
    shared = stacks_of(random_weight, ("Q8_0", "Q8_0", "Q8_0"), 32, 256, 0)
    helped, requests = Helped(host, stacks, held=4, share=share, ahead=ahead), 0
    for n in (1, 1, 5, ROWS, 1):
        x, ids, weights = drawn(n, 5, 12, 256, seed=requests)
        logits = np.linspace(-1, 1, n).astype(np.float32)
        got = helped.mixture(x, ids, weights, True, shared, logits)
        np.testing.assert_array_equal(got, helped.mixture(x, ids, weights, False, shared, logits))
        missing = len(set(ids.ravel().tolist()) - set(range(4)))
        own = min((missing * share + ahead) // 256, missing)
        requests += own < missing
        assert helped.desk.words[ASKED] == helped.desk.words[ANSWERED] == requests
        assert helped.helper.own[REQUESTS] == requests >= helped.helper.own[WAITS]
        asked = len({int(a) for a in helped.desk.at[: ids.size]} - {0})
        assert asked == missing - own
    assert helped.desk.failed is None and (requests > 0) == (share < 256)


@pytest.mark.parametrize(("share", "ahead", "asked"), [(100, 0, 1), (100, 192, 0), (0, 192, 1)])
def test_one_missing_expert_alone_waits_for_the_processor_unless_the_card_has_a_head_start(
    host, random_weight, share, ahead, asked
):
    helped = Helped(host, stacks_of(random_weight, TYPES[0], 64, 256, 6), held=5, share=share, ahead=ahead)
    ids = np.array([[0, 5, 3]], np.int32)
    x, weights = np.ones((1, 256), np.float32), np.ones((1, 3), np.float32)
    got = helped.mixture(x, ids, weights, True)
    np.testing.assert_array_equal(got, helped.mixture(x, ids, weights, False))
    assert helped.desk.words[ASKED] == asked


@pytest.mark.parametrize("types", TYPES, ids=str)
@pytest.mark.parametrize("threads", [1, 2])
def test_an_expert_in_halves_of_blocks_has_the_same_bits(host, random_weight, types, threads):
    """Three blocks of hidden values are few for two threads, and not for one."""
    helped = Helped(host, stacks_of(random_weight, types, 96, 256, 4), held=3, share=0)
    helped.server.use(threads)
    for seed in range(24):
        x, ids, weights = drawn(1 + seed % ROWS, 4, 4, 256, seed=seed)
        got = helped.mixture(x, ids, weights, True)
        np.testing.assert_array_equal(got, helped.mixture(x, ids, weights, False))


@pytest.mark.parametrize("types", TYPES, ids=str)
@pytest.mark.parametrize("share", [0, 128, 256])
def test_experts_that_lie_in_the_file_only_have_the_same_bits_and_are_never_the_cards(
    host, random_weight, types, share
):
    stacks = stacks_of(random_weight, types, 64, 256, 12)
    helped, filed = Helped(host, stacks, held=2, share=share, filed=6), 0
    for seed, n in enumerate((1, 5, ROWS, 1)):
        x, ids, weights = drawn(n, 5, 12, 256, seed=seed)
        got = helped.mixture(x, ids, weights, True)
        np.testing.assert_array_equal(got, helped.mixture(x, ids, weights, False))
        picked = set(ids.ravel().tolist())
        filed += len([e for e in picked if e >= 6])
        in_ram = len([e for e in picked if 2 <= e < 6])
        asked = {int(a) for a in helped.desk.at[: ids.size]} - {0}
        assert {a - IN_FILE for a in asked if a >= IN_FILE} == {e for e in picked if e >= 6}
        assert len([a for a in asked if a < IN_FILE]) == in_ram - in_ram * share // 256
    each = sum(w.data[0].nbytes for w in stacks)
    assert helped.server.filed == (filed, filed * each) and filed


def test_the_card_keeps_what_most_rows_pick(host, random_weight):
    stacks = stacks_of(random_weight, TYPES[0], 64, 256, 6)
    helped = Helped(host, stacks, held=0, share=128)
    ids = np.array([[0, 5], [1, 5], [2, 5], [3, 5]], np.int32)
    x, _, weights = drawn(4, 2, 6, 256, seed=1)
    got = helped.mixture(x, ids, weights, True)
    np.testing.assert_array_equal(got, helped.mixture(x, ids, weights, False))
    at = helped.desk.at[:8].reshape(4, 2)
    assert (at[:, 1] == 0).all() and (at[:, 0] != 0).tolist() == [False, True, True, True]


def test_a_processor_that_does_not_answer_ends_the_wait_once_and_is_named(host, random_weight):
    stacks = stacks_of(random_weight, TYPES[0], 64, 256, 6)
    helped = Helped(host, stacks, held=0, share=0, served=False, limit_s=0.05)
    x, ids, weights = drawn(2, 3, 6, 256, seed=1)
    begun = time.perf_counter()
    assert not helped.mixture(x, ids, weights, True).any()
    assert helped.desk.failed == 1 and time.perf_counter() - begun > 0.05
    begun = time.perf_counter()
    helped.mixture(*drawn(8, 3, 6, 256, seed=2), True)
    assert helped.desk.words[ASKED] == 2 and helped.desk.words[ANSWERED] == 0


def test_requests_long_after_each_other_are_seen(host, random_weight):
    stacks = stacks_of(random_weight, TYPES[0], 64, 256, 6)
    helped = Helped(host, stacks, held=0, share=0)
    for seed in range(3):
        x, ids, weights = drawn(1, 3, 6, 256, seed=seed)
        np.testing.assert_array_equal(helped.mixture(x, ids, weights, True), helped.mixture(x, ids, weights, False))
        time.sleep(0.3)  # the time itself is tested: the server naps meanwhile


def test_the_thread_ends_with_its_server(host, random_weight):
    helped = Helped(host, stacks_of(random_weight, TYPES[0], 64, 256, 6), held=0, share=0)
    threads = [thread for thread in threading.enumerate() if thread.name == "experts"]
    assert threads
    del helped
    gc.collect()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()

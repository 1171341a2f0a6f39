"""Where an expert lies never changes a bit: all in VRAM, a quarter, one; read in place or through any ring."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest

from strata.engine.device.cuda import CudaDevice
from strata.engine.experts.adapt import Swap, dropping
from strata.engine.experts.exchange import Exchange
from strata.engine.experts.placement import by_number
from strata.engine.experts.plan import Asked
from strata.engine.flags import WINDOW_ROWS
from strata.engine.memory.ram import ExpertSource
from strata.engine.model import Rows
from strata.engine.model.resident import Resident
from strata.engine.model.window import Draw
from strata.engine.pack import open_pack
from strata.kernels.ops import Sampling

NEVER = 1 << 20
GREEDY = Sampling()
DRAWN = Sampling(temperature=1.0, top_k=40, seed=11)
STEPS = 6


class Answer(NamedTuple):
    """Logits of a prompt's parts, sampled ids and the logits before each, the state that is left; hits a window."""

    found: list[np.ndarray]
    hits: list[list[int] | None]


def made(driver, pack, asked: Asked | None, stream_min: int, chunk: int) -> Resident:
    """asked: None = all experts lie in VRAM."""
    device = CudaDevice(driver=driver)
    asked = None if asked is None else replace(asked, prefill=chunk)
    resident = Resident(
        pack, device, max_context=4 * chunk, n_slots=2, chunks=[chunk], experts=asked, stream_min=stream_min
    )
    assert (device.tiers is None) == (asked is None) and resident.chunk == chunk
    assert asked is None or resident.store._staging.size, "windows bring experts over"
    resident.warm()
    return resident


def answer(resident: Resident, how: Sampling, between: Callable[[], None] = lambda: None, steps: int = STEPS) -> Answer:
    """A prompt of two chunks and a window, then tokens one after the other; `between`: what is done behind a window,
    when the next one is under way."""
    n = resident.chunk
    ids = np.random.default_rng(5).integers(0, 900, 2 * n + 4).astype(np.int32)
    windows, state, found, hits = resident.windows, resident.state, [], []
    for begin, end in pairwise([0, n - 1, 2 * n - 1, len(ids)]):
        rows = Rows.of([(0, state.length(0), ids[begin:end])])
        found.append(resident.device.read(resident.model.forward(rows, state, [end - begin - 1])))
    windows.sample_with([Draw(how, ids[:0], len(ids))] * WINDOW_ROWS)
    state.reserve(0, 1)
    ticket = windows.start(Rows.of([(0, state.length(0), ids[:1])]), 1)
    for step in range(steps):
        found += [np.array(ticket.wait()), resident.device.read(ticket.logits)]
        hits.append(ticket.hits())
        state.advance(0, 1)
        state.reserve(0, 1)
        ticket = windows.step(ticket, state.length(0) + step)
        between()
    ticket.wait()
    found.append(np.frombuffer(state.state_bytes(0), np.uint8))
    state.reset(0)
    state.check()
    return Answer(found, hits)


def swapped(resident: Resident, how: Sampling, seed: int = 0, steps: int = STEPS) -> Answer:
    """The same while experts of all layers change places behind every window."""
    random, store = np.random.default_rng(seed), resident.store
    before = store.resident
    changed = np.zeros_like(before)

    def swap() -> None:
        swaps = []
        for layer, held in enumerate(store.resident):
            leaves, gets = (random.permutation(np.flatnonzero(each))[:3] for each in (held, ~held))
            swaps += [Swap(layer, int(g), int(e)) for g, e in zip(gets, leaves, strict=False)]
        store.swap(dropping(swaps, random.random(before.shape), store.in_ram))
        changed[store.resident != before] = True

    got = answer(resident, how, swap, steps)
    assert changed.any(1).all()
    assert (store.resident.sum(1) == before.sum(1)).all(), "a swap is one for one"
    return got


def same(got: Answer, wanted: Answer) -> None:
    for one, other in zip(got.found, wanted.found, strict=True):
        np.testing.assert_array_equal(one, other)


def exchanged(resident: Resident, how: Sampling, seed: int = 0, steps: int = STEPS) -> Answer:
    """The same while they change places beside the windows: a step behind each of them, or none, or two."""
    random, store = np.random.default_rng(seed), resident.store
    exchange, before = Exchange(resident.device.driver, store), store.resident
    changed = np.zeros_like(before)

    def go_on() -> None:
        changed[store.resident != before] = True
        for _ in range(random.integers(0, 3)):
            if exchange.moving:
                exchange.step()
                continue
            swaps = []
            for layer, held in enumerate(store.resident):
                leaves, gets = (random.permutation(np.flatnonzero(each))[:2] for each in (held, ~held))
                swaps += [Swap(layer, int(g), int(e)) for g, e in zip(gets, leaves, strict=False)]
            exchange.fetch(dropping(swaps, random.random(before.shape), store.in_ram))

    got = answer(resident, how, go_on, steps)
    again = answer(resident, how, go_on, steps)  # its prompt comes between two steps, or is read through the ring
    same(again, got)
    while exchange.moving:
        exchange.step()
    assert (changed | (store.resident != before)).any(1).all()
    assert (store.resident.sum(1) == before.sum(1)).all(), "a swap is one for one"
    return got


def share_of(pack, share: float, ring: int) -> Asked:
    return Asked(cache=max(1, int(share * pack.spec.layers * pack.spec.experts)), ring=ring)


def from_file(pack, share: float, ring: int, copies: float, **more) -> Asked:
    """copies: of the experts that VRAM lacks, the share that has copies in RAM."""
    asked, missing = share_of(pack, share, ring), (1 - share) * pack["blk.0.ffn_up_exps.weight"].data.size
    room = int(copies * missing * 3 * pack.spec.layers)
    source = ExpertSource("resident", headroom=0, given=room) if copies else ExpertSource("mapped")
    return replace(asked, source=source, threads=2, **more)


CHUNK = 18


@pytest.fixture(scope="module")
def pack(packs):
    return open_pack(packs["odd-q8_0"])


@pytest.fixture(scope="module")
def whole(emulated_card, pack):
    """What the model answers with all experts in VRAM, by how it samples."""
    with emulated_card.plugged_in() as card:
        resident = made(card.driver(), pack, None, NEVER, CHUNK)
        return {how: answer(resident, how) for how in (GREEDY, DRAWN)}


@pytest.mark.parametrize(
    ("share", "stream_min", "ring", "eager"),
    [
        pytest.param(0.25, NEVER, 0, False, id="quarter-in-place"),
        pytest.param(0, NEVER, 0, False, id="none-in-place", marks=pytest.mark.soak),
        pytest.param(0.25, 1, 4, True, id="quarter-ring-4", marks=pytest.mark.soak),
        pytest.param(0, 1, 10, False, id="none-ring-10"),
        pytest.param(0, 1, 0, True, id="none-ring-of-layers", marks=pytest.mark.soak),
    ],
)
def test_logits_texts_and_states_are_the_same_wherever_experts_lie(
    emulated_card, pack, whole, share, stream_min, ring, eager
):
    with emulated_card.plugged_in() as card:
        driver = card.driver()
        driver.eager = eager
        resident = made(driver, pack, share_of(pack, share, ring), stream_min, CHUNK)
        assert 1 <= resident.experts_in_vram <= max(1, pack.spec.layers * pack.spec.experts // 4)
        for how, wanted in whole.items():
            same(answer(resident, how), wanted)


@pytest.mark.parametrize(
    ("stream_min", "ring", "eager"),
    [
        (1, 6, True),
        pytest.param(NEVER, 0, False, marks=pytest.mark.soak),
        pytest.param(1, 6, False, marks=pytest.mark.soak),
        pytest.param(1, 0, True, marks=pytest.mark.soak),
    ],
)
def test_experts_that_change_places_behind_every_window_change_no_bit(
    emulated_card, pack, whole, stream_min, ring, eager
):
    """The prompts between come in place and through the ring, whose tables and bytes have changed."""
    with emulated_card.plugged_in() as card:
        driver = card.driver(rehearses=False)
        driver.eager = eager
        resident = made(driver, pack, share_of(pack, 0.25, ring), stream_min, CHUNK)
        for seed, how in enumerate((DRAWN, GREEDY, DRAWN)):
            same(swapped(resident, how, seed), whole[how])


@pytest.mark.parametrize(
    ("stream_min", "ring", "eager"),
    [
        (1, 6, True),
        pytest.param(NEVER, 0, False, marks=pytest.mark.soak),
        pytest.param(1, 0, False, marks=pytest.mark.soak),
    ],
)
def test_experts_that_change_places_beside_windows_change_no_bit(emulated_card, pack, whole, stream_min, ring, eager):
    """Copies go as early as they may, or as late, and a step comes whenever it likes."""
    with emulated_card.plugged_in() as card:
        driver = card.driver(rehearses=False)
        driver.eager = eager
        resident = made(driver, pack, replace(share_of(pack, 0.25, ring), spare=2), stream_min, CHUNK)
        for seed, how in enumerate((DRAWN, GREEDY)):
            same(exchanged(resident, how, seed), whole[how])
        same(answer(resident, DRAWN), whole[DRAWN])


@pytest.mark.parametrize(
    ("share", "pcie"),
    [
        pytest.param(0.25, 0.0, id="all"),
        pytest.param(0, 0.5, id="half", marks=pytest.mark.soak),
        pytest.param(0, None, id="measured", marks=pytest.mark.soak),
    ],
)
def test_experts_that_the_processor_computes_change_no_bit(emulated_card, pack, whole, share, pcie):
    """Nor do swaps meanwhile: what a window asks for lies where its own table says."""
    with emulated_card.plugged_in() as card:
        asked = replace(share_of(pack, share, 0), pcie=pcie, threads=2)
        resident = made(card.driver(), pack, asked, NEVER, CHUNK)
        helpers = resident.store.helpers
        for how, wanted in whole.items():
            same(answer(resident, how), wanted)
        if share:
            same(swapped(resident, DRAWN), whole[DRAWN])
        counters = resident.device.read(resident.store.counters)
    reads, computed = counters[:, -2:].sum(0).tolist()
    assert computed > 0 and (reads > 0) == (pcie != 0) and 0 <= helpers.share < 1
    assert helpers._desk.failed is None and (helpers.share == pcie or pcie is None)


FROM_FILE = [
    pytest.param(0.25, 0.5, NEVER, 6, 1.0, False, id="half-in-place", marks=pytest.mark.soak),
    pytest.param(0.25, 0.5, 1, 6, 0.5, True, id="half-ring"),
    pytest.param(0, 0, NEVER, 4, 1.0, True, id="mapped-in-place"),
    pytest.param(0.25, 0, 1, 0, 1.0, False, id="mapped-ring-of-layers", marks=pytest.mark.soak),
    pytest.param(0.25, 2, NEVER, 0, 0.0, False, id="all", marks=pytest.mark.soak),
]


@pytest.mark.parametrize(("share", "copies", "stream_min", "ring", "pcie", "eager"), FROM_FILE)
def test_experts_that_lie_in_the_file_only_change_no_bit(
    emulated_card, pack, whole, share, copies, stream_min, ring, pcie, eager
):
    """Nor do swaps with them, whoever of RAM is dropped: windows have them computed, prompts bring them over."""
    with emulated_card.plugged_in() as card:
        driver = card.driver()
        driver.eager = eager
        asked = from_file(pack, share, ring, copies, pcie=pcie)
        resident = made(driver, pack, asked, stream_min, CHUNK)
        placement, store = resident.store.placement, resident.store
        filed = int(placement.filed.sum())
        assert (filed > 0) == (copies < 1) and placement.in_cache + int(
            placement.in_ram.sum()
        ) + filed == placement.pairs
        assert sum(len(layer.ram) for layer in store._layers) == placement.locked_bytes
        for how, wanted in whole.items():
            same(answer(resident, how), wanted)
        brought = store.read_in_file
        assert (brought > 0) == (copies < 1)
        if share:
            for seed in range(2):
                same(swapped(resident, DRAWN, seed), whole[DRAWN])
            same(answer(resident, GREEDY), whole[GREEDY])
            assert int((store.resident | store.in_ram).sum()) == placement.pairs - filed
        if copies < 1:
            assert store.helpers.filed[0] > 0 and store.helpers._desk.failed is None


@pytest.mark.parametrize(
    ("copies", "stream_min"),
    [
        (0.5, 1),
        pytest.param(0.5, NEVER, marks=pytest.mark.soak),
        pytest.param(0, 1, marks=pytest.mark.soak),
    ],
)
def test_experts_of_the_file_that_change_places_beside_windows_change_no_bit(
    emulated_card, pack, whole, copies, stream_min
):
    with emulated_card.plugged_in() as card:
        driver = card.driver(rehearses=False)
        driver.eager = True
        resident = made(driver, pack, from_file(pack, 0.25, 6, copies, spare=2), stream_min, CHUNK)
        before = int(resident.store.in_ram.sum())
        for seed, how in enumerate((DRAWN, GREEDY)):
            same(exchanged(resident, how, seed), whole[how])
        same(answer(resident, DRAWN), whole[DRAWN])
        assert int(resident.store.in_ram.sum()) == before


def test_of_two_caches_that_share_no_expert_one_has_what_the_other_lacks(emulated_card, pack, whole):
    """Each picked expert is a hit in just one of them; that the texts are equal says that the picks are."""
    pairs = by_number(pack.spec.layers, pack.spec.experts)
    half, picks, hits = len(pairs) // 2, pack.spec.layers * pack.spec.experts_used, []
    for order in (pairs[:half], pairs[half:]):
        with emulated_card.plugged_in() as card:
            resident = made(card.driver(rehearses=False), pack, Asked(cache=half, order=tuple(order)), NEVER, CHUNK)
            assert resident.experts_in_vram == half
            got = answer(resident, DRAWN)
        same(got, whole[DRAWN])
        hits.append([n for window in got.hits for n in window])
    assert len(hits[0]) == STEPS
    assert [sum(both) for both in zip(*hits, strict=True)] == [picks] * STEPS
    assert whole[DRAWN].hits == [None] * STEPS


@pytest.mark.soak  # the emulated card takes most of a minute for float products
def test_float_experts_come_in_rounds_as_well(emulated_card, packs):
    """Their hidden values are floats of all pairs, of which a round has computed some."""
    floats = open_pack(packs["odd-f32"])
    answers = []
    for asked in (None, share_of(floats, 0.25, 6)):
        with emulated_card.plugged_in() as card:
            answers.append(answer(made(card.driver(rehearses=False), floats, asked, 1, CHUNK), GREEDY))
    same(*answers)


LONG = 200
"""Tokens of an answer on a card, where they cost little."""


@pytest.mark.gpu
@pytest.mark.parametrize("how", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("name", ["odd-q8_0", "tiny-q2_0", "tiny-iq3_s", "tiny-q4_k_m", "tiny-q5_k_m", "tiny-bf16"])
def test_200_tokens_are_the_same_wherever_a_card_finds_experts(new_card, packs, name, how):
    pack, chunk = open_pack(packs[name]), 1024  # four of them are the packs' context
    whole = answer(made(new_card(), pack, None, NEVER, chunk), how, steps=LONG)
    for share, stream_min, ring in ((0.25, NEVER, 0), (0, NEVER, 0), (0.25, 1024, 6), (0, 1024, 0)):
        resident = made(new_card(), pack, share_of(pack, share, ring), stream_min, chunk)
        same(answer(resident, how, steps=LONG), whole)
        if share:
            same(swapped(resident, how, steps=LONG), whole)
            same(answer(resident, how, steps=LONG), whole)
    if name != "tiny-bf16":
        for share, copies, stream_min, ring in (
            (0.25, 0.5, NEVER, 6),
            (0.25, 0, 1024, 6),
            (0, 0, NEVER, 0),
            (0, 0.5, 1024, 0),
        ):
            asked = replace(from_file(pack, share, ring, copies, spare=2), threads=8)
            resident = made(new_card(), pack, asked, stream_min, chunk)
            same(answer(resident, how, steps=LONG), whole)
            assert resident.store.helpers.filed[0] > 0 < resident.store.read_in_file
            if share:
                same(swapped(resident, how, steps=LONG), whole)
                same(exchanged(resident, how, steps=LONG), whole)
        for share, pcie in ((0.25, 0.0), (0, 0.5), (0, None)):
            asked = replace(share_of(pack, share, 0), pcie=pcie, threads=8, spare=2)
            resident = made(new_card(), pack, asked, NEVER, chunk)
            same(answer(resident, how, steps=LONG), whole)
            if share:
                same(swapped(resident, how, steps=LONG), whole)
                same(exchanged(resident, how, steps=LONG), whole)

"""The model on a real card: recorded logits, the bits of the host, one arithmetic over prompts and windows, memory."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from strata.engine.device.cuda import CudaDevice
from strata.engine.device.host import HostDevice
from strata.engine.flags import WINDOW_ROWS
from strata.engine.model import Model, Rows
from strata.engine.model.resident import Resident
from strata.engine.model.window import Draw
from strata.kernels.ops import Sampling

pytestmark = pytest.mark.gpu

FLOAT = ("tiny-f32", "tiny-bf16", "odd-f32")
QUANTISED = (
    *(f"tiny-{q}" for q in ("q8_0", "q6_k", "q5_k_m", "q4_k_m", "iq4_xs", "iq3_s", "iq3_xxs")),
    *(f"tiny-{q}" for q in ("iq2_xs", "iq2_m", "iq1_m", "q2_0")),
    "odd-q8_0",
    "odd-q2_0",
)
ONE_ARITHMETIC = ("tiny-q2_0", "tiny-iq2_xs", "tiny-iq3_s", "tiny-q4_k_m", "tiny-q8_0", "tiny-bf16")
PROMPTS = ("len1", "len3", "len17", "eos", "len130", "len300")
FLOAT_LIMIT = 2e-3
CONTEXT, CHUNK, SLOTS = 2112, 2048, 8
GREEDY = Draw(Sampling(), np.empty(0, np.int32), 0)


@pytest.fixture(scope="module")
def resident(new_card, pack_of):
    """resident(pack): on the card with eight slots; only the last one asked for is kept."""
    kept: dict[str, Resident] = {}

    def make(name: str) -> Resident:
        if name not in kept:
            kept.clear()
            device = CudaDevice(driver=new_card())
            kept[name] = Resident(
                pack_of(name), device, max_context=CONTEXT, n_slots=SLOTS, chunks=[CHUNK], logits=CHUNK
            )
            kept[name].windows.sample_with([GREEDY] * WINDOW_ROWS)
        for slot in range(SLOTS):
            kept[name].state.reset(slot)
        return kept[name]

    yield make
    kept.clear()


def read(resident: Resident, ids, slot: int = 0, cuts: list[int] | None = None) -> np.ndarray:
    """Logits of every token, read in the pieces between the cuts."""
    parts = []
    for begin, end in pairwise(cuts or [0, len(ids)]):
        rows = Rows.of([(slot, resident.state.length(slot), ids[begin:end])])
        parts.append(resident.device.read(resident.model.forward(rows, resident.state, range(len(rows)))))
    return np.concatenate(parts)


def window(resident: Resident, parts) -> np.ndarray:
    """Logits of the last row of every sequence, one window that counts."""
    rows = Rows.of([(slot, resident.state.length(slot), part) for slot, part in parts])
    resident.state.reserve_all([(slot, len(part)) for slot, part in parts])
    ticket = resident.windows.start(rows, len(parts))
    for slot, part in parts:
        resident.state.advance(slot, len(part))
    return resident.device.read(ticket.logits)


def long_prompt(n: int) -> np.ndarray:
    return np.random.default_rng(n).integers(0, 998, n).astype(np.int32)


@pytest.mark.parametrize("name", FLOAT)
def test_float_weights_give_the_recorded_logits_and_greedy_text(resident, golden, name):
    card, hf = resident(name), golden(f"{name.split('-')[0]}-hf")
    for slot, prompt in enumerate(PROMPTS):
        last = hf[f"{prompt}.last_logits"]
        logits = read(card, hf[f"{prompt}.ids"], slot)[-len(last) :]
        assert np.abs(logits - last).max() <= FLOAT_LIMIT, prompt
        text = []
        for after in hf[f"{prompt}.decode_logits"]:
            text.append(int(logits[-1].argmax()))
            logits = window(card, [(slot, text[-1:])])
            assert np.abs(logits[-1] - after).max() <= FLOAT_LIMIT, prompt
        assert text == hf[f"{prompt}.decode_ids"].tolist(), prompt
    card.state.check()


@pytest.mark.parametrize("name", (*FLOAT, *QUANTISED))
def test_logits_and_state_are_those_of_the_host_bit_for_bit(resident, pack_of, golden, name):
    card, ids = resident(name), golden(f"{name.split('-')[0]}-hf")["len300.ids"]
    host = Model(pack_of(name), HostDevice("cpu", 2), 512)
    state = host.new_state(1)
    wanted = host.forward(Rows.of([(0, 0, ids)]), state, range(len(ids)))
    np.testing.assert_array_equal(read(card, ids), wanted)
    assert card.state.state_bytes(0) == state.state_bytes(0)
    for token in (5, 6, 7):
        row = Rows.of([(0, state.length(0), [token])])
        np.testing.assert_array_equal(window(card, [(0, [token])]), host.forward(row, state, [0]))
    assert card.state.state_bytes(0) == state.state_bytes(0)


@pytest.mark.parametrize("name", ONE_ARITHMETIC)
def test_a_prompt_whole_in_chunks_and_through_windows_has_the_same_bits(resident, name):
    card, ids = resident(name), long_prompt(2000)
    logits, n = read(card, ids), len(ids)
    state = card.state.state_bytes(0)
    for slot, cuts in enumerate(([0, 1999, n], [0, 17, 81, 593, 1105, n], [0, 1, 2, 18, 1200, n]), 1):
        np.testing.assert_array_equal(read(card, ids, slot, cuts), logits)
        assert card.state.state_bytes(slot) == state
    for slot, size in ((4, 1), (5, WINDOW_ROWS)):
        for begin in range(0, n, size):
            got = window(card, [(slot, ids[begin : begin + size])])
            np.testing.assert_array_equal(got[-1], logits[min(begin + size, n) - 1])
        assert card.state.state_bytes(slot) == state


@pytest.mark.parametrize("name", ONE_ARITHMETIC)
def test_tokens_decoded_alone_among_others_and_read_as_a_prompt_have_the_same_bits(resident, name):
    card, ids = resident(name), long_prompt(300)
    logits = read(card, ids)
    state = card.state.state_bytes(0)
    card.state.reset(0)
    for slot in range(1, SLOTS):  # other sequences, of other lengths
        read(card, ids[: 10 * slot], slot)
    for i, token in enumerate(ids):
        parts = [(slot, [(int(token) + slot) % 998]) for slot in range(1, SLOTS)]
        parts.insert(i % SLOTS, (0, [token]))
        np.testing.assert_array_equal(window(card, parts)[i % SLOTS], logits[i])
    assert card.state.state_bytes(0) == state
    card.state.reset(0)
    for i, token in enumerate(ids):
        np.testing.assert_array_equal(window(card, [(0, [token])])[0], logits[i])
    assert card.state.state_bytes(0) == state


@pytest.mark.parametrize("name", ["tiny-q4_k_m", "tiny-bf16"])
def test_the_graph_gives_the_bits_of_the_eager_pass(resident, name):
    card, ids = resident(name), long_prompt(100)
    for slot in (0, 1):
        read(card, ids, slot)
    for n in (1, 2, 5, 8):
        for run in (card.windows.start, card.windows.start):
            results = []
            for slot, each in ((0, card.windows.eager), (1, run)):
                rows = Rows.of([(slot, card.state.length(slot), ids[:n])])
                card.state.reserve(slot, n)
                ticket = each(rows, 1)
                card.state.advance(slot, n)
                results.append(card.device.read(ticket.logits))
            np.testing.assert_array_equal(*results)
    assert card.state.state_bytes(0) == card.state.state_bytes(1)


@pytest.mark.whole_card
def test_a_thousand_windows_take_no_memory(resident):
    card = resident("tiny-q4_k_m")
    card.warm()
    read(card, long_prompt(64))
    card.state.reserve(0, 1)
    ticket = card.windows.start(Rows.of([(0, 64, [5])]), 1)
    card.state.advance(0, 1)
    whole = super(type(card.device.driver), card.device.driver).memory  # as the driver says it, not as shared
    graphs, before = card.windows.n_graphs, whole()
    for position in range(65, 1065):
        card.state.reserve(0, 1)
        following = card.windows.step(ticket, position)
        ticket.wait()
        card.state.advance(0, 1)
        ticket = following
    ticket.wait()
    assert whole() == before and card.windows.n_graphs == graphs
    card.state.check()


def test_half_precision_keys_and_values_stay_near(new_card, pack_of, golden):
    ids = golden("tiny-hf")["len130.ids"]
    device = CudaDevice(driver=new_card())
    card = Resident(pack_of("tiny-f32"), device, max_context=256, kv="fp16", chunks=[256])
    rows = Rows.of([(0, 0, ids)])
    logits = device.read(card.model.forward(rows, card.state, [len(ids) - 1]))
    assert np.abs(logits - golden("tiny-hf")["len130.last_logits"][-1]).max() <= 0.05
    assert card.state.pages.layers[0].k.dtype == np.float16

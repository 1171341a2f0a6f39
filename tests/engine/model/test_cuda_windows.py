"""Windows on a card: the graph gives the bits of the eager pass, rows do not see each other, what nobody wanted leaves
no trace."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from strata.engine.device.cuda import CudaDevice
from strata.engine.flags import WINDOW_ROWS
from strata.engine.model import Rows
from strata.engine.model.resident import Resident
from strata.engine.model.window import Draw, Layout
from strata.kernels import cpu
from strata.kernels.ops import Sampling

LAYERS = 4
PACK, CONTEXT, SLOTS, CHUNK = "odd-q8_0", 96, 8, 18
GREEDY = Sampling()
DRAWN = Sampling(temperature=1.0, top_k=40, seed=11)
PENALISED = Sampling(temperature=0.9, seed=12, penalty_repeat=1.4, penalty_present=0.5)


@pytest.fixture(scope="module")
def resident(any_card, pack_of, altered) -> Resident:
    """A pack without its last layers: a block of every kind is left."""
    spec = pack_of(PACK).spec
    few = replace(spec, layers=LAYERS, recurrent=spec.recurrent[:LAYERS], ratios=spec.ratios[:LAYERS])
    device, pack = CudaDevice(driver=any_card()), altered(pack_of(PACK), spec=few)
    made = Resident(pack, device, max_context=CONTEXT, n_slots=SLOTS, chunks=[CHUNK], logits=CHUNK)
    made.warm()
    return made


@pytest.fixture(autouse=True)
def empty_slots(resident):
    yield
    for slot in range(SLOTS):
        resident.state.reset(slot)
    resident.state.check()


@pytest.fixture(scope="module")
def ids() -> np.ndarray:
    return np.random.default_rng(5).integers(0, 900, 64).astype(np.int32)


def plain(how: Sampling) -> Draw:
    return Draw(how, np.empty(0, np.int32), 0)


def read(resident: Resident, ids, slot: int = 0) -> np.ndarray:
    """Logits of every token, read in chunks."""
    parts = []
    for begin in range(0, len(ids), CHUNK):
        rows = Rows.of([(slot, resident.state.length(slot), ids[begin : begin + CHUNK])])
        parts.append(resident.device.read(resident.model.forward(rows, resident.state, range(len(rows)))))
    return np.concatenate(parts)


def window(resident: Resident, parts, wanted: int, run=None) -> tuple[np.ndarray, list[int]]:
    """One window that counts. -> logits of the wanted rows, ids."""
    rows = Rows.of([(slot, resident.state.length(slot), part) for slot, part in parts])
    resident.state.reserve_all([(slot, len(part)) for slot, part in parts])
    ticket = (run or resident.windows.start)(rows, wanted)
    got = ticket.wait()
    logits = resident.device.read(ticket.logits) if wanted else np.empty(0)
    for slot, part in parts:
        resident.state.advance(slot, len(part))
    return logits, got


def test_a_replayed_graph_gives_the_bits_of_the_eager_pass(resident, ids):
    windows = resident.windows
    windows.sample_with([plain(DRAWN)])
    for slot, run in ((0, windows.eager), (1, windows.start), (2, windows.start)):
        read(resident, ids[:6], slot)
        runs = [window(resident, [(slot, [token])], 1, run) for token in (7, 8, 9)]
        if slot == 0:
            logits, drawn = zip(*runs, strict=True)
        else:
            np.testing.assert_array_equal([a for a, _ in runs], logits)
            assert [b for _, b in runs] == list(drawn)
            assert resident.state.state_bytes(slot) == resident.state.state_bytes(0)


def test_tokens_fed_on_the_card_are_those_fed_by_the_host(resident, ids):
    state, windows = resident.state, resident.windows
    for slot in (0, 1):
        read(resident, ids[:6], slot)
    windows.sample_with([plain(DRAWN)])
    state.reserve(0, 5)
    ticket = windows.start(Rows.of([(0, 6, [3])]), 1)
    fed = []
    for position in range(7, 11):
        state.advance(0, 1)
        following = windows.step(ticket, position)  # before anybody has read the id
        fed += ticket.wait()
        ticket = following
    by_host = [3]
    for _ in range(4):
        by_host += window(resident, [(1, by_host[-1:])], 1)[1]
    assert fed == by_host[1:]
    ticket.wait()
    assert state.digest(0) == state.digest(1)


def test_a_window_that_nobody_wanted_leaves_no_trace(resident, ids):
    state, windows = resident.state, resident.windows
    for slot in (0, 1):
        read(resident, ids[:6], slot)
    windows.sample_with([plain(GREEDY)])
    state.reserve(0, 2)
    ticket = windows.start(Rows.of([(0, 6, [3])]), 1)
    state.advance(0, 1)
    before = state.state_bytes(0)
    windows.step(ticket, 7).wait()
    assert state.state_bytes(0) == before
    window(resident, [(1, [3])], 1)
    np.testing.assert_array_equal(read(resident, ids[6:9], 0), read(resident, ids[6:9], 1))
    assert state.digest(0) == state.digest(1)


def test_rows_of_other_sequences_in_a_window_change_no_bit(resident, ids):
    state, lengths = resident.state, (6, 3, 1, 2, 5, 1, 2)
    for slot, n in enumerate(lengths):
        read(resident, ids[slot : slot + n], slot)
    read(resident, ids[:6], 7)
    resident.windows.sample_with([plain(DRAWN)] * WINDOW_ROWS)
    alone = [window(resident, [(7, [token])], 1) for token in (4, 5)]
    together = [window(resident, [(slot, [token + slot]) for slot in range(7)], 7) for token in (4, 5)]
    for (logits, drawn), (others, many) in zip(alone, together, strict=True):
        np.testing.assert_array_equal(others[0], logits[0])
        assert many[0] == drawn[0]
    assert state.digest(0) == state.digest(7)


def test_a_prompt_read_through_windows_is_the_prompt_read_in_chunks(resident, ids):
    logits, parts = read(resident, ids[:CHUNK]), []
    for begin in range(0, CHUNK, WINDOW_ROWS):
        part = ids[begin : min(begin + WINDOW_ROWS, CHUNK)]
        parts.append(window(resident, [(1, part)], len(part))[0])
    np.testing.assert_array_equal(np.concatenate(parts), logits)
    assert resident.state.digest(1) == resident.state.digest(0)


@pytest.mark.parametrize("how", [GREEDY, DRAWN, PENALISED], ids=["greedy", "drawn", "penalised"])
def test_a_window_samples_what_the_host_samples_from_its_logits(resident, ids, how):
    windows, state, look_back = resident.windows, resident.state, 4
    read(resident, ids[:6])
    tokens = [*ids[:6].tolist(), 3]
    state.reserve(0, 4)
    width = windows.sample_with([Draw(how, np.array(tokens[-look_back - 1 : -1], np.int32), 6)])
    ticket = windows.start(Rows.of([(0, 6, tokens[6:])]), 1, width)
    for _ in range(3):
        state.advance(0, 1)
        got, logits = ticket.wait()[0], resident.device.read(ticket.logits)[0]
        recent = np.array(tokens[-look_back:], np.int32)
        assert got == cpu.sample(logits, recent, how, len(tokens))
        tokens.append(got)
        ticket = windows.step(ticket, len(tokens) - 1)
    last = windows.draw(ticket.logits, [Draw(how, np.array(tokens[-look_back:], np.int32), len(tokens))])
    assert last.wait() == [
        cpu.sample(resident.device.read(ticket.logits)[0], np.array(tokens[-look_back:], np.int32), how, len(tokens))
    ]


def test_a_layout_that_cannot_say_what_comes_next_is_not_stepped(resident, ids):
    rows = Rows.of([(0, 0, ids[:3])])
    resident.state.reserve(0, 3)
    ticket = resident.windows.start(rows, 1)
    with pytest.raises(ValueError, match="does not say which tokens come next"):
        resident.windows.step(ticket, 3)
    with pytest.raises(ValueError, match="at most 8 rows, got 9"):
        resident.windows.start(Rows.of([(0, 0, ids[:9])]), 1)
    ticket.wait()


def test_windows_near_the_beginning_become_windows_anywhere_at_the_budget(resident):
    budget = resident.model.spec.index_budget
    near = resident.windows.layout(Rows.of([(0, budget - 1, [1])]), 1)
    assert (near.bound, resident.windows.layout(Rows.of([(0, budget, [1])]), 1)) == (budget, Layout(1, 1, 1))
    assert resident.layouts(1) == (near, Layout(1, 1, 1))


def test_a_draw_behind_a_replayed_window_leaves_its_logits_alone(resident, ids):
    """The pass that the host went through last took less of the workspace than the window does that is replayed."""
    state, windows = resident.state, resident.windows
    drawn = []
    for _ in range(2):  # the second time from a graph
        state.reserve_all([(0, 2), (1, 1)])
        ticket = windows.start(Rows.of([(0, 0, ids[:2])]), 1)
        before = resident.device.read(ticket.logits)
        drawn += windows.draw(ticket.logits, [Draw(PENALISED, ids[:2], 2, 64)]).wait()
        np.testing.assert_array_equal(resident.device.read(ticket.logits), before)
        windows.eager(Rows.of([(1, 0, ids[:1])]), 1).wait()
    assert drawn[0] == drawn[1] >= 0


def test_no_kernel_of_a_window_is_compiled_after_the_start(resident, ids, request):
    driver = resident.device.driver
    if driver.name != "emulated card":
        pytest.skip("a card keeps no list of what it was asked for")
    card = request.getfixturevalue("emulated_card")
    card.loaded.clear()
    for n in (1, 3, WINDOW_ROWS):
        window(resident, [(0, ids[:n])], 1, resident.windows.eager)
        window(resident, [(slot, [slot]) for slot in range(n)], n, resident.windows.eager)
    assert card.loaded and card.loaded <= driver.collected

"""One arithmetic: what is computed for a token depends on the tokens before it and on nothing else, bit for bit."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strata.engine.device.host import HostDevice
from strata.engine.model import Model, Rows

PACKS = ("tiny-iq3_s", "tiny-q4_k_m", "odd-q8_0", "odd-f32")


def read(sequence, ids, chunk: int, slot: int = 0) -> np.ndarray:
    """The logits of every token, read `chunk` tokens at a time."""
    parts = [ids[i : i + chunk] for i in range(0, len(ids), chunk)]
    return np.concatenate([sequence.feed(part, slot, want=len(part)) for part in parts])


@pytest.fixture(scope="module")
def whole(sequences, golden):
    """whole(pack): ids, logits of every token and the state's bytes of a 300-token prompt read in one forward."""
    kept: dict = {}

    def run(pack: str):
        if pack not in kept:
            ids = golden(f"{pack.split('-')[0]}-hf")["len300.ids"]
            sequence = sequences(pack, "cpu")
            kept[pack] = ids, read(sequence, ids, len(ids)), sequence.state.state_bytes(0)
        return kept[pack]

    return run


@pytest.mark.parametrize("chunk", [1, 7, 64, 128])
@pytest.mark.parametrize("pack", PACKS)
def test_the_chunk_of_a_prompt_changes_no_bit_of_logits_and_state(whole, sequences, pack, chunk):
    ids, logits, state = whole(pack)
    sequence = sequences(pack, "cpu")
    np.testing.assert_array_equal(read(sequence, ids, chunk), logits)
    assert sequence.state.state_bytes(0) == state


@given(data=st.data())
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_cut_of_a_prompt_changes_a_bit(whole, sequences, data):
    ids, logits, state = whole("odd-q8_0")
    cuts = data.draw(st.lists(st.integers(1, len(ids) - 1), max_size=6, unique=True).map(sorted))
    sequence, edges = sequences("odd-q8_0", "cpu"), [0, *cuts, len(ids)]
    for begin, end in pairwise(edges):
        np.testing.assert_array_equal(sequence.feed(ids[begin:end])[0], logits[end - 1])
    assert sequence.state.state_bytes(0) == state


@pytest.mark.parametrize("pack", PACKS)
def test_rows_of_other_slots_in_the_forward_change_no_bit(whole, sequences, pack):
    ids, logits, _ = whole(pack)
    sequence = sequences(pack, "cpu", n_slots=3)
    model, state, got = sequence.model, sequence.state, [[], [], []]
    lengths, prompts = (40, 9, 130), (ids, ids[150:], ids[::-1])
    while any(state.length(slot) < lengths[slot] for slot in range(3)):
        parts = []
        for slot, take in enumerate((1, 3, 64)):
            at = state.length(slot)
            parts.append((slot, at, prompts[slot][at : min(at + take, lengths[slot])]))
        rows = Rows.of([part for part in parts if len(part[2])])
        out = model.forward(rows, state, range(len(rows)))
        for slot, begin, end in rows.segments:
            got[slot].append(out[begin:end])
    np.testing.assert_array_equal(np.concatenate(got[0]), logits[:40])
    for slot in range(3):
        alone = sequences(pack, "cpu")
        part = prompts[slot][: lengths[slot]]
        np.testing.assert_array_equal(np.concatenate(got[slot]), read(alone, part, len(part)))
        assert state.digest(slot) == alone.state.digest(0)
    state.check()


def test_a_used_slot_is_as_good_as_a_new_one(whole, sequences):
    ids, logits, state = whole("odd-q8_0")
    sequence = sequences("odd-q8_0", "cpu", n_slots=2)
    sequence.feed(ids[100:250], slot=1)
    sequence.feed(ids[:130], slot=0)
    sequence.state.reset(1)
    for layer in sequence.state.pages.layers:  # whatever a freed page holds is never read
        free = np.setdiff1d(np.arange(sequence.state.pages.n_pages), sequence.state.pages.tables[0])
        for array in (layer.k, layer.v, layer.raw, layer.block):
            array[free] = np.nan
    np.testing.assert_array_equal(read(sequence, ids, 128, slot=1), logits)
    assert sequence.state.state_bytes(1) == state


def test_the_number_of_threads_changes_no_bit(whole, pack_of):
    ids, logits, state = whole("tiny-iq3_s")
    for threads in (1, 2):
        model = Model(pack_of("tiny-iq3_s"), HostDevice("cpu", threads), 512)
        own = model.new_state(1)
        np.testing.assert_array_equal(model.forward(Rows.of([(0, 0, ids)]), own, range(300)), logits)
        assert own.state_bytes(0) == state


def test_only_wanted_rows_reach_the_head_and_their_logits_are_the_same(whole, sequences):
    ids, logits, _ = whole("odd-q8_0")
    sequence = sequences("odd-q8_0", "cpu")
    rows = Rows.of([(0, 0, ids[:50])])
    got = sequence.model.forward(rows, sequence.state, [49, 3, 3])
    np.testing.assert_array_equal(got, logits[[49, 3, 3]])


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_float_weight_gives_the_same_bits_in_any_type_that_holds_it(sequences, golden, backend):
    ids = golden("tiny-hf")["len17.ids"]
    wide, narrow = (sequences(name, backend) for name in ("tiny-f32", "tiny-bf16"))
    np.testing.assert_array_equal(wide.feed(ids, want=17), narrow.feed(ids, want=17))
    assert wide.state.digest(0) == narrow.state.digest(0)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_split_pack_computes_what_the_single_file_computes(sequences, golden, backend):
    ids = golden("tiny-hf")["eos.ids"]
    one, two = (sequences(name, backend) for name in ("tiny-q2_0", "tiny-q2_0-split"))
    np.testing.assert_array_equal(one.feed(ids, want=len(ids)), two.feed(ids, want=len(ids)))
    assert one.state.digest(0) == two.state.digest(0)

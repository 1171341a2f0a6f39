"""Slots: lengths, room, reset, digests, memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from strata.engine.state.pages import AccountsError, OutOfPages
from strata.engine.state.slots import StatePool, StateTooLarge, estimate_bytes, require_memory
from strata.kernels.ops import PAGE


def arrays_of(state: StatePool) -> list[np.ndarray]:
    recurrent, pages = state.recurrent, state.pages.layers
    return [
        *(a for layer in recurrent.gdn for a in (layer.conv, layer.state)),
        recurrent.ple_conv,
        recurrent.history,
        *(a for layer in pages for a in (layer.k, layer.v, layer.raw, layer.block)),
    ]


def scribble(state: StatePool, seed: int) -> None:
    """Random contents in every array of the state."""
    rng = np.random.default_rng(seed)
    for a in arrays_of(state):
        a[...] = rng.integers(1, 900, a.shape)


def feed(state: StatePool, slot: int, n: int) -> None:
    state.reserve(slot, n)
    state.advance(slot, n)


def test_room_is_made_for_all_slots_of_a_call_or_for_none(spec):
    state = StatePool(spec, 3, 10 * PAGE, n_pages=6)
    feed(state, 0, 2 * PAGE)
    with pytest.raises(OutOfPages, match="5 more pages"):
        state.reserve_all([(0, PAGE), (1, 2 * PAGE), (2, PAGE + 1)])
    assert [state.pages.held(slot) for slot in range(3)] == [2, 0, 0]
    state.reserve_all([(0, PAGE), (1, 2 * PAGE), (2, PAGE)])
    assert state.pages.n_free == 0
    state.check()


def test_the_context_is_the_limit_even_where_the_last_page_has_room(spec):
    state = StatePool(spec, 1, 100)
    feed(state, 0, 99)
    state.reserve(0, 1)
    with pytest.raises(OutOfPages, match="slot 0: 101 tokens do not fit the context of 100"):
        state.reserve(0, 2)


def test_nothing_survives_a_reset(spec):
    state = StatePool(spec, 2, 200)
    fresh = state.state_bytes(0)
    assert (state.recurrent.history == spec.ple.eos).all()
    feed(state, 0, 150)
    feed(state, 1, 70)
    scribble(state, 1)
    neighbour = state.state_bytes(1)
    assert state.state_bytes(0) != fresh
    state.reset(0)
    assert state.state_bytes(0) == fresh and state.length(0) == 0 and state.pages.held(0) == 0
    assert state.state_bytes(1) == neighbour
    state.check()


def test_the_digest_names_contents_not_pages(spec):
    one, two = StatePool(spec, 2, 256), StatePool(spec, 2, 256)
    feed(two, 1, 200)  # two's slot 0 gets other pages, and holds spare ones
    two.reserve(0, 250)
    two.advance(0, 150)
    feed(one, 0, 150)
    for state in (one, two):
        pages, rng = state.pages.tables[0, :3], np.random.default_rng(3)
        for a in arrays_of(state)[-4 * len(state.pages.layers) :]:
            a[pages] = rng.integers(1, 9, a[pages].shape)
    assert one.digest(0) == two.digest(0)
    layer = two.pages.layers[-1]
    layer.v[two.pages.tables[0, 2], 150 % PAGE] += 1  # the first token that is not there yet
    assert one.digest(0) == two.digest(0)
    layer.block[two.pages.tables[0, 2], (150 % PAGE) // layer.r - 1] += 1  # the last complete block
    assert one.digest(0) != two.digest(0)


def test_the_digest_sees_every_part_of_the_state(spec):
    state = StatePool(spec, 1, PAGE)
    feed(state, 0, PAGE)
    seen = {state.digest(0)}
    for n, part in enumerate(arrays_of(state), 2):
        part[0].reshape(-1)[-1] += 1
        seen.add(state.digest(0))
        assert len(seen) == n


def test_the_estimate_is_what_the_arrays_take(spec):
    for given in (spec, replace(spec, ple=None), replace(spec, ratios=(0,) * spec.layers)):
        state = StatePool(given, 3, 300, n_pages=7)
        assert sum(a.nbytes for a in arrays_of(state)) == estimate_bytes(given, 3, 300, 7)
    assert estimate_bytes(spec, 3, 300) == estimate_bytes(spec, 3, 300, 15)


def test_a_state_that_the_machine_cannot_hold_is_refused_with_numbers(spec):
    needed = estimate_bytes(spec, 2, 1 << 24)
    require_memory(spec, 2, 1 << 24, needed)
    with pytest.raises(StateTooLarge, match=r"2 slots of 16777216 tokens takes .* GiB, .* GiB are free; use a smaller"):
        require_memory(spec, 2, 1 << 24, needed - 1)


def test_the_real_model_takes_the_bytes_that_its_description_says(spec):
    real = replace(
        spec,
        hidden=2560,
        layers=48,
        streams=4,
        kv_heads=2,
        head_dim=256,
        index_dim=128,
        recurrent=tuple(i % 4 != 3 for i in range(48)),
        ratios=tuple(4 * (i % 4 == 3) for i in range(48)),
        gdn_key_heads=16,
        gdn_value_heads=48,
        gdn_head_dim=128,
        gdn_kernel=4,
        ple=replace(spec.ple, order=3, kernel=4),
    )
    keys_and_values, raw, block = 2 * 24_576, 2 * 3_072, 1_536  # float32 here, half precision in the description
    fixed = 113_246_208 + 4_423_680 + 368_640 + 8
    assert estimate_bytes(real, 1, 64) == 64 * (keys_and_values + raw + block) + fixed


@pytest.mark.parametrize("figures", [(0, 10, None), (1, 0, None), (1, 10, 0)])
def test_an_empty_state_is_refused(spec, figures):
    with pytest.raises(ValueError, match="empty"):
        StatePool(spec, *figures)


def test_the_check_sees_tokens_without_pages(spec):
    state = StatePool(spec, 1, 200)
    feed(state, 0, 10)
    state.advance(0, 60)
    with pytest.raises(AccountsError, match="slot 0 has 70 tokens in 1 pages"):
        state.check()

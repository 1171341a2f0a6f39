"""Pages: accounts balance through any sequence of operations, and nothing is taken when there is not enough."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.engine.state.pages import AccountsError, OutOfPages, PagePool, page_bytes, pages_for
from strata.kernels.ops import PAGE

SLOTS, PER_SLOT, PAGES = 3, 5, 8


def table(pool: PagePool, slot: int) -> list[int]:
    return pool.tables[slot, : pool.held(slot)].tolist()


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_free_and_held_pages_add_up_after_any_operations(spec, data):
    pool = PagePool(spec, SLOTS, PER_SLOT, PAGES)
    for _ in range(data.draw(st.integers(0, 25))):
        slot, other = data.draw(st.integers(0, SLOTS - 1)), data.draw(st.integers(0, SLOTS - 1))
        match data.draw(st.sampled_from(["grow", "release", "share"])):
            case "grow":
                tokens = data.draw(st.integers(0, (PER_SLOT + 1) * PAGE))
                before = table(pool, slot), pool.n_free
                try:
                    pool.grow(slot, tokens)
                    assert pool.held(slot) >= pages_for(tokens)
                    assert table(pool, slot)[: len(before[0])] == before[0]
                except OutOfPages:
                    assert (table(pool, slot), pool.n_free) == before
            case "release":
                pool.release(slot)
                assert pool.held(slot) == 0
            case "share" if slot != other and not pool.held(other):
                n = data.draw(st.integers(0, pool.held(slot)))
                free = pool.n_free
                pool.share(slot, other, n)
                assert table(pool, other) == table(pool, slot)[:n] and pool.n_free == free
        pool.check()
    for slot in range(SLOTS):
        pool.release(slot)
    pool.check()
    assert pool.n_free == PAGES


def test_a_shared_page_outlives_its_first_holder(spec):
    pool = PagePool(spec, SLOTS, PER_SLOT, PAGES)
    pool.grow(0, 3 * PAGE)
    pool.share(0, 1, 2)
    first = table(pool, 0)
    pool.release(0)
    assert table(pool, 1) == first[:2] and pool.n_free == PAGES - 2
    pool.grow(2, (PAGES - 2 - 1) * PAGE)
    assert not set(table(pool, 2)) & set(first[:2])
    pool.check()


def test_an_empty_pool_says_how_many_pages_are_missing(spec):
    pool = PagePool(spec, SLOTS, PER_SLOT, PAGES)
    pool.grow(0, 5 * PAGE)
    with pytest.raises(OutOfPages, match="4 more pages of 64 tokens are needed, 3 of 8 are free; end a conversation"):
        pool.grow(1, 3 * PAGE + 1)
    with pytest.raises(OutOfPages, match="slot 2: 321 tokens do not fit its 320; use a larger context"):
        pool.grow(2, 5 * PAGE + 1)


def test_sharing_into_a_slot_that_holds_pages_is_refused(spec):
    pool = PagePool(spec, SLOTS, PER_SLOT, PAGES)
    pool.grow(0, PAGE)
    pool.grow(1, PAGE)
    with pytest.raises(AccountsError):
        pool.share(0, 1, 1)
    with pytest.raises(AccountsError):
        pool.share(0, 2, 2)
    pool.check()


@pytest.mark.parametrize("damage", ["lost", "twice", "foreign"])
def test_the_check_sees_a_page_that_is_lost_or_held_twice(spec, damage):
    pool = PagePool(spec, SLOTS, PER_SLOT, PAGES)
    pool.grow(0, 2 * PAGE)
    pool.grow(1, PAGE)
    match damage:
        case "lost":
            pool.tables[1, 0] = -1
        case "twice":
            pool.tables[1, 0] = pool.tables[0, 0]
        case "foreign":
            pool.tables[1, 0] = PAGES
    with pytest.raises(AccountsError):
        pool.check()


def test_a_page_takes_what_the_estimate_says(spec):
    pool = PagePool(spec, SLOTS, PER_SLOT, PAGES)
    arrays = [a for layer in pool.layers for a in (layer.k, layer.v, layer.raw, layer.block)]
    assert sum(a.nbytes for a in arrays) == PAGES * page_bytes(spec)
    assert [layer.r for layer in pool.layers] == [spec.ratios[i] for i in spec.attention_layers]

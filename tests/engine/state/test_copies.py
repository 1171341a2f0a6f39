"""States that are copied, branched, imaged and restored are the states that they came from, in every memory."""

from __future__ import annotations

import numpy as np
import pytest

from strata.engine.state.pages import OutOfPages
from strata.engine.state.slots import StateImage
from strata.kernels.ops import PAGE

CONTEXT = 4 * PAGE
LENGTHS = (1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE + 5)


def words(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 200, n).astype(np.int32)


@pytest.mark.parametrize("n", LENGTHS)
def test_a_copy_is_equal_and_neither_side_sees_what_the_other_writes_later(new_state, n):
    s = new_state(2, CONTEXT, n_checkpoints=1)
    s.write(0, words(n))
    s.write(1, words(30, 9))
    s.state.copy(0, 2)
    s.state.copy(2, 1)
    before = s.state.state_bytes(0)
    for slot in (1, 2):
        assert s.state.state_bytes(slot) == before
    s.write(0, words(70, 1))
    after = s.state.state_bytes(0)
    assert s.state.state_bytes(1) == s.state.state_bytes(2) == before
    s.write(1, words(70, 1))
    assert s.state.state_bytes(1) == after
    s.state.copy(0, 0)
    assert s.state.state_bytes(0) == after and s.state.state_bytes(2) == before
    s.state.check()


def test_a_copy_takes_one_page_for_what_is_unfinished(new_state):
    s = new_state(2, CONTEXT)
    s.write(0, words(2 * PAGE + 5))
    free = s.state.pages.n_free
    s.state.copy(0, 1)
    assert s.state.pages.n_free == free - 1
    s.state.copy(0, 1)
    assert s.state.pages.n_free == free - 1, "a copy over a copy takes nothing more"


def test_kernels_see_the_table_of_a_copy(new_state):
    s = new_state(2, CONTEXT)
    s.write(0, words(2 * PAGE))
    s.state.copy(0, 1)
    seen = s.memory.read(s.state.pages.kernel_tables)
    np.testing.assert_array_equal(seen, s.state.pages.tables[:2])
    assert (seen[1, :2] == seen[0, :2]).all()


def test_a_copy_without_a_page_left_changes_nothing(new_state):
    s = new_state(3, CONTEXT, n_pages=3)
    s.write(0, words(PAGE + 1))
    s.write(1, words(PAGE))
    before = [s.state.state_bytes(slot) for slot in range(3)]
    with pytest.raises(OutOfPages):
        s.state.copy(0, 2)
    with pytest.raises(OutOfPages):
        s.state.branch(0, 2, 5, s.state.recurrent.read(0))
    with pytest.raises(OutOfPages):
        s.state.restore(2, s.state.image(0))
    assert [s.state.state_bytes(slot) for slot in range(3)] == before
    s.state.copy(0, 1)  # the page of the target itself is enough
    assert s.state.state_bytes(1) == before[0]
    s.state.check()


def test_pages_that_others_hold_too_do_not_count_as_room(new_state):
    s = new_state(2, CONTEXT, n_pages=2, n_checkpoints=1)
    s.write(0, words(PAGE))
    s.state.copy(0, 2)
    s.write(0, words(3))
    before = s.state.state_bytes(2)
    with pytest.raises(OutOfPages):
        s.state.copy(0, 2)
    assert s.state.state_bytes(2) == before
    s.state.check()


def test_pages_are_asked_for_before_a_copy_gives_up(new_state):
    s = new_state(3, CONTEXT, n_pages=3)
    s.write(0, words(PAGE + 1))
    s.write(1, words(5))
    s.state.relieve = lambda: s.state.length(1) > 0 and not s.state.drop(1)
    s.state.copy(0, 2)
    assert s.state.state_bytes(2) == s.state.state_bytes(0) and s.state.length(1) == 0


@pytest.mark.parametrize("n", LENGTHS)
def test_an_image_restores_the_state_or_an_earlier_one_of_which_the_block_was_kept(new_state, n):
    s = new_state(2, CONTEXT)
    s.write(1, words(PAGE + 3, 4))
    s.write(0, words(n // 2))
    early, block = s.state.state_bytes(0), s.state.recurrent.read(0)
    s.write(1, words(PAGE, 5))  # so that the pages of slot 0 are no neighbours
    s.write(0, words(n - n // 2, 1))
    late, image = s.state.state_bytes(0), s.state.image(0)
    assert len(image.pages) + len(image.block) == s.state.image_bytes(n)
    s.state.reset(0)
    s.state.restore(0, image)
    assert s.state.state_bytes(0) == late
    s.state.restore(1, image, n // 2, block)
    assert s.state.state_bytes(1) == early
    s.state.check()


def test_an_image_fits_another_pool_of_the_same_model(new_state):
    one, two = new_state(1, CONTEXT), new_state(3, 2 * CONTEXT, n_checkpoints=1)
    one.write(0, words(100))
    two.state.restore(2, one.state.image(0))
    assert two.state.state_bytes(2) == one.state.state_bytes(0)
    one.write(0, words(40, 1))
    two.write(2, words(40, 1))
    assert two.state.state_bytes(2) == one.state.state_bytes(0)


def test_a_branch_shares_pages_with_the_state_that_went_on(new_state):
    s = new_state(1, CONTEXT, n_checkpoints=1)
    s.write(0, words(PAGE + 9))
    early, block = s.state.state_bytes(0), s.state.recurrent.read(0)
    s.write(0, words(PAGE, 1))
    free = s.state.pages.n_free
    s.state.branch(0, 1, PAGE + 9, block)
    assert s.state.state_bytes(1) == early and s.state.pages.n_free == free - 1


@pytest.mark.parametrize("damage", ["pages", "block", "length"])
def test_an_image_of_the_wrong_size_is_refused_before_anything_changes(new_state, damage):
    s = new_state(2, CONTEXT)
    s.write(0, words(100))
    s.write(1, words(7))
    before, good = s.state.state_bytes(1), s.state.image(0)
    wrong = {
        "pages": StateImage(100, good.pages[:-1], good.block),
        "block": StateImage(100, good.pages, good.block[1:]),
        "length": StateImage(CONTEXT, good.pages, good.block),
    }[damage]
    with pytest.raises(ValueError, match="bytes of an image"):
        s.state.restore(1, wrong)
    assert s.state.state_bytes(1) == before

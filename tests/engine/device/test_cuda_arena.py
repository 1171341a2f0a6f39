"""Memory of a card: arenas do not overlap or overflow, the account knows its limit, refusals say what helps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.engine.device.arena import ALIGNMENT, MIB, Account, Arena, padded, shown
from strata.engine.device.base import Memory
from strata.kernels.cuda.compile import DeviceError


class Card:
    """Memory by numbers: `free` and `total` as the driver would say."""

    def __init__(self, free: int, total: int) -> None:
        self.free, self.total = free, total
        self.asked: list[int] = []

    def memory(self) -> tuple[int, int]:
        return self.free, self.total

    def allocate(self, n_bytes: int) -> np.ndarray:
        self.asked.append(n_bytes)
        self.free -= n_bytes
        return np.empty(n_bytes, np.uint8)


def aligned(n_bytes: int) -> np.ndarray:
    room = np.zeros(n_bytes + ALIGNMENT, np.uint8)
    return room[-room.ctypes.data % ALIGNMENT :][:n_bytes]


SHAPES = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), max_size=20)
TYPES = st.sampled_from([np.uint8, np.int32, np.float32, np.float64, np.uint64])


@given(shapes=SHAPES, data=st.data())
@settings(max_examples=100, deadline=None)
def test_arrays_of_an_arena_are_aligned_and_keep_their_contents(shapes, data):
    kinds = [np.dtype(data.draw(TYPES)) for _ in shapes]
    needed = sum(padded(int(np.prod(shape)) * kind.itemsize) for shape, kind in zip(shapes, kinds, strict=True))
    arena = Arena(aligned(needed), "the arena")
    arrays = [arena.array(shape, kind) for shape, kind in zip(shapes, kinds, strict=True)]
    for i, array in enumerate(arrays):
        assert array.ctypes.data % ALIGNMENT == 0 and array.flags.c_contiguous
        array[...] = i + 1
    for i, (array, shape, kind) in enumerate(zip(arrays, shapes, kinds, strict=True)):
        assert array.shape == shape and array.dtype == kind and (array == i + 1).all()
    assert (arena.used, arena.free) == (needed, 0)
    with pytest.raises(DeviceError, match=r"the arena: \(1,\) uint8 takes 1 bytes, 0 are left"):
        arena.array((1,), np.uint8)


@pytest.mark.parametrize(
    ("limit", "held", "want"),
    [
        (0, 0, Memory(1000 * MIB, 800 * MIB)),
        (500, 0, Memory(500 * MIB, 500 * MIB)),
        (900, 0, Memory(900 * MIB, 800 * MIB)),  # other programs have 200
        (500, 300, Memory(500 * MIB, 200 * MIB)),
        (2000, 0, Memory(1000 * MIB, 800 * MIB)),
    ],
)
def test_a_limit_makes_the_card_smaller_and_never_larger(limit, held, want):
    account = Account(Card(800 * MIB, 1000 * MIB), limit * MIB)
    if held:
        account.take(held * MIB, "something", "")
    if limit != 500 or not held:
        assert account.memory() == want
    else:
        assert account.memory() == Memory(want.total, 200 * MIB)


def test_every_arena_counts_against_the_limit():
    card = Card(1 << 30, 1 << 30)
    account = Account(card, 64 * MIB)
    account.take(40 * MIB, "the weights", "")
    with pytest.raises(DeviceError) as refused:
        account.take(25 * MIB, "the state", "use a smaller --max-context")
    assert str(refused.value) == (
        "the state take 0.02 GiB of the card's memory, 0.02 GiB are free within --vram-limit-mib 64; "
        "use a smaller --max-context"
    )
    assert card.asked == [40 * MIB]
    account.give(40 * MIB)
    account.take(25 * MIB, "the state", "")
    assert account.held == 25 * MIB


def test_what_does_not_fit_is_refused_before_the_driver_is_asked():
    card = Card(10 * MIB, 1 << 30)
    with pytest.raises(DeviceError, match=r"the weights take 61\.78 GiB of the card's memory, 0\.01 GiB are"):
        Account(card).take(int(61.78 * 2**30), "the weights", "use a smaller file")
    assert card.asked == []


@pytest.mark.parametrize(("n", "text"), [(0, "0.00 MiB"), (3 * MIB // 2, "1.50 MiB"), (3 << 29, "1.50 GiB")])
def test_sizes_are_shown_in_units_that_a_person_reads(n, text):
    assert shown(n) == text

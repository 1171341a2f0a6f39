"""Pages whose keys and values are in RAM: a frame of two pages, or a byte that stays behind, is a wrong text."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.engine.device.meter import Meter
from strata.engine.state.frames import Frames
from strata.engine.state.pages import AccountsError, OutOfPages, frame_bytes, pages_for
from strata.engine.state.slots import StatePool, estimate_bytes, far_bytes
from strata.kernels.ops import PAGE

CONTEXT, RESIDENT, SLOTS, CHECKPOINTS = 7 * PAGE, 2 * PAGE, 2, 2


@given(st.integers(1, 6), st.lists(st.tuples(st.booleans(), st.integers(0, 8)), max_size=60))
def test_frames_are_those_of_the_pages_that_came_last(n, steps):
    frames, near, far = Frames(n, 9), list[int](), set[int]()
    for enters, page in steps:
        if enters and page not in near and page not in far:
            wanted = near[0] if len(near) == n else None
            left = frames.enter(page)
            assert (left and left[0]) == wanted
            if wanted is not None:
                near.remove(wanted)
                far.add(wanted)
            near.append(page)
        elif not enters:
            frames.leave(page)
            near, far = [other for other in near if other != page], far - {page}
        assert [at for at in range(9) if frames.place[at] >= 0] == sorted(near) and frames.used == len(near)
        assert frames.faults([int(at in near or at in far) for at in range(9)]) is None


def test_tables_name_frames_and_pages_at_home():
    frames = Frames(2, 5)
    assert [frames.enter(page) for page in (3, 0, 4)] == [None, None, (3, 0)]
    tables = np.array([[3, 0, 4, -1]], np.int32)
    assert frames.named(tables).tolist() == [[~3, 1, 0, -1]]


@pytest.mark.parametrize("n", [0, 5, 6])
def test_frames_for_all_pages_are_none(n):
    with pytest.raises(ValueError, match=f"{n} frames for 5 pages"):
        Frames(n, 5)


class Twins:
    """A pool with all pages in memory, and one with few frames, that do the same."""

    def __init__(self, spec, kv: str = "fp32") -> None:
        self.pools = [
            StatePool(spec, SLOTS, CONTEXT, kv=kv, n_checkpoints=CHECKPOINTS, resident=resident)
            for resident in (0, RESIDENT)
        ]
        self.rng = np.random.default_rng(3)

    def read(self, slot: int, n: int) -> None:
        """n tokens of random state, where kernels would write them."""
        begin = self.pools[0].length(slot)
        if begin + n > CONTEXT:
            return
        for pool in self.pools:
            pool.reserve(slot, n)
        for i, name in self.pools[0].pages._names():
            for position in range(begin, begin + n):
                page, at = divmod(position, PAGE)
                whole = getattr(self.pools[0].pages.layers[i], name)
                row = at * whole.shape[1] // PAGE
                value = self.rng.integers(0, 100, whole.shape[2:])
                for pool in self.pools:
                    pool.pages.part(i, name, int(pool.pages.tables[slot, page]))[0][row] = value
        for pool in self.pools:
            pool.advance(slot, n)

    def check(self) -> None:
        for pool in self.pools:
            pool.check()
        for slot in range(SLOTS + CHECKPOINTS):
            if self.pools[0].length(slot):
                assert self.pools[0].state_bytes(slot) == self.pools[1].state_bytes(slot)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("read"), st.integers(0, SLOTS - 1), st.integers(1, 150)),
        st.tuples(st.just("copy"), st.integers(0, SLOTS + CHECKPOINTS - 1), st.integers(0, SLOTS + CHECKPOINTS - 1)),
        st.tuples(st.just("reset"), st.integers(0, SLOTS + CHECKPOINTS - 1), st.just(0)),
        st.tuples(st.just("park"), st.integers(0, SLOTS - 1), st.integers(0, SLOTS - 1)),
    ),
    max_size=14,
)


@settings(max_examples=30, deadline=None)
@given(STEPS)
def test_states_with_pages_in_ram_are_those_with_all_in_memory(spec, steps):
    """Grown, copied to checkpoints and back, parked and restored: lengths, keys, values and images are the same."""
    twins = Twins(spec)
    for what, first, second in steps:
        outcomes = []
        if what == "read":
            twins.read(first, second)
            continue
        for pool in twins.pools:
            try:
                if what == "copy":
                    pool.copy(first, second)
                elif what == "reset":
                    pool.reset(first)
                else:
                    image = pool.image(first)
                    pool.restore(second, image)
                    outcomes.append(image.pages.tobytes())
            except OutOfPages:
                outcomes.append(b"full")
        assert len(set(outcomes)) <= 1
        twins.check()
    twins.check()


def test_what_is_in_ram_is_counted_and_the_rest_is_what_memory_takes(spec):
    twins = Twins(spec)
    pages = twins.pools[1].pages
    twins.read(0, CONTEXT)
    twins.read(1, CONTEXT)
    assert pages.n_far == 2 * pages_for(CONTEXT) - (SLOTS * pages_for(RESIDENT) + CHECKPOINTS)
    assert twins.pools[0].pages.n_far == 0
    twins.check()
    twins.pools[1].reset(0)
    twins.pools[1].reset(1)
    assert pages.n_far == 0
    for kv in ("fp32", "int8", "k8v4"):
        meter = Meter(2)
        pool = StatePool(spec, SLOTS, CONTEXT, kv=kv, memory=meter, n_checkpoints=CHECKPOINTS, resident=RESIDENT)
        wanted = estimate_bytes(spec, SLOTS, CONTEXT, None, kv, 2, CHECKPOINTS, RESIDENT)
        small = 3 * pool.pages.tables.nbytes + 256 * 8 * spec.layers
        assert wanted <= meter.state <= wanted + small
        assert meter.far_state == far_bytes(spec, SLOTS, CONTEXT, CHECKPOINTS, kv, RESIDENT)
        assert meter.far_state == pool.pages.n_pages * frame_bytes(spec, kv)
    assert far_bytes(spec, SLOTS, CONTEXT, CHECKPOINTS, "int8", CONTEXT) == 0, "the whole context is resident"


def test_a_book_of_frames_that_is_wrong_is_a_fault(spec):
    pool = Twins(spec).pools[1]
    pool.reserve(0, 3 * PAGE)
    pool.pages._frames.place[int(pool.pages.tables[0, 0])] += 1
    with pytest.raises(AccountsError, match="others than the books say"):
        pool.check()

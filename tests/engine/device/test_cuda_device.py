"""The card as a device: staged copies, mirrors, the workspace that fits, memory that is refused."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import numpy as np
import pytest

from strata.engine.device.arena import MIB
from strata.engine.device.cuda import STAGING, CudaDevice, Staging
from strata.kernels.cuda.compile import DeviceError
from strata.kernels.formats import BY_NAME, Weight

ROOM = 1 << 30
"""Memory that a fit leaves alone."""


@pytest.fixture
def device(any_card) -> CudaDevice:
    made = CudaDevice(driver=any_card())
    made.open("weights", 4 * MIB, "")
    made.open("state", 4 * MIB, "")
    return made


def test_a_staged_copy_keeps_its_values_when_the_source_and_the_buffers_are_used_again(device):
    staging, targets = Staging(device.driver, 64), [device.fixed(64) for _ in range(3 * STAGING)]
    source = np.empty(64, np.uint8)
    for i, target in enumerate(targets):
        source[:] = i
        staging.upload(target, source)
    for i, target in enumerate(targets):
        assert (device.read(target) == i).all()


def test_kernels_see_a_mirror_as_of_its_last_update(device):
    mirror = device.mirror((3, 5), -1)
    assert (device.read(mirror.array) == -1).all()
    mirror.host[1] = 7
    assert (device.read(mirror.array) == -1).all()
    mirror.update()
    mirror.host[2] = 9
    np.testing.assert_array_equal(device.read(mirror.array), [[-1] * 5, [7] * 5, [-1] * 5])


def test_state_begins_as_zeros_and_is_filled_without_touching_its_neighbours(device):
    a, b = device.zeros((2, 6)), device.zeros((4,), np.int32)
    device.fill(a[1], 2.5)
    device.fill(b[:0], 3)
    np.testing.assert_array_equal(device.read(a), [[0] * 6, [2.5] * 6])
    device.fill(a[1], 0)
    assert not device.read(a).any() and not device.read(b).any()


def test_weights_keep_the_bytes_of_the_file(device):
    rng = np.random.default_rng(0)
    given = [
        Weight(BY_NAME["Q8_0"], (3, 64), rng.integers(0, 256, (3, 68), np.uint8)),
        Weight(BY_NAME["F32"], (2, 3, 5), rng.integers(0, 256, (2, 3, 20), np.uint8)),
    ]
    device.table_place = "ram"
    bound = [*map(device.weight, given), device.table(given[0])]
    small = device.put(np.arange(12.0, dtype=np.float32).reshape(3, 4)[:, ::2])
    device.load()
    device.loaded()
    for weight, want in zip(bound, [*given, given[0]], strict=True):
        assert (weight.type, weight.shape) == (want.type, want.shape)
        np.testing.assert_array_equal(device.read(weight.data), want.data)
    np.testing.assert_array_equal(device.read(small), [[0, 2], [4, 6], [8, 10]])


def test_rows_are_taken_in_any_order(device):
    def largest() -> None:
        device.begin()
        device.kernels.workspace.array((9, 3))
        device.take(device.kernels.workspace.array((5, 3)), np.array([4, 0, 2]))

    assert device.fit(largest, ROOM)
    x = device.put(np.arange(15, dtype=np.float32).reshape(5, 3))
    device.load()
    device.loaded()
    device.begin()
    for rows in ([4, 0, 2], [1, 2, 3], [2], []):
        np.testing.assert_array_equal(device.read(device.take(x, np.array(rows, np.int64))), device.read(x)[rows])


def test_the_workspace_is_what_the_largest_passes_take_and_no_more(device):
    def passes(rows: int) -> None:
        for part, blocks in ((1000, (300, 20)), (10, (5, 700))):
            device.begin()
            device.kernels.workspace.array((part,), np.uint8)
            for block in blocks:
                device.turn(rows)
                device.kernels.workspace.array((block,), np.uint8)

    held = device.account.held
    for rows, work in ((0, 2 * 768), (16, 2 * 768), (17, 768)):
        for _ in range(2):
            assert device.fit(partial(passes, rows), ROOM)
            assert device.workspace_bytes == 1024 + work == device.account.held - held
            passes(rows)  # just fits


def test_a_workspace_that_has_no_room_is_no_error(device):
    def too_much() -> None:
        device.begin()
        device.kernels.workspace.array((device.memory().total + 1,), np.uint8)

    held = device.account.held
    assert not device.fit(too_much, ROOM)
    assert not device.fit(too_much, device.memory().free)
    assert device.account.held == held


def bytes_of(array) -> range:
    begin = array.__array_interface__["data"][0] if isinstance(array, np.ndarray) else array.data.ptr
    return range(begin, begin + array.nbytes)


def apart(one, other) -> bool:
    one, other = bytes_of(one), bytes_of(other)
    return one.stop <= other.start or other.stop <= one.start


def test_blocks_of_windows_share_no_memory_with_the_next_one_and_those_of_longer_passes_have_all_of_it(device):
    def blocks(rows: int) -> list:
        device.begin()
        found = []
        for _ in range(4):
            device.turn(rows)
            found.append(device.kernels.workspace.array((700,), np.uint8))
        return found

    assert device.fit(lambda: (blocks(16), blocks(17)), ROOM)
    first, second, third, fourth = blocks(16)
    assert bytes_of(first) == bytes_of(third) and bytes_of(second) == bytes_of(fourth) and apart(first, second)
    assert len(set(map(bytes_of, blocks(17)))) == 1


def test_what_a_block_leaves_lies_where_no_other_block_works_and_its_beta_apart_from_the_one_before(device):
    def passed(rows: int) -> tuple[list, list]:
        device.begin()
        x = device.kernels.workspace.array((rows, 4, 8))
        kept, work = [], []
        for n in (rows, rows, 20, rows):  # 20: a draft layer's pass behind some of the rows
            device.turn(n)
            work.append(device.kernels.workspace.array((100 * n,), np.uint8))
            kept.append(device.kept(x[:n]))
        return kept, work

    assert device.fit(lambda: passed(40), ROOM)
    kept, work = passed(40)
    assert [beta.shape for beta, _ in kept] == [(40, 4), (40, 4), (20, 4), (40, 4)]
    assert all(apart(array, space) for pair in kept for array in pair for space in work)
    assert all(apart(one[0], other[0]) for one, other in pairwise(kept)) and apart(*kept[0])
    assert len({bytes_of(y).start for _, y in kept}) == 1, "one place for all outputs"
    assert device.kept(kept[0][1].reshape(-1, 4, 8)[:16]) is None


def test_an_arena_beyond_the_limit_is_refused_with_the_flag(any_card):
    device = CudaDevice(limit_mib=16, driver=any_card())
    assert device.memory().total == 16 * MIB
    with pytest.raises(DeviceError, match=r"the weights take 0.03 GiB .* within --vram-limit-mib 16; use a smaller"):
        device.open("weights", 32 * MIB, "use a smaller file")


def test_state_goes_to_another_place_and_to_the_host_and_back_byte_for_byte(device):
    a, b = device.zeros((3, 5)), device.zeros((3, 5))
    given = np.random.default_rng(1).integers(0, 256, 20, np.uint8)
    device.upload(a[1], given)
    wanted, given = given.copy(), np.zeros_like(given)
    device.copy(b[2], a[1])
    device.fill(a[1], 0)
    device.download(given, b[2])
    np.testing.assert_array_equal(given, wanted)
    assert not device.read(a).any() and not device.read(b[:2]).any()

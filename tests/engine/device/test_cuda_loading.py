"""Weights on their way to the card: every byte arrives, buffers are not reused too early, a failure ends the load."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from strata.engine.device.loading import PIECE, Copy, Loading, pieces
from strata.kernels.cuda.compile import DeviceError
from strata.kernels.cuda.repack import file_bytes
from strata.kernels.formats import BY_NAME, CARD_FORMS
from strata.kernels.reference.repack import repack


def copies(rng: np.random.Generator, sizes: list[int], host: bool = False) -> list[Copy]:
    return [Copy(rng.integers(0, 256, n, np.uint8), np.zeros(n, np.uint8), host) for n in sizes]


def test_pieces_cover_the_tensors_without_gap_or_overlap():
    given = copies(np.random.default_rng(0), [0, 1, 10, 11, 30])
    cut = list(pieces(given, most=10))
    assert [p.source.size for p in cut] == [1, 10, 10, 1, 10, 10, 10]
    assert b"".join(p.source.tobytes() for p in cut) == b"".join(c.source.tobytes() for c in given)
    assert all(p.source.size == p.target.size for p in cut)


@pytest.mark.parametrize("threads", [1, 3])
def test_every_byte_arrives_although_buffers_are_used_again(emulated_card, threads):
    rng = np.random.default_rng(1)
    given = copies(rng, [3 * PIECE + 5, 17, 2 * PIECE, PIECE - 1]) + copies(rng, [1000], host=True)
    Loading(emulated_card.driver(), given, threads).wait()
    for copy in given:
        np.testing.assert_array_equal(copy.target, copy.source)


@pytest.mark.parametrize("name", CARD_FORMS)
def test_what_the_card_keeps_in_another_form_arrives_whole(emulated_card, name):
    kind, rng = BY_NAME[name], np.random.default_rng(4)
    n_blocks = [PIECE // file_bytes(kind) + 3, 1, 200]
    sources = [rng.integers(0, 256, n * file_bytes(kind), np.uint8) for n in n_blocks]
    given = [Copy(s, np.zeros(repack(kind, s).size, np.uint8), kind=kind) for s in sources]
    plain = copies(rng, [PIECE + 5])
    Loading(emulated_card.driver(), [*given, *plain], 2).wait()
    for copy in given:
        np.testing.assert_array_equal(copy.target, repack(kind, copy.source))
    np.testing.assert_array_equal(plain[0].target, plain[0].source)


def test_a_failing_card_ends_the_load_in_the_thread_that_waits(emulated_card):
    driver = emulated_card.driver()

    def fail(n_bytes: int) -> np.ndarray:
        raise MemoryError("no page-locked memory")

    driver.pinned = fail
    with pytest.raises(MemoryError, match="page-locked"):
        Loading(driver, copies(np.random.default_rng(2), [100]), 2).wait()


def test_a_cancelled_load_leaves_no_thread_behind(emulated_card):
    loading = Loading(emulated_card.driver(), copies(np.random.default_rng(3), [4 * PIECE]), 2)
    loading.cancel()
    assert not any(thread.is_alive() for thread in loading._threads)


def test_bytes_that_the_card_does_not_keep_are_seen_where_a_copy_is_read_back(emulated_card):
    rng = np.random.default_rng(6)
    sure, blind = copies(rng, [PIECE + 300])[0], copies(rng, [100])[0]
    given = [replace(sure, checked=True), blind]
    Loading(emulated_card.driver(), given).wait()
    loading = Loading(emulated_card.driver(), given)
    for thread in loading._threads:
        thread.join()
    blind.target[7] ^= 4
    loading.wait()
    sure.target[PIECE + 7] ^= 4
    with pytest.raises(DeviceError, match=f"1 of {PIECE + 300} bytes .* number {PIECE + 7};") as found:
        loading.wait()
    assert "\n" not in str(found.value)

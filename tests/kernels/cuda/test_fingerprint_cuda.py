"""Bytes on a card that are no longer what they were are noticed, whichever of them it is."""

from __future__ import annotations

import numpy as np
import pytest

from strata.kernels.cuda.fingerprint import fingerprint
from strata.kernels.reference.fingerprint import fingerprint as plain


def on(target, data: np.ndarray, before: int = 0) -> int:
    total = target.put(np.array([before], np.uint64))
    fingerprint(target.put(data), total)
    return int(target.host(total)[0])


@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 2048, 32 * 1024, 32 * 1024 + 8, 3 * 32 * 1024 + 13])
def test_a_card_finds_the_number_of_the_reference(target, n):
    data = np.random.default_rng(n).integers(0, 256, n).astype(np.uint8)
    assert on(target, data) == plain(data)
    assert on(target, data, 5) == (plain(data) + 5) % (1 << 64)


@pytest.mark.parametrize("n", [1, 13, 4096])
def test_every_changed_byte_and_every_exchanged_word_gives_another_number(n):
    data = np.random.default_rng(n).integers(0, 256, n).astype(np.uint8)
    found = {plain(data)}
    for place in range(n):
        changed = data.copy()
        changed[place] ^= 1 << place % 8
        found.add(plain(changed))
    assert len(found) == 1 + n
    if n >= 16:
        other = np.concatenate([data[8:16], data[:8], data[16:]])
        assert plain(other) != plain(data)
        assert plain(np.zeros(16, np.uint8)) != plain(np.zeros(24, np.uint8))


def test_bytes_that_begin_in_a_word_are_refused(target):
    data = target.put(np.zeros(64, np.uint8))
    with pytest.raises(ValueError, match="multiple of 8"):
        fingerprint(data[4:], target.put(np.zeros(1, np.uint64)))

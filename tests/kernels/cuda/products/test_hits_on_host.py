"""Picks that lie in the expert cache are counted row by row, over all layers, and those of no expert are not."""

from __future__ import annotations

import numpy as np
import pytest

from strata.kernels.cuda import mixture


@pytest.mark.parametrize("rows, used", [(1, 10), (8, 3), (16, 33), (5, 64)])
def test_picks_between_two_addresses_are_counted_over_all_layers(host, rows, used):
    experts, begin, end = 70, 1 << 40, (1 << 40) + 4096
    random = np.random.default_rng(used)
    hits, wanted = host.upload(np.full(16, 99, np.int32)), np.zeros(rows, np.int64)
    use, picked = host.upload(np.zeros(experts, np.int32)), np.zeros(experts, np.int64)
    for layer in range(3):
        addresses = random.choice([0, begin - 1, begin, end - 1, end, 1 << 62], experts).astype(np.uint64)
        ids = random.integers(-1, experts, (rows, used)).astype(np.int32)
        mixture.count_hits(host.upload(ids), host.upload(addresses), mixture.Tally(hits, use, begin, end, layer == 0))
        inside = (addresses >= begin) & (addresses < end)
        wanted += (inside[ids] & (ids >= 0)).sum(1)
        picked += np.bincount(ids[ids >= 0], minlength=experts)
    got = host.download(hits)
    assert got[:rows].tolist() == wanted.tolist()
    assert (got[rows:] == 99).all()
    np.testing.assert_array_equal(host.download(use), picked)

"""Picks that lie in the expert cache are counted row by row, over all layers, those of no expert are not, and what
several rows pick is read once."""

from __future__ import annotations

import numpy as np
import pytest

from strata.kernels.cuda import mixture


@pytest.mark.parametrize("rows, used", [(1, 10), (8, 3), (16, 33), (5, 64)])
def test_picks_in_the_cache_and_reads_of_others_are_counted_over_all_layers(host, rows, used):
    experts, begin, end = 70, 1 << 40, (1 << 40) + 4096
    random = np.random.default_rng(used)
    hits, wanted = host.upload(np.full((2, 16), 99, np.int32)), np.zeros((2, rows), np.int64)
    use, picked = host.upload(np.zeros(experts, np.int32)), np.zeros(experts, np.int64)
    reads, wanted_reads = host.upload(np.zeros(2, np.int32)), np.zeros(2, int)
    for layer in range(3):
        addresses = random.choice([0, begin - 1, begin, end - 1, end, 1 << 62], experts).astype(np.uint64)
        ids = np.stack([random.permutation(experts)[:used] for _ in range(rows)]).astype(np.int32)
        ids[random.random(ids.shape) < 0.1] = -1
        tally = mixture.Tally(hits, use, reads, begin, end, layer == 0)
        asked = random.random(experts) < 0.5
        kept = np.where(asked[ids], -1, ids).astype(np.int32)
        mixture.count_hits(host.upload(ids), host.upload(kept), host.upload(addresses), tally)
        inside = (addresses >= begin) & (addresses < end)
        wanted += [(inside[ids] & (ids >= 0)).sum(1), (asked[ids] & (ids >= 0)).sum(1)]
        picked += np.bincount(ids[ids >= 0], minlength=experts)
        there = np.unique(ids[ids >= 0])
        missing = there[~inside[there] & (addresses[there] != 0)]
        wanted_reads += [(~asked[missing]).sum(), asked[missing].sum()]
    got = host.download(hits)
    assert got[:, :rows].tolist() == wanted.tolist()
    assert (got[:, rows:] == 99).all()
    np.testing.assert_array_equal(host.download(use), picked)
    assert host.download(reads).tolist() == wanted_reads.tolist()

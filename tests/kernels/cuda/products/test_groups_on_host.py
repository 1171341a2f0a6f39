"""Pairs of a prompt sorted by expert: every pair in a tile of its own expert, whatever the number of blocks."""

from __future__ import annotations

import numpy as np
import pytest

from strata.kernels.cuda import mixture


@pytest.mark.parametrize(
    "rows, used, experts, tile", [(17, 2, 3, 8), (900, 10, 512, 16), (820, 10, 70, 64), (60, 1, 1, 24)]
)
def test_every_pair_is_in_one_tile_of_its_expert(host, rows, used, experts, tile):
    """One block and three; experts without pairs; ids that name no expert are left out."""
    ids = np.random.default_rng(rows).integers(-1, experts + 1, (rows, used)).astype(np.int32)
    grouped = mixture.group_rows(host.workspace(), host.upload(ids), experts, tile)
    order, tiles, n_tiles = (host.download(a) for a in grouped)
    flat, seen = ids.reshape(-1), []
    for expert, first, count, _ in tiles[: n_tiles[0]]:
        assert 0 < count <= tile
        pairs = order[first : first + count]
        assert (flat[pairs] == expert).all()
        seen += pairs.tolist()
    assert sorted(seen) == np.flatnonzero((flat >= 0) & (flat < experts)).tolist()
    counts = np.bincount(flat[(flat >= 0) & (flat < experts)], minlength=experts)
    assert n_tiles[0] == (-(-counts // tile)).sum()

"""Skewed routers: picks follow the law that was asked for, and no file changes that synth has not written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from strata.bench.__main__ import main
from strata.bench.demo_pack.config import SMOKE
from strata.bench.skew_router import MOST, frequencies, lengths, rewrite, routers, skewed
from strata.bench.synthetic import Pools, Types, write
from strata.engine.experts.adapt import AdaptRules, choose
from strata.engine.experts.use import Use
from strata.engine.pack import PackError, open_pack
from strata.engine.pack.gguf import read_gguf
from strata.kernels.reference.moe import route

TYPES = Types(dense="Q8_0", hyper="Q8_0", experts="IQ4_NL", head="Q8_0", embedding="Q8_0")


def shares(rows: np.ndarray, used: int, tokens: int = 4000) -> np.ndarray:
    """How often each expert is picked for random activations, of all picks, most first."""
    x = np.random.default_rng(7).standard_normal((tokens, rows.shape[1])).astype(np.float32)
    ids, _ = route(x @ rows.T, used)
    return np.sort(np.bincount(ids.ravel(), minlength=len(rows)))[::-1] / ids.size


def test_a_quarter_of_the_experts_takes_the_picks_that_the_law_gives_it():
    rows = (np.random.default_rng(1).standard_normal((512, 640)) / np.sqrt(640)).astype(np.float32)
    even = shares(skewed(rows, 10, 0.0, 1, 0), 10)
    assert 0.25 < even[:128].sum() < 0.4
    for exponent in (0.8, 1.2, 1.5):
        wanted = frequencies(512, 10, exponent) / 10
        got = shares(skewed(rows, 10, exponent, 1, 0), 10)
        assert got[:128].sum() == pytest.approx(wanted[:128].sum(), abs=0.03)
        assert got[:4].max() < 1.2 * MOST / 10
    assert 0.78 < shares(skewed(rows, 10, 1.2, 1, 0), 10)[:128].sum() < 0.9


def test_ranks_differ_by_layer_and_seed_and_not_otherwise():
    rows = np.random.default_rng(1).standard_normal((64, 32)).astype(np.float32)
    one = skewed(rows, 4, 1.2, 1, 0)
    np.testing.assert_array_equal(one, skewed(rows, 4, 1.2, 1, 0))
    assert not np.array_equal(one, skewed(rows, 4, 1.2, 1, 1)) and not np.array_equal(one, skewed(rows, 4, 1.2, 2, 0))
    np.testing.assert_allclose(skewed(one, 4, 1.2, 1, 0), one, rtol=1e-5)


def test_what_no_router_can_be_is_refused():
    for experts, used, exponent in ((10, 8, 1.2), (512, 10, -1.0), (512, 10, 9.0)):
        with pytest.raises(ValueError, match="exponent from 0 to 4"):
            lengths(experts, used, exponent)


def test_a_pack_is_rewritten_in_place_and_the_rest_of_its_bytes_stays(tmp_path: Path):
    path, used = tmp_path / "a.gguf", SMOKE.experts_used
    write(path, SMOKE, TYPES, Pools(), Console(quiet=True))
    before, found = path.read_bytes(), routers(read_gguf(path))
    assert rewrite(path, 1.0, 3) == len(found) == SMOKE.layers
    after = path.read_bytes()
    assert len(after) == len(before) and after != before
    kept = np.ones(len(before), bool)
    for info in found.values():
        kept[info.offset : info.offset + info.n_bytes] = False
    changed = np.frombuffer(before, np.uint8) != np.frombuffer(after, np.uint8)
    assert not (changed & kept).any()
    for layer, info in found.items():
        rows = np.frombuffer(before, np.float32, info.n_bytes // 4, info.offset).reshape(info.shape)
        np.testing.assert_array_equal(open_pack(path).array(info.name), skewed(rows, used, 1.0, 3, layer))


def test_synth_writes_the_routers_that_rewriting_gives(tmp_path: Path):
    console, used = Console(quiet=True), SMOKE.experts_used
    write(tmp_path / "a.gguf", SMOKE, TYPES, Pools(1, used, 1.0), console)
    write(tmp_path / "b.gguf", SMOKE, TYPES, Pools(1), console)
    rewrite(tmp_path / "b.gguf", 1.0, 1)
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


def test_other_packs_are_refused_and_stay_as_they_are(packs, tmp_path: Path):
    path = tmp_path / "other.gguf"
    path.write_bytes(Path(packs["odd-q8_0"]).read_bytes())
    before = path.read_bytes()
    with pytest.raises(PackError, match="no pack of `strata-bench synth`"):
        rewrite(path, 1.2, 1)
    assert path.read_bytes() == before


def test_a_skew_that_cannot_be_is_named_by_synth(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["synth", str(tmp_path / "x.gguf"), "--router-skew", "9"]) == 2
    assert "exponent from 0 to 4" in capsys.readouterr().out and not list(tmp_path.iterdir())


def test_a_cold_quarter_holds_most_of_what_a_skewed_router_picks_after_512_tokens():
    """By the rules' defaults: 0.82 is what the best quarter would have, 0.25 what a cold one has."""
    layers, experts, used, rules = 8, 512, 10, AdaptRules(swaps=AdaptRules().swaps * 8 // 48)
    rng = np.random.default_rng(0)
    deviations = np.stack([lengths(experts, used, 1.2)[rng.permutation(experts)] for _ in range(layers)])
    resident = np.zeros((layers, experts), bool)
    resident[:, : experts // 4] = True
    use, picked, hits, moved = Use((layers, experts), rules), np.zeros((layers, experts), np.int64), [], []
    for token in range(640):
        logits = rng.standard_normal((layers, experts)) * deviations
        ids = np.argpartition(-logits, used, 1)[:, :used]
        hits.append(np.take_along_axis(resident, ids, 1).mean())
        np.put_along_axis(picked, ids, np.take_along_axis(picked, ids, 1) + 1, 1)
        if (token + 1) % rules.every == 0:
            use.add(picked)
            picked[:] = 0
            swaps = choose(use.begin(resident), resident, rules)
            for each in swaps:
                resident[each.layer, [each.gets, each.leaves]] = True, False
            use.end()
            moved.append(len(swaps))
    assert np.mean(hits[:32]) < 0.5 and np.mean(hits[512:]) > 0.78
    assert sum(moved[-16:]) < sum(moved[:16]) / 3, "what is there stays there"

"""Sampling on a card: the ids of the reference for random settings; rows do not know of each other."""

from __future__ import annotations

import numpy as np
import pytest

from strata.kernels import reference
from strata.kernels.cuda.sample import pack, sample, sample_rows
from strata.kernels.ops import Sampling

GREEDY = Sampling(temperature=0.0)


def logits_of(rng: np.random.Generator, vocab: int, kind: int) -> np.ndarray:
    """Logits of several manners: spread, with many equals, all equal, mostly minus infinity."""
    values = (rng.standard_normal(vocab) * rng.choice([0.5, 3, 10])).astype(np.float32)
    if kind == 1:
        values = np.round(values)
    elif kind == 2:
        values[:] = 1
    elif kind == 3:
        values[rng.random(vocab) < 0.9] = -np.inf
        values[vocab // 2] = 1
    return values


def settings_of(rng: np.random.Generator) -> Sampling:
    return Sampling(
        temperature=float(rng.choice([0, 0.7, 1.0, 1.5])),
        top_k=int(rng.integers(1, 65)),
        top_p=float(rng.choice([1.0, 0.9, 0.5])),
        min_p=float(rng.choice([0, 0.05])),
        penalty_repeat=float(rng.choice([1, 1.3])),
        penalty_freq=float(rng.choice([0, 0.2])),
        penalty_present=float(rng.choice([0, 0.3])),
        seed=int(rng.integers(0, 2**63)),
    )


@pytest.mark.parametrize("vocab", [77, 1024, 64 * 70 + 3, 70_003])
@pytest.mark.parametrize("kind", [0, 1, 2, 3])
def test_ids_are_those_of_the_reference(target, vocab, kind):
    rng, space = np.random.default_rng([vocab, kind]), target.workspace()
    for i in range(12):
        values, how, position = logits_of(rng, vocab, kind), settings_of(rng), int(rng.integers(0, 200_000))
        recent = rng.integers(0, vocab, int(rng.choice([0, 3, 50, 300]))).astype(np.int32)
        if i % 3 == 0:  # the penalties hit the best
            recent = np.argsort(-values)[: min(vocab, 100)].astype(np.int32)
        got = sample(space, target.put(values), target.put(recent), how, position)
        assert got == reference.sample(values, recent, how, position), (i, how, position)


def test_a_row_of_a_batch_is_the_row_alone(target):
    rng, space, n, vocab = np.random.default_rng(5), target.workspace(), 6, 3000
    values = np.stack([logits_of(rng, vocab, i % 4) for i in range(n)])
    hows = [GREEDY if i == 2 else settings_of(rng) for i in range(n)]
    recent = rng.integers(-1, vocab, (n, 40)).astype(np.int32)
    positions = rng.integers(0, 9000, n).astype(np.int32)
    arrays = [target.put(a) for a in (values, *pack(hows), positions, recent)]
    ids = target.host(sample_rows(space, *arrays, ahead=1))
    for i in range(n):
        own = recent[i][recent[i] >= 0]
        assert ids[i] == reference.sample(values[i], own, hows[i], int(positions[i]) + 1)


def test_a_captured_sampler_replayed_with_other_settings_obeys_them(target):
    rng, space, n, vocab, results = np.random.default_rng(6), target.workspace(), 3, 1000, []
    values = np.stack([logits_of(rng, vocab, 0) for _ in range(n)])
    arrays = [
        target.put(a) for a in (values, *pack([GREEDY] * n), np.zeros(n, np.int32), np.full((n, 20), -1, np.int32))
    ]
    replay = target.graph(lambda: results.__setitem__(slice(None), [sample_rows(space, *arrays)]))
    for _ in range(4):
        hows, recent = [settings_of(rng) for _ in range(n)], rng.integers(0, vocab, (n, 20)).astype(np.int32)
        positions = rng.integers(0, 9000, n).astype(np.int32)
        for array, value in zip(arrays, (values, *pack(hows), positions, recent), strict=True):
            target.update(array, value)
        replay()
        want = [reference.sample(values[i], recent[i], hows[i], int(positions[i])) for i in range(n)]
        assert target.host(results[0]).tolist() == want


def test_the_draw_follows_seed_and_position_beyond_32_bits_of_the_seed(target):
    values, space, recent = np.zeros(64, np.float32), target.workspace(), np.empty(0, np.int32)
    for seed in (1, 1 << 40, (1 << 63) + 5):
        how = Sampling(temperature=1.0, top_k=64, seed=seed)
        got = [sample(space, target.put(values), target.put(recent), how, p) for p in range(20)]
        assert got == [reference.sample(values, recent, how, p) for p in range(20)]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("how", [GREEDY, Sampling(temperature=1.0, penalty_repeat=1.2)], ids=["greedy", "drawn"])
@pytest.mark.parametrize("recent", [[], [17, 17, 3]])
def test_logits_that_are_not_finite_are_refused_not_sampled(target, bad, how, recent):
    values = np.random.default_rng(3).standard_normal(500).astype(np.float32)
    values[17] = bad
    with pytest.raises(ValueError, match="logits must be finite"):
        sample(target.workspace(), target.put(values), target.put(np.array(recent, np.int32)), how, 3)


def test_settings_out_of_range_are_refused_on_the_host():
    for how in (
        Sampling(temperature=1.0, top_k=65),
        Sampling(temperature=1.0, top_p=0.0),
        Sampling(temperature=1.0, min_p=1.5),
        Sampling(temperature=1.0, penalty_repeat=0.0),
    ):
        with pytest.raises(ValueError, match="must be"):
            pack([how])

"""Counts last as long as the subject, and by a given factor where one is given."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.bench.skew_router import lengths
from strata.engine.experts.adapt import DECAY, AdaptRules, choose
from strata.engine.experts.use import Use

LAYERS, EXPERTS, USED, SLOTS = 6, 512, 10, 128


def picked(tokens: int, seed: int) -> np.ndarray:
    """ids (tokens, layers, used) of a subject: of experts that are picked by a power law, in an order of each layer."""
    rng = np.random.default_rng(seed)
    ranks = np.stack([rng.permutation(EXPERTS) for _ in range(LAYERS)])
    logits = rng.standard_normal((tokens, LAYERS, EXPERTS)) * lengths(EXPERTS, USED, 1.2)[ranks]
    return np.argpartition(-logits, USED, 2)[:, :, :USED]


class Windows:
    """A cache that begins with the first experts, and follows windows of one token."""

    def __init__(self, **given: float) -> None:
        self.rules = AdaptRules(swaps=AdaptRules().swaps * LAYERS // 48, **given)
        self.use = Use((LAYERS, EXPERTS), self.rules)
        self.resident = np.zeros((LAYERS, EXPERTS), bool)
        self.resident[:, :SLOTS] = True

    def run(self, ids: np.ndarray) -> tuple[float, int]:
        """The share of hits, and how many experts have changed places."""
        hits, moved, layers = [], 0, np.arange(LAYERS)[:, None]
        for number, of_token in enumerate(ids, 1):
            hits.append(self.resident[layers, of_token].mean())
            picks = np.zeros((LAYERS, EXPERTS), np.int64)
            picks[layers, of_token] = 1
            self.use.add(picks)
            if number % self.rules.every:
                continue
            swaps = choose(self.use.begin(self.resident), self.resident, self.rules)
            for each in swaps:
                self.resident[each.layer, [each.gets, each.leaves]] = True, False
            self.use.end()
            moved += len(swaps)
        return float(np.mean(hits)), moved


def test_counts_that_forget_miss_what_is_picked_seldom():
    lasting, fading = Windows(), Windows(decay=0.7, min_gain=1.5)
    for windows in (lasting, fading):
        windows.run(picked(1024, 1)[:512])
    (hits, moved), (hits_fading, moved_fading) = (w.run(picked(1024, 1)[512:]) for w in (lasting, fading))
    assert hits > hits_fading + 0.02 and moved < moved_fading, "more of them in the cache, by fewer swaps"
    assert lasting.use.forgot == 0


def test_counts_that_last_do_not_outlive_their_subject():
    lasting, fading = Windows(), Windows(decay=0.7, min_gain=1.5)
    for windows in (lasting, fading):
        windows.run(picked(512, 1))
    for _ in range(3):
        hits, hits_fading = (w.run(picked(128, 2))[0] for w in (lasting, fading))
        assert hits > hits_fading - 0.01, "of another subject as soon as ever"
    assert lasting.use.forgot == 1


@pytest.mark.parametrize("seed", range(4))
def test_a_few_picks_are_no_other_subject(seed):
    """A small model: hits of two picks a window are mostly chance."""
    rng, use = np.random.default_rng(seed), Use((1, 8), AdaptRules())
    resident = np.arange(8)[None] < 4
    for _ in range(2000):
        picks = np.zeros((1, 8), np.int64)
        picks[0, rng.choice(8, 2, replace=False)] = 1
        use.add(picks)
        use.begin(resident)
        use.end()
    assert use.forgot == 0


@given(
    st.sampled_from([{"decay": 0.25}, {"min_gain": 1.0}, {"decay": 0.5, "min_gain": 0.0}]),
    st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), max_size=8),
)
def test_a_given_factor_is_kept_to(given_rules, rounds):
    rules = AdaptRules(**given_rules)
    use, wanted = Use((1, 3), rules), np.zeros(3)
    for row in rounds:
        use.add(np.array([row]))
        wanted += row
        assert use.begin(np.array([[True, False, False]])).tolist() == [wanted.tolist()]
        use.end()
        wanted *= given_rules.get("decay", DECAY)
    assert use.forgot == 0

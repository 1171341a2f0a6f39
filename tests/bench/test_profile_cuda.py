"""The profile's own arithmetic: when the link rests, and beside what."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from strata.bench.kernel_profile import Span, merged
from strata.bench.profile_cuda import COPY, link_rests, overlap

SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), min_size=1, max_size=12)


def test_a_rest_of_the_link_is_laid_to_the_kernels_that_ran_meanwhile() -> None:
    copies = [Span(COPY, *each) for each in ((0, 10), (14, 20), (18, 30), (35, 41))]
    found = {r.work: r.median for r in link_rests([*copies, Span("k", 5, 12), Span("j", 16, 34)], "p")}
    assert found["p: the link brings"] == 32
    assert found["p: the link rests"] == 9
    assert found["p: the link rests beside j"] == 4
    assert found["p: the link rests beside k"] == 2
    assert found["p: the link rests beside nothing at all"] == 3


def test_a_prompt_that_streams_nothing_has_no_figures_of_the_link() -> None:
    assert link_rests([Span(COPY, 0, 1), Span("k", 1, 90)], "p") == []


@given(copies=SPANS, span=st.tuples(st.integers(0, 60), st.integers(1, 20)))
def test_rests_and_copies_never_overlap_and_cover_all(copies: list[tuple[int, int]], span: tuple[int, int]) -> None:
    busy = np.zeros(100, bool)
    for begin, n in copies:
        busy[begin : begin + n] = True
    spans = merged([Span(COPY, begin, begin + n) for begin, n in copies])
    assert sum(b - a for a, b in spans) == busy.sum()
    rests = [(a[1], b[0]) for a, b in itertools.pairwise(spans)]
    begin, end = span[0], sum(span)
    inside = np.arange(100)[begin:end]
    inside = inside[(inside >= spans[0][0]) & (inside < spans[-1][1])]
    assert overlap(Span("", begin, end), rests) == (~busy[inside]).sum()

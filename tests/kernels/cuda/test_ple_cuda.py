"""The n-gram embedding on a card: table rows, the residual and both states as on the host, however rows are cut."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from strata.kernels import cpu
from strata.kernels.cuda.ple import FEW_ROWS, ple, ple_rows
from strata.kernels.formats import Weight
from strata.kernels.ops import Ple

EPS = 1e-6
EOS = 7


class Case:
    """Weights of N-grams up to `order`, and the states of `slots` sequences."""

    def __init__(
        self, random_weight: Callable[..., Weight], order: int, c: int, h: int, kernel: int, slots: int
    ) -> None:
        self.rng = np.random.default_rng([order, c, h])
        heads, width = (order - 1) * 2, 32
        sizes = self.rng.integers(20, 50, heads).astype(np.uint64)
        f = lambda *shape: self.rng.standard_normal(shape).astype(np.float32)  # noqa: E731
        self.f, self.c, self.h = f, c, h
        self.weights = Ple(
            table=random_weight("Q4_0", int(sizes.sum()), width, scale=0.3),
            key=random_weight("Q8_0", c * h, heads * width),
            value=random_weight("Q8_0", h, heads * width),
            norm_key=f(c, h),
            norm_query=f(c, h),
            norm_conv=f(c, h),
            conv=f(c * h, kernel),
            multipliers=self.rng.integers(1 << 40, 1 << 45, order).astype(np.uint64) | np.uint64(1),
            sizes=sizes,
            offsets=np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.uint64),
            eos=EOS,
        )
        self.history = self.rng.integers(0, 250_000, (slots, order - 1)).astype(np.int32)
        self.conv = f(slots, (kernel - 1) * order, c * h)

    def tokens(self, n: int) -> np.ndarray:
        """Ids of a large vocabulary, every fifth an eos."""
        tokens = self.rng.integers(0, 250_000, n).astype(np.int32)
        tokens[self.rng.random(n) < 0.2] = EOS
        return tokens


def segments(*parts: tuple[int, int]) -> np.ndarray:
    """Segments of (slot, tokens)."""
    ends = np.cumsum([n for _, n in parts])
    return np.array([[slot, end - n, end] for (slot, n), end in zip(parts, ends, strict=True)], np.int32)


SHAPES = [
    (3, 4, 64, 4, [(1, 1), (0, 1), (2, 1)]),
    (4, 2, 96, 3, [(0, FEW_ROWS - 20), (2, 1), (1, 5)]),
    (3, 2, 64, 4, [(2, FEW_ROWS), (0, 2)]),
]


@pytest.mark.parametrize(("order", "c", "h", "kernel", "parts"), SHAPES)
def test_rows_residual_and_states_are_the_bits_of_the_host(
    target, same_bits, random_weight, order, c, h, kernel, parts
):
    case, rows = Case(random_weight, order, c, h, kernel, slots=3), segments(*parts)
    n, space, weights = int(rows[-1, 2]), target.workspace(), target.put(case.weights)
    tokens, x = case.tokens(n), case.f(n, c, h)
    history, conv, moved, moved_rows = (target.put(a) for a in (case.history, case.conv, x, rows))
    found = ple_rows(space, weights, target.put(tokens), moved_rows, history)
    ple(space, weights, moved, found, moved_rows, conv, EPS, rows_at_once=17)
    want = cpu.ple_rows(case.weights, tokens, rows, case.history)
    cpu.ple(case.weights, x, want, rows, case.conv, EPS)
    np.testing.assert_array_equal(target.host(found), want)
    np.testing.assert_array_equal(target.host(history), case.history)
    same_bits(target.host(moved), x)
    same_bits(target.host(conv), case.conv)


@pytest.mark.parametrize("cuts", [[1] * 30, [20, 10]])
def test_a_prompt_cut_into_chunks_gives_the_bits_of_the_whole(target, same_bits, random_weight, cuts):
    case = Case(random_weight, 3, 2, 64, 4, slots=1)
    weights, space, tokens, x = target.put(case.weights), target.workspace(), case.tokens(30), case.f(30, 2, 64)
    results = []
    for parts in ([30], cuts):
        history, conv, out, at = target.put(case.history), target.put(case.conv), [], 0
        for n in parts:
            own, rows = target.put(x[at : at + n].copy()), target.put(segments((0, n)))
            with space.scratch():
                found = ple_rows(space, weights, target.put(tokens[at : at + n].copy()), rows, history)
                ple(space, weights, own, found, rows, conv, EPS, rows_at_once=64)
            out.append(target.host(own))
            at += n
        results.append((np.concatenate(out), target.host(history), target.host(conv)))
    for whole, cut in zip(*results, strict=True):
        same_bits(cut, whole)

"""Scalar functions of the host kernels: the written steps bit for bit, in scalar calls and in loops of full vectors."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from strata.kernels.cpu.lanes import get, lanes_dot, lanes_sum, peak, put
from strata.kernels.cpu.math import JIT, exp_f32, fma, round_even, sigmoid_f32, silu_f32, softplus_f32, sqrt_f32
from strata.kernels.reference.fma import fma as exact_fma

NAMES = ("exp", "sigmoid", "silu", "softplus")
EDGES = (0.0, -0.0, 1e-45, -1e-45, 1e-38, 87.2999, 87.3, -87.3, -87.30001, 88.3, 89.0, 200.0, -200.0, np.inf, -np.inf)
UNCACHED = {**JIT, "cache": False}


@njit(**UNCACHED)
def _loops(x, out):
    n = x.size
    for i in range(n):
        put(out, i, exp_f32(get(x, i)))
    for i in range(n):
        put(out, n + i, sigmoid_f32(get(x, i)))
    for i in range(n):
        put(out, 2 * n + i, silu_f32(get(x, i)))
    for i in range(n):
        put(out, 3 * n + i, softplus_f32(get(x, i)))


@njit(**UNCACHED)
def _fma_loop(a, b, c, out):
    for i in range(a.size):
        put(out, i, fma(get(a, i), get(b, i), get(c, i)))


@njit(**UNCACHED)
def _sums(a, i, b, j, n):
    return lanes_dot(a, i, b, j, n), lanes_sum(a, i, n), peak(a, i, n)


@njit(**UNCACHED)
def _rounded(x):
    return round_even(x), sqrt_f32(x)


@pytest.fixture(scope="module")
def values() -> np.ndarray:
    rng = np.random.default_rng(1)
    spread = rng.uniform(-100, 100, 200_000)
    small = rng.standard_normal(100_000) * 10.0 ** rng.integers(-30, 1, 100_000)
    halves = (np.arange(-126, 127) + 0.5) / 1.44269504
    return np.concatenate([spread, small, halves, EDGES]).astype(np.float32)


def test_a_loop_of_vectors_gives_the_bits_of_the_written_steps(values, written):
    out = np.empty(4 * values.size, np.float32)
    _loops(values, out)
    with np.errstate(invalid="ignore", over="ignore"):
        for name, got in zip(NAMES, out.reshape(4, -1), strict=True):
            wanted = getattr(written, name)(values)
            assert written.same(got, wanted), (name, values[got != wanted][:5])


def test_a_scalar_call_gives_the_bits_of_a_loop(values):
    out = np.empty(4 * values.size, np.float32)
    _loops(values, out)
    some = np.r_[0:500, values.size - len(EDGES) : values.size]
    for function, got in zip((exp_f32, sigmoid_f32, silu_f32, softplus_f32), out.reshape(4, -1), strict=True):
        scalar = np.array([function(x) for x in values[some]], np.float32)
        assert (scalar.view(np.uint32) == got[some].view(np.uint32)).all()


def test_the_written_steps_are_the_functions_they_are_named_after(values):
    x = values[np.abs(values) < 85].astype(np.float64)
    out = np.empty(4 * x.size, np.float32)
    _loops(x.astype(np.float32), out)
    truth = (np.exp(x), 1 / (1 + np.exp(-x)), x / (1 + np.exp(-x)), np.logaddexp(0, x))
    for name, got, wanted in zip(NAMES, out.reshape(4, -1), truth, strict=True):
        floor = np.maximum(np.abs(wanted), 1e-37)
        assert (np.abs(got - wanted) / floor).max() < 5e-7, name


def test_nan_is_not_hidden():
    nan = np.float32(np.nan)
    assert np.isnan([exp_f32(nan), sigmoid_f32(nan), silu_f32(nan), softplus_f32(nan), *_rounded(nan)]).all()


def test_fma_rounds_once_where_two_roundings_would_differ():
    rng = np.random.default_rng(2)
    a, b = (rng.standard_normal(400_000).astype(np.float32) for _ in range(2))
    near = (-a.astype(np.float64) * b).astype(np.float32)  # cancels all but the rounding error of the product
    tiny = np.float32(1e-38) * a
    for x, y, z in ((a, b, near), (a, b, b), (tiny, np.float32(1e-3) * b, np.zeros_like(a)), (tiny, b, tiny)):
        out = np.empty_like(x)
        _fma_loop(x, y, z, out)
        assert (out.view(np.uint32) == exact_fma(x, y, z).view(np.uint32)).all()


def test_halves_round_to_the_even_number():
    x = np.array([0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 2.4999998, 3.0], np.float32)
    assert [_rounded(v)[0] for v in x] == [0, 2, 2, 0, -2, 126, 2, 3]


@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 32, 64, 96, 127, 128, 129, 160, 255, 256, 300, 2560])
def test_a_sum_over_lanes_has_the_written_order_at_any_length(n, written):
    rng = np.random.default_rng(n)
    a, b = rng.standard_normal((2, n + 7)).astype(np.float32)
    dot, total, largest = _sums(a, 3, b, 5, n)
    x, y = a[3 : 3 + n], b[5 : 5 + n]
    assert (dot, total) == (written.lanes(x, y), written.lanes(x))
    assert largest == x.max()


def test_a_sum_over_lanes_reads_nothing_beside_its_elements():
    a = np.full(300, np.nan, np.float32)
    a[100:231] = 1
    assert _sums(a, 100, a, 100, 131) == (131, 131, 1)


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=40))
@settings(max_examples=50, deadline=None)
def test_peak_is_the_maximum(values):
    x = np.array(values, np.float32)
    assert _sums(x, 0, x, 0, x.size)[2] == x.max()

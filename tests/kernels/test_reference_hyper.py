"""Hyper-connections against the formulas written out stream by stream."""

from __future__ import annotations

import numpy as np
import pytest

from strata.kernels import reference
from strata.kernels.formats import BY_NAME, Weight
from strata.kernels.ops import Hyper

N, C, H, R = 5, 3, 8, 4


def matrix(rng: np.random.Generator, rows: int, cols: int) -> Weight:
    values = (rng.normal(size=(rows, cols)) / np.sqrt(cols)).astype(np.float32)
    return Weight(BY_NAME["F32"], (rows, cols), values.view(np.uint8))


def values(w: Weight) -> np.ndarray:
    return w.data.view(np.float32).astype(np.float64)


@pytest.fixture
def case():
    rng = np.random.default_rng(2)
    norm = rng.normal(1, 0.1, size=(C, H)).astype(np.float32)
    hc = Hyper(norm, matrix(rng, R, C * H), matrix(rng, C * H, R), matrix(rng, C, C * H))
    return rng.normal(size=(N, C, H)).astype(np.float32), hc


def logistic(x):
    return 1 / (1 + np.exp(-x))


def test_the_gate_multiplies_the_normed_streams_and_the_division_is_inside_silu(case):
    x, hc = case
    u, beta = reference.hyper_mix(x, hc, 1e-6)
    for row in range(N):
        normed = np.stack([s / np.sqrt((s * s).mean() + 1e-6) for s in x[row].astype(np.float64)]) * hc.norm
        a = values(hc.down) @ normed.ravel() / C
        gate = logistic(values(hc.up) @ (a * logistic(a))).reshape(C, H)
        np.testing.assert_allclose(u[row], (gate * normed).sum(0) / C, atol=1e-6)
        np.testing.assert_allclose(beta[row], 2 * logistic(values(hc.inject) @ normed.ravel() / C), atol=1e-6)


def test_a_mixer_without_inject_has_no_beta_and_the_same_mix(case):
    x, hc = case
    u, beta = reference.hyper_mix(x, Hyper(hc.norm, hc.down, hc.up, None), 1e-6)
    assert beta is None
    np.testing.assert_array_equal(u, reference.hyper_mix(x, hc, 1e-6)[0])


def test_adding_goes_to_the_raw_residual_by_stream(case):
    x, _ = case
    rng = np.random.default_rng(3)
    beta, y = rng.normal(size=(N, C)).astype(np.float32), rng.normal(size=(N, H)).astype(np.float32)
    wanted = x + beta[:, :, None] * y[:, None, :]
    reference.hyper_add(x, beta, y)
    np.testing.assert_allclose(x, wanted, atol=1e-6)


def test_a_wrong_shape_leaves_the_residual_alone(case):
    x, _ = case
    before = x.copy()
    with pytest.raises(ValueError, match=r"beta must be .*\(5, 2\)"):
        reference.hyper_add(x, np.ones((N, C - 1), np.float32), np.ones((N, H), np.float32))
    np.testing.assert_array_equal(x, before)

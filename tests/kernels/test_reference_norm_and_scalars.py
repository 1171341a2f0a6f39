"""The reference's scalar functions and its norm."""

from __future__ import annotations

import numpy as np
import pytest

from strata.kernels.reference import rms_norm
from strata.kernels.reference.scalar import sigmoid, silu, softplus


def test_scalars_do_not_overflow_where_exp_would():
    x = np.array([-1e4, -700.0, -40.0, 0.0, 40.0, 700.0, 1e4])
    np.testing.assert_allclose(sigmoid(x), [0, 0, 4.248354255291589e-18, 0.5, 1, 1, 1], rtol=1e-12, atol=1e-300)
    np.testing.assert_allclose(silu(x), x * sigmoid(x))
    np.testing.assert_allclose(softplus(x), [0, 0, 4.248354255291589e-18, np.log(2), 40, 700, 1e4], atol=1e-300)


def test_rms_is_a_mean_not_a_sum_and_the_epsilon_is_inside_the_root():
    x = np.array([[3.0, 4.0, 0.0, 0.0], [1e-4, 0.0, 0.0, 0.0]], np.float32)
    y = rms_norm(x, np.ones(4, np.float32), 1e-6)
    np.testing.assert_allclose(y[0], x[0] / np.sqrt(25 / 4 + 1e-6), rtol=1e-6)
    np.testing.assert_allclose(y[1, 0], 1e-4 / np.sqrt(1e-8 / 4 + 1e-6), rtol=1e-6)


def test_each_stream_has_its_own_statistic_and_factor():
    rng = np.random.default_rng(1)
    x, w = rng.normal(size=(3, 2, 8)).astype(np.float32), rng.normal(size=(2, 8)).astype(np.float32)
    whole = rms_norm(x, w, 1e-6)
    for stream in range(2):
        np.testing.assert_array_equal(whole[:, stream], rms_norm(x[:, stream].copy(), w[stream].copy(), 1e-6))


@pytest.mark.parametrize("w", [np.ones(3, np.float32), np.ones((3, 4), np.float32)])
def test_a_factor_of_another_size_is_refused(w):
    with pytest.raises(ValueError, match=r"w must .*\(2, 4\)"):
        rms_norm(np.ones((2, 4), np.float32), w, 1e-6)

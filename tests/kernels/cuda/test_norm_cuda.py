"""RMS norm on a card: the bits of the host's, whatever rows are beside a row."""

from __future__ import annotations

import numpy as np
import pytest

from strata.kernels import cpu
from strata.kernels.cuda.norm import rms_norm

SHAPES = [((1, 2560), (2560,)), ((3, 4, 192), (4, 192)), ((2, 5, 129), (129,)), ((7, 1), (1,)), ((6, 3, 100), (3, 100))]


@pytest.mark.parametrize(("shape", "factors"), SHAPES)
def test_norm_gives_the_bits_of_the_host(target, same_bits, shape, factors):
    rng = np.random.default_rng(1)
    x, w = (rng.standard_normal(s).astype(np.float32) for s in (shape, factors))
    got = target.host(rms_norm(target.workspace(), target.put(x), target.put(w), 1e-6))
    same_bits(got, cpu.rms_norm(x, w, 1e-6))


def test_a_row_of_zeros_is_zero(target):
    x, w = np.zeros((2, 256), np.float32), np.ones(256, np.float32)
    assert not target.host(rms_norm(target.workspace(), target.put(x), target.put(w), 1e-6)).any()


def test_factors_of_another_size_are_refused(target):
    x, w = target.put(np.ones((2, 8), np.float32)), target.put(np.ones(9, np.float32))
    with pytest.raises(ValueError, match=r"w must have the last sizes of x \(2, 8\), got \(9,\)"):
        rms_norm(target.workspace(), x, w, 1e-6)

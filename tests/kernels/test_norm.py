"""Root mean square norm on the host: written bits, independence of neighbouring rows, refusals."""

from __future__ import annotations

import numpy as np
import pytest

from strata.kernels import reference
from strata.kernels.cpu.norm import rms_norm

EPS = 1e-6


def arrays(n, *rest, seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((n, *rest)).astype(np.float32), rng.standard_normal(rest).astype(np.float32)


@pytest.mark.parametrize("sizes", [(1, 1), (3, 31), (5, 128), (2, 192), (4, 300), (9, 2560), (70, 40)])
def test_rows_have_the_written_bits(sizes, written):
    x, w = arrays(*sizes)
    assert written.same(rms_norm(x, w, EPS), written.rms(x, w, EPS))


@pytest.mark.parametrize(("sizes", "groups"), [((3, 4, 64), 2), ((2, 3, 5, 96), 1)])
def test_it_agrees_with_the_reference_for_every_form_of_the_factor(sizes, groups):
    x, w = arrays(*sizes)
    w = w[..., :, :].reshape(-1, sizes[-1])[: sizes[-2]] if groups == 2 else w.reshape(-1, sizes[-1])[0]
    assert np.allclose(rms_norm(x, w, EPS), reference.rms_norm(x, w, EPS), rtol=1e-6, atol=1e-6)


def test_a_rows_bits_do_not_depend_on_its_neighbours_or_on_threads(threads):
    x, w = arrays(300, 4, 256)
    threads(1)
    whole = rms_norm(x, w, EPS)
    threads(2)
    assert (rms_norm(x, w, EPS) == whole).all()
    for cut in (1, 7, 64, 128):
        parts = [rms_norm(x[i : i + cut], w, EPS) for i in range(0, len(x), cut)]
        assert (np.concatenate(parts) == whole).all()


def test_no_rows_are_no_rows():
    assert rms_norm(np.empty((0, 4, 32), np.float32), np.ones((4, 32), np.float32), EPS).shape == (0, 4, 32)


@pytest.mark.parametrize(
    ("x", "w"),
    [
        (np.ones((2, 3), np.float32), np.ones(4, np.float32)),
        (np.ones((2, 3), np.float64), np.ones(3, np.float32)),
        (np.ones((2, 3), np.float32), np.ones((1, 2, 3), np.float32)),
        (np.ones((2, 6), np.float32)[:, ::2], np.ones(3, np.float32)),
    ],
)
def test_what_does_not_fit_is_refused_with_both_shapes(x, w):
    with pytest.raises(ValueError, match=r"\bw?\b.*\(2, 3\)|strides"):
        rms_norm(x, w, EPS)

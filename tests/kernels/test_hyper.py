"""Hyper-connections on the host: written bits, reference, chunks of rows, refusals before anything is written."""

from __future__ import annotations

import numpy as np
import pytest

from strata.kernels import reference
from strata.kernels.cpu import hyper
from strata.kernels.cpu.hyper import hyper_add, hyper_mix
from strata.kernels.cpu.linear import linear
from strata.kernels.ops import DOWN_PART, Hyper, streams_of_a_part
from strata.kernels.reference.hyper import ordered_down

EPS = 1e-6
F = np.float32


def streams(n, c, h, seed=0):
    return np.random.default_rng(seed).standard_normal((n, c, h)).astype(F)


@pytest.fixture
def module(random_weight):
    def make(c, h, r, kind="Q8_0", inject=True, down=None) -> Hyper:
        norm = 1 + F(0.1) * streams(1, c, h, 5)[0]
        mix = (random_weight(down or kind, r, c * h), random_weight(kind, c * h, r))
        return Hyper(norm, *mix, random_weight("F32", c, c * h) if inject else None)

    return make


def written_mix(x, hc, w, down=None):
    n, c, _ = x.shape
    share = F(1) / F(c)
    normed = w.rms(x, hc.norm, EPS)
    down = ordered_down(hc.down, normed) if down is None else down
    (inject,) = linear([hc.inject], normed.reshape(n, -1))
    (up,) = linear([hc.up], w.silu(down * share))
    gate = w.sigmoid(up.reshape(x.shape))
    u = gate[:, 0] * normed[:, 0]
    for s in range(1, c):
        u = w.fma(gate[:, s], normed[:, s], u)
    return u * share, F(2) * w.sigmoid(inject * share)


@pytest.mark.parametrize(("n", "c", "h", "r"), [(1, 4, 64, 32), (5, 4, 256, 64), (3, 2, 96, 32), (2, 3, 64, 32)])
def test_mixing_has_the_written_bits(n, c, h, r, module, written):
    x, hc = streams(n, c, h), module(c, h, r)
    for got, wanted in zip(hyper_mix(x, hc, EPS), written_mix(x, hc, written), strict=True):
        assert written.same(got, wanted)


IN_PARTS = [
    (2, 4, 2560, 32, "Q6_K", [1, 1, 1, 1]),
    (1, 4, 1280, 32, "Q4_K", [2, 2]),
    (131, 3, 1280, 32, "Q6_K", [2, 1]),
    (3, 2, 3072, 32, "Q8_0", [1, 1]),
    (2, 4, 640, 32, "Q2_K", [4]),
    (2, 4, 736, 32, "Q8_0", [4]),
    (2, 4, 2560, 32, "F32", [4]),
]


@pytest.mark.parametrize(("n", "c", "h", "r", "kind", "parts"), IN_PARTS)
def test_a_long_row_of_down_is_summed_in_parts_of_whole_streams(n, c, h, r, kind, parts, module, written):
    x, hc = streams(n, c, h), module(c, h, r, down=kind)
    together = streams_of_a_part(hc.down.type, c, h)
    assert [min(together, c - begin) for begin in range(0, c, together)] == parts
    for got, wanted in zip(hyper_mix(x, hc, EPS), written_mix(x, hc, written), strict=True):
        assert written.same(got, wanted)
    one = written_mix(x, hc, written, linear([hc.down], written.rms(x, hc.norm, EPS).reshape(n, -1))[0])[0]
    assert written.same(hyper_mix(x, hc, EPS)[0], one) == (len(parts) == 1)


@pytest.mark.parametrize("c", [1, 2, 3, 4, 8])
def test_parts_of_down_are_whole_streams_and_blocks(c, random_weight):
    kind = random_weight("Q6_K", 1, 256).type
    for h in range(4, 6000, 4):
        together = streams_of_a_part(kind, c, h)
        assert 1 <= together <= c
        if together < c:
            assert together * h % 256 == 0 and (together == 1 or together * h <= DOWN_PART < (together + 1) * h)


@pytest.mark.parametrize(("n", "c", "h", "r"), [(1, 4, 192, 32), (20, 3, 40, 8)])
def test_mixing_agrees_with_the_reference_on_float_weights(n, c, h, r, module):
    x, hc = streams(n, c, h), module(c, h, r, "F32")
    for got, wanted in zip(hyper_mix(x, hc, EPS), reference.hyper_mix(x, hc, EPS), strict=True):
        assert np.abs(got - wanted).max() < 2e-6


def test_a_module_that_does_not_inject_gives_no_strengths(module):
    x = streams(3, 4, 64)
    u, beta = hyper_mix(x, module(4, 64, 32, inject=False), EPS)
    assert beta is None
    assert (u == hyper_mix(x, module(4, 64, 32), EPS)[0]).all()


def test_a_rows_bits_do_not_depend_on_its_neighbours_chunks_or_threads(module, threads, monkeypatch):
    x, hc = streams(150, 4, 64), module(4, 64, 32)
    threads(1)
    whole = hyper_mix(x, hc, EPS)
    threads(2)
    monkeypatch.setattr(hyper, "ROWS_AT_ONCE", 37)
    for cut in (1, 7, 64, 128, 150):
        parts = zip(*(hyper_mix(x[i : i + cut], hc, EPS) for i in range(0, len(x), cut)), strict=True)
        for got, wanted in zip(parts, whole, strict=True):
            assert (np.concatenate(got) == wanted).all()


@pytest.mark.parametrize(("n", "c", "h"), [(1, 4, 2560), (70, 4, 640), (9, 2, 33)])
def test_adding_back_is_one_fma_an_element(n, c, h, written, threads):
    x, beta, y = streams(n, c, h), streams(1, n, c, 1)[0], streams(1, n, h, 2)[0]
    wanted = written.fma(beta[:, :, None], y[:, None, :], x)
    for count in (1, 2):
        threads(count)
        got = x.copy()
        hyper_add(got, beta, y)
        assert written.same(got, wanted)


def test_what_does_not_fit_is_refused_before_the_residual_changes(module):
    x = streams(3, 4, 64)
    before = x.copy()
    with pytest.raises(ValueError, match="beta must be"):
        hyper_add(x, np.ones((2, 4), F), np.ones((3, 64), F))
    with pytest.raises(ValueError, match=r"y must be .*got \(3, 32\)"):
        hyper_add(x, np.ones((3, 4), F), np.ones((3, 32), F))
    with pytest.raises(ValueError, match="x must be C-contiguous"):
        hyper_add(x[:, :, ::2], np.ones((3, 4), F), np.ones((3, 32), F))
    with pytest.raises(ValueError, match="norm must be"):
        hyper_mix(x, module(4, 32, 32), EPS)
    assert (x == before).all()

"""The gated delta net: token by token against the chunked form, which is another way to compute the same thing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from strata.kernels import reference
from strata.kernels.ops import Gdn

K, V, D, KERNEL = 2, 6, 32, 4
CHANNELS = 2 * K * D + V * D
EPS = 1e-6


def logistic(x):
    return 1 / (1 + np.exp(-x))


def case(n: int, slots: int = 1, seed: int = 0):
    rng = np.random.default_rng(seed)
    f = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    w = Gdn(f(CHANNELS, KERNEL), -np.exp(f(V)), f(V), 1 + 0.1 * f(D))
    inputs = (f(n, CHANNELS), f(n, V * D), f(n, V), f(n, V))
    state = (0.1 * f(slots, KERNEL - 1, CHANNELS), 0.1 * f(slots, V, D, D))
    return w, inputs, state


def rows(*lengths: int) -> np.ndarray:
    ends = np.cumsum(lengths)
    return np.array([[slot, end - n, end] for slot, (n, end) in enumerate(zip(lengths, ends, strict=True))], np.int32)


def chunked(w, p, z, b, a, conv, state):
    """One chunk by the closed form: a triangular solve instead of a recurrence. Returns (outputs, state)."""
    n = len(p)
    inputs = np.concatenate([conv, p]).astype(np.float64)
    c = sum(inputs[j : j + n] * w.conv[:, j] for j in range(KERNEL))
    c = c * logistic(c)
    q, k, v = (part.reshape(n, -1, D) for part in np.split(c, [K * D, 2 * K * D], axis=1))
    q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    g = w.a * np.log1p(np.exp(a.astype(np.float64) + w.dt))
    beta = logistic(b.astype(np.float64))
    out, new = np.empty((n, V, D)), np.empty((V, D, D))
    for j in range(V):
        kj, qj, vj, bj = k[:, j % K], q[:, j % K] / np.sqrt(D), v[:, j], beta[:, j]
        total = np.cumsum(g[:, j])
        decay = np.exp(np.where(np.tri(n, dtype=bool), total[:, None] - total, -np.inf))
        m = np.tril(bj[:, None] * (kj @ kj.T) * decay, -1)
        solved = np.linalg.inv(np.eye(n) + m)
        s = state[j].astype(np.float64)
        written = solved @ (bj[:, None] * vj) - solved @ ((bj * np.exp(total))[:, None] * kj) @ s
        out[:, j] = np.exp(total)[:, None] * (qj @ s) + (qj @ kj.T * decay) @ written
        new[j] = np.exp(total[-1]) * s + (np.exp(total[-1] - total)[:, None] * kj).T @ written
    y = out / np.sqrt((out * out).mean(-1, keepdims=True) + EPS) * w.norm * logistic(z.reshape(n, V, D))
    return y.reshape(n, -1), new


@pytest.mark.parametrize("n", [1, 2, 17, 64])
def test_the_recurrence_is_the_closed_form_of_a_chunk(n):
    w, inputs, (conv, state) = case(n, seed=n)
    wanted, wanted_state = chunked(w, *inputs, conv[0], state[0])
    wanted_conv = np.concatenate([conv[0], inputs[0]])[-(KERNEL - 1) :]
    y = reference.gdn(w, *inputs, rows(n), conv, state, EPS)
    np.testing.assert_allclose(y, wanted, atol=2e-5)
    np.testing.assert_allclose(state[0], wanted_state, atol=2e-6)
    np.testing.assert_array_equal(conv[0], wanted_conv)


def test_the_cut_of_a_prompt_does_not_matter():
    w, inputs, (conv, state) = case(40, seed=4)
    conv_cut, state_cut = conv.copy(), state.copy()
    whole = reference.gdn(w, *inputs, rows(40), conv, state, EPS)
    parts = [
        reference.gdn(w, *(a[i:j].copy() for a in inputs), rows(j - i), conv_cut, state_cut, EPS)
        for i, j in [(0, 1), (1, 3), (3, 30), (30, 40)]
    ]
    np.testing.assert_allclose(np.concatenate(parts), whole, atol=1e-5)
    np.testing.assert_allclose(state_cut, state, atol=1e-6)
    np.testing.assert_array_equal(conv_cut, conv)


def test_segments_do_not_see_each_other():
    w, inputs, (conv, state) = case(12, slots=3, seed=5)
    alone_conv, alone_state = conv[1:2].copy(), state[1:2].copy()
    together = reference.gdn(w, *inputs, rows(4, 5, 3), conv, state, EPS)
    alone = reference.gdn(w, *(a[4:9].copy() for a in inputs), rows(5), alone_conv, alone_state, EPS)
    np.testing.assert_array_equal(together[4:9], alone)
    np.testing.assert_array_equal(state[1], alone_state[0])


def test_grouped_and_tiled_value_heads_differ_and_the_file_order_is_tiled():
    w, (p, z, b, a), (conv, state) = case(6, seed=6)
    before = reference.gdn(w, p, z, b, a, rows(6), conv.copy(), state.copy(), EPS).reshape(6, V, D)
    p = p.copy()
    p[:, D : 2 * D] += 1.0  # queries of key head 1
    changed = reference.gdn(w, p, z, b, a, rows(6), conv.copy(), state.copy(), EPS).reshape(6, V, D)
    moved = np.flatnonzero((before != changed).any(axis=(0, 2)))
    np.testing.assert_array_equal(moved, [j for j in range(V) if j % K == 1])


def test_the_output_gate_is_a_logistic_and_the_norm_factor_is_used_as_it_is():
    w, (p, z, b, a), (conv, state) = case(3, seed=7)
    y = reference.gdn(w, p, z, b, a, rows(3), conv.copy(), state.copy(), EPS)
    opened = reference.gdn(w, p, np.full_like(z, 100), b, a, rows(3), conv.copy(), state.copy(), EPS)
    np.testing.assert_allclose(y, opened * logistic(z.astype(np.float64)), rtol=1e-5, atol=1e-7)
    doubled = reference.gdn(replace(w, norm=2 * w.norm), p, z, b, a, rows(3), conv.copy(), state.copy(), EPS)
    np.testing.assert_allclose(doubled, 2 * y, rtol=1e-6)


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([[0, 0, 3]], "segments must cover rows 0 to 4"),
        ([[0, 0, 2], [0, 2, 4]], "slot"),
        ([[0, 0, 2], [5, 2, 4]], "slot"),
    ],
)
def test_bad_segments_are_refused_before_the_state_is_touched(segments, message):
    w, inputs, (conv, state) = case(4, slots=2)
    before = conv.copy(), state.copy()
    with pytest.raises(ValueError, match=message):
        reference.gdn(w, *inputs, np.array(segments, np.int32), conv, state, EPS)
    np.testing.assert_array_equal(conv, before[0])
    np.testing.assert_array_equal(state, before[1])

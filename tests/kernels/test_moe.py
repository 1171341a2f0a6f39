"""Routing and the mixture of experts of the host, against the steps of `ops.py` written out plainly."""

from __future__ import annotations

import sys
from itertools import pairwise

import numpy as np
import pytest

from strata.kernels.cpu import moe, route
from strata.kernels.ops import EXP_POLY, Moe
from strata.kernels.reference.fma import fma
from strata.kernels.reference.linear import ordered_linear
from strata.kernels.reference.moe import moe as plain_moe

HIDDEN, EXPERTS, INNER, SHARED = 256, 12, 96, 64


def exp32(x: np.ndarray) -> np.ndarray:
    """`exp` of ops.py for values between -80 and 80."""
    x = x.astype(np.float32)
    n = np.rint(x * np.float32(1.44269504))
    r = fma(-n, 1.42860677e-6, fma(-n, 0.693145751953125, x))
    p = np.full_like(x, EXP_POLY[0])
    for c in EXP_POLY[1:]:
        p = fma(p, r, c)
    return (fma(p, r * r, r) + np.float32(1)) * np.exp2(n)


def expected(w: Moe, x: np.ndarray, used: int) -> np.ndarray:
    """The steps of the contract, a row at a time."""
    logits, gates = ordered_linear([w.router, w.shared_router], x)
    rows = []
    for row, logit, gate in zip(x[:, None], logits, gates, strict=True):
        best = np.argsort(-logit, kind="stable")[:used]
        e = exp32(logit[best] - logit[best[0]])
        total = e[0]
        for v in e[1:]:
            total = total + v
        acc = np.zeros_like(row)
        for expert, weight in zip(best, e / total, strict=True):
            acc = fma(weight, one_expert(w.gate.expert(expert), w.up.expert(expert), w.down.expert(expert), row), acc)
        shared = one_expert(w.shared_gate, w.shared_up, w.shared_down, row)
        rows.append(fma(np.float32(1) / (np.float32(1) + exp32(-gate)), shared, acc))
    return np.concatenate(rows)


def one_expert(gate, up, down, row: np.ndarray) -> np.ndarray:
    g, u = ordered_linear([gate, up], row)
    return ordered_linear([down], g / (np.float32(1) + exp32(-g)) * u)[0]


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@pytest.fixture
def block(random_weight):
    """A mixture of experts of the named types."""

    def make(gate: str = "IQ3_S", down: str = "IQ4_NL", shared: str = "Q8_0", router: str = "F32") -> Moe:
        def scale(name: str) -> float:
            return {"IQ3_S": 0.004, "IQ4_NL": 0.001, "Q8_0": 0.001, "Q4_K": 2e-4, "Q5_0": 0.004}.get(name, 0.05)

        def matrix(name: str, rows: int, cols: int, experts: int = 0, seed: int = 0):
            return random_weight(name, rows, cols, scale=scale(name), experts=experts, seed=seed)

        return Moe(
            router=matrix(router, EXPERTS, HIDDEN),
            gate=matrix(gate, INNER, HIDDEN, EXPERTS, 1),
            up=matrix(gate, INNER, HIDDEN, EXPERTS, 2),
            down=matrix(down, HIDDEN, INNER, EXPERTS, 3),
            shared_router=matrix("F32", 1, HIDDEN),
            shared_gate=matrix(shared, SHARED, HIDDEN, seed=1),
            shared_up=matrix(shared, SHARED, HIDDEN, seed=2),
            shared_down=matrix(shared, HIDDEN, SHARED, seed=3),
        )

    return make


def inputs(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, n]).standard_normal((n, HIDDEN)).astype(np.float32)


@pytest.mark.parametrize("types", [("IQ3_S", "IQ4_NL", "Q8_0"), ("Q4_K", "Q5_0", "Q5_0"), ("BF16", "F16", "F32")])
@pytest.mark.parametrize("used", [1, 3, EXPERTS])
def test_the_output_has_the_bits_of_the_written_steps(types: tuple[str, str, str], used: int, block):
    w, x = block(*types), inputs(7)
    assert same(moe(w, x, used), expected(w, x, used))


def test_the_output_is_the_references_within_the_error_of_quantised_activations(block):
    w, x = block(), inputs(20)
    want = plain_moe(w, x, 4)
    assert np.abs(moe(w, x, 4) - want).max() < 0.02 * np.abs(want).max()


def test_a_row_has_the_same_bits_in_any_company_and_across_the_limit_of_rows_at_once(block, monkeypatch):
    w, x = block(), inputs(29)
    whole = moe(w, x, 3)
    for cut in ((0, 1, 2, 29), (0, 9, 20, 29)):
        assert same(np.concatenate([moe(w, x[a:b], 3) for a, b in pairwise(cut)]), whole)
    monkeypatch.setattr(sys.modules["strata.kernels.cpu.moe"], "ROWS_AT_ONCE", 8)
    assert same(moe(w, x, 3), whole)


def test_rows_that_all_pick_the_same_experts_share_them(block):
    w = block()
    x = np.repeat(inputs(1), 19, axis=0)
    got = moe(w, x, 2)
    assert same(got, np.repeat(moe(w, x[:1], 2), 19, axis=0))


def test_no_rows_give_an_empty_result(block):
    assert moe(block(), inputs(0), 3).shape == (0, HIDDEN)


def test_weights_that_do_not_fit_are_refused_by_name(block, random_weight):
    w = block()
    wrong = Moe(**{name: getattr(w, name) for name in Moe.__slots__} | {"down": random_weight("IQ4_NL", 128, INNER)})
    with pytest.raises(ValueError, match=r"down must be \(12, 256, 96\) for x \(2, 256\), got \(128, 96\)"):
        moe(wrong, inputs(2), 3)
    with pytest.raises(ValueError, match="used must be in 1 to 12, got 13"):
        moe(w, inputs(2), 13)


def test_equal_logits_are_routed_to_the_lower_index():
    logits = np.float32([[1, 3, 3, 2, 3], [0, 0, 0, 0, 0]])
    experts, weights = route(logits, 3)
    np.testing.assert_array_equal(experts, [[1, 2, 4], [0, 1, 2]])
    np.testing.assert_array_equal(weights, np.full((2, 3), np.float32(1) / np.float32(3)))


def test_routing_weights_follow_the_contract_for_many_experts():
    logits = np.random.default_rng(2).standard_normal((9, 512)).astype(np.float32) * 3
    experts, weights = route(logits, 10)
    order = np.argsort(-logits, axis=1, kind="stable")[:, :10]
    np.testing.assert_array_equal(experts, order)
    picked = np.take_along_axis(logits, order, 1)
    e = exp32(picked - picked[:, :1])
    total = e[:, 0]
    for i in range(1, 10):
        total = total + e[:, i]
    assert same(weights, e / total[:, None])


def test_a_logit_that_is_no_number_picks_experts_that_exist():
    logits = np.full((2, 8), np.nan, np.float32)
    logits[1, 5] = 1
    experts, _ = route(logits, 4)
    assert ((experts >= 0) & (experts < 8)).all() and experts[1, 0] in range(8)


def test_too_many_experts_are_refused():
    with pytest.raises(ValueError, match="used must be in 1 to 64, got 65"):
        route(np.zeros((1, 512), np.float32), 65)

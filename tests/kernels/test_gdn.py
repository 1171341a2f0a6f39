"""The gated delta net on the host: the written recurrence bit for bit, any cut of a prompt, any company of slots."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.kernels import reference
from strata.kernels.cpu.gdn import gdn
from strata.kernels.ops import GDN_GROUPS, Gdn

EPS = 1e-6
F = np.float32


class Case:
    """Random weights, rows and states of `slots` sequences. The states are copied for every run."""

    def __init__(self, n, key_heads, heads, d, kernel=4, slots=3, seed=0):
        rng = np.random.default_rng(seed)
        channels = (2 * key_heads + heads) * d
        f = lambda *shape: rng.standard_normal(shape).astype(F)  # noqa: E731
        self.key_heads, self.heads, self.d = key_heads, heads, d
        self.w = Gdn(f(channels, kernel), -np.exp(f(heads)), f(heads), 1 + F(0.1) * f(d))
        self.p, self.z, self.b, self.a = f(n, channels), f(n, heads * d), f(n, heads), f(n, heads)
        self.conv, self.state = f(slots, kernel - 1, channels), F(0.3) * f(slots, heads, d, d)

    def run(self, segments, conv, state, begin=0, end=None, op=gdn):
        rows = slice(begin, end)
        parts = (np.ascontiguousarray(x[rows]) for x in (self.p, self.z, self.b, self.a))
        return op(self.w, *parts, np.array(segments, np.int32), conv, state, EPS)

    def whole(self, segments, op=gdn):
        """(output, conv, state) of one call."""
        conv, state = self.conv.copy(), self.state.copy()
        return self.run(segments, conv, state, op=op), conv, state

    def in_parts(self, cuts, slot=0):
        """(output, conv, state) of one sequence read in several calls."""
        conv, state = self.conv.copy(), self.state.copy()
        out = [self.run([(slot, 0, e - b)], conv, state, b, e) for b, e in pairwise([0, *cuts, len(self.p)])]
        return np.concatenate(out), conv, state


def written_gdn(case: Case, slot: int, w):
    """The contract's steps for one sequence, token by token, with an exact fma; w: the written arithmetic."""
    k_heads, heads, d, kernel = case.key_heads, case.heads, case.d, case.w.conv.shape[1]
    inputs, s = np.concatenate([case.conv[slot], case.p]), case.state[slot].copy()
    out, which = np.empty((len(case.p), heads, d), F), np.arange(heads) % k_heads
    for t in range(len(case.p)):
        c = case.w.conv[:, 0] * inputs[t]
        for j in range(1, kernel):
            c = w.fma(case.w.conv[:, j], inputs[t + j], c)
        c = w.silu(c).reshape(-1, d)
        q, k, v = np.split(c, [k_heads, 2 * k_heads])
        q, k = (x * (F(1) / np.sqrt(w.lanes(x, x) + F(1e-6)))[:, None] for x in (q, k))
        q, k = (q * (F(1) / np.sqrt(F(d))))[which], k[which]
        decay, beta = w.exp(case.w.a * w.softplus(case.a[t] + case.w.dt)), w.sigmoid(case.b[t])
        s = s * decay[:, None, None]
        e = beta[:, None] * (v - row_sums(s, k, w))
        s = w.fma(k[:, :, None], e[:, None, :], s)
        out[t] = w.rms(row_sums(s, q, w), case.w.norm, EPS) * w.sigmoid(case.z[t]).reshape(heads, d)
    return out.reshape(len(out), -1), inputs[len(case.p) :], s


def row_sums(s, x, w):
    """Sums over the state rows: groups, four chains in each, folded as trees. s (V, D, D), x (V, D) -> (V, D)."""
    heads, d = x.shape
    s, x = s.reshape(heads, GDN_GROUPS, -1, 4, d), x.reshape(heads, GDN_GROUPS, -1, 4, 1)
    chains = np.zeros((heads, GDN_GROUPS, 4, d), F)
    for i in range(s.shape[2]):
        chains = w.fma(s[:, :, i], x[:, :, i], chains)
    g = (chains[:, :, 0] + chains[:, :, 1]) + (chains[:, :, 2] + chains[:, :, 3])
    pairs = g[:, 0::2] + g[:, 1::2]
    return (pairs[:, 0] + pairs[:, 1]) + (pairs[:, 2] + pairs[:, 3])


def same(a, b):
    return all(x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(
    ("n", "key_heads", "heads", "d", "kernel"),
    [(5, 2, 6, 32, 4), (40, 1, 2, 64, 3), (3, 1, 3, 128, 4), (2, 2, 2, 256, 2), (2, 3, 3, 96, 5)],
)
def test_outputs_and_states_have_the_written_bits(n, key_heads, heads, d, kernel, written):
    case = Case(n, key_heads, heads, d, kernel)
    out, conv, state = case.whole([(1, 0, n)])
    assert same((out, conv[1], state[1]), written_gdn(case, 1, written))


@pytest.mark.parametrize(
    ("n", "key_heads", "heads", "d"), [(70, 2, 6, 32), (33, 4, 12, 64), (9, 16, 48, 128), (4, 1, 2, 256)]
)
def test_it_agrees_with_the_reference(n, key_heads, heads, d):
    case = Case(n, key_heads, heads, d)
    segments = [(2, 0, 1), (0, 1, n)]
    for got, wanted in zip(case.whole(segments), case.whole(segments, reference.gdn), strict=True):
        assert np.abs(got - wanted).max() < 2e-5


@pytest.mark.parametrize("cut", [1, 7, 64, 128])
def test_a_prompt_read_in_chunks_leaves_the_bits_of_one_read_at_once(cut):
    case = Case(150, 2, 4, 32)
    assert same(case.in_parts(range(cut, 150, cut)), case.whole([(0, 0, 150)]))


@given(st.sets(st.integers(1, 69), max_size=6))
@settings(max_examples=30, deadline=None)
def test_any_cut_of_a_prompt_leaves_the_same_bits(cuts):
    case = Case(70, 1, 2, 32)
    assert same(case.in_parts(sorted(cuts)), case.whole([(0, 0, 70)]))


def test_a_sequence_has_the_same_bits_alone_and_beside_others():
    case = Case(50, 2, 6, 64)
    together, conv, state = case.whole([(2, 0, 1), (0, 1, 45), (1, 45, 50)])
    for slot, begin, end in ((2, 0, 1), (0, 1, 45), (1, 45, 50)):
        alone_conv, alone_state = case.conv.copy(), case.state.copy()
        alone = case.run([(slot, 0, end - begin)], alone_conv, alone_state, begin, end)
        assert same((alone, alone_conv[slot], alone_state[slot]), (together[begin:end], conv[slot], state[slot]))


def test_slots_without_rows_keep_their_state():
    case = Case(6, 1, 2, 32)
    _, conv, state = case.whole([(1, 0, 6)])
    for slot in (0, 2):
        assert same((conv[slot], state[slot]), (case.conv[slot], case.state[slot]))


def test_the_number_of_threads_changes_no_bit(threads):
    case = Case(90, 4, 8, 64)
    segments = [(0, 0, 60), (1, 60, 61), (2, 61, 90)]
    threads(1)
    one = case.whole(segments)
    threads(2)
    assert same(case.whole(segments), one)


def test_no_rows_are_no_rows():
    case = Case(0, 1, 2, 32)
    out, conv, state = case.whole(np.empty((0, 3)))
    assert out.shape == (0, 64)
    assert same((conv, state), (case.conv, case.state))


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ({"p": (4, 100)}, "w_conv"),
        ({"z": (4, 32)}, "z"),
        ({"b": (3, 2)}, "b"),
        ({"conv": (3, 2, 128)}, "conv"),
        ({"state": (3, 2, 32, 16)}, "state"),
        ({"segments": [(0, 0, 3)]}, "segments"),
        ({"segments": [(0, 0, 2), (0, 2, 4)]}, "slot 0"),
        ({"segments": [(3, 0, 4)]}, "slot 3"),
        ({"segments": [(0, 0, 5)]}, "segments"),
        ({"segments": [(0, 0, 2), (1, 3, 4)]}, "segments"),
    ],
)
def test_what_does_not_fit_is_refused_before_a_state_changes(what, named):
    case = Case(4, 1, 2, 32)
    arrays = {"p": case.p, "z": case.z, "b": case.b, "a": case.a, "segments": [(0, 0, 4)]}
    arrays |= {"conv": case.conv.copy(), "state": case.state.copy()}
    for name, value in what.items():
        arrays[name] = value if name == "segments" else np.zeros(value, F)
    segments = np.array(arrays.pop("segments"), np.int32)
    with pytest.raises(ValueError, match=named):
        gdn(case.w, *(arrays[x] for x in "pzba"), segments, arrays["conv"], arrays["state"], EPS)
    if "conv" not in what and "state" not in what:
        assert same((arrays["conv"], arrays["state"]), (case.conv, case.state))


def test_a_head_size_that_fills_no_tile_is_refused():
    case = Case(2, 1, 1, 16)
    with pytest.raises(ValueError, match="D must be a multiple of 32, got 16"):
        case.whole([(0, 0, 2)])


def test_value_heads_that_do_not_repeat_the_key_heads_are_refused():
    case = Case(2, 2, 3, 32)
    with pytest.raises(ValueError, match="V a multiple of K"):
        case.whole([(0, 0, 2)])


def test_a_transposed_factor_is_refused():
    case = Case(2, 1, 2, 32)
    case.w = replace(case.w, conv=np.asfortranarray(case.w.conv))
    with pytest.raises(ValueError, match="w_conv must be C-contiguous"):
        case.whole([(0, 0, 2)])

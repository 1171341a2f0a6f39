"""The gated delta net on a card: the bits of the host's, however the tokens are cut and whoever is beside them."""

from __future__ import annotations

import numpy as np
import pytest

from strata.kernels import cpu, reference
from strata.kernels.cuda import forms, product
from strata.kernels.cuda import gdn as gdns
from strata.kernels.cuda.gdn import gdn, slots_bytes, slots_columns
from strata.kernels.cuda.product_variants import CARDS
from strata.kernels.formats import BY_NAME
from strata.kernels.ops import Gdn

EPS = 1e-6


class Case:
    """Weights and tokens of `slots` sequences; `run` reads rows of some of them."""

    def __init__(self, k: int, v: int, d: int, kernel: int = 4, slots: int = 1, seed: int = 0) -> None:
        rng = np.random.default_rng([seed, k, v, d])
        self.f = lambda *shape: rng.standard_normal(shape).astype(np.float32)
        self.v, self.d, self.channels = v, d, (2 * k + v) * d
        self.weights = Gdn(self.f(self.channels, kernel), -np.exp(self.f(v)), self.f(v), 1 + 0.1 * self.f(d))
        self.conv, self.state = self.f(slots, kernel - 1, self.channels), 0.1 * self.f(slots, v, d, d)

    def inputs(self, n: int) -> tuple[np.ndarray, ...]:
        return self.f(n, self.channels), self.f(n, self.v * self.d), self.f(n, self.v), self.f(n, self.v)


def segments(*parts: tuple[int, int]) -> np.ndarray:
    """Segments of (slot, tokens)."""
    ends = np.cumsum([n for _, n in parts])
    return np.array([[slot, end - n, end] for (slot, n), end in zip(parts, ends, strict=True)], np.int32)


GEOMETRIES = [
    (1, 2, 32, 4, [(0, 37)]),
    (2, 6, 32, 3, [(2, 1), (0, 17), (1, 2)]),
    (2, 2, 64, 4, [(1, 16), (0, 1)]),
    (1, 3, 128, 4, [(0, 18)]),
    (1, 3, 64, 4, [(1, 53), (0, 27)]),
    (2, 8, 32, 4, [(0, 32), (3, 24), (2, 1)]),
    (2, 4, 128, 2, [(3, 1), (1, 1), (0, 1), (2, 1)]),
]


@pytest.mark.parametrize(("k", "v", "d", "kernel", "parts"), GEOMETRIES)
def test_outputs_and_states_are_the_bits_of_the_host(target, same_bits, k, v, d, kernel, parts):
    case, rows = Case(k, v, d, kernel, slots=4), segments(*parts)
    inputs = case.inputs(int(rows[-1, 2]))
    conv, state = target.put(case.conv), target.put(case.state)
    device = [target.put(a) for a in (*inputs, rows)]
    y = gdn(target.workspace(), target.put(case.weights), *device, conv, state, EPS)
    want = cpu.gdn(case.weights, *inputs, rows, case.conv, case.state, EPS)
    same_bits(target.host(y), want)
    same_bits(target.host(conv), case.conv)
    same_bits(target.host(state), case.state)


@pytest.mark.parametrize("columns", [0, 64, 128])
@pytest.mark.parametrize("parts", [[(0, 1), (2, 1), (1, 1)], [(1, 5), (0, 1), (3, 3)]])
@pytest.mark.parametrize("moved", [0, 4])
def test_a_window_of_many_sequences_has_the_bits_of_one_of_few(target, same_bits, monkeypatch, columns, parts, moved):
    """States in place and in another row than before, of whole heads and of halves, copied in every way."""
    monkeypatch.setattr(gdns, "in_registers", lambda segments: bool(moved) == (columns == 128))
    if target.emulated and moved:
        monkeypatch.setattr(gdns, "BULK_ARCH", 80)
    for d in (64, 128)[columns == 128 :]:
        monkeypatch.setattr(gdns, "slots_columns", lambda *_: columns)
        case, rows = Case(3, 6, d, slots=8), segments(*parts)
        inputs, want_rows = case.inputs(int(rows[-1, 2])), rows.copy()
        conv, state, ended = target.put(case.conv), target.put(case.state), target.put(np.zeros(9, np.uint32))
        rows[:, 0] |= moved << 16
        device = [target.put(a) for a in (*inputs, rows)]
        space = target.workspace()
        y = gdn(space, target.put(case.weights), *device, conv, state, EPS, ended=ended)
        want = cpu.gdn(case.weights, *inputs, want_rows, case.conv, case.state, EPS)
        same_bits(target.host(y), want)
        for slot in want_rows[:, 0]:
            same_bits(target.host(conv)[slot ^ moved], case.conv[slot])
            same_bits(target.host(state)[slot ^ moved], case.state[slot])
        known, quantized = forms.known(space, y, BY_NAME["Q5_1"]), product.quantize(space, y, BY_NAME["Q5_1"])
        for got, wanted in ((known.q, quantized.q), (known.d, quantized.d), (known.sums, quantized.sums)):
            same_bits(target.host(got), target.host(wanted))
        assert not target.host(ended).any()


@pytest.mark.parametrize("arch", CARDS)
def test_blocks_for_many_sequences_fit_every_card(arch):
    card = CARDS[arch]
    for segments_, heads, d, tokens in (
        (8, 48, 128, 1),
        (1, 48, 128, 1),
        (3, 48, 128, 16),
        (16, 4, 64, 1),
        (8, 48, 32, 1),
    ):
        columns = slots_columns(card, segments_, heads, d, tokens, True)
        assert columns <= d and slots_bytes(columns, d, tokens) <= card.shared_block
        assert not columns or 3 * segments_ * heads * d >= columns * card.multiprocessors
    assert slots_columns(CARDS[90], 2, 48, 128, 1, True) == 128
    assert slots_columns(CARDS[90], 8, 48, 128, 1, True) == 64
    assert slots_columns(CARDS[90], 1, 48, 128, 1, True) == 128
    assert slots_columns(CARDS[90], 1, 24, 128, 1, True) == 64
    assert slots_columns(CARDS[90], 1, 16, 128, 1, True) == 0


def test_outputs_are_those_of_the_reference(target):
    case, rows = Case(2, 4, 64), segments((0, 30))
    inputs = case.inputs(30)
    device = [target.put(a) for a in (*inputs, rows, case.conv, case.state)]
    y = target.host(gdn(target.workspace(), target.put(case.weights), *device, EPS))
    want = reference.gdn(case.weights, *inputs, rows, case.conv, case.state, EPS)
    assert np.abs(y - want).max() < 2e-5 * np.abs(want).max()


@pytest.mark.parametrize("cuts", [[1] * 40, [17, 23], [39, 1]])
def test_a_prompt_cut_into_chunks_gives_the_bits_of_the_whole(target, same_bits, cuts):
    case = Case(1, 2, 64)
    inputs, weights, space = [target.put(a) for a in case.inputs(40)], target.put(case.weights), target.workspace()
    results = []
    for parts in ([40], cuts):
        conv, state, out, at = target.put(case.conv), target.put(case.state), [], 0
        for n in parts:
            rows = [a[at : at + n] for a in inputs]
            with space.scratch():
                y = gdn(space, weights, *rows, target.put(segments((0, n))), conv, state, EPS)
                out.append(target.host(y))
            at += n
        results.append((np.concatenate(out), target.host(conv), target.host(state)))
    for whole, cut in zip(*results, strict=True):
        same_bits(cut, whole)


def test_a_sequence_is_the_same_alone_and_between_others(target, same_bits):
    case = Case(2, 4, 32, slots=3)
    inputs, weights, space = case.inputs(25), target.put(case.weights), target.workspace()
    together = segments((2, 5), (0, 12), (1, 8))
    conv, state = target.put(case.conv), target.put(case.state)
    y = target.host(gdn(space, weights, *map(target.put, (*inputs, together)), conv, state, EPS))
    alone_conv, alone_state = target.put(case.conv), target.put(case.state)
    own = [target.put(a[5:17]) for a in inputs]
    alone = target.host(gdn(space, weights, *own, target.put(segments((0, 12))), alone_conv, alone_state, EPS))
    same_bits(y[5:17], alone)
    same_bits(target.host(conv)[0], target.host(alone_conv)[0])
    same_bits(target.host(state)[0], target.host(alone_state)[0])


@pytest.mark.parametrize("n", [3, 20])
def test_what_the_delta_net_leaves_for_products_is_its_result_quantised(target, same_bits, n):
    case, space, kind = Case(1, 2, 64), target.workspace(16), BY_NAME["Q6_K"]
    arrays = [target.put(a) for a in (*case.inputs(n), segments((0, n)), case.conv, case.state)]
    y = gdn(space, target.put(case.weights), *arrays, EPS)
    known, want = forms.known(space, y, kind), product.quantize(space, y, kind)
    assert known is not None
    same_bits(target.host(known.q), target.host(want.q))
    same_bits(target.host(known.d), target.host(want.d))


@pytest.mark.parametrize("n", [1, 3, 20])
def test_a_state_that_advances_into_another_row_leaves_the_one_before_it(target, same_bits, n):
    case = Case(1, 2, 64, slots=3)
    inputs, weights, space = [target.put(a) for a in case.inputs(n)], target.put(case.weights), target.workspace()
    results = []
    for slot, to in ((1, 1), (1, 2)):
        rows = target.put(np.array([[slot | (slot ^ to) << 16, 0, n]], np.int32))
        conv, state = target.put(case.conv), target.put(case.state)
        y = target.host(gdn(space, weights, *inputs, rows, conv, state, EPS))
        results.append((y, target.host(conv), target.host(state)))
    (y, conv, state), (other_y, other_conv, other_state) = results
    same_bits(other_y, y)
    for before, in_place, moved in ((case.conv, conv, other_conv), (case.state, state, other_state)):
        same_bits(moved[2], in_place[1])
        same_bits(moved[:2], before[:2])


def test_a_captured_window_replayed_for_other_slots_gives_what_they_get_eagerly(target, same_bits):
    case = Case(1, 2, 64, slots=4)
    weights, space, results = target.put(case.weights), target.workspace(), []
    first, second = ((case.inputs(3), segments(*parts)) for parts in ([(2, 2), (0, 1)], [(3, 1), (1, 2)]))
    arrays = [target.put(a) for a in (*first[0], first[1])]
    conv, state = target.put(case.conv), target.put(case.state)

    def window() -> None:
        with space.scratch():
            results[:] = [gdn(space, weights, *arrays, conv, state, EPS)]

    replay = target.graph(window)
    for inputs, rows in (second, first):
        target.update(conv, case.conv)
        target.update(state, case.state)
        own_conv, own_state = target.put(case.conv), target.put(case.state)
        want = target.host(gdn(space, weights, *map(target.put, (*inputs, rows)), own_conv, own_state, EPS))
        for array, value in zip(arrays, (*inputs, rows), strict=True):
            target.update(array, value)
        replay()
        same_bits(target.host(results[0]), want)
        same_bits(target.host(conv), target.host(own_conv))
        same_bits(target.host(state), target.host(own_state))


def test_a_head_size_that_has_no_kernel_is_refused(target):
    case = Case(1, 1, 96)
    arrays = [target.put(a) for a in (*case.inputs(1), segments((0, 1)), case.conv, case.state)]
    with pytest.raises(ValueError, match=r"D must be one of \(32, 64, 128\), got 96"):
        gdn(target.workspace(), target.put(case.weights), *arrays, EPS)


@pytest.mark.parametrize("d", [32, 128])
@pytest.mark.parametrize("kind", ["Q6_K", "Q5_1", "IQ3_S"])
def test_what_a_window_leaves_for_the_output_product_is_its_result_quantised(target, same_bits, d, kind):
    case, space, type_ = Case(1, 2, d), target.workspace(), BY_NAME[kind]
    device = [target.put(a) for a in (*case.inputs(3), segments((0, 3)), case.conv, case.state)]
    y = gdn(space, target.put(case.weights), *device, EPS)
    known, want = forms.known(space, y, type_), product.quantize(space, y, type_)
    for got, wanted in ((known.q, want.q), (known.d, want.d), (known.sums, want.sums)):
        assert (got is None) == (wanted is None)
        if got is not None:
            same_bits(target.host(got), target.host(wanted))

"""Blocks of layers that work in the same bytes of a card: nothing that the next one needs is lost, and prompts whose
mixers take some rows at a time have the bits of those that take all."""

from __future__ import annotations

import numpy as np
import pytest

from strata.engine.device.cuda import CudaDevice
from strata.engine.device.host import HostDevice
from strata.engine.model import Model, Rows
from strata.engine.model.resident import Resident
from strata.kernels.cuda.plans import WINDOW_ROWS

CONTEXT, CHUNK, MIXER_ROWS = 320, 200, 128
LENGTHS = (17, CHUNK, 5, WINDOW_ROWS, 40)
BESIDE = 20
"""A chunk that is no window, the longest one, windows, and one behind them; of the other sequence BESIDE at most."""


MOST = 16 << 20
"""Bytes of the largest space that blocks of this trunk work in, with room."""


class Forgetful(CudaDevice):
    """Every block finds the bytes that it works in spoiled. `spoiled`: how often that was the whole space; the one in
    which a start measures, most of the card, is spoiled at its beginning only."""

    spoiled = 0

    def turn(self, rows: int = 0) -> None:
        super().turn(rows)
        memory = self.kernels.workspace._memory
        memory[:MOST] = 0xFF  # not a number, whatever is read of them
        self.spoiled += memory.nbytes <= MOST


def ids(n: int) -> np.ndarray:
    return np.random.default_rng(n).integers(0, 998, n).astype(np.int32)


def read(model: Model, state, fetch) -> list:
    """Logits of all rows of two sequences that are read in turn, and their states."""
    found = []
    for length in LENGTHS:
        for slot, n in ((0, length), (1, min(length, BESIDE))):
            rows = Rows.of([(slot, state.length(slot), ids(n + slot)[:n] % model.spec.vocab)])
            found.append(fetch(model.forward(rows, state, range(len(rows) - 3, len(rows)))))
    both = [(slot, state.length(slot), ids(20) % model.spec.vocab) for slot in (1, 0)]
    found.append(fetch(model.forward(Rows.of(both), state, [19, 39])))
    return [*found, state.state_bytes(0), state.state_bytes(1)]


@pytest.fixture(scope="module")
def wanted(trunk):
    """What the host computes, where every array has memory of its own."""
    model = Model(trunk, HostDevice("cpu", 2), CONTEXT)
    return read(model, model.new_state(2), np.array)


def check(found: list, wanted: list) -> None:
    for got, want in zip(found, wanted, strict=True):
        if isinstance(want, bytes):
            assert got == want
        else:
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("mixer_rows", [0, MIXER_ROWS])
def test_prompts_and_windows_have_the_bits_of_the_host(any_card, trunk, wanted, mixer_rows):
    device = Forgetful(driver=any_card())
    device.mixer_rows = mixer_rows
    card = Resident(trunk, device, max_context=CONTEXT, n_slots=2, chunks=[CHUNK], logits=3)
    assert card.chunk == CHUNK
    at_start = device.spoiled
    check(read(card.model, card.state, device.read), wanted)
    passes = 2 * len(LENGTHS) + 1
    assert device.spoiled - at_start >= passes * trunk.spec.layers

"""A model's geometry for the tests of its state, memories to hold it, and sequences without a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext

import numpy as np
import pytest

from strata.engine.device.arena import MIB
from strata.engine.device.base import StateMemory
from strata.engine.device.cuda import CudaDevice
from strata.engine.device.host import HostMemory
from strata.engine.pack import ModelSpec, open_pack
from strata.engine.state.slots import StatePool
from strata.kernels.ops import PAGE


@pytest.fixture(scope="session")
def spec(packs) -> ModelSpec:
    return open_pack(packs["odd-q2_0"]).spec


class TwoSided(HostMemory):
    """RAM in which a pass writes beside what it reads, as on a card."""

    sides = 2


class Written:
    """A state pool, and what forward passes do to it without a model: each token leaves its mark on everything that
    the tokens after it depend on."""

    def __init__(self, state: StatePool, memory: StateMemory) -> None:
        self.state = state
        self.memory = memory

    def write(self, slot: int, tokens) -> None:
        self.state.reserve(slot, len(tokens))
        for token in np.asarray(tokens).tolist():
            self._write_one(slot, token)

    def _write_one(self, slot: int, token: int) -> None:
        state, n = self.state, self.state.length(slot)
        before = int(state.recurrent.read(slot)[:2].view(np.uint16)[0])
        mark = np.uint8((31 * before + token + 1) % 251)
        state.recurrent.advance(slot)
        state.recurrent.write(slot, np.full(state.recurrent.n_bytes, mark, np.uint8))
        page = state.pages.tables[slot, n // PAGE]
        for array in state.pages.arrays:
            values = self.memory.read(array[page])
            values[n % PAGE * len(values) // PAGE] = mark
            self.memory.upload(array[page], values.reshape(-1).view(np.uint8))
        state.recurrent.advance(slot)  # `StatePool.advance` turns the sides once more
        state.advance(slot, 1)


@pytest.fixture(params=["host", "two sides", "card"])
def new_state(request, spec) -> Iterator[Callable[..., Written]]:
    """new_state(n_slots, context, ...): a state pool, in every kind of memory there is."""

    def memory() -> StateMemory:
        if request.param != "card":
            return HostMemory() if request.param == "host" else TwoSided()
        device = CudaDevice(driver=card.driver())
        device.open("state", 64 * MIB, "")
        return device

    def make(*args, **kwargs) -> Written:
        own = memory()
        return Written(StatePool(spec, *args, memory=own, **kwargs), own)

    with request.getfixturevalue("emulated_card").plugged_in() if request.param == "card" else nullcontext() as card:
        yield make

"""Models on test packs, sequences through them, and a backend that remembers what was computed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest

from strata.engine.device.host import HostDevice
from strata.engine.model import Model, Rows
from strata.engine.pack import Pack, open_pack
from strata.engine.state.slots import StatePool
from strata.kernels import reference
from strata.kernels.formats import BY_NAME, Weight

CONTEXT = 512


class Sequences:
    """A model with the state of its slots; `feed` reads tokens where a slot's state ends."""

    def __init__(self, model: Model, n_slots: int = 1) -> None:
        self.model = model
        self.state: StatePool = model.new_state(n_slots)

    def feed(self, ids: Sequence[int], slot: int = 0, want: int = 1) -> np.ndarray:
        """Logits of the last `want` of these tokens."""
        rows = Rows.of([(slot, self.state.length(slot), ids)])
        return self.model.forward(rows, self.state, range(len(ids) - want, len(ids)))

    def greedy(self, logits: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
        """n tokens by the argmax in all slots at once, from logits (slots, vocab) before the first.

        -> ids (slots, n) and the logits after each, (slots, n, vocab).
        """
        ids, after = [], []
        for _ in range(n):
            ids.append(logits.argmax(1))
            rows = Rows.of([(slot, self.state.length(slot), [token]) for slot, token in enumerate(ids[-1])])
            logits = self.model.forward(rows, self.state, range(len(rows)))
            after.append(logits)
        return np.stack(ids, 1), np.stack(after, 1)


class Expanded(Pack):
    """A pack whose matrices are stored as float32: what the reference computes with, dequantised once for all."""

    def __init__(self, pack: Pack) -> None:
        self.__dict__ |= pack.__dict__
        self._weights: dict[str, Weight] = {}

    def weight(self, name: str) -> Weight:
        if name not in self._weights:
            w = super().weight(name)
            parts = [w.expert(e) for e in range(w.experts)] if len(w.shape) == 3 else [w]
            values = np.stack([reference.dequantize(part, np.arange(w.rows)) for part in parts])
            self._weights[name] = Weight(BY_NAME["F32"], w.shape, values.reshape(w.shape).view(np.uint8))
        return self._weights[name]


class Recorder:
    """A backend that computes with another one and keeps the arguments and the result of every call, in order."""

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels
        self.calls: list[tuple[str, tuple[Any, ...], Any]] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        operation = getattr(self._kernels, name)

        def recorded(*args: Any) -> Any:
            before = copy.deepcopy(args) if name in ("ple", "hyper_add") else args
            result = operation(*args)
            self.calls.append((name, before, args[1].copy() if name == "ple" else result))
            return result

        return recorded


@pytest.fixture(scope="session")
def pack_of(packs: Any) -> Callable[[str], Pack]:
    """pack_of("tiny-f32"): an open pack, opened once."""
    return cache(lambda name: open_pack(packs[name]))


@pytest.fixture(scope="session")
def sequences(pack_of: Callable[[str], Pack]) -> Callable[..., Sequences]:
    """sequences("tiny-f32", "cpu", n_slots=1): fresh slots on a model that is bound once. A Pack serves for a name."""
    bound: dict[tuple[str, str], Model] = {}

    def make(pack: str | Pack, backend: Any, n_slots: int = 1) -> Sequences:
        if isinstance(pack, Pack):
            return Sequences(Model(pack, HostDevice(backend, 1), CONTEXT), n_slots)
        if (pack, backend) not in bound:
            bound[pack, backend] = Model(pack_of(pack), HostDevice(backend, 1), CONTEXT)
        return Sequences(bound[pack, backend], n_slots)

    return make


@pytest.fixture(scope="session")
def expanded(pack_of: Callable[[str], Pack]) -> Callable[[str], Pack]:
    """expanded("tiny-q8_0"): the pack with its matrices as float32. Not kept: it is large."""
    return lambda name: Expanded(pack_of(name))


@pytest.fixture(scope="session")
def recorded(pack_of: Callable[[str], Pack]) -> Callable[..., Recorder]:
    """recorded("tiny-f32", "cpu", ids): the calls that reading these ids in one forward makes."""

    def run(name: str, backend: Any, ids: Sequence[int]) -> Recorder:
        device = HostDevice(backend, 1)
        recorder = Recorder(device.kernels)
        device.kernels = recorder  # type: ignore[assignment]
        sequence = Sequences(Model(pack_of(name), device, CONTEXT))
        sequence.feed(ids)
        return recorder

    return run


@pytest.fixture(scope="session")
def altered() -> Callable[..., Pack]:
    """altered(pack, spec=.., arrays={name: array}): the same pack with another geometry or other tensors."""

    def alter(pack: Pack, spec: Any = None, arrays: dict[str, np.ndarray] | None = None) -> Pack:
        class Altered(Pack):
            def __init__(self) -> None:
                self.__dict__ |= pack.__dict__
                self.spec = spec or pack.spec

            def weight(self, name: str) -> Weight:
                if name not in (arrays or {}):
                    return super().weight(name)
                values = np.ascontiguousarray((arrays or {})[name], np.float32)
                return Weight(BY_NAME["F32"], values.shape, values.view(np.uint8))

            def array(self, name: str) -> np.ndarray:
                return (arrays or {})[name] if name in (arrays or {}) else super().array(name)

        return Altered()

    return alter

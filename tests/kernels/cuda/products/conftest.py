"""Fixtures of the product tests: the products on the host's emulator of a card, and on a card.

`host` and `device` give the same `Place`: arrays there and back, and checks that compare bits with the written order.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from strata.kernels.cuda import (
    arguments,
    card,
    fetch,
    few_plans,
    handover,
    mixture,
    product,
    prompt_plans,
    repack,
    wide,
    wide_plans,
)
from strata.kernels.cuda.card import Card
from strata.kernels.cuda.workspace import Workspace
from strata.kernels.formats import Weight
from strata.kernels.reference.fma import fma
from strata.kernels.reference.linear import ordered_linear

EMULATOR = Path(__file__).resolve().parents[1] / "emulator" / "emulator.py"

Mixed = tuple[Weight, Weight, Weight]


def activations(n: int, cols: int, seed: int = 0) -> np.ndarray:
    """Activations whose blocks differ in size, one block of zeros among them."""
    rng = np.random.default_rng([seed, n, cols])
    size = np.exp(rng.uniform(-3, 3, (n, cols // 32 + 1))).repeat(32, 1)[:, :cols]
    x = (rng.standard_normal((n, cols)) * size).astype(np.float32)
    x[0, :32] = 0
    return x


def picks(n: int, used: int, experts: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Experts of n rows, int32 (n, used), each once a row; their weights."""
    rng = np.random.default_rng([seed, n, used, experts])
    ids = np.stack([rng.permutation(experts)[:used] for _ in range(n)]).astype(np.int32)
    return ids, rng.random((n, used)).astype(np.float32)


def same_bits(got: np.ndarray, want: np.ndarray) -> None:
    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))


class Place:
    """Where products run. The checks raise AssertionError when a bit differs from the written order.

    scratch_part: the part of the scratch that is asked for which there is: the emulator's few multiprocessors want less
    """

    def __init__(
        self,
        upload: Callable[[np.ndarray], Any],
        download: Callable[[Any], np.ndarray],
        written: Any,
        scratch_part: int = 1,
    ) -> None:
        self.upload = upload
        self.download = download
        self._written = written
        self._scratch_part = scratch_part
        self._kept: list[Any] = []

    def workspace(self, megabytes: int = 16) -> Workspace:
        """Scratch that holds NaN, so that what no kernel writes shows."""
        return Workspace(self.upload(np.full((megabytes << 20) // self._scratch_part, 0xFF, np.uint8)))

    def weight(self, w: Weight) -> Weight:
        return Weight(w.type, w.shape, self.upload(np.ascontiguousarray(w.data)))

    def bank(self, w: Weight, missing: tuple[int, ...] = ()) -> mixture.Bank:
        """A stack as a bank of experts, some of which are not there."""
        stack = self.weight(w)
        self._kept.append(stack)
        addresses = mixture.stack_addresses(stack)
        addresses[list(missing)] = 0
        return mixture.Bank(w.type, w.rows, w.cols, self.upload(addresses))

    def linear(self, weights: list[Weight], x: np.ndarray, **more: Any) -> list[np.ndarray]:
        placed = [self.weight(w) for w in weights]
        return [self.download(y) for y in product.linear(self.workspace(), placed, self.upload(x), **more)]

    def check_linear(self, weights: list[Weight], n: int, **more: Any) -> None:
        """linear() of fresh activations against the written order."""
        x = activations(n, weights[0].cols)
        for got, want in zip(self.linear(weights, x, **more), ordered_linear(weights, x), strict=True):
            same_bits(got, want)

    def mixture(
        self,
        stacks: Mixed,
        x: np.ndarray,
        ids: np.ndarray,
        weights: np.ndarray,
        missing: tuple[int, ...],
        given: Any,
        shared: Mixed | None = None,
        logits: Any = None,
    ) -> np.ndarray:
        banks = [self.bank(w, missing) for w in stacks]
        arrays = [self.upload(a) for a in (x, ids, weights)]
        given = None if given is None else self.upload(given)
        own = None if shared is None else (mixture.Shared(*map(self.weight, shared)), self.upload(logits))
        return self.download(mixture.mixture(self.workspace(64), *banks, *arrays, given, own))

    def check_mixture(
        self, stacks: Mixed, n: int, used: int, missing: tuple[int, ...] = (), shared: Mixed | None = None
    ) -> None:
        """mixture() of fresh activations and picks, and of an expert that all rows have, against the written order."""
        gate, up, down = stacks
        x = activations(n, gate.cols)
        ids, weights = picks(n, used, gate.experts)
        given = activations(n * used, down.rows, seed=9) if missing else None
        logits = activations(n, 32, seed=8)[:, -1].copy()
        got = self.mixture(stacks, x, ids, weights, missing, given, shared, logits)
        outputs = np.zeros((n, used, down.rows), np.float32) if given is None else given.reshape(n, used, -1).copy()
        for e in set(ids.ravel().tolist()) - set(missing):
            row, rank = np.nonzero(ids == e)
            g, u = ordered_linear([gate.expert(e), up.expert(e)], x[row])
            (outputs[row, rank],) = ordered_linear([down.expert(e)], self._written.silu(g) * u)
        want = np.zeros((n, down.rows), np.float32)
        for k in range(used):
            want = fma(weights[:, k, None], outputs[:, k], want)
        if shared is not None:
            g, u = ordered_linear(shared[:2], x)
            (y,) = ordered_linear(shared[2:], self._written.silu(g) * u)
            want = fma(self._written.sigmoid(logits)[:, None], y, want)
        same_bits(got, want)


def aligned(a: np.ndarray) -> np.ndarray:
    """A copy at an address that is a multiple of 256, with readable bytes after it."""
    room = np.empty(a.nbytes + 512, np.uint8)
    start = -room.ctypes.data % 256
    copy = room[start : start + a.nbytes].view(a.dtype).reshape(a.shape)
    copy[...] = a
    return copy


class HostLoader:
    """`load_kernel` for the emulator; `order` seeds the order in which its threads run."""

    def __init__(self, module: ModuleType, folder: Path) -> None:
        self.emulator = module.Emulator(folder, "-Og")

    def __call__(self, source: str, name: str, **constants: int | str) -> Any:
        kernel = self.emulator.load_kernel(source, name, **constants)

        def launch(grid: Any, block: Any, args: tuple[Any, ...], shared_mem: int) -> None:
            kernel(grid, block, tuple(a[()] if isinstance(a, np.ndarray) else a for a in args), shared_mem=shared_mem)

        launch.max_dynamic_shared_size_bytes = 1 << 30  # type: ignore[attr-defined]
        return launch


@pytest.fixture(scope="session")
def host_loader(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> HostLoader:
    spec = importlib.util.spec_from_file_location("strata_test_emulator", EMULATOR)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    cache_dir = getattr(request.config, "cache", None)
    return HostLoader(module, Path(cache_dir.mkdir("emulated")) if cache_dir else tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def host(host_loader: HostLoader, written: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """The products on the emulator, as on a card with 3 multiprocessors."""
    for module in (arguments, product, mixture, repack, handover, fetch, wide):
        monkeypatch.setattr(module, "load_kernel", host_loader)
    monkeypatch.setattr(card, "card", lambda: Card(80, 3, 227 << 10, 228 << 10))
    yield Place(aligned, np.array, written, scratch_part=8)
    host_loader.emulator.order = 0


@pytest.fixture
def tiles_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of any length go through tiles."""
    monkeypatch.setattr(few_plans, "MOST_ROWS", 0)
    monkeypatch.setattr(few_plans, "MOST_EACH", 0)


@pytest.fixture
def unpacked_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Weights of prompts that go through tiles are unpacked once for all blocks of any product."""
    monkeypatch.setattr(prompt_plans, "READY_TILES", 1)
    monkeypatch.setattr(prompt_plans, "READY_WORK", 0)
    product._prepared.cache_clear()
    yield
    product._prepared.cache_clear()


@pytest.fixture
def four_warps(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Prompts that go through tiles are multiplied by four warps together where card and type allow it; an entry for
    each."""
    products: list[str] = []
    call = wide.Wide.__call__
    monkeypatch.setattr(wide_plans, "pays", lambda *_: True)
    monkeypatch.setattr(wide.Wide, "__call__", lambda *given: (products.append("wide"), call(*given))[1])
    product._prepared.cache_clear()
    yield products
    product._prepared.cache_clear()


@pytest.fixture
def device(written: Any) -> Place:
    """The products on a card."""
    import cupy

    return Place(cupy.asarray, cupy.asnumpy, written)

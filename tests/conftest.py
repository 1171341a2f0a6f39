"""Fixtures for every test: the recorded packs and the numbers that other implementations compute from them."""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

# Read when NumPy loads its BLAS: a team of spinning threads costs the reference path a factor of 3 on busy cores.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
import pytest

HERE = Path(__file__).resolve().parent
DATA = HERE / "data"


FIRST = (
    "kernels/cuda/test_compile.py",
    "bench/test_slot_tools.py",
    "engine/test_cuda_rounds.py",
)
"""The files that take longest begin, so that no worker is left with one. While the first one compiles for cards, the
second one's engine compiles the host's kernels, which both workers would do otherwise."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    first = {HERE / name: at for at, name in enumerate(FIRST)}
    items.sort(key=lambda item: first.get(item.path, len(FIRST)))


def pytest_collection_finish() -> None:
    """What was imported and collected stays: no later search for garbage walks it, and tests ask for many."""
    gc.collect()
    gc.freeze()


def module_of(path: Path) -> ModuleType:
    """A file beside the tests as a module, loaded once."""
    name = f"strata_test_{path.stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec and spec.loader
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


class Packs:
    """Test packs by name ("tiny-q8_0", "odd-f32", "tiny-q2_0-split", "mtp-tiny-q8_0"), unpacked when asked for.

    `packs[name]` is the path of the file, of the first shard for a split pack. Files are kept between runs in a folder
    named by the archive's hash and checked against their own hash once a run; parallel runs may share the folder.
    """

    def __init__(self, folder: Path) -> None:
        module = module_of(DATA / "unpack.py")
        self.folder = folder / module.digest(module.ARCHIVE)
        self._archive = module.Archive()
        self._paths: dict[str, Path] = {}

    @property
    def names(self) -> list[str]:
        return self._archive.names()  # type: ignore[no-any-return]

    def __getitem__(self, name: str) -> Path:
        if name not in self._paths:
            self._paths[name] = self._archive.unpack(name, self.folder)
        return self._paths[name]


@pytest.fixture(scope="session")
def packs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Packs:
    cache_dir = getattr(request.config, "cache", None)
    return Packs(Path(cache_dir.mkdir("packs")) if cache_dir else tmp_path_factory.mktemp("packs"))


@pytest.fixture(scope="session")
def golden() -> Callable[[str], dict[str, np.ndarray]]:
    """golden("tiny-hf")["len17.last_logits"]: arrays of a recording by key, loaded once."""

    @cache
    def load(name: str) -> dict[str, np.ndarray]:
        with np.load(DATA / "golden" / f"{name}.npz") as members:
            return {key: members[key] for key in members.files}

    return load


@pytest.fixture(scope="session")
def golden_index() -> dict[str, Any]:
    """`golden/index.json`: margins of every routing choice, agreement between implementations, counts of types."""
    return json.loads((DATA / "golden" / "index.json").read_text())  # type: ignore[no-any-return]


@pytest.fixture(scope="session")
def emulated_card(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The machine of tests/engine/device/emulated_card.py; its compiled kernels are kept between runs."""
    cache_dir = getattr(request.config, "cache", None)
    folder = Path(cache_dir.mkdir("emulated")) if cache_dir else tmp_path_factory.mktemp("emulated")
    return module_of(HERE / "engine" / "device" / "emulated_card.py").EmulatedCard(folder)

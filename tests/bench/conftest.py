"""A card without hardware for the benches of cards, and a pack of two layers for it."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from strata.engine.pack import Pack, open_pack

LAYERS = 2


@pytest.fixture(scope="session")
def emulated_card(request, tmp_path_factory) -> object:
    """The machine of tests/engine/device/emulated_card.py; its compiled kernels are kept between runs."""
    path = Path(__file__).parents[1] / "engine" / "device" / "emulated_card.py"
    spec = importlib.util.spec_from_file_location("strata_test_emulated_card", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    cache_dir = getattr(request.config, "cache", None)
    folder = Path(cache_dir.mkdir("emulated")) if cache_dir else tmp_path_factory.mktemp("emulated")
    return module.EmulatedCard(folder)


@pytest.fixture(scope="module")
def trunk(packs) -> Pack:
    """A layer of either kind."""
    whole = open_pack(packs["tiny-q8_0"])

    class Short(Pack):
        def __init__(self) -> None:
            self.__dict__ |= whole.__dict__
            kinds = (True, False)
            self.spec = replace(whole.spec, layers=LAYERS, recurrent=kinds, ratios=(0, 4), ple=None)

        def weight(self, name: str):
            return super().weight(name.replace("blk.1.", "blk.3."))

        def array(self, name: str):
            return super().array(name.replace("blk.1.", "blk.3."))

    return Short()

"""A card without hardware for the benches of cards, and a pack of two layers for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from strata.engine.pack import Pack, open_pack

LAYERS = 2


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

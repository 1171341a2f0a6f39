"""A model's geometry for the tests of its state."""

from __future__ import annotations

import pytest

from strata.engine.pack import ModelSpec, open_pack


@pytest.fixture(scope="session")
def spec(packs) -> ModelSpec:
    return open_pack(packs["odd-q2_0"]).spec

"""A card without hardware for the streams of experts."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def new_driver(emulated_card):
    """new_driver(eager): a driver whose streams run at once, or only as far as something waits for them."""

    def make(eager: bool):
        driver = emulated_card.driver()
        driver.eager = eager
        return driver

    return make

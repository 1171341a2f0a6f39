"""The bench of keys and values in RAM, on a card without hardware: both runs say the same and are measured."""

from __future__ import annotations

from argparse import Namespace

import numpy as np
import pytest

from strata.bench import kv_resident_cuda as bench
from strata.kernels.ops import PAGE


@pytest.mark.soak  # the emulated card
def test_a_text_with_keys_and_values_in_ram_is_the_same_and_both_are_measured(emulated_card, trunk):
    args, runs = Namespace(pack="", context=4 * PAGE, kv="int8", chunk=PAGE), {}
    prompt = np.random.default_rng(1).integers(0, 900, 2 * PAGE + 5).astype(np.int32)
    with emulated_card.plugged_in() as card:
        for resident in (0, PAGE):
            runs[resident] = bench.run(bench.made(trunk, resident, args, card.driver()), prompt, bench.WARM + 2, 1)
    before, streamed = runs.values()
    assert streamed.tokens == before.tokens and streamed.digest == before.digest
    assert streamed.far == 2 > before.far
    assert len(streamed.chunks) == 1 and len(streamed.windows) == 2
    works = [record.work for record in bench.records(runs)]
    assert "chunk, all in VRAM" in works and f"window, {PAGE} resident" in works

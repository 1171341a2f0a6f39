"""Memory of the expert cache that is not there, or does not keep what was written: fewer slots and the same texts, or
no start."""

from __future__ import annotations

import threading

import msgspec
import numpy as np
import pytest

from strata.engine.cuda_runner import CudaRunner
from strata.engine.options import Options, Refused
from strata.engine.pack import open_pack
from strata.engine.schedule.solo import Request
from strata.kernels.cuda.compile import DeviceError
from strata.kernels.ops import Sampling

CONTEXT, CHUNK, SLOTS = 52, 18, 36
OPTIONS = Options(pack="", device="cuda", max_context=CONTEXT, prefill=CHUNK, short_read=0, expert_cache=SLOTS)
REQUEST = Request(np.arange(5, 5 + CHUNK + 3, dtype=np.int32), 3, Sampling(temperature=1.0, seed=3))


class Stingy:
    """A card that gives no piece of these sizes."""

    def __init__(self, driver, refused: set[int]) -> None:
        self._driver, self._refused, self.asked = driver, refused, []

    def __getattr__(self, name):
        return getattr(self._driver, name)

    def allocate(self, n_bytes):
        self.asked.append(n_bytes)
        if n_bytes in self._refused:
            raise DeviceError(f"the card gives no {n_bytes} bytes in one piece")
        return self._driver.allocate(n_bytes)


class Forgetful:
    """A card that turns a bit of every piece of these sizes that comes to it."""

    def __init__(self, driver, sizes: set[int]) -> None:
        self._driver, self._sizes = driver, sizes

    def __getattr__(self, name):
        return getattr(self._driver, name)

    def uploader(self):
        return _Turning(self._driver.uploader(), self._sizes)


class _Turning:
    def __init__(self, uploader, sizes: set[int]) -> None:
        self._uploader, self._sizes = uploader, sizes

    def __getattr__(self, name):
        return getattr(self._uploader, name)

    def upload(self, target, source):
        self._uploader.upload(target, source)
        if target.nbytes in self._sizes:
            self._uploader._stream.add(lambda: target.__setitem__(9, target[9] ^ 16))


@pytest.fixture(scope="module")
def pack(packs):
    return open_pack(packs["odd-q8_0"])


def test_a_cache_that_the_card_refuses_twice_has_nine_sixteenths_of_its_slots_and_the_text_is_the_same(
    emulated_card, pack, answer
):
    sizes, texts = [], []
    with emulated_card.plugged_in() as card:
        for refused in (0, 2):
            driver = Stingy(card.driver(rehearses=False), set(sizes[:refused]))
            runner = CudaRunner(pack, OPTIONS, driver=driver)
            runner.warm()
            texts.append(answer(runner, REQUEST, CONTEXT))
            slot = runner._resident.expert_bytes // runner._resident.experts_in_vram
            sizes = sizes or [slot * SLOTS, slot * (SLOTS * 3 // 4)]
            assert set(sizes[:refused]) <= set(driver.asked)
    assert runner._resident.experts_in_vram == SLOTS * 3 // 4 * 3 // 4 and texts[0] == texts[1]


def test_a_card_whose_memory_forgets_does_not_start_and_says_so(emulated_card, pack):
    whole = (pack[f"blk.0.ffn_{name}_exps.weight"].data.nbytes for name in ("gate", "up", "down"))
    each = {n_bytes // pack.spec.experts for n_bytes in whole}
    before = threading.active_count()
    with (
        emulated_card.plugged_in() as card,
        pytest.raises(Refused, match="--device cuda: the card's memory does not keep what was written") as refused,
    ):
        CudaRunner(pack, msgspec.structs.replace(OPTIONS, expert_cache=1), driver=Forgetful(card.driver(), each))
    assert "1 of " in str(refused.value) and "number 9;" in str(refused.value) and "\n" not in str(refused.value)
    assert threading.active_count() <= before

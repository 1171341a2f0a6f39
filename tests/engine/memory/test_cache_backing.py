"""The expert cache of the full-size model on a card that has less for it than the plan was told."""

from __future__ import annotations

import logging

import pytest

from strata.engine.device.arena import GIB, MIB
from strata.engine.device.cuda import CudaDevice
from strata.engine.experts.placement import by_number
from strata.engine.experts.plan import Asked
from strata.engine.memory.cache import AFTER_FILL_SLACK, REFUSAL_TRIES
from strata.engine.memory.loan import plan_loan
from strata.engine.model.resident import Resident
from strata.engine.pack import open_pack
from strata.kernels.cuda.compile import DeviceError

TOTAL, RESERVE, CONTEXT = 12 * GIB, 700 * MIB, 16_384
WAYS = {"own": {"borrow": False}, "slots": {"borrow": True}, "head": {"borrow": False}}


class Shared:
    """A card that other programs use as well. other: bytes that they have · grab: those that they take while the cache
    is written · refusals: how often the driver gives no cache. tried: bytes of the caches that were asked for."""

    def __init__(self, driver, grab: int = 0, refusals: int = 0, before: int = 0) -> None:
        self._driver, self._grab, self._refusals, self._before = driver, grab, refusals, before
        self.other, self.tried, self.account = 0, [], None

    def __getattr__(self, name):
        return getattr(self._driver, name)

    def memory(self):
        held = 0 if self.account is None else self.account.held
        return max(0, TOTAL - held - self.other), TOTAL

    def device(self) -> CudaDevice:
        device = CudaDevice(driver=self)
        self.account, take = device.account, device.account.take

        def watched(n_bytes, what, remedy):
            if what != "the expert cache":
                return take(n_bytes, what, remedy)
            self.tried.append(n_bytes)
            self.other = max(self.other, self._before)
            if len(self.tried) <= self._refusals:
                raise DeviceError(f"{what}: the card gives no {n_bytes} bytes in one piece; {remedy}")
            memory = take(n_bytes, what, remedy)
            self.other = max(self.other, self._grab)
            return memory

        device.account.take = watched
        return device


@pytest.fixture
def start(counting, full_pack, headers_only, caplog):
    """start(way, cache, ...): the model on such a card; nothing is read from the file."""
    caplog.set_level(logging.INFO, "strata.engine")
    pack = open_pack(full_pack)
    order = by_number(pack.spec.layers, pack.spec.experts)

    def make(way: str, cache: int = 0, **shared: int) -> tuple[Resident, Shared]:
        card = Shared(counting, **shared)
        asked = Asked(cache, order, RESERVE, True, **WAYS[way])
        loan = plan_loan if way == "head" else None
        found = Resident(
            pack, card.device(), max_context=CONTEXT, kv="int8", table="ram", chunks=[1024], experts=asked, loan=loan
        )
        assert found.prompt_memory[0] == way
        return found, card

    return make


def largest(found: Resident) -> int:
    return max(size.n_bytes for size in found.store.placement.sizes)


@pytest.mark.parametrize("way", ["own", *(pytest.param(way, marks=pytest.mark.soak) for way in WAYS if way != "own")])
def test_a_card_that_gives_what_it_said_is_asked_once(start, way):
    found, card = start(way)
    assert card.tried == [found.expert_bytes] and found.device.memory().free >= RESERVE


@pytest.mark.parametrize("way", WAYS)
def test_a_cache_that_the_card_refuses_is_planned_again_at_three_quarters(start, way, caplog):
    found, card = start(way, refusals=2)
    place = found.store.placement
    for before, after in zip(card.tried, card.tried[1:], strict=False):
        assert before * 3 // 4 - 2 * largest(found) < after <= before * 3 // 4
    assert len(card.tried) == 3 and place.cache_bytes == found.store.cache.size == card.tried[-1]
    assert place.in_cache + int(place.in_ram.sum()) == place.pairs, "who lost a slot lies in RAM"
    assert place.in_cache == found.experts_in_vram
    said = [line for line in caplog.messages if "are tried" in line]
    assert len(said) == 2 and all("in one piece; use a smaller --expert-cache" in line for line in said)


def test_a_cache_of_a_given_size_steps_down_as_well(start):
    found, card = start("own", cache=1000, refusals=1)
    assert len(card.tried) == 2 and card.tried[0] * 3 // 4 - 2 * largest(found) < found.expert_bytes
    assert found.expert_bytes <= card.tried[0] * 3 // 4


def test_a_card_that_refuses_every_size_ends_the_start_with_the_remedy(start, caplog):
    with pytest.raises(DeviceError, match="use a smaller --expert-cache") as refused:
        start("own", refusals=REFUSAL_TRIES)
    assert "\n" not in str(refused.value)
    assert sum("are tried" in line for line in caplog.messages) == REFUSAL_TRIES - 1


@pytest.mark.parametrize("way", ["own", *(pytest.param(way, marks=pytest.mark.soak) for way in WAYS if way != "own")])
def test_memory_that_others_take_while_the_cache_is_written_comes_from_the_cache_and_not_from_the_reserve(
    start, way, caplog
):
    whole = start(way)[0].expert_bytes
    found, card = start(way, grab=500 * MIB)
    lost = whole - found.expert_bytes
    assert 500 * MIB - AFTER_FILL_SLACK <= lost <= 500 * MIB + AFTER_FILL_SLACK + 4 * largest(found)
    assert found.device.memory().free >= RESERVE and len(card.tried) == 2
    assert sum("that were written" in line for line in caplog.messages) == 1


def test_a_cache_of_a_given_size_keeps_it_while_it_is_there(start):
    found, card = start("own", cache=1000, grab=500 * MIB)
    assert card.tried == [found.expert_bytes]


@pytest.mark.parametrize("way", [pytest.param("own", marks=pytest.mark.soak), "slots"])
def test_memory_that_others_take_before_the_cache_leaves_a_smaller_one(start, way):
    whole = start(way)[0].expert_bytes
    found, card = start(way, before=3 * GIB)
    assert found.device.memory().free >= RESERVE and 0 < found.expert_bytes <= whole - 2 * GIB
    assert len(card.tried) > 1

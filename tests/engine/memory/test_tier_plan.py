"""What a card with some experts in RAM plans for its prompts: mixers give way where memory counts, and there only."""

from __future__ import annotations

import pytest

from strata.engine.device.arena import GIB, MIB
from strata.engine.device.meter import Meter
from strata.engine.experts.plan import Asked, TierPlan
from strata.engine.experts.tiering import Tiering
from strata.engine.memory.borrow import draft_beside
from strata.engine.memory.price import MIXER_ROWS
from strata.engine.model.model import bind
from strata.engine.model.weights import rope_table
from strata.engine.pack import open_pack

CONTEXT, RAM = 32_768, 1 << 40


@pytest.fixture(scope="module")
def planned(full_pack):
    """planned(free, cache=..) -> the plan of the full-size model in so many bytes."""
    pack, meter = open_pack(full_pack), Meter(2)
    bind(pack, meter, rope_table(pack.spec, CONTEXT, meter))

    def make(free: int, drafts: bool = False, alias: bool = False, **asked: object) -> TierPlan:
        more = (lambda rows: draft_beside(pack.spec, rows)) if drafts else (lambda rows: 0)
        return Tiering.of(pack, meter, Asked(**asked), CONTEXT, beside=more).plan(free, RAM, 0, alias)

    return make


def test_mixers_take_all_rows_at_once_where_memory_abounds(planned):
    plan = planned(100 * GIB, cache=1)
    assert (plan.chunks[0], plan.mixer_rows) == (8192, 0)
    layer = 512 * plan.placement.sizes[0].n_bytes
    assert plan.ring_bytes == 2 * layer, "a layer is one round"


@pytest.mark.parametrize("free", [2 * GIB, 6 * GIB])
def test_mixers_take_some_rows_at_a_time_where_memory_counts(planned, free):
    plan = planned(free)
    assert (plan.chunks[0], plan.mixer_rows) == (2048, MIXER_ROWS)


def test_what_a_draft_layer_takes_beside_a_chunk_is_no_experts(planned):
    plain, drafts = planned(6 * GIB), planned(6 * GIB, drafts=True)
    assert plain.chunks == drafts.chunks
    less = plain.placement.cache_bytes - drafts.placement.cache_bytes
    assert 28 * MIB < less < 36 * MIB


def test_a_hundredth_of_the_experts_gives_way_to_prompts_that_have_the_heads_memory(planned):
    free = 1900 * MIB
    few = planned(free)
    assert 0 < few.placement.in_cache < 245
    assert planned(free, alias=True).placement.in_cache == 0
    assert planned(free, alias=True, cache=3).placement.in_cache == 3, "what was asked for stays"
    many = planned(6 * GIB, alias=True)
    assert many.placement.in_cache == planned(6 * GIB).placement.in_cache > 245

"""Slots and checkpoints of a card: the plan must not promise more than the state really takes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.engine.device.arena import GIB, MIB
from strata.engine.device.meter import Meter
from strata.engine.memory.state import SlotCosts, draft_slot_bytes, plan_slots, slot_costs
from strata.engine.pack import DraftSpec, open_pack
from strata.engine.state.checkpoints import CacheRules
from strata.engine.state.plan import plan_state
from strata.engine.state.slots import StatePool, estimate_bytes


@pytest.mark.parametrize("kv", ["fp32", "fp16", "int8", "q4_0", "k8v4"])
@pytest.mark.parametrize("context", [64, 1000, 4096])
def test_a_slot_and_a_checkpoint_take_what_the_state_pool_takes(packs, kv, context):
    spec = open_pack(packs["tiny-q8_0"]).spec
    costs = slot_costs(spec, kv, context, 0, 2)
    assert costs.slot * 3 + costs.checkpoint * 2 == estimate_bytes(spec, 3, context, None, kv, 2, 2)
    meter = Meter(2)
    StatePool(spec, 3, context, kv=kv, memory=meter, n_checkpoints=2)
    assert 0 <= meter.state - (costs.slot * 3 + costs.checkpoint * 2) < MIB
    assert costs.streamed == 0


@pytest.mark.parametrize("kv", ["fp32", "int8", "k8v4"])
def test_streamed_keys_and_values_take_what_the_state_pool_takes(packs, kv):
    spec, context, resident = open_pack(packs["tiny-q8_0"]).spec, 4096, 1000
    costs = slot_costs(spec, kv, context, resident, 2)
    taken = costs.slot * 3 + costs.checkpoint * 2 + costs.staged
    assert taken == estimate_bytes(spec, 3, context, None, kv, 2, 2, resident)
    meter = Meter(2)
    StatePool(spec, 3, context, kv=kv, memory=meter, n_checkpoints=2, resident=resident)
    assert 0 <= meter.state - taken < MIB
    assert meter.far_state == costs.streamed * 3 + costs.kept * 2
    plan = plan_slots(costs, 60 * MIB, 60 * MIB, 4, 6)
    own = plan_state(spec, context, 60 * MIB, 4, CacheRules(6, 0, 0), kv, 2, resident)
    assert plan is not None and (plan.n_slots, plan.n_checkpoints) == (own.n_slots, own.n_checkpoints)
    assert plan.slot_bytes + plan.checkpoint_bytes == own.n_bytes


@pytest.mark.parametrize("free", [10, 30, 60, 100, 200, 1000])
def test_slots_and_checkpoints_are_those_of_the_state_s_own_plan(packs, free):
    spec = open_pack(packs["tiny-q8_0"]).spec
    costs = slot_costs(spec, "fp32", 1024, 0, 2)
    plan = plan_slots(costs, free * MIB, free * MIB, 4, 6)
    own = plan_state(spec, 1024, free * MIB, 4, CacheRules(6, 0, 0), sides=2)
    assert plan is not None
    assert (plan.n_slots, plan.n_checkpoints) == (own.n_slots, own.n_checkpoints)


def test_streamed_keys_and_values_take_no_more_vram_when_the_context_grows_than_their_index(full_pack):
    spec = open_pack(full_pack).spec
    short, long = (slot_costs(spec, "q4_0", context, 32_768, 2) for context in (131_072, 262_144))
    pooled = 131_072 // 4 * 128 * 4 * 12
    assert long.slot - short.slot == pooled
    assert long.streamed == 2 * short.streamed > 2 * GIB
    assert slot_costs(spec, "q4_0", 32_768, 32_768, 2).streamed == 0


def test_keys_and_values_take_their_published_share_of_a_token(full_pack):
    # of 512 numbers each: float16 2,048 bytes a token and layer; scales of blocks of 32 instead of 64 make int8 1,088
    spec = open_pack(full_pack).spec
    base = slot_costs(spec, "fp16", 32_768, 0, 1).slot
    taken = {kv: slot_costs(spec, kv, 32_768, 0, 1).slot for kv in ("fp32", "fp16", "int8", "q4_0", "k8v4")}
    per = {kv: 2048 + (n - base) / 32_768 / 12 for kv, n in taken.items()}
    assert per == {"fp32": 4096, "fp16": 2048, "int8": 1088, "q4_0": 576, "k8v4": 832}


def test_the_solo_conversation_comes_first_and_without_room_for_it_there_is_no_plan():
    costs = SlotCosts(100, 10, 0)
    assert plan_slots(costs, 99, 1000, 4, 6) is None
    alone = plan_slots(costs, 100, 0, 4, 6)
    assert alone is not None and (alone.n_slots, alone.n_checkpoints, alone.slot_bytes) == (0, 0, 100)
    assert alone.wanted_checkpoints == 6


def test_what_a_slot_takes_beside_its_state_counts():
    costs = SlotCosts(100, 10, 0)
    assert plan_slots(costs, 100, 410, 3, 1).n_slots == 3
    assert plan_slots(costs, 100, 410, 3, 1, each=1).n_slots == 2
    assert plan_slots(costs, 100, 500, 1, 0).n_slots == 0  # one slot is no batch


@given(
    st.integers(1, 500),
    st.integers(1, 50),
    st.integers(0, 8),
    st.integers(0, 9),
    st.integers(0, 6000),
    st.integers(0, 99),
)
def test_no_state_exceeds_its_room_and_more_room_never_means_fewer_slots(slot, checkpoint, batch, kept, room, each):
    costs = SlotCosts(slot, checkpoint, 0)
    plan, larger = (plan_slots(costs, n, n, batch, kept, each) for n in (room, room + 500))
    if plan is None:
        assert slot > room
        return
    assert plan.slot_bytes + plan.checkpoint_bytes + each * plan.n_slots <= room
    assert larger.n_slots >= plan.n_slots
    assert plan.n_slots <= batch and plan.n_checkpoints <= plan.wanted_checkpoints


def test_the_draft_layer_remembers_one_attention_layer(full_pack):
    spec = open_pack(full_pack).spec
    one = draft_slot_bytes(spec, DraftSpec(48, 4, True), "int8", 32_768)
    assert one == 32_768 * (1088 + 512 + 128)

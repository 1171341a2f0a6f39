"""The plan of the state: what is promised fits, and nothing that fits is left out."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.engine.state.checkpoints import CacheRules
from strata.engine.state.plan import plan_state
from strata.engine.state.slots import StatePool, StateTooLarge, estimate_bytes


def takes(spec, slots: int, checkpoints: int, context: int, sides: int = 1) -> int:
    return estimate_bytes(spec, 1 + slots, context, None, "fp32", sides, checkpoints)


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_a_plan_fits_and_one_more_slot_or_checkpoint_would_not(spec, data):
    context, batch = data.draw(st.integers(1, 3000)), data.draw(st.integers(0, 8))
    rules, sides = CacheRules(data.draw(st.integers(0, 8))), data.draw(st.integers(1, 2))
    low, high = takes(spec, 0, 0, context, sides), takes(spec, 9, 20, context, sides)
    free = data.draw(st.integers(low, high))
    plan = plan_state(spec, context, free, batch, rules, sides=sides)
    assert plan.n_bytes == takes(spec, plan.n_slots, plan.n_checkpoints, context, sides) <= free
    wanted = rules.checkpoints + plan.n_slots if rules.reuse else 0
    assert plan.n_slots == 0 or 2 <= plan.n_slots <= batch
    assert plan.n_checkpoints <= wanted
    if plan.n_slots < batch and batch > 1:
        assert takes(spec, max(2, plan.n_slots + 1), int(rules.reuse), context, sides) > free
    if plan.n_checkpoints < wanted:
        assert takes(spec, plan.n_slots, plan.n_checkpoints + 1, context, sides) > free
    assert len(plan.said) == (plan.n_slots < batch) + (plan.n_checkpoints < wanted), "what is not as asked is said"


def test_the_pool_of_a_plan_has_the_pages_for_every_slot_at_once(spec):
    plan = plan_state(spec, 200, 1 << 32, 3, CacheRules(2))
    assert (plan.n_slots, plan.n_checkpoints, plan.said) == (3, 5, ())
    state = StatePool(spec, 1 + plan.n_slots, 200, plan.n_pages, n_checkpoints=plan.n_checkpoints)
    for slot in range(4):
        state.reserve(slot, 200)
    assert state.pages.n_free == plan.n_checkpoints


def test_a_memory_without_room_for_one_sequence_is_refused_with_figures(spec):
    with pytest.raises(StateTooLarge, match="the state of 1 slots of 200 tokens takes"):
        plan_state(spec, 200, takes(spec, 0, 0, 200) - 1, 4, CacheRules())


def test_what_runs_instead_is_said_in_words(spec):
    low = takes(spec, 3, 2, 2000)
    plan = plan_state(spec, 2000, low, 8, CacheRules(2))
    assert plan.n_slots == 3 and plan.n_checkpoints == 2
    assert plan.said[0].startswith("batch: 8 slots asked, 3 run: one of 2000 tokens takes 0.0")
    assert plan.said[1].startswith("prompt cache: 2 checkpoints of 5 wanted: one takes 0.0")
    assert plan_state(spec, 2000, 1 << 34, 1, CacheRules(2)).said == (
        "batch: 1 slot asked, none runs: a batch has at least 2",
    )

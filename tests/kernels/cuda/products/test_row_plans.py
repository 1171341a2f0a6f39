"""Plans of window products: what product_row.cu takes for granted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.kernels.cuda import row_plans
from strata.kernels.cuda.plans import DENSE, DOWN, GATE_UP, PAIRS
from strata.kernels.cuda.product_variants import CARDS, QUANTISED
from strata.kernels.cuda.row_plans import LANES, MOST_COLUMNS, MOST_PAIRS, MOST_TURNS, RowPlan, row_plan
from strata.kernels.formats import BY_NAME

jobs = st.tuples(
    st.sampled_from(sorted(CARDS)),
    st.sampled_from(QUANTISED),
    st.sampled_from((DENSE, GATE_UP, DOWN, PAIRS)),
    st.lists(st.integers(1, 70000), min_size=1, max_size=8),
    st.integers(1, 40),
    st.integers(1, 16),
    st.integers(1, 10),
)


def planned(job: tuple) -> tuple[RowPlan, list[int], str]:
    arch, name, mode, rows, blocks, n, used = job
    kind = BY_NAME[name]
    rows = rows if mode == DENSE else rows[:1]
    used = 0 if mode == DENSE else used
    plan = row_plan(CARDS[arch], kind, mode, tuple(rows), blocks * max(kind.block, 64), n, used)
    return plan, rows, mode


@given(jobs)
def test_every_row_and_item_has_a_place_and_every_sum_a_lane(job):
    try:
        plan, rows, mode = planned(job)
    except ValueError:
        return
    halves = 2 if mode == GATE_UP else 1
    assert plan.warps > plan.summers >= 1
    assert (plan.chains // 2 or 1) * plan.strip * plan.columns * halves <= plan.chains * LANES * (plan.chains // 2 or 1)
    assert (plan.parts - 1) * plan.part_items < plan.items <= plan.parts * plan.part_items
    if plan.tall:
        assert plan.turns == plan.groups * plan.part_items
        assert plan.groups * plan.tall >= plan.strip
    else:
        assert plan.columns <= row_plans.LANE_COLUMNS and plan.parts == plan.groups == 1
        assert plan.turns * row_plans.UNIT >= plan.strip * plan.items
    own = [-(-r // plan.blocks) for r in rows]
    strips = sum(-(-r // plan.strip) for r in own)
    assert strips * plan.parts * plan.turns * halves < MOST_TURNS
    assert 1 <= plan.regions <= row_plans.MOST_REGIONS
    assert plan.shared <= CARDS[job[0]].shared_block - row_plans.STATIC


@given(jobs, st.integers(0, MOST_TURNS - 1))
def test_a_division_by_an_inverse_is_exact(job, number):
    try:
        plan, _, _ = planned(job)
    except ValueError:
        return
    entered = plan.arguments()
    for name, by in (("item", plan.items), ("turn", plan.turns), ("part", plan.parts), ("region", plan.regions)):
        inverse = entered[f"{name}_inverse"] % (1 << 32)
        assert by == 1 or number * inverse >> 32 == number // by


@pytest.mark.parametrize("n, used", [(MOST_COLUMNS + 1, 0), (13, 10)])
def test_a_window_that_is_too_large_is_refused_with_its_limit(n, used):
    mode = DOWN if used else DENSE
    with pytest.raises(ValueError, match=f"at most {MOST_PAIRS if used else MOST_COLUMNS} .* send fewer rows"):
        row_plan(CARDS[90], BY_NAME["Q6_K"], mode, (512,), 2560, n, used)

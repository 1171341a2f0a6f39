"""Plans of window products: what product_row.cu takes for granted."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.kernels.cuda import row_plans
from strata.kernels.cuda.plans import DENSE, DOWN, GATE_UP, PAIRS, RowTuning
from strata.kernels.cuda.product_variants import CARDS, QUANTISED
from strata.kernels.cuda.row_plans import LANES, MOST_COLUMNS, MOST_PAIRS, MOST_TURNS, RowPlan, row_plan
from strata.kernels.cuda.row_product import ROW
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
    cols = blocks * max(kind.block, 64)
    plan = row_plan(CARDS[arch], kind, mode, tuple(rows), cols, n, used, tuning=RowTuning(tiled=False))
    assert isinstance(plan, RowPlan)
    return plan, rows, mode


@given(jobs)
def test_every_row_and_item_has_a_place_and_every_sum_a_lane(job):
    try:
        plan, rows, mode = planned(job)
    except ValueError:
        return
    halves = 2 if mode == GATE_UP else 1
    assert plan.strip * plan.columns * halves <= LANES
    assert plan.turns * LANES >= plan.strip * plan.items * plan.lanes
    assert plan.strips * plan.turns * halves < MOST_TURNS
    assert -(-sum(rows) // plan.blocks) + plan.strip < MOST_TURNS
    assert 1 <= plan.regions <= plan.strips
    assert (
        plan.items <= row_plans.NEIGHBOURS
        or plan.items % row_plans.NEIGHBOURS == 0
        or plan.extra >= row_plans.NEIGHBOURS - 1
    )
    assert 8 * plan.warps * plan.depth + 16 <= row_plans.STATIC
    assert plan.shared <= CARDS[job[0]].shared_block - row_plans.STATIC


@given(jobs)
def test_no_block_has_more_segments_or_strips_than_there_is_room_for(job):
    try:
        plan, rows, mode = planned(job)
    except ValueError:
        return
    n, used = job[5], 0 if mode == DENSE else job[6]
    times, sources = 1, rows
    if mode == DOWN:
        sources, times = rows * n, used
    elif used:
        sources = rows * (n * used)
    each, ends = -(-sum(sources) // plan.blocks), [0, *accumulate(sources)]
    room = (plan.at_arrived - plan.at_segments) // row_plans.SEGMENT - 1
    for block in {0, 1, plan.blocks // 2, plan.blocks - 1}:
        begin, end = each * block, min(each * (block + 1), ends[-1])
        own = [min(end, b) - max(begin, a) for a, b in pairwise(ends) if min(end, b) > max(begin, a)]
        assert len(own) * times <= room
        assert sum(-(-r // plan.strip) for r in own) * times <= plan.strips


@given(jobs, st.integers(0, MOST_TURNS - 1))
def test_a_division_by_an_inverse_is_exact(job, number):
    try:
        plan, _, _ = planned(job)
    except ValueError:
        return
    entered = plan.arguments()
    for name, by in (("strip", plan.strip), ("strip_turn", plan.strip_turns), ("region", plan.regions)):
        inverse = entered[f"{name}_inverse"] % (1 << 32)
        assert by == 1 or number * inverse >> 32 == number // by


@pytest.mark.parametrize("n, used", [(MOST_COLUMNS + 1, 0), (13, 10)])
def test_a_window_that_is_too_large_is_refused_with_its_limit(n, used):
    mode = DOWN if used else DENSE
    with pytest.raises(ValueError, match=f"at most {MOST_PAIRS if used else MOST_COLUMNS} .* send fewer rows"):
        row_plan(CARDS[90], BY_NAME["Q6_K"], mode, (512,), 2560, n, used)


@pytest.mark.parametrize("name, cols, wanted, spans", [("Q6_K", 2560, 5, 8), ("Q8_0", 2560, 5, 5), ("Q8_0", 128, 5, 1)])
def test_a_tuned_number_of_spans_that_a_row_cannot_be_cut_into_is_not_taken(name, cols, wanted, spans):
    plan = row_plan(CARDS[90], BY_NAME[name], DENSE, (512,), cols, 8, tuning=RowTuning(spans=wanted))
    assert plan.spans == spans and plan.items * spans * 32 == cols


def test_tools_read_the_columns_of_a_launch():
    assert {"matrix", "cols", "used"} <= set(ROW.names or ())

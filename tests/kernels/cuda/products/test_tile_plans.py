"""Plans of experts by matrix steps: what tile_job.cuh takes for granted, and what goes the other way."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.kernels.cuda import tile_plans
from strata.kernels.cuda.nvrtc import usage
from strata.kernels.cuda.plans import DOWN, GATE_UP, PAIRS, RowTuning
from strata.kernels.cuda.product_variants import CARDS, QUANTISED, products
from strata.kernels.cuda.row_plans import MOST_COLUMNS, RowPlan, row_plan, side_plan
from strata.kernels.cuda.tile_plans import TilePlan, tile_plan, tiled
from strata.kernels.formats import BY_NAME

TYPES = [name for name in QUANTISED if tiled(CARDS[90], BY_NAME[name], DOWN, 1, 100)]
jobs = st.tuples(
    st.sampled_from(TYPES),
    st.sampled_from((GATE_UP, DOWN, PAIRS)),
    st.integers(1, 70000),
    st.integers(1, 40),
    st.integers(1, 12),
    st.integers(1, 10),
)


def test_types_with_groups_of_32_and_no_offsets_are_cut_into_tiles():
    assert {"IQ3_S_CARD", "IQ4_NL_CARD", "Q8_0", "IQ3_S", "MXFP4"} <= set(TYPES)
    assert not {"Q6_K", "Q6_K_CARD", "Q4_K", "Q5_1", "IQ2_XS"} & set(TYPES)


@given(jobs)
def test_no_block_has_more_segments_or_outputs_than_there_is_room_for(job):
    name, mode, rows, spans, n, used = job
    kind = BY_NAME[name]
    plan = tile_plan(CARDS[90], kind, mode, rows, spans * max(kind.block, 64), n, used)
    if plan is None:
        return
    sources, times = ([rows] * n, used) if mode == DOWN else ([rows] * (n * used), 1)
    each, ends = -(-sum(sources) // plan.blocks), [0, *accumulate(sources)]
    room = (plan.at_terms - plan.at_segments) // tile_plans.SEGMENT - 1
    for block in {0, 1, plan.blocks // 2, plan.blocks - 1}:
        begin, end = each * block, min(each * (block + 1), ends[-1])
        own = [min(end, b) - max(begin, a) for a, b in pairwise(ends) if min(end, b) > max(begin, a)]
        assert len(own) * times <= room
    assert each < 1 << 16 and plan.shared <= CARDS[90].shared_block - tile_plans.STATIC
    assert mode != DOWN or plan.end - plan.at_y >= 4 * used * each
    assert 8 * plan.warps * plan.depth + 16 <= tile_plans.STATIC


@pytest.mark.parametrize("n, warps", [(4, 7), (6, 8), (8, 7)])
def test_no_warp_has_a_tile_more_than_others_could_share(n, warps):
    """Eight rows: 49 tiles a block, seven of each of seven warps; of eight one would have seven, the others six."""
    plan = tile_plan(CARDS[90], BY_NAME["IQ3_S_CARD"], GATE_UP, 640, 2560, n, 10)
    assert plan is not None and plan.tilers == warps


@pytest.mark.parametrize("mode, rows, cols", [(GATE_UP, 640, 2560), (DOWN, 2560, 640)])
@pytest.mark.parametrize("n", [4, 8, 12])
def test_the_plan_of_the_model_keeps_enough_bytes_under_way(mode, rows, cols, n):
    kind = BY_NAME["IQ3_S_CARD" if mode == GATE_UP else "IQ4_NL_CARD"]
    plan = row_plan(CARDS[90], kind, mode, (rows,), cols, n, 10, tuning=RowTuning(tiled=True))
    assert isinstance(plan, TilePlan)
    assert plan.shared <= CARDS[90].shared_block - tile_plans.STATIC
    assert plan.tilers * plan.depth * 16 * kind.row_bytes(cols) >= 72 << 10
    assert n > MOST_COLUMNS or side_plan(CARDS[90], plan, BY_NAME["Q8_0"], mode, rows, cols, n) is not None


@pytest.mark.parametrize("n", [4, 8])
def test_the_shared_expert_has_room_beside_gate_and_up_of_several_rows(n):
    plan = row_plan(CARDS[90], BY_NAME["IQ3_S_CARD"], GATE_UP, (640,), 2560, n, 10)
    assert isinstance(plan, RowPlan) and (plan.lanes, plan.warps, plan.depth) == (1, 20, 1)
    assert side_plan(CARDS[90], plan, BY_NAME["Q8_0"], GATE_UP, 640, 2560, n) is not None


@pytest.mark.parametrize(
    "arch, name, n, used", [(90, "IQ3_S_CARD", 1, 10), (90, "Q6_K", 8, 10), (90, "Q4_K", 8, 10), (89, "IQ3_S", 8, 10)]
)
def test_few_pairs_other_types_and_small_cards_are_not_cut_into_tiles(arch, name, n, used):
    plan = row_plan(CARDS[arch], BY_NAME[name], DOWN, (2560,), 768, n, used)
    assert not isinstance(plan, TilePlan)


def test_rows_that_are_too_long_for_a_tile_go_the_other_way():
    kind, cols = BY_NAME["Q8_0"], 1 << 14
    assert tile_plan(CARDS[90], kind, GATE_UP, 512, cols, 2, 2) is None
    assert isinstance(row_plan(CARDS[90], kind, GATE_UP, (512,), cols, 2, 2, tuning=RowTuning(tiled=True)), RowPlan)


@pytest.mark.parametrize("mode", [GATE_UP, pytest.param(DOWN, marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", ["IQ3_S_CARD", pytest.param("IQ4_NL_CARD", marks=pytest.mark.soak)])
def test_kernels_of_tiles_compile_and_keep_all_in_registers(name, mode):
    jobs = [
        (source, constants)
        for source, constants in products(CARDS[90], (name,), (mode,), (8,))
        if constants.get("TILED")
    ]
    assert {source for source, _ in jobs} == {"product_row.cu", "product_row_beside.cu"}
    for source, constants in jobs:
        assert not any(row["spill_bytes"] for row in usage(90, source, constants))

"""Cuts of prompts of a few rows: what they ask of a card, and where tiles have the product."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.kernels.cuda import few_plans
from strata.kernels.cuda.few_plans import FewPlan
from strata.kernels.cuda.plans import DENSE, GATE_UP, PAIRS, chunk_pitch, table_bytes
from strata.kernels.cuda.product_variants import CARDS, QUANTISED
from strata.kernels.cuda.prompt_plans import PromptPlan
from strata.kernels.formats import BY_NAME

H200 = CARDS[90]


@given(
    arch=st.sampled_from(sorted(CARDS)),
    name=st.sampled_from(QUANTISED),
    mode=st.sampled_from([DENSE, GATE_UP, PAIRS]),
    rows=st.integers(1, 20000),
    blocks=st.integers(1, 40),
    n=st.integers(1, 600),
)
def test_no_cut_asks_for_more_than_a_card_has(arch, name, mode, rows, blocks, n):
    card, kind, cols = CARDS[arch], BY_NAME[name], 256 * blocks
    plan = few_plans.cut(card, kind, mode, (rows,), cols, n)
    if plan is None:
        return
    sixteens = 2 if mode == GATE_UP else 1
    ring = plan.warps * plan.depth * sixteens * 16 * chunk_pitch(kind)
    columns = plan.columns * (cols + 32 + 4 * cols // 32 + (4 * cols // kind.group if kind.has_offset else 0) + 8)
    assert ring + columns + table_bytes(kind) * plan.copies <= plan.shared <= card.shared_block
    assert plan.run % plan.warps == 0 and plan.rows_of_a_run(mode) == 16 * plan.run
    assert mode == DENSE or plan.columns >= min(n, 32)


def test_few_rows_go_to_warps_and_many_to_tiles():
    def of(mode: str, rows: int, cols: int, n: int, card=H200) -> FewPlan | PromptPlan:
        return few_plans.plan(card, BY_NAME["Q6_K_CARD"], mode, (rows,), cols, n)

    assert isinstance(of(DENSE, 16384, 2560, 64), FewPlan) and isinstance(of(DENSE, 16384, 2560, 65), PromptPlan)
    assert isinstance(of(DENSE, 320, 10240, 512), FewPlan) and isinstance(of(DENSE, 320, 10240, 513), PromptPlan)
    assert isinstance(of(PAIRS, 2560, 512, 24), FewPlan) and isinstance(of(PAIRS, 2560, 512, 25), PromptPlan)
    old = replace(H200, arch=75)
    assert isinstance(of(PAIRS, 2560, 512, 4, old), PromptPlan), "its copies are waited for"


def test_columns_that_do_not_fit_a_card_go_to_tiles():
    small = replace(CARDS[86], shared_block=48 << 10, shared_multiprocessor=64 << 10)
    assert few_plans.few_plan(small, BY_NAME["Q6_K"], DENSE, (320,), 10240, 40) is None
    assert few_plans.few_plan(small, BY_NAME["Q8_0"], DENSE, (320,), 640, 40) is not None


def test_a_result_is_not_quantised_by_the_way():
    plan = few_plans.cut(H200, BY_NAME["IQ3_S_CARD"], GATE_UP, (640,), 2560, 4)
    assert plan is not None and not plan.quantizes
    with pytest.raises(ValueError, match="quantises no results"):
        plan.constants(BY_NAME["IQ3_S_CARD"], GATE_UP, BY_NAME["Q8_0"])

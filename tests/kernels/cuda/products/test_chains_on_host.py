"""Float weights with the rows of a window on the emulated card: however they are cut, the bits of the written order."""

from __future__ import annotations

import numpy as np
import pytest

from strata.kernels.cuda import chains, product
from strata.kernels.cuda.chains import ChainsPlan, chains_plan, router_plan


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("cols", [64, 127, 388, 2560, 5251])
@pytest.mark.parametrize("n", [1, 3, 8, 11])
def test_columns_of_any_number_give_the_bits_of_the_written_order(host, random_weight, name, cols, n):
    host.check_linear([random_weight(name, rows, cols, seed=rows) for rows in (5, 1, 2)], n)


@pytest.mark.parametrize("plan", [(1, 1, 1, 4), (2, 2, 1, 1), (4, 1, 2, 1), (2, 4, 2, 2), (4, 8, 1, 3), (1, 8, 2, 1)])
def test_no_cut_changes_a_bit(host, random_weight, monkeypatch, plan):
    rows, inputs, groups, parts = plan
    monkeypatch.setattr(
        chains, "chains_plan", lambda all_rows, n: ChainsPlan(rows, inputs, groups, -(-all_rows // rows), parts)
    )
    host.check_linear([random_weight("F32", 9, 1300), random_weight("F32", 2, 1300, seed=1)], 13)


def test_the_order_in_which_threads_run_changes_no_chain(host, host_loader, random_weight):
    for order in (1, 2):
        host_loader.emulator.order = order
        host.check_linear([random_weight("F32", 7, 1032)], 9)


def test_a_chain_without_elements_and_negative_zeros_stay_as_they_are(host, random_weight):
    w = random_weight("F32", 3, 130)
    w.data.view(np.float32)[:] = -0.0
    x = np.ones((2, 130), np.float32)
    (y,) = host.linear([w], x)
    np.testing.assert_array_equal(y, np.zeros((2, 3), np.float32))
    host.check_linear([w], 2)


def test_a_joined_product_of_a_window_is_added_behind_its_gate(host, written, random_weight):
    rng = np.random.default_rng(3)
    w = random_weight("BF16", 6, 260)
    x, before, gate = (rng.standard_normal(s).astype(np.float32) for s in ((5, 260), (5, 6), (5,)))
    (y,) = host.linear([w], x)
    out, arrays = host.upload(before), [host.upload(a) for a in (x, gate)]
    product.linear(host.workspace(), [host.weight(w)], arrays[0], join=arrays[1], out=[out])
    want = written.fma(written.sigmoid(gate)[:, None], y, before)
    np.testing.assert_array_equal(host.download(out), want)


@pytest.mark.parametrize("n", range(1, 17))
def test_every_row_and_input_is_in_one_block(n):
    for rows in (1, 4, 96, 513, 640, 5000):
        for plan in (chains_plan(rows, n), router_plan(rows, n)):
            assert (plan.blocks - 1) * plan.rows < rows <= plan.blocks * plan.rows
            assert plan.parts * plan.inputs * plan.groups <= n + 1

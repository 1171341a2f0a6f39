"""Float weights with many rows on the emulated card: every way to cut them gives the bits of the written order."""

from __future__ import annotations

import numpy as np
import pytest

from strata.kernels.cuda import card, product
from strata.kernels.cuda.lanes import THIN_ROWS, lanes_plan
from strata.kernels.cuda.product_variants import CARDS
from strata.kernels.formats import BY_NAME


@pytest.mark.parametrize("cols", [260, 256, 1024])
def test_a_block_goes_through_many_row_tiles_of_several_matrices(host, random_weight, cols):
    host.check_linear([random_weight("F32", rows, cols, seed=rows) for rows in (70, 1, 33)], 130)


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("cols", [256, 388, 261])
def test_columns_that_do_not_fit_shared_memory_are_read_for_every_row_tile(
    host, random_weight, monkeypatch, name, cols
):
    monkeypatch.setattr(card, "card", lambda: card.Card(75, 3, 64 << 10, 64 << 10))
    host.check_linear([random_weight(name, 40, cols)], 21)
    monkeypatch.setattr(card, "card", lambda: card.Card(75, 3, 48 << 10, 64 << 10))
    host.check_linear([random_weight(name, 19, cols)], 17)


@pytest.mark.parametrize("name, cols, n", [("F32", 1028, 18), ("BF16", 132, 35), ("F16", 131, 17), ("F32", 520, 17)])
def test_matrices_of_few_rows_have_the_bits_of_the_written_order(host, random_weight, name, cols, n):
    host.check_linear([random_weight(name, rows, cols, seed=rows) for rows in (4, THIN_ROWS, 1)], n)


@pytest.mark.parametrize("rows", [4, 20])
def test_a_joined_product_of_float_weights_is_added_behind_its_gate(host, written, random_weight, rows):
    rng = np.random.default_rng(rows)
    w = random_weight("F32", rows, 132)
    x, before, gate = (rng.standard_normal(s).astype(np.float32) for s in ((18, 132), (18, rows), (18,)))
    (y,) = host.linear([w], x)
    out, arrays = host.upload(before), [host.upload(a) for a in (x, gate)]
    product.linear(host.workspace(), [host.weight(w)], arrays[0], join=arrays[1], out=[out])
    want = written.fma(written.sigmoid(gate)[:, None], y, before)
    np.testing.assert_array_equal(host.download(out), want)


def test_the_order_in_which_threads_run_changes_no_sum_of_lanes(host, host_loader, random_weight):
    for order in (1, 2):
        host_loader.emulator.order = order
        for rows in (4, 40):
            host.check_linear([random_weight("F32", rows, 1032)], 17)


@pytest.mark.parametrize("arch", CARDS)
@pytest.mark.parametrize("name", ["F32", "BF16"])
def test_every_card_has_a_plan_that_fits_and_covers_all_rows(arch, name):
    for cols in (128, 2560, 2561, 10240, 1 << 16):
        for row_tiles, column_tiles in ((1, 2), (33, 2), (33, 512), (4096, 3)):
            plan = lanes_plan(CARDS[arch], BY_NAME[name], cols, row_tiles, column_tiles)
            assert plan.shared <= CARDS[arch].shared_block
            assert 1 <= plan.each <= row_tiles
    assert lanes_plan(CARDS[90], BY_NAME["F32"], 2560, 33, 512).resident

"""What kernels must read and multiply: of products from their launch, of the rest from the geometry or the arrays."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from strata.bench.ceilings import Ceilings, Work, from_records, records
from strata.bench.kernel_limits import FLOAT, QUANTISED, Limits, Pass, different, given, kept, scored
from strata.bench.window_launches import Launch
from strata.engine.device.cuda import CudaDevice
from strata.engine.model import Rows
from strata.engine.model.resident import Resident
from strata.engine.model.window import Draw
from strata.engine.pack import open_pack
from strata.kernels.cuda.arguments import LANES_WINDOW, PROMPT, WINDOW, enter_matrices, fill
from strata.kernels.cuda.row_product import ROW
from strata.kernels.formats import BY_NAME
from strata.kernels.ops import Sampling
from tests.engine.device import emulated_card as cards

CEILINGS = Ceilings(gb_s=1000.0, steps={16: 100.0, 32: 200.0}, floats=10.0)
EXPERTS = Pass.window(1, 10)


@pytest.fixture(scope="module")
def pack(packs):
    return open_pack(packs["odd-q8_0"])


def launch(name: str, *arguments: Any) -> Launch:
    return Launch(SimpleNamespace(name=name), (1,), (1,), arguments, 0)


def product(name: str, kind: Any, rows: list[int], **values: int) -> Launch:
    struct = fill(kind, **values)
    enter_matrices(struct, [(0, None, n) for n in rows], 1)
    return launch(name, struct)


def test_a_product_reads_the_matrices_that_its_launch_names(pack):
    qkv, gate = pack["blk.0.attn_qkv.weight"], pack["blk.0.attn_gate.weight"]
    cols, rows = qkv.shape[1], qkv.shape[0] + gate.shape[0]
    limits = Limits.of(pack, CEILINGS, Pass.window(3, 10))
    one = product("product_window", WINDOW, [qkv.shape[0], gate.shape[0]], n=3, cols=cols)
    work = limits.work([one, one])
    assert work.n_bytes == 2 * (qkv.data.nbytes + gate.data.nbytes + 3 * (FLOAT * rows + QUANTISED * cols))
    assert work.macs == 2 * 3 * rows * cols and work.macs_us == pytest.approx(work.macs / 200e6)
    assert limits.label(one) == f"product_window {qkv.shape[0]}+{gate.shape[0]} x {cols} Q8_0"
    assert limits.limit([one, one]).launches == 2


def test_unpacking_reads_a_matrix_and_writes_int8_and_scales_but_multiplies_nothing(pack):
    gate = pack["blk.0.attn_gate.weight"]
    n, cols = gate.shape
    one = product("prompt_unpack", PROMPT, [n], n=cols // 256, cols=cols, divide=1)
    work = Limits.of(pack, CEILINGS, Pass.prompt(4096)).work([one])
    assert gate.type.group == 32 and work == Work(float(gate.data.nbytes + n * cols * 5 // 4), 0.0, 0.0)
    one = product("prompt_wide_weights", PROMPT, [n], n=cols // 256, cols=cols, divide=1)
    work = Limits.of(pack, CEILINGS, Pass.prompt(4096)).work([one])
    assert work == Work(float(gate.data.nbytes + n * cols * 17 // 8), 0.0, 0.0)


def test_a_matrix_of_blocks_with_the_shape_of_a_router_keeps_its_type(pack):
    router = pack["blk.0.ffn_gate_inp.weight"]
    n, cols = router.shape
    q8_0 = BY_NAME["Q8_0"]
    limits = replace(of := Limits.of(pack, CEILINGS, EXPERTS), types={**of.types, (n, cols, False, False): q8_0})
    assert router.type.is_float and limits.label(product("lanes_prompt", PROMPT, [n], cols=cols)).endswith("F32")
    assert limits.label(product("prompt_wide", PROMPT, [n], cols=cols)).endswith("Q8_0")


def test_a_head_of_the_tables_shape_has_its_own_type(packs):
    pack = open_pack(packs["tiny-q4_k_m"])
    table, head = pack["token_embd.weight"], pack["output.weight"]
    assert table.shape == head.shape and table.type is not head.type
    one = product("product_row", ROW, [head.shape[0]], cols=head.shape[1])
    assert Limits.of(pack, CEILINGS, EXPERTS).label(one).endswith(head.type.name)


def test_gate_and_up_of_experts_are_both_read_and_the_shared_expert_beside_them(pack):
    spec, gate, own = pack.spec, pack["blk.0.ffn_gate_exps.weight"], pack["blk.0.ffn_gate_shexp.weight"]
    width = spec.expert_width
    bank = {"n": 1, "used": spec.experts_used, "cols": spec.hidden, "first": 1}
    limits = Limits.of(pack, CEILINGS, EXPERTS)
    once = product("product_row", ROW, [width], **bank, second=2)
    beside = Launch(once.kernel, (1,), (1,), (*once.arguments, fill(ROW, n=1, cols=spec.hidden)), 0)
    enter_matrices(beside.arguments[1], [(0, None, own.shape[0])] * 2, 1)
    alone = limits.work([once])
    picked = 2 * gate.data.nbytes * spec.experts_used / spec.experts
    made = FLOAT * spec.experts_used * width + QUANTISED * spec.hidden
    assert alone.n_bytes == pytest.approx(picked + made)
    assert alone.macs == 2 * spec.experts_used * width * spec.hidden
    more = limits.work([beside])
    shared = 2 * own.data.nbytes + 2 * FLOAT * own.shape[0] + QUANTISED * spec.hidden
    assert more.n_bytes == pytest.approx(alone.n_bytes + shared)
    assert "beside" in limits.label(beside) and "gate and up" in limits.label(once)


def test_pairs_of_a_prompt_are_multiplied_and_their_experts_read_once(pack):
    spec, down = pack.spec, pack["blk.0.ffn_down_exps.weight"]
    pairs = 4000 * spec.experts_used
    one = product("product_prompt", PROMPT, [spec.hidden], n=pairs, divide=1, cols=spec.expert_width, first=1)
    work = Limits.of(pack, CEILINGS, Pass.prompt(4000)).work([one])
    activations = pairs * (FLOAT * spec.hidden + QUANTISED * spec.expert_width)
    assert work.n_bytes == pytest.approx(down.data.nbytes + activations)
    assert work.macs == pairs * spec.hidden * spec.expert_width


def test_parts_of_the_columns_of_a_matrix_are_one_matrix(pack):
    w = pack["blk.0.ffn_down_shexp.weight"]
    rows, cols = w.shape
    parts = product("product_prompt", PROMPT, [rows, rows], n=40, divide=1, cols=cols // 2, pitch=cols, apart=cols // 2)
    whole = product("product_prompt", PROMPT, [rows], n=40, divide=1, cols=cols, pitch=cols)
    limits = Limits.of(pack, CEILINGS, Pass.prompt(40))
    assert limits.work([parts]) == limits.work([whole]) and limits.work([whole]) is not None
    assert limits.label(parts) == limits.label(whole)


def test_a_matrix_that_is_not_of_the_pack_has_no_limit(pack):
    limits = Limits.of(pack, CEILINGS, EXPERTS)
    strange = product("product_row", ROW, [7], n=1, cols=9)
    assert limits.work([strange]) is None and limits.limit([strange]).us is None
    assert limits.label(strange) == "product_row 7 x 9 ?"
    assert limits.label(product("lanes_window", LANES_WINDOW, [7], n=1, used=2, cols=9)).endswith("?, experts")


def test_rows_that_draw_the_same_experts_share_them():
    assert different(512, 10, 1) == pytest.approx(10)
    assert 70 < different(512, 10, 8) < 80
    assert different(512, 10, 10_000) == pytest.approx(512)


def test_the_budget_of_attention_counts_whole_blocks_and_the_rest():
    at = np.array([0, 7, 8, 9, 11, 12])
    assert kept(at, 4, 8).tolist() == [1, 8, 9, 10, 8, 9]
    assert scored(at, 4, 8).tolist() == [0, 0, 0, 0, 3, 3]
    assert kept(at, 0, 8).tolist() == [1, 8, 9, 10, 12, 13] and not scored(at, 0, 8).any()


def test_a_window_reads_keys_for_every_row_and_a_prompt_once(pack):
    spec = pack.spec
    layers = len(spec.attention_layers)
    vector, heads = spec.kv_heads * spec.head_dim * FLOAT, spec.heads * spec.head_dim
    asked = launch("qsa_keys")
    window = Limits.of(pack, CEILINGS, Pass.window(3, 4)).work([asked])
    assert window.n_bytes == layers * 3 * (5 * vector + FLOAT * heads) and window.macs == layers * 3 * 5 * heads
    prompt = Limits.of(pack, CEILINGS, Pass.prompt(5)).work([launch("qsa_prompt_keys")] * 4)
    assert prompt.n_bytes == layers * 5 * (vector + FLOAT * heads) and prompt.macs == layers * 15 * heads


def test_other_kernels_move_the_arrays_that_they_are_given_each_once():
    x, y = np.zeros((4, 8), np.float32), np.zeros(4, np.float32)
    assert given(launch("hyper_mean", x, y, x, None, 3, np.int64(2), fill(WINDOW))) == x.nbytes + y.nbytes
    assert given(launch("hyper_add", x, y)) == 2 * x.nbytes + y.nbytes
    assert given(launch("hyper_rows", x, None, y)) == x.nbytes + y.nbytes
    assert given(launch("dequantize", x, y)) == y.nbytes


def test_the_limit_is_that_of_what_takes_longer():
    assert CEILINGS.us(Work(3e6, 1e6, 2.0)) == 3.0 and CEILINGS.us(Work(1e6, 1e6, 2.0)) == 2.0
    assert [CEILINGS.of(BY_NAME[name]) for name in ("Q6_K", "IQ3_S", "BF16")] == [100.0, 200.0, 10.0]


def test_ceilings_survive_their_report_and_a_missing_one_is_named():
    assert from_records(records(CEILINGS)) == CEILINGS
    with pytest.raises(KeyError, match="float32"):
        from_records(records(CEILINGS)[:-1])


class Noting:
    """Writes down what the emulated card launches."""

    def __init__(self, load: Any) -> None:
        self._load = load
        self.found: list[Launch] = []

    def __call__(self, source: str, name: str, **constants: Any) -> Any:
        kernel = self._load(source, name, **constants)

        def call(grid: Any, block: Any, args: tuple[Any, ...], shared_mem: int = 0) -> None:
            self.found.append(Launch(SimpleNamespace(name=name), grid, block, args, shared_mem))
            kernel(grid, block, args, shared_mem=shared_mem)

        return call

    def take(self) -> list[Launch]:
        found, self.found = self.found, []
        return found


@pytest.mark.soak  # the emulated card
def test_every_kernel_of_a_window_and_of_a_prompt_has_a_limit(emulated_card, pack):
    with emulated_card.plugged_in() as card, ExitStack() as patched:
        resident = Resident(pack, CudaDevice(driver=card.driver()), max_context=72, n_slots=2, chunks=[24])
        noting = Noting(card.load_kernel)
        for module in cards.LOADING:
            patched.enter_context(mock.patch.object(module, "load_kernel", noting))
        ids = np.arange(24, dtype=np.int32)
        resident.model.forward(Rows.of([(0, 0, ids)]), resident.state, [23])
        passes = [(noting.take(), Pass.prompt(24))]
        resident.windows.sample_with([Draw(Sampling(), ids[:0], 0)])
        resident.state.reserve_all([(0, 1)])
        resident.windows.start(Rows.of([(0, 24, [5])]), 1).wait()
        passes.append((noting.take(), Pass.window(1, 24)))
        for launches, rows in passes:
            limits, by_label = Limits.of(pack, CEILINGS, rows), {}
            for each in launches:
                by_label.setdefault(limits.label(each), []).append(each)
            assert len(by_label) > 10
            bad = {label: limits.limit(some).us for label, some in by_label.items() if not limits.limit(some).us}
            assert not bad

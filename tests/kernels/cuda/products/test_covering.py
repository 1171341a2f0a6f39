"""Every kind of product with every tensor type, each once and small: on a card what memcheck has time for.

`gpu_tests --sanitize --covering` runs these beside the tests that bench/covering.py names for all other kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from strata.kernels.cpu.handover import Server
from strata.kernels.cuda import product
from strata.kernels.cuda.fetch import Stage
from strata.kernels.cuda.handover import OWN_WORDS, Helper
from strata.kernels.cuda.mixture import Bank, mixture
from strata.kernels.cuda.plans import Tuning
from strata.kernels.desk import ANSWERED, ASKED, Desk
from strata.kernels.formats import BY_NAME, CARD_FORMS, TensorType, Weight
from strata.kernels.reference.linear import dequantize

from .conftest import Place, activations, aligned, picks, same_bits
from .test_hits_on_host import test_picks_in_the_cache_and_reads_of_others_are_counted_over_all_layers as check_hits
from .test_repack import formed, on_card

ON_HOST = ("Q6_K", "IQ3_S_CARD", "BF16")
"""Types that the emulator has in `make test`; it has all of them in the soak."""
WIDTH, INNER, EXPERTS, USED = 256, 128, 4, 2


def places() -> Iterator[object]:
    for kind in BY_NAME.values():
        soak = [] if kind.name in ON_HOST else [pytest.mark.soak]
        yield pytest.param(kind, "host", marks=soak, id=f"{kind.name}-host")
        yield pytest.param(kind, "device", marks=pytest.mark.gpu, id=f"{kind.name}-card")


ANYWHERE = [pytest.param("host", id="host"), pytest.param("device", marks=pytest.mark.gpu, id="card")]
EVERY_TYPE = pytest.mark.parametrize(("kind", "where"), list(places()))


@pytest.fixture
def place(request: pytest.FixtureRequest, where: str) -> Place:
    return request.getfixturevalue(where)


def inner(kind: TensorType) -> int:
    return max(INNER, kind.block)


@EVERY_TYPE
def test_windows_and_rows_of_every_type(place, random_weight, kind):
    w = random_weight(kind.name, 21, 2 * WIDTH)
    for n, together in ((1, False), (8, False), (3, True)):
        place.check_linear([w], n, tuning=Tuning(together=together))
    rows = np.array([20, 0, 7, 7], np.int64)
    got = product.dequantize(place.workspace(), place.weight(w), place.upload(rows))
    np.testing.assert_array_equal(place.download(got), dequantize(w, rows))


@EVERY_TYPE
def test_prompts_of_every_type(request, place, random_weight, kind):
    w = random_weight(kind.name, 21, WIDTH)
    place.check_linear([w], 19)
    request.getfixturevalue("tiles_only")
    place.check_linear([w], 19)
    if not kind.is_float:
        request.getfixturevalue("unpacked_once")
        place.check_linear([w], 19)
        request.getfixturevalue("four_warps")
        place.check_linear([w], 19)


def stacks(random_weight, gate: str, up: str, down: str, experts: int = EXPERTS):
    shapes = [(inner(BY_NAME[down]), WIDTH)] * 2 + [(WIDTH, inner(BY_NAME[down]))]
    names = (gate, up, down)
    return tuple(
        random_weight(name, *shape, experts=experts, seed=i)
        for i, (name, shape) in enumerate(zip(names, shapes, strict=True))
    )


@EVERY_TYPE
def test_experts_of_windows_of_every_type(place, random_weight, kind):
    some = stacks(random_weight, kind.name, kind.name, kind.name)
    place.check_mixture(some, 1, USED, missing=(1,))
    if not kind.is_float:
        place.check_mixture(some, 3, USED, shared=stacks(random_weight, *[kind.name] * 3, experts=0))


@EVERY_TYPE
def test_experts_of_prompts_of_every_type(request, place, random_weight, kind):
    some = stacks(random_weight, kind.name, kind.name, kind.name)
    place.check_mixture(some, 18, USED)
    if not kind.is_float:
        request.getfixturevalue("tiles_only")
        place.check_mixture(some, 18, USED)


@pytest.mark.parametrize("where", ANYWHERE)
def test_gate_and_up_of_two_types_and_float_matrices_of_any_width(place, random_weight):
    for n in (2, 18):
        place.check_mixture(stacks(random_weight, "Q4_K", "Q6_K", "Q8_0"), n, USED)
        place.check_linear([random_weight("BF16", 2, 260), random_weight("F32", 9, 131 * 2)][:1], n)
        place.check_linear([random_weight("F32", 9, 131)], n)


@pytest.mark.parametrize("where", ANYWHERE)
@pytest.mark.parametrize("name", CARD_FORMS)
def test_card_forms_of_every_type(place, random_weight, name):
    w = random_weight(name, 7, 5 * CARD_FORMS[name].block)
    np.testing.assert_array_equal(on_card(place, w), formed(w).data)


@pytest.mark.parametrize("where", ANYWHERE)
def test_hits_of_a_window(place):
    check_hits(place, 8, 3)


class Ram:
    """Experts one behind the other in page-locked RAM, gate, up and down of one together."""

    def __init__(self, place: Place, where: str, some: tuple[Weight, ...]) -> None:
        self._place, self._where, self.some = place, where, some
        sizes = [-(-w.data[0].nbytes // 256) * 256 for w in some]
        self.each, self.begins = sum(sizes), (0, sizes[0], sizes[0] + sizes[1])
        self.memory = self.pinned(len(some[0].data) * self.each)
        lines = self.memory.reshape(-1, self.each)
        for w, begin in zip(some, self.begins, strict=True):
            lines[:, begin : begin + w.data[0].nbytes] = w.data.reshape(len(lines), -1).view(np.uint8)
        self.base = self.memory.ctypes.data
        at = np.uint64(self.base) + np.arange(len(lines), dtype=np.uint64) * np.uint64(self.each)
        self.banks = [
            Bank(w.type, w.rows, w.cols, place.upload(at + np.uint64(begin)))
            for w, begin in zip(some, self.begins, strict=True)
        ]

    def pinned(self, n_bytes: int) -> np.ndarray:
        if self._where == "host":
            return aligned(np.zeros(n_bytes, np.uint8))
        import cupy

        memory = np.frombuffer(cupy.cuda.alloc_pinned_memory(n_bytes), np.uint8, n_bytes)
        memory[:] = 0
        return memory

    def mixture(self, drawn: tuple[np.ndarray, ...], **of_gate: object) -> np.ndarray:
        gate, *others = self.banks
        arrays = [self._place.upload(a) for a in drawn]
        return self._place.download(mixture(self._place.workspace(), replace(gate, **of_gate), *others, *arrays))


@pytest.mark.parametrize("where", ANYWHERE)
def test_experts_in_ram_that_are_brought_over_or_that_the_processor_computes(place, random_weight, where):
    ram, experts = Ram(place, where, stacks(random_weight, "IQ3_S", "IQ3_S", "Q8_0", experts=6)), 6
    drawn = (activations(3, WIDTH), *picks(3, USED, experts))
    want = ram.mixture(drawn)
    staging = place.upload(np.zeros(3 * ram.each, np.uint8))
    same_bits(ram.mixture(drawn, stage=Stage(staging, 3, ram.each, ram.begins, ram.base, ram.base + ram.each)), want)
    desk = Desk.within(ram.pinned(Desk.n_bytes(8, WIDTH)), 8, WIDTH)
    server = Server(desk, 2, ram.some[0].rows)
    server.layer(0, ram.some, ram.begins)
    server.start()
    helper = Helper(desk, place.upload(np.zeros(OWN_WORDS, np.uint32)), 0, ram.base, ram.base + ram.each, 60.0)
    same_bits(ram.mixture(drawn, helper=helper), want)
    server.stop()
    assert desk.failed is None and desk.words[ANSWERED] == desk.words[ASKED] == 1

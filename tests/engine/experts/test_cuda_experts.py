"""Where an expert lies never changes a bit: all in VRAM, a quarter, one; read in place or through any ring."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from strata.engine.device.cuda import CudaDevice
from strata.engine.experts.plan import Asked
from strata.engine.model import Rows
from strata.engine.model.resident import WINDOW_ROWS, Resident
from strata.engine.model.window import Draw
from strata.engine.pack import open_pack
from strata.kernels.ops import Sampling

CONTEXT, CHUNK, NEVER = 96, 18, 1 << 20
PACKS = ("odd-q8_0", "tiny-q2_0")
GREEDY = Sampling()
DRAWN = Sampling(temperature=1.0, top_k=40, seed=11)


@pytest.fixture(scope="module", params=PACKS)
def pack(request, packs):
    return open_pack(packs[request.param])


def made(any_card, pack, asked: Asked | None, stream_min: int, eager: bool = False) -> Resident:
    driver = any_card()
    if eager:
        driver.eager = True
    device = CudaDevice(driver=driver)
    resident = Resident(
        pack, device, max_context=CONTEXT, n_slots=2, chunks=[CHUNK], experts=asked, stream_min=stream_min
    )
    resident.warm()
    return resident


def answers(resident: Resident, how: Sampling) -> list[np.ndarray]:
    """Logits of a prompt in chunks and windows, sampled ids with the logits before each, and the state that is left."""
    ids = np.random.default_rng(5).integers(0, 900, 40).astype(np.int32)
    windows, state, found = resident.windows, resident.state, []
    for begin, end in pairwise([0, 17, 35, 40]):  # the last part is a window
        rows = Rows.of([(0, state.length(0), ids[begin:end])])
        found.append(resident.device.read(resident.model.forward(rows, state, [end - begin - 1])))
    windows.sample_with([Draw(how, ids[:0], len(ids))] * WINDOW_ROWS)
    state.reserve(0, 1)
    ticket = windows.start(Rows.of([(0, state.length(0), ids[:1])]), 1)
    for step in range(6):
        found += [np.array(ticket.wait()), resident.device.read(ticket.logits)]
        state.advance(0, 1)
        state.reserve(0, 1)
        ticket = windows.step(ticket, state.length(0) + step)
    ticket.wait()
    found.append(np.frombuffer(state.state_bytes(0), np.uint8))
    state.reset(0)
    return found


@pytest.fixture(scope="module")
def whole(any_card, pack):
    """What the model answers with all experts in VRAM, by how it samples."""
    resident = made(any_card, pack, None, NEVER)
    return {how: answers(resident, how) for how in (GREEDY, DRAWN)}


def asked(pack, share: float, ring: int) -> Asked:
    pairs = pack.spec.layers * pack.spec.experts
    return Asked(cache=max(1, int(share * pairs)), ring=ring)


@pytest.mark.parametrize(
    ("share", "stream_min", "ring"),
    [(0.25, NEVER, 0), (0, NEVER, 0), (0.25, 1, 4), (0, 1, 10), (0, 1, 0)],
    ids=["quarter-in-place", "none-in-place", "quarter-ring-4", "none-ring-10", "none-ring-of-layers"],
)
def test_logits_texts_and_states_are_the_same_wherever_experts_lie(any_card, pack, whole, share, stream_min, ring):
    resident = made(any_card, pack, asked(pack, share, ring), stream_min)
    pairs = pack.spec.layers * pack.spec.experts
    assert 1 <= resident.experts_in_vram <= max(1, pairs // 4)
    for how, wanted in whole.items():
        for got, want in zip(answers(resident, how), wanted, strict=True):
            np.testing.assert_array_equal(got, want)

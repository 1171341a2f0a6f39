"""Every length of a prompt in the memory that was planned for the longest one: a pass that takes more ends the engine.

Nothing is computed: the kernels' wrappers take what they take, on a card that only counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import numpy as np
import pytest

from strata.engine.cuda_runner import CudaRunner
from strata.engine.experts.placement import by_number
from strata.engine.memory.loan import LoanPlan, LoanRoom, Piece, Priced
from strata.engine.memory.profile import Profile, write_profile
from strata.engine.model.head_loan import HeadLoan
from strata.engine.model.resident import Resident
from strata.engine.model.slot_loan import SlotLoan
from strata.engine.options import Options
from strata.engine.pack import Pack, open_draft, open_pack
from strata.engine.schedule.ports import SOLO
from strata.kernels.cuda.workspace import OutOfWorkspace

CONTEXT, STAYS = 128, 10
DRAFTED = {"mtp": "", "spec": 3}
PACKS = [
    "tiny-q8_0",
    "odd-f32",
    *(pytest.param(name, marks=pytest.mark.soak) for name in ("odd-q2_0", "tiny-bf16", "tiny-q4_k_m", "tiny-iq3_xxs")),
]
CHUNKS = [22, *(pytest.param(n, marks=pytest.mark.soak) for n in (16, 32, 99, CONTEXT))]
FLOATS = ("odd-f32", "tiny-bf16")
"""Packs whose experts only a card computes."""


def lending(room: LoanRoom, price: Priced) -> LoanPlan:
    """Pieces of just their price, the blocks' part in the head where that holds it."""
    whole, work = (-(-part // 256) * 256 for part in price.parts(room.most))
    lent, at, pieces = work <= room.head, 0, []
    for size in (whole + room.beside, room.ring_step, *([] if lent else [work])):
        pieces.append(Piece(False, at, at + size))
        at += size
    held = Piece(True, 0, work) if lent else pieces.pop()
    own = max(at, 4 * price(STAYS))
    return LoanPlan(room.most, 0, STAYS, pieces[0], held, pieces[1], own, room.beside)


@pytest.fixture
def short_streams() -> Iterator[None]:
    """Chunks of few rows stream their experts, so a loan is one for them."""
    with mock.patch.dict(Resident.__init__.__kwdefaults__, stream_min=STAYS + 1):
        yield


def walk(runner: CudaRunner, lengths: range) -> None:
    """Read prompts of these lengths, in chunks, as requests do. Fails with the lengths that take more than there is."""
    lacks = []
    for n in lengths:
        try:
            for begin in range(0, n, runner.chunk):
                piece = np.zeros(min(runner.chunk, n - begin), np.int32)
                runner.feed(SOLO, begin, piece, begin + len(piece) == n)
        except OutOfWorkspace as error:
            lacks.append((n, str(error)))
        if runner._loan is not None:
            runner._loan.before_window()
        runner.request_over()
        runner.state.reset(SOLO)
        if runner.drafter is not None:
            runner.drafter.book.state.reset(SOLO)
    assert not lacks


def made(counting: object, pack: Pack, **changes: object) -> CudaRunner:
    draft = open_draft(pack, changes.pop("draft")) if "draft" in changes else None
    options = Options(pack="", device="cuda", max_context=CONTEXT, **changes)
    return CudaRunner(pack, options, draft, counting, loan=lending)


@pytest.mark.parametrize("name", PACKS)
@pytest.mark.parametrize("chunk", CHUNKS)
def test_a_head_that_is_lent_has_room_for_every_length(packs, counting, headers_only, short_streams, name, chunk):
    changes = {"draft": packs["mtp-tiny-q8_0"], **DRAFTED} if name == "tiny-q8_0" else {}
    pack = open_pack(packs[name])
    share = 1.0 if name in FLOATS else 0.5
    runner = made(
        counting, pack, prefill=chunk, short_read=0, expert_cache=1, prefill_head_alias=True, pcie_frac=share, **changes
    )
    assert isinstance(runner._loan, HeadLoan) and runner.chunk == chunk
    walk(runner, range(1, 100))


@pytest.fixture
def small_borrowing() -> Iterator[None]:
    """Of the small cache of these packs all slots but one may be lent; a small ring, and short reads are very short."""
    with (
        mock.patch("strata.engine.memory.prompt.KEPT_SLOTS", 1),
        mock.patch("strata.engine.memory.card.RING", 4),
        mock.patch("strata.engine.experts.plan.STAYS", STAYS),
        mock.patch("strata.engine.memory.borrow.SHORT", (14, 18)),
    ):
        yield


@pytest.mark.parametrize("name", PACKS)
def test_slots_that_are_lent_have_room_for_every_length(
    packs, counting, headers_only, short_streams, small_borrowing, tmp_path, name
):
    pack, profile = open_pack(packs[name]), tmp_path / "order.strp"
    layers, experts = pack.spec.layers, pack.spec.experts
    slots = layers * experts - 24
    write_profile(profile, Profile(layers, experts, slots, by_number(layers, experts)))
    share = 1.0 if name in FLOATS else 0.5
    how = {"expert_cache": slots, "expert_profile": str(profile), "prefill": 22, "short_read": 0, "pcie_frac": share}
    runner = made(counting, pack, **how)
    assert isinstance(runner._loan, SlotLoan) and runner.chunk == 22
    walk(runner, range(1, 100))


@pytest.mark.parametrize("name", PACKS)
@pytest.mark.parametrize("chunk", CHUNKS)
def test_buffers_of_their_own_have_room_for_every_length(packs, counting, headers_only, name, chunk):
    changes = {"draft": packs["mtp-tiny-q8_0"], **DRAFTED} if name == "tiny-q8_0" else {}
    runner = made(counting, open_pack(packs[name]), prefill=chunk, **changes)
    assert runner._loan is None and runner.chunk == chunk
    walk(runner, range(1, CONTEXT))

"""What `--plan` says of the full-size model is what a start with that command line does, on cards that only count:
experts in VRAM, the chunk, where its buffers lie, the ring. And both refuse the same command lines."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from itertools import product

import msgspec
import pytest

from strata.engine.cuda_runner import CudaRunner
from strata.engine.device.arena import MIB
from strata.engine.memory.alias import refused, require_alias
from strata.engine.memory.card import STREAM_MIN
from strata.engine.memory.command import gather, switches
from strata.engine.memory.figures import DoesNotFit, MemoryPlan, Switches
from strata.engine.memory.plan import plan_memory
from strata.engine.options import Options, Refused, fitted
from strata.engine.pack import open_draft, open_pack

RESERVE_MIB = 590
CARDS = [8151, 12_288, 16_384, 32_607]
WHERE = {"own": "own", "borrowed": "slots", "head alias": "head"}


@pytest.fixture
def line(full_pack, full_draft, full_profile):
    """line(8151, profile=.., alias=..) -> the options of the alias's measurements on a card of so many MiB."""

    def make(vram: int, profile: bool, alias: bool, **more: object) -> Options:
        options = Options(
            pack=str(full_pack),
            device="cuda",
            vram_limit_mib=vram,
            ram_limit_mib=1 << 20,
            vram_reserve_mib=RESERVE_MIB,
            kv="int8",
            max_context=29_880,
            prompt_cache=3,
            mtp=str(full_draft),
            spec=4,
            short_read=0,
            serve=True,
            prefill_head_alias=alias,
            expert_profile=str(full_profile) if profile else "none",
        )
        return fitted(msgspec.structs.replace(options, **more), open_pack(full_pack).spec)

    return make


def planned(options: Options, switched: Switches = Switches()) -> MemoryPlan:  # noqa: B008
    return plan_memory(gather(open_pack(options.pack), options), options, switched)


@pytest.fixture
def started(counting, full_draft, headers_only):
    """started(options) -> the model of an engine on a card that only counts."""

    def start(options: Options):
        pack = open_pack(options.pack)
        draft = None if options.mtp is None else open_draft(pack, full_draft)
        return CudaRunner(pack, options, draft, counting)._resident

    return start


def ring_of(resident) -> int:
    if resident.loan is None:
        return resident._own_ring
    ring = resident.loan.ring
    return ring if isinstance(ring, int) else int(ring.size)


def cases() -> Iterator[object]:
    """All of them; those that stay out of the soak have each way to lay buffers, and take seconds each."""
    shorter = {(8151, False, False), (8151, True, True), (12_288, True, False)}
    for case in product(CARDS, (False, True), (False, True)):
        name = f"{case[0]}-{'profile' if case[1] else 'no order'}-{'alias' if case[2] else 'plain'}"
        yield pytest.param(*case, id=name, marks=() if case in shorter else pytest.mark.soak)


@pytest.mark.parametrize(("vram", "profile", "alias"), list(cases()))
def test_a_start_does_what_the_plan_said(line, started, caplog, vram, profile, alias):
    options = line(vram, profile, alias)
    plan = planned(options)
    with caplog.at_level(logging.INFO, "strata.engine"):
        made = started(options)
    card, (where, taken) = plan.card, made.prompt_memory
    assert len(card.slots) == made.experts_in_vram and card.slots.n_bytes == made.expert_bytes
    assert card.layout.chunk == made.chunk
    assert WHERE[card.way] == where
    assert card.ring == ring_of(made)
    assert (1 + plan.slots.n_slots, plan.slots.n_checkpoints) == (made.state.n_slots, made.state.n_checkpoints)
    layout = card.layout
    planned_bytes = layout.own_bytes + layout.lent_bytes + layout.head_bytes
    assert 0.9 * planned_bytes < taken <= planned_bytes, "a card may take a little less than the price"
    assert card.free <= made.device.memory().free < card.free + 64 * MIB
    assert card.free >= RESERVE_MIB * MIB
    for said in card.said:
        assert said in caplog.text


def streaming() -> Iterator[object]:
    """Long contexts of which RAM has the keys and values: a card has hardly room for a prompt beside them."""
    shorter = {(True, True, 32_768, RESERVE_MIB), (False, False, 32_768, -1)}
    for alias, profile, kept, reserve in product(
        (True, False), (True, False), (20_480, 32_768), (RESERVE_MIB, -1, 450)
    ):
        case = (alias, profile, kept, reserve)
        name = f"{'alias' if alias else 'plain'}-{'profile' if profile else 'no order'}-{kept}-{reserve}"
        yield pytest.param(*case, id=name, marks=() if case in shorter else pytest.mark.soak)


@pytest.mark.parametrize(("alias", "profile", "kept", "reserve"), list(streaming()))
def test_a_start_with_streamed_keys_and_values_does_what_the_plan_said(line, started, alias, profile, kept, reserve):
    long = {"max_context": 262_144, "kv": "q4_0", "kv_resident": kept, "vram_reserve_mib": reserve}
    options = line(8151, profile, alias, **long)
    plan, made = planned(options), started(options)
    card = plan.card
    assert (WHERE[card.way], card.layout.chunk) == (made.prompt_memory[0], made.chunk)
    assert card.ring == ring_of(made) or card.layout.chunk < STREAM_MIN
    assert (len(card.slots), plan.slots.n_checkpoints) == (made.experts_in_vram, made.state.n_checkpoints)
    assert card.reserve == made.reserve <= card.free <= made.device.memory().free


@pytest.mark.parametrize("profile", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_a_start_with_variables_of_the_environment_does_what_the_plan_said(line, started, monkeypatch, profile):
    given = {"EXPERT_CACHE_HEADROOM": "0.1", "PREFILL_RING": "32", "PREFILL_STREAM_MIN": "2048"}
    for name, text in given.items():
        monkeypatch.setenv(f"STRATA_{name}", text)
    options = line(12_288, profile, alias=False)
    card, made = planned(options, switches(os.environ)).card, started(options)
    assert (len(card.slots), card.layout.chunk, card.ring) == (made.experts_in_vram, made.chunk, ring_of(made))
    assert card.reserve == made.reserve > RESERVE_MIB * MIB + 400 * MIB
    assert made.device.memory().free >= card.free >= card.reserve
    assert made.store._stream_min == 2048
    assert card.ring == 32 * max(size.n_bytes for size in made.store.placement.sizes)


@pytest.mark.parametrize("vram", [8151, pytest.param(12_288, marks=pytest.mark.soak)])
def test_a_start_with_experts_in_the_file_borrows_what_the_plan_said(line, started, vram):
    options = line(vram, profile=True, alias=False, mmap_experts=True, mtp=None, spec=1)
    plan, made = planned(options), started(options)
    card, placement = plan.card, made.store.placement
    assert (card.way, made.prompt_memory[0]) == ("borrowed", "slots")
    assert (len(card.slots), card.layout.chunk, card.ring) == (made.experts_in_vram, made.chunk, ring_of(made))
    assert (plan.homes.lent_copy_bytes, plan.homes.mapped_bytes) == (placement.twin_bytes, placement.filed_bytes)
    assert card.free <= made.device.memory().free


@pytest.mark.parametrize("vram", [8151, pytest.param(12_288, marks=pytest.mark.soak)])
def test_a_start_that_borrows_nothing_does_what_the_plan_said_and_may_lend_the_head(line, started, vram):
    options = line(vram, profile=True, alias=True, no_prefill_borrow=True)
    card, made = planned(options).card, started(options)
    assert (card.way, made.prompt_memory[0]) == ("head alias", "head")
    assert (len(card.slots), card.layout.chunk, card.ring) == (made.experts_in_vram, made.chunk, ring_of(made))


def test_a_profile_does_not_turn_chunks_that_stream_into_short_ones_that_read_in_place(line, started):
    """Borrowed slots would hold 308 of 24,576 experts here, and give chunks of 768 that take four times as long."""
    without, known = planned(line(8151, profile=False, alias=False)), planned(line(8151, profile=True, alias=False))
    assert without.card.layout.chunk == known.card.layout.chunk == 2048 >= STREAM_MIN
    assert (known.card.way, known.card.layout.lent) == ("own", 0)
    assert 0 < len(known.card.slots) < 308
    made = started(line(8151, profile=True, alias=False))
    assert (made.prompt_memory[0], made.chunk) == ("own", 2048)


def test_slots_are_borrowed_where_own_buffers_would_not_stream_either(line):
    card = planned(line(8151, profile=True, alias=False, prefill=512)).card
    assert (card.way, card.layout.chunk) == ("borrowed", 512)


def test_slots_are_borrowed_where_own_buffers_that_stream_leave_less_than_the_reserve(line):
    reserve = next(n for n in range(RESERVE_MIB, 1200, 10) if planned(_reserving(line, n)).card.way == "borrowed")
    card = planned(_reserving(line, reserve)).card
    assert reserve < 1200 and card.layout.chunk < STREAM_MIN and card.free >= reserve * MIB


def _reserving(line, reserve: int) -> Options:
    return line(8151, profile=True, alias=False, vram_reserve_mib=reserve)


@pytest.mark.parametrize(
    "changed",
    [
        {"serve": False},
        {"batch": 2},
        {"short_read": 64},
        {"expert_cache": 2},
        {"mtp": None, "spec": 1},
        {"expert_cache": 1},
        {"no_prefill_borrow": True},
        {},
    ],
    ids=lambda changed: " ".join(map(str, changed)) or "nothing",
)
@pytest.mark.parametrize("profile", [False, True], ids=["no order", "profile"])
def test_a_plan_and_an_engine_refuse_the_same_command_lines(line, changed, profile):
    options = line(12_288, profile, True, **changed)
    reason = refused(options, head=True, mtp=options.mtp is not None)
    if reason is None:
        require_alias(options, head=True)
        assert planned(options).card.layout.chunk >= STREAM_MIN
        return
    with pytest.raises(Refused) as of_engine:
        require_alias(options, head=True)
    with pytest.raises(DoesNotFit) as of_plan:
        planned(options)
    assert str(of_engine.value) == str(of_plan.value) == reason

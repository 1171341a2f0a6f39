"""Prompts that borrow expert slots: texts and states as with all experts in VRAM, and books that balance throughout."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import msgspec
import numpy as np
import pytest

from strata.engine.cuda_runner import CudaRunner
from strata.engine.memory.profile import Profile, write_profile
from strata.engine.model.resident import Resident
from strata.engine.model.slot_loan import SlotLoan
from strata.engine.options import Options
from strata.engine.pack import open_pack
from strata.engine.schedule.live import Path
from strata.engine.schedule.ports import SOLO, Rules
from strata.engine.schedule.solo import Request
from strata.engine.state.checkpoints import CacheRules
from strata.engine.state.conversations import Conversations
from strata.kernels.ops import Sampling
from strata.protocol.lines import Admitted, Done, SlotToken, Token, Yielded

CONTEXT, CHUNK, STAYS, SLOTS = 80, 22, 10, 36
OPTIONS = Options(pack="", max_context=CONTEXT, prefill=CHUNK, device="cuda", verify_accounts=True, pcie_frac=1.0)
DRAWN = Sampling(temperature=1.0, top_k=40, seed=5)
STREAMS, IN_PLACE = STAYS + 1, 1 << 20
FILE = {"mmap_experts": True, "threads": 2}
"""Experts that VRAM lacks lie in the file, but for copies of those whose slots may be lent."""
WHERE = [pytest.param({}, id="ram"), pytest.param(FILE, id="file", marks=pytest.mark.soak)]
LENGTHS = (STAYS, STAYS + 1, CHUNK + 1, 2 * CHUNK + 9)
"""The longest read that borrows nothing, one that does, and chunks with tails of a window and of more."""


@pytest.fixture(scope="module")
def pack(packs):
    return open_pack(packs["odd-q8_0"])


@pytest.fixture(scope="module")
def order(pack, tmp_path_factory):
    """A profile of all pairs: the last slots are those of any layers."""
    layers, experts = pack.spec.layers, pack.spec.experts
    pairs = [divmod(int(n), experts) for n in np.random.default_rng(3).permutation(layers * experts)]
    path = tmp_path_factory.mktemp("profile") / "order.strp"
    write_profile(path, Profile(layers, experts, SLOTS, tuple(pairs)))
    return str(path)


@pytest.fixture(scope="module", autouse=True)
def small() -> Iterator[None]:
    """Of the small cache of these packs all slots but one may be lent; a small ring, and short reads are very short."""
    with (
        mock.patch("strata.engine.memory.prompt.KEPT_SLOTS", 1),
        mock.patch("strata.engine.memory.card.RING", 4),
        mock.patch("strata.engine.experts.plan.STAYS", STAYS),
        mock.patch("strata.engine.memory.borrow.SHORT", (14,)),
    ):
        yield


def made(driver, pack, order: str, stream_min: int = STREAMS, **changes: object) -> CudaRunner:
    options = msgspec.structs.replace(OPTIONS, expert_cache=SLOTS, expert_profile=order, short_read=0)
    with mock.patch.dict(Resident.__init__.__kwdefaults__, stream_min=stream_min):
        runner = CudaRunner(pack, msgspec.structs.replace(options, **changes), driver=driver)
    runner.warm()
    return runner


def lending_of(runner: CudaRunner):
    loan = runner._resident.loan
    assert isinstance(loan, SlotLoan)
    return loan.lending


def ids(n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 900, n).astype(np.int32)


def path_of(runner: CudaRunner) -> Path:
    for slot in range(runner.state.n_slots + runner.state.n_checkpoints):
        runner.state.drop(slot)
    cache = CacheRules(1, every=0, root=0)
    sessions = Conversations(runner.state, runner.n_slots, cache, None, turn_token=10**6, verify=True)
    rules = Rules(
        chunk=runner.chunk, max_context=CONTEXT, end_ids=(), n_slots=runner.n_slots, short_read=0, verify=True
    )
    return Path(runner, sessions, rules, clock=lambda: 0.0)


def answered(path: Path, request: Request) -> list[int]:
    events = path.start(request)
    while path.busy:
        events += path.step()
    return [event.id for event in events if isinstance(event, Token)]


def texts(runner: CudaRunner) -> list[tuple]:
    """Per request its tokens, and the digest of the state that it leaves."""
    found = []
    for seed, n in enumerate(LENGTHS):
        path = path_of(runner)
        found.append((answered(path, Request(ids(n, seed), 5, DRAWN)), runner.state.digest(SOLO)))
        runner.request_over(path.busy)
    return found


def twins_are_slots(runner: CudaRunner) -> None:
    """Every slot that may be lent holds the bytes of its twin, none is lent, and tables name the slots."""
    lending, store = lending_of(runner), runner._resident.store
    lending.settle()
    store._ring._copies.finish()  # what a chunk that never came had asked for
    assert not lending.lent and lending.slots == 0
    for layer in range(len(store.placement.sizes)):
        homes = store.homes(layer)
        for begin in homes.twins.tolist():
            slot = runner._device.read(store.slot(layer, begin))
            for at, end in zip(homes.size.begins, (homes.size.gate, homes.size.up, homes.size.down), strict=True):
                np.testing.assert_array_equal(slot[at:][:end], store.place(layer, homes.twin(begin))[at:][:end])


@pytest.fixture(scope="module")
def wanted(any_card, pack):
    """Texts and states with all experts in VRAM."""
    return texts(made(any_card(rehearses=False), pack, "none", expert_cache=0))


@pytest.mark.parametrize(
    ("stream_min", "eager", "changes"),
    [
        pytest.param(STREAMS, True, {}, id="ring"),
        pytest.param(IN_PLACE, False, {}, id="in-place", marks=pytest.mark.soak),
        pytest.param(CHUNK, True, {"adapt_every": 1, "adapt_min_gain": 0.0}, id="swaps", marks=pytest.mark.soak),
        pytest.param(STREAMS, True, {"adapt_every": 1, "adapt_min_gain": 0.0, "adapt_async": 1}, id="swaps-beside"),
        pytest.param(STREAMS, False, {"pcie_frac": 0.5, "threads": 2}, id="processor", marks=pytest.mark.soak),
        pytest.param(STREAMS, False, FILE, id="file"),
        pytest.param(IN_PLACE, False, FILE, id="file-picked", marks=pytest.mark.soak),
        pytest.param(
            CHUNK, False, FILE | {"adapt_every": 1, "adapt_min_gain": 0.0}, id="file-swaps", marks=pytest.mark.soak
        ),
    ],
)
def test_texts_and_states_are_those_with_all_experts_in_vram(any_card, pack, order, wanted, stream_min, eager, changes):
    driver = any_card()
    driver.eager = eager
    runner = made(driver, pack, order, stream_min, **changes)
    lending = lending_of(runner)
    assert runner.chunk == CHUNK and 0 < lending.of <= SLOTS
    assert texts(runner) == wanted
    filed = "mmap_experts" in changes
    assert runner._resident.store.reads_file == filed
    assert lending.reads == sum(n > STAYS or filed for n in LENGTHS) and 0 < lending.most < lending.of
    if "adapt_every" in changes:
        assert runner.figures()["expert_swaps"] > 0
    twins_are_slots(runner)


def test_a_short_read_borrows_no_slot_and_a_longer_one_more_of_them(any_card, pack, order):
    runner = made(any_card(), pack, order)
    lending, lent = lending_of(runner), []
    for n in (STAYS, STAYS + 1, CHUNK):
        runner.feed(SOLO, 0, ids(n, 1), False)
        lending.check()
        lent.append(lending.slots)
        runner.request_over(False)
        runner.state.reset(SOLO)
    assert lent[0] == 0 < lent[1] < lent[2] < SLOTS
    runner.feed(SOLO, 0, ids(STAYS + 1, 1), False)
    runner.request_over(True)
    assert lending.slots == lent[1], "a request of another slot has ended beside the read"
    runner.feed(SOLO, STAYS + 1, ids(CHUNK, 1), True)
    assert lending.reads == 3 and lending.slots == lent[2], "the longer chunk borrows more for the same read"
    assert runner.figures()["lent_slots"] == lent[2] and runner.info()["prefill_memory"] == "slots"
    slots = runner._resident.store.placement.lendable
    assert 0 < runner._resident.prompt_memory[1] <= slots, "the longest chunk lies in the slots that may be lent"
    twins_are_slots(runner)


@pytest.mark.parametrize("changes", WHERE)
def test_slots_that_decode_between_chunks_say_what_they_say_alone(any_card, pack, order, changes):
    """Their windows find lent experts in RAM, in graphs that were captured before."""
    found = []
    for cache, profile in ((0, "none"), (SLOTS, order)):
        runner = made(any_card(rehearses=False), pack, profile, expert_cache=cache, batch=2, **changes)
        path, said, most = path_of(runner), [], 0
        events = path.admit(0, Request(ids(5, 1), 9, DRAWN))
        while path.busy:
            events += path.step()
        events += path.start(Request(ids(2 * CHUNK + 3, 2), 3, DRAWN))
        while path.busy or path.decoding:
            events += path.step()
            most = max(most, lending_of(runner).slots if cache else 0)
        said = [(type(event).__name__, event.id) for event in events if isinstance(event, (Token, SlotToken))]
        found.append(said)
        assert (most > 0) == bool(cache)
    assert found[0] == found[1]
    twins_are_slots(runner)


def test_a_start_that_times_short_reads_gives_back_what_they_borrow(any_card, pack, order, wanted):
    """Its passes are longer than what has memory of its own; windows are captured before and behind them."""
    runner = made(any_card(), pack, order, short_read=64)
    assert lending_of(runner).reads == 0
    twins_are_slots(runner)
    assert texts(runner) == wanted
    twins_are_slots(runner)


@pytest.mark.parametrize("changes", WHERE)
@pytest.mark.parametrize("how", ["stop", "yield"])
def test_a_read_that_is_given_up_gives_its_slots_back_and_the_next_one_says_the_same(
    any_card, pack, order, how, changes
):
    runner = made(any_card(rehearses=False), pack, order, batch=2, **changes)
    lending, path = lending_of(runner), path_of(runner)
    before = answered(path, Request(ids(CHUNK + 5, 7), 4, DRAWN))
    events = path.start(Request(ids(3 * CHUNK, 8), 4, DRAWN))
    events += path.step()
    assert lending.slots > 0
    events += path.step(True) if how == "stop" else path.give_way(0)
    assert any(isinstance(event, Done) for event in events)
    assert any(isinstance(event, (Yielded, Admitted)) for event in events) == (how == "yield")
    runner.request_over(path.busy)
    twins_are_slots(runner)
    assert answered(path_of(runner), Request(ids(CHUNK + 5, 7), 4, DRAWN)) == before


@pytest.mark.soak  # the emulated card takes a minute for it
def test_a_draft_layer_reads_long_prompts_in_borrowed_slots(any_card, trunk, draft, order, tmp_path):
    layers, experts = trunk.spec.layers, trunk.spec.experts
    pairs = tuple(divmod(int(n), experts) for n in np.random.default_rng(3).permutation(layers * experts))
    profile, found = tmp_path / "order.strp", []
    write_profile(profile, Profile(layers, experts, SLOTS, pairs))
    for cache, name in ((0, "none"), (layers * experts * 3 // 4, str(profile))):
        options = msgspec.structs.replace(OPTIONS, expert_cache=cache, expert_profile=name, mtp="", spec=3)
        runner = CudaRunner(trunk, options, draft, any_card())
        runner.warm()
        path = path_of(runner)
        runner.feed(SOLO, 0, ids(CHUNK, 1), False)
        runner.feed(SOLO, CHUNK, ids(STAYS, 2), True)
        states = [runner.drafter.book.state.digest(0), runner.state.digest(SOLO)]
        runner.state.reset(SOLO)
        found.append((states, [answered(path, Request(ids(n, 7), 4, Sampling())) for n in (CHUNK + 9, 5)]))
    assert found[0] == found[1]
    assert lending_of(runner).reads == 2


def test_no_prefill_borrow_and_a_cache_without_an_order_lend_nothing(any_card, pack, order):
    for profile, changes in ((order, {"no_prefill_borrow": True}), ("none", {})):
        runner = made(any_card(rehearses=False), pack, profile, **changes)
        assert runner._resident.loan is None and "lent_slots" not in runner.figures()
        assert runner._resident.store.placement.lendable == 0

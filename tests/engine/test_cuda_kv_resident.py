"""Keys and values in RAM beyond a few pages: texts, states and moved conversations as with all of them on the card."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import msgspec
import numpy as np
import pytest

from strata.engine.cuda_runner import CudaRunner
from strata.engine.device.base import Memory
from strata.engine.facts import engine_info
from strata.engine.model import resident
from strata.engine.options import Options, Refused
from strata.engine.pack import Pack, open_pack
from strata.engine.schedule.live import Path
from strata.engine.schedule.ports import SOLO, Row, Rules
from strata.engine.schedule.solo import Request
from strata.engine.state.checkpoints import CacheRules
from strata.engine.state.conversations import Conversations
from strata.kernels.ops import PAGE, Sampling
from strata.protocol.lines import Resume, SlotToken, Token

CONTEXT, CHUNK, FRAMES = 4 * PAGE, 70, 2
OPTIONS = Options(
    pack="", device="cuda", max_context=CONTEXT, prefill=CHUNK, short_read=0, batch=2, prompt_cache=2, pcie_frac=1.0,
    verify_accounts=True,
)  # fmt: skip
DRAWN = Sampling(temperature=1.0, seed=5)


@pytest.fixture(scope="module")
def pack(packs):
    """The first three layers of a pack: a block of every kind."""
    whole = open_pack(packs["odd-q8_0"])

    class Short(Pack):
        def __init__(self) -> None:
            self.__dict__ |= whole.__dict__
            self.spec = replace(whole.spec, layers=3, recurrent=whole.spec.recurrent[:3], ratios=whole.spec.ratios[:3])

    return Short()


def made(driver, pack, kv_resident: int, **changes: object) -> CudaRunner:
    runner = CudaRunner(pack, msgspec.structs.replace(OPTIONS, kv_resident=kv_resident, **changes), driver=driver)
    runner.warm()
    return runner


def ids(n: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 900, n).astype(np.int32)


def path_of(runner: CudaRunner) -> Path:
    for slot in range(runner.state.n_slots + runner.state.n_checkpoints):
        runner.state.drop(slot)
    cache = CacheRules(2, every=PAGE, root=0)
    sessions = Conversations(runner.state, runner.n_slots, cache, None, turn_token=10**6, verify=True)
    rules = Rules(chunk=CHUNK, max_context=CONTEXT, end_ids=(), n_slots=runner.n_slots, verify=True)
    return Path(runner, sessions, rules, clock=lambda: 0.0)


def finished(path: Path, events: list) -> list[tuple]:
    while path.busy or path.decoding:
        events += path.step()
    kinds = {Token: "id", SlotToken: "id", Resume: "reused"}
    return [
        (type(event).__name__, getattr(event, "slot", SOLO), getattr(event, kinds[type(event)]))
        for event in events
        if type(event) in kinds
    ]


def conversation(runner: CudaRunner) -> tuple:
    """Chunks and windows far beyond the resident page, a continued turn, and one that goes back to a checkpoint."""
    path, prompt = path_of(runner), ids(2 * PAGE + 31)
    said = finished(path, path.start(Request(prompt, 5, DRAWN)))
    said += finished(path, path.start(Request(np.append(prompt, ids(24, 2)), 3, Sampling())))
    digest = runner.state.digest(SOLO)
    said += finished(path, path.start(Request(np.append(prompt[:110], ids(9, 3)), 3, DRAWN)))
    assert any(name == "Resume" and reused for name, _, reused in said)
    return said, digest, runner.state.digest(SOLO)


def slots(runner: CudaRunner) -> tuple:
    """Windows of two slots, also between the chunks of a read."""
    path = path_of(runner)
    events = path.admit(0, Request(ids(PAGE + 3, 4), 5, DRAWN))
    while path.busy:
        events += path.step()
    events += path.admit(1, Request(ids(PAGE - 3, 5), 6, Sampling()))
    while path.busy:
        events += path.step()
    said = finished(path, events + path.start(Request(ids(CHUNK + 3, 6), 2, DRAWN)))
    return said, [runner.state.digest(slot) for slot in range(runner.state.n_slots)]


def parked(runner: CudaRunner) -> tuple:
    """A conversation that goes to the host and comes back in another slot."""
    path_of(runner)
    state, prompt = runner.state, ids(2 * PAGE + 5, 7)
    state.reset(SOLO)
    for begin in range(0, len(prompt), CHUNK):
        runner.feed(SOLO, begin, prompt[begin : begin + CHUNK], False)
    image, before = state.image(SOLO), state.digest(SOLO)
    state.reset(SOLO)
    state.restore(1, image)
    assert state.digest(1) == before
    runner.feed(1, len(prompt), ids(20, 8), False)
    runner.feed(1, len(prompt) + 20, ids(3, 9), False)
    return before, state.digest(1)


@pytest.fixture(scope="module")
def few_frames():
    """Fewer pages on the card than conversations with a resident page each have: little has to be read."""
    with mock.patch("strata.engine.state.slots.frames_of", lambda *figures: FRAMES if figures[-1] else None):
        yield


@pytest.fixture(scope="module", params=["fp32", pytest.param("k8v4", marks=pytest.mark.soak)])
def found(request, any_card, pack, few_frames) -> list[dict[str, tuple]]:
    """What happens with all keys and values on the card, then with those of two pages."""
    results: list[dict[str, tuple]] = []
    for kv_resident in (0, PAGE):
        runner, results = made(any_card(), pack, kv_resident, kv=request.param), [*results, {}]
        for scene in (conversation, slots, parked):
            results[-1][scene.__name__] = scene(runner)
            runner.state.check()
            assert (runner.state.pages.n_far > 0) == bool(kv_resident)
    return results


@pytest.mark.parametrize("scene", ["conversation", "slots", "parked"])
def test_texts_and_states_are_those_with_all_keys_and_values_on_the_card(found, scene):
    assert found[1][scene] == found[0][scene]


@pytest.mark.soak  # the emulated card takes a minute for it
def test_windows_with_drafts_and_rounds_beside_pages_in_ram_say_the_same(any_card, trunk, draft, few_frames):
    """Rounds feed themselves and are started ahead, across the edge of a page that makes another one leave."""
    found = []
    for kv_resident in (0, PAGE):
        options = msgspec.structs.replace(OPTIONS, kv_resident=kv_resident, spec=3, mtp="", batch=0, eos_ids=())
        runner = CudaRunner(trunk, options, draft, any_card())
        runner.warm()
        prompt, how = ids(3 * PAGE - 9, 11), Sampling()
        logits = None
        for begin in range(0, len(prompt), CHUNK):
            logits = runner.feed(SOLO, begin, prompt[begin : begin + CHUNK], begin + CHUNK >= len(prompt))
        tokens = [*prompt.tolist(), runner.sample(logits, prompt, how, len(prompt))]
        row = Row(SOLO, np.array(tokens, np.int32), how, 0)
        tokens += runner.verify([row._replace(drafts=(5, 6))])[0]
        while len(tokens) < len(prompt) + 16:
            tokens += runner.round(Row(SOLO, np.array(tokens, np.int32), how, 0), 2).tokens
        while runner.state.length(SOLO) < len(prompt) + 20:
            tokens += runner.verify([Row(SOLO, np.array(tokens, np.int32), how, 0)])[0]
        found.append((tokens[: len(prompt) + 20], runner.state.length(SOLO), runner.state.digest(SOLO)))
        assert (runner.state.pages.n_far > 0) == bool(kv_resident)
    assert found[0] == found[1]


def test_what_is_resident_is_said_and_what_a_context_does_not_reach_is_not(emulated_card, pack):
    spec = pack.spec
    with emulated_card.plugged_in():
        for kv_resident, wanted in ((PAGE, PAGE), (CONTEXT, 0), (0, 0)):
            runner = made(emulated_card.driver(), pack, kv_resident)
            options = msgspec.structs.replace(OPTIONS, kv_resident=kv_resident)
            assert dict(engine_info(options, spec.vocab, 0, runner.info()).values)["kv_resident"] == wanted
            assert (runner.state.pages.layers[0].far is not None) == bool(wanted)


def test_ram_that_does_not_hold_what_the_card_lacks_is_refused_with_what_helps(emulated_card, pack, monkeypatch):
    monkeypatch.setattr(resident, "ram", lambda: Memory(1 << 10, 1 << 10))
    with emulated_card.plugged_in(), pytest.raises(Refused, match=r"keys and values in RAM take .* leave out --kv-r"):
        made(emulated_card.driver(), pack, PAGE)

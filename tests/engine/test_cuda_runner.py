"""Requests on a card: the texts of the host, stops and sessions as on the host, memory that is refused at start."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from strata.engine import cuda_runner, window_cost
from strata.engine.cuda_runner import CudaRunner
from strata.engine.device.arena import MIB
from strata.engine.device.base import Memory
from strata.engine.experts import helpers, learned, tier
from strata.engine.memory.profile import read_profile
from strata.engine.model import resident
from strata.engine.model.resident import RESERVE
from strata.engine.options import Options, Refused
from strata.engine.pack import ModelSpec, open_pack
from strata.engine.runner import ModelRunner
from strata.engine.schedule.live import Path
from strata.engine.schedule.ports import SOLO, Row, Rules
from strata.engine.schedule.short import NO_SHORT, ShortReads
from strata.engine.schedule.solo import Request
from strata.engine.state.checkpoints import CacheRules
from strata.engine.state.conversations import Conversations
from strata.kernels.cuda.compile import DeviceError
from strata.kernels.ops import Sampling
from strata.protocol.lines import Done, Progress, Resume, SlotDone, SlotToken, Token

PACK, CONTEXT, CHUNK, END = "odd-q8_0", 52, 18, 1000
REHEARSES = False  # slots start with rehearsals in test_cuda_growth.py, places of experts in experts/
OPTIONS = Options(pack="", max_context=CONTEXT, prefill=CHUNK, short_read=0, verify_accounts=True, pcie_frac=1.0)
DRAWN = Sampling(temperature=1.0, seed=5)
PENALISED = Sampling(temperature=0.8, seed=7, penalty_repeat=1.3, penalty_present=0.5)


@pytest.fixture(scope="module")
def pack(packs):
    return open_pack(packs[PACK])


@pytest.fixture(scope="module")
def host(pack):
    return ModelRunner(pack, replace_options(batch=2))


@pytest.fixture(scope="module")
def runner(any_card, pack):
    made = CudaRunner(pack, replace_options(device="cuda", batch=2), driver=any_card())
    made.warm()
    return made


def replace_options(**changes: object) -> Options:
    return msgspec.structs.replace(OPTIONS, **changes)


def ids(n: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 900, n).astype(np.int32)


def path_of(runner, chunk: int = CHUNK, end_ids: Collection[int] = (END,), short: ShortReads = NO_SHORT) -> Path:
    """A schedule on the runner with fresh books; only the live session is continued. Its clock stands still, so slots
    have one window between two chunks."""
    for slot in range(runner.state.n_slots + runner.state.n_checkpoints):
        runner.state.drop(slot)
    cache = CacheRules(1, every=0, root=0)
    sessions = Conversations(runner.state, runner.n_slots, cache, None, turn_token=10**6, verify=True)
    rules = Rules(chunk=chunk, max_context=CONTEXT, end_ids=end_ids, n_slots=runner.n_slots, verify=True, short=short)
    return Path(runner, sessions, rules, clock=lambda: 0.0)


def run(runner, requests, stop_after: int = 0, chunk: int = CHUNK, short: ShortReads = NO_SHORT) -> list[tuple]:
    """Requests through one solo path: (tokens, reused, finish). A stop comes for the first after so many tokens."""
    path = path_of(runner, chunk, short=short)
    results = []
    for request in requests:
        events = path.start(request)
        while path.busy:
            tokens = [event for event in events if isinstance(event, Token)]
            events += path.step(bool(stop_after) and not results and len(tokens) >= stop_after)
        tokens = [event.id for event in events if isinstance(event, Token)]
        reused = next(event.reused for event in events if isinstance(event, Resume))
        results.append((tokens, reused, events[-1].finish))
        assert isinstance(events[-1], Done)
    return results


def test_texts_are_those_of_the_host_whatever_is_sampled_and_however_it_is_read(runner, host):
    long = ids(CHUNK + 3)
    requests = [
        Request(long[:3], 3, Sampling()),
        Request(long, 4, DRAWN),
        Request(long[:6], 4, PENALISED, penalty_last_n=4),
        Request(ids(5), 4, PENALISED, penalty_last_n=64),
    ]
    assert run(runner, requests) == run(host, requests)


def test_chunks_of_a_few_rows_are_windows_with_the_same_text(runner, host):
    request = Request(ids(11, 8), 2, DRAWN)
    ((tokens, _, _),) = run(runner, [request], chunk=4)
    assert len(tokens) == 2
    assert run(host, [request], chunk=4)[0][0] == tokens


SHORT = ShortReads(most=CHUNK, rows=8)


def test_a_prompt_read_through_windows_leaves_tokens_and_state_of_the_prompt_path_and_of_the_host(runner, host):
    """Whole windows without logits, the last one with them; the next turn's pieces; a read that is longer."""
    first = Request(ids(17, 9), 3, PENALISED, penalty_last_n=64)

    def turns(each, short: ShortReads) -> tuple[list[tuple], str]:
        ((tokens, _, _),) = run(each, [first], short=short)
        following = np.concatenate([first.prompt, tokens, ids(8, 10)]).astype(np.int32)
        longer = np.concatenate([following, ids(CHUNK + 1, 11)]).astype(np.int32)
        found = run(each, [first, Request(following, 2, DRAWN), Request(longer, 1, Sampling())], short=short)
        return found, each.state.digest(SOLO)

    want = turns(runner, NO_SHORT)
    assert turns(runner, SHORT) == want
    assert turns(host, SHORT)[0] == turns(host, NO_SHORT)[0] == want[0]
    assert turns(host, SHORT) == turns(host, NO_SHORT)


def test_the_logits_behind_windows_of_a_prompt_are_those_of_the_prompt_path(runner):
    tokens, found = ids(CHUNK, 12), []
    for cuts in ((CHUNK,), (8, 16, CHUNK), (5, 13, CHUNK)):
        runner.state.reset(SOLO)
        for begin, end in pairwise((0, *cuts)):
            logits = runner.feed(SOLO, begin, tokens[begin:end], end == CHUNK)
        found.append(runner._device.read(logits).tobytes())
    assert found[0] == found[1] == found[2]


def test_slots_go_on_beside_a_read_through_windows(runner, host):
    arrivals = [(0, asked(ids(5), 9, **GROWING)), (1, asked(ids(CHUNK - 1, 2), 3)), (None, asked(ids(12, 3), 3))]
    got = batch(runner, arrivals, short=SHORT)
    assert got == batch(host, arrivals, short=SHORT)
    assert sorted(map(repr, got)) == sorted(map(repr, batch(host, arrivals))), "the same, in another order"


@pytest.mark.parametrize("stop_after", [1, 3])
def test_a_stop_with_a_window_under_way_leaves_the_session_of_the_host(runner, host, stop_after):
    first = Request(ids(4, 2), 20, DRAWN)
    tokens = run(host, [first], stop_after)[0][0]
    again = Request(np.concatenate([first.prompt, tokens, ids(2, 9)]).astype(np.int32), 2, Sampling())
    got = run(runner, [first, again], stop_after)
    assert got == run(host, [first, again], stop_after)
    assert got[0][2] == "cancel" and got[1][1] == 4 + len(tokens) - 1


def test_a_session_continues_after_its_end(runner, host):
    first = Request(ids(3, 3), 3, DRAWN)

    def turns(each):
        ((tokens, _, _),) = run(each, [first])
        following = np.concatenate([first.prompt, tokens, ids(3, 4)]).astype(np.int32)
        other = np.concatenate([following[:5], ids(2, 5)]).astype(np.int32)
        return run(each, [first, Request(following, 2, Sampling()), Request(other, 2, Sampling())])

    got = turns(runner)
    assert got == turns(host)
    assert got[1][1] == 5, "all but the last token of the answer"


def test_an_answer_runs_to_the_end_of_the_context(runner, host):
    n = 2 * CHUNK + 5
    request = Request(ids(n, 6), CONTEXT - n, Sampling())
    tokens = run(runner, [request])[0][0]
    assert len(tokens) == CONTEXT - n
    assert run(host, [request])[0][0] == tokens


GROWING = {"how": PENALISED, "last_n": 64}
SLIDING = {"how": PENALISED, "last_n": 7}


def asked(prompt: np.ndarray, max_new: int, how: Sampling = DRAWN, last_n: int = 0) -> Request:
    return Request(prompt, max_new, how, last_n)


def batch(
    runner, arrivals, chunk: int = CHUNK, windows: int = 2, stop: int = -1, short: ShortReads = NO_SHORT
) -> list[object]:
    """All that is said of requests that come `windows` windows after each other, without times. `stop`: a slot that is
    stopped before the last one comes. A request with a slot of None is a solo one."""
    path, events = path_of(runner, chunk, short=short), []
    for number, (slot, request) in enumerate(arrivals):
        if number == len(arrivals) - 1 and stop >= 0:
            events += path.stop_slot(stop)
        events += path.start(request) if slot is None else path.admit(slot, request)
        while path.busy:
            events += path.step()
        for _ in range(windows):
            events += path.step() if path.decoding else []
    while path.decoding:
        events += path.step()
    return [event for event in map(timeless, events) if not isinstance(event, Progress)]


def timeless(event: object) -> object:
    if isinstance(event, SlotDone):
        return msgspec.structs.replace(event, ms=0.0)
    return msgspec.structs.replace(event, prompt_ms=0.0, decode_ms=0.0) if isinstance(event, Done) else event


def test_slots_say_on_a_card_what_they_say_on_the_host_beside_reads_and_stops(runner, host):
    """Windows of one and two slots, between chunks of many rows and of few, with lists that grow and that slide."""
    cases = [
        ([(0, asked(ids(5), 7, **GROWING)), (1, asked(ids(CHUNK + 3, 2), 3))], {}),
        ([(1, asked(ids(6, 3), 8, **SLIDING)), (0, asked(ids(4, 4), 4, **GROWING))], {"chunk": 3}),
        ([(0, asked(ids(3, 5), 12)), (1, asked(ids(4, 6), 7)), (0, asked(ids(5, 7), 3))], {"stop": 0}),
        ([(0, asked(ids(3, 5), 6)), (None, asked(ids(4, 6), 3, **SLIDING)), (1, asked(ids(5, 7), 3))], {"windows": 1}),
    ]
    for arrivals, how in cases:
        assert batch(runner, arrivals, **how) == batch(host, arrivals, **how)


def test_a_slot_says_what_it_says_alone_and_holds_the_same_state(runner):
    requests = [asked(ids(5, 11), 5, last_n=3, how=PENALISED), asked(ids(8, 12), 5)]
    alone, digests = [], []
    for request in requests:
        alone.append(run(runner, [request])[0][0])
        digests.append(runner.state.digest(SOLO))
    events = batch(runner, list(enumerate(requests)), windows=1)
    firsts = [event.id for event in events if isinstance(event, Token)]
    for slot in range(2):
        said = [event.id for event in events if isinstance(event, SlotToken) and event.slot == slot]
        assert [firsts[slot], *said] == alone[slot]
        assert runner.state.digest(1 + slot) == digests[slot]


def test_a_slot_that_ends_with_a_window_under_way_leaves_no_trace(runner, host):
    """The end token of one slot is seen while the next window of both runs; both conversations go on afterwards."""
    first, second = asked(ids(5, 21), 8), asked(ids(6, 22), 8)
    tokens = run(host, [first])[0][0]
    end = next(token for i, token in enumerate(tokens) if i >= 3 and token not in tokens[:i])

    def turns(each) -> list[object]:
        path, events = path_of(each, end_ids={end}), []
        for slot, request in ((0, first), (1, second)):
            events += path.admit(slot, request)
            while path.busy:
                events += path.step()
        while path.decoding:
            events += path.step()
        said = [event.id for event in events if isinstance(event, SlotToken) and event.slot == 0]
        assert said[-1] == end
        following = np.concatenate([first.prompt, tokens[:1], said, ids(2, 23)]).astype(np.int32)
        events += path.admit(0, asked(following, 3))
        while path.busy or path.decoding:
            events += path.step()
        return [timeless(event) for event in events if not isinstance(event, Progress)]

    dropped = runner.cost.dropped
    got = turns(runner)
    assert runner.cost.dropped > dropped
    assert got == turns(host)
    assert [event.reused for event in got if isinstance(event, Resume)][-1] > len(first.prompt)


def test_windows_of_slots_are_started_ahead_and_use_what_was_captured_at_the_start(runner):
    path = path_of(runner)
    path.admit(0, asked(ids(4, 30), 1))  # the window that reads four tokens is captured when it is first used
    while path.busy or path.decoding:
        path.step()
    graphs, before = runner._windows.n_graphs, replace(runner.cost)
    for slot, seed in ((0, 31), (1, 32)):
        path.admit(slot, asked(ids(4, seed), 8))
        while path.busy:
            path.step()
    while path.decoding:
        path.step()
    assert runner._windows.n_graphs == graphs
    assert runner.cost.ahead - before.ahead == 5, "of seven windows: not behind an admission, and not behind the last"
    assert runner.cost.dropped == before.dropped


def test_windows_are_started_ahead_and_the_host_is_told_what_it_took(runner):
    path_of(runner)
    before = replace(runner.cost)
    run(runner, [Request(ids(6, 7), 6, DRAWN)])
    cost = runner.cost
    assert cost.ahead - before.ahead == 4, "of five windows, the last of which is known to be the last"
    assert cost.dropped == before.dropped
    assert cost.windows > before.windows and cost.seconds > before.seconds
    assert "us a window" in runner.costs and "started ahead" in runner.costs


def test_time_between_requests_is_no_work_of_the_host_for_a_window(runner, monkeypatch):
    """It is what --stats says the host takes."""
    hour, clock, late = 3600.0, time.perf_counter, [0.0]
    monkeypatch.setattr(window_cost, "time", SimpleNamespace(perf_counter=lambda: clock() + late[0]))
    path_of(runner)
    run(runner, [Request(ids(6, 7), 6, DRAWN)])
    before, late[0] = runner.cost.windows, hour
    run(runner, [Request(ids(6, 8), 6, DRAWN)])
    assert runner.cost.windows > before and runner.cost.longest < hour > runner.cost.seconds


def test_the_log_says_of_each_request_what_the_host_took_for_its_windows(runner, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(cuda_runner, "log", said.append)
    monkeypatch.setattr(runner, "_stats", True)
    path_of(runner)
    runner.request_over()
    before, said[:] = replace(runner.cost), []
    for n in (6, 4, 1):
        run(runner, [Request(ids(6, n), n, DRAWN)])
        runner.request_over()
    told = window_cost.laps("\n".join(said))
    assert [lap.windows for lap in told] == [3, 1, 0], "all but the first, which none was before, and the last"
    spent = sum(lap.us * lap.windows for lap in told) / 1e6
    assert spent == pytest.approx(runner.cost.seconds - before.seconds, rel=0.01)


def test_logits_of_another_position_are_refused(runner):
    path_of(runner)
    logits = runner.feed(SOLO, 0, ids(3), True)
    runner.sample(logits, ids(3), Sampling(), 3)
    with pytest.raises(RuntimeError, match="the logits before position 9 are gone"):
        runner.sample(logits, ids(3), Sampling(), 9)
    runner.window([Row(SOLO, ids(4), Sampling(), 0)], False)
    with pytest.raises(RuntimeError, match="are gone"):
        runner.sample(logits, ids(3), Sampling(), 3)


def test_info_tells_the_card(runner):
    info = runner.info()
    assert info["prefill_chunk"] == CHUNK == runner.chunk
    assert info["window_rows"] == 8 and info["vram_free_mib"] > 0
    assert info["expert_slots"] == 6 * 24 and " " not in info["gpu"]
    assert (info["prefill_memory"], info["vram_reserve_mib"]) == ("own", RESERVE // MIB)
    assert runner._resident.prompt_memory == ("own", runner._device.workspace_bytes)
    assert info["prefill_mib"] == runner._device.workspace_bytes // MIB


def same_as_host(tiered: CudaRunner, host: ModelRunner, spec: ModelSpec, n: int) -> Done:
    """A request of n tokens and two slots say what they say on the host; the end of the request when it is repeated,
    with what windows have picked."""
    request = Request(ids(CHUNK + 3), n, PENALISED, penalty_last_n=64)
    assert run(tiered, [request]) == run(host, [request])
    slots = [(0, asked(ids(5), 4, **GROWING)), (1, asked(ids(6, 2), 3))]
    assert batch(tiered, slots) == batch(host, slots)
    path = path_of(tiered)
    path.rules = replace(path.rules, routed=spec.layers * spec.experts_used, in_vram=True, hits=tiered.solo_hits)
    events = path.start(request)
    while path.busy:
        events += path.step()
    return events[-1]


@pytest.mark.parametrize("beside", [0, 1], ids=["waiting", "beside"])
def test_requests_with_a_quarter_of_the_experts_in_vram_are_those_of_the_host_and_say_where_experts_lay(
    any_card, pack, host, beside
):
    spec = pack.spec
    quarter = spec.layers * spec.experts // 4
    rules = {"adapt_every": 1, "adapt_min_gain": 0.0, "adapt_async": beside}
    how = replace_options(device="cuda", batch=2, expert_cache=quarter, **rules)
    tiered = CudaRunner(pack, how, driver=any_card())
    tiered.warm()
    assert tiered.info()["expert_slots"] == quarter
    done = same_as_host(tiered, host, pack.spec, 6)
    assert done.lookups == 5 * spec.layers * spec.experts_used == done.hits + done.ram_blobs
    assert 0 < done.hits < done.lookups and done.offloaded == done.ram_blobs
    assert " experts have changed places in " in tiered.costs and "; 0 experts" not in tiered.costs
    figures = tiered.figures()
    assert figures["expert_rounds"] > 0 < figures["expert_swaps"] and figures["expert_reads"] < figures["expert_picks"]


def test_requests_whose_missing_experts_the_processor_computes_are_those_of_the_host(any_card, pack, host):
    how = replace_options(device="cuda", batch=2, expert_cache=36, adapt_every=1, adapt_min_gain=0.0, pcie_frac=0.0)
    helped = CudaRunner(pack, how, driver=any_card())
    helped.warm()
    done = same_as_host(helped, host, pack.spec, 5)
    assert done.offloaded == 0 < done.ram_blobs == done.lookups - done.hits, "the processor computes all of them"
    helped.close()
    figures = helped.figures()
    assert helped.info()["pcie_frac"] == 0.0 and figures["expert_reads"] == 0
    assert figures["expert_helped"] > 0 < figures["expert_helped_ms"]
    assert "; the processor has computed " in helped.costs


@pytest.mark.parametrize(
    "where", ["half", *(pytest.param(where, marks=pytest.mark.soak) for where in ("no-ram", "mapped"))]
)
def test_requests_whose_missing_experts_lie_in_the_file_are_those_of_the_host(any_card, pack, host, monkeypatch, where):
    """As asked for, beside some that are locked, and on a machine with too little RAM for any."""
    quarter = pack.spec.layers * pack.spec.experts // 4
    size = sum(pack[f"blk.0.ffn_{name}_exps.weight"].data.size for name in ("gate", "up", "down"))
    changes = {"mmap_experts": True} if where == "mapped" else {}
    if where == "half":
        monkeypatch.setenv("STRATA_ARENA_PIN_GIB", f"{0.4 * pack.spec.layers * size / (1 << 30):.9f}")
    if where == "no-ram":
        monkeypatch.setattr(resident, "ram", lambda: Memory(1 << 40, 1 << 20))
    rules = {"adapt_every": 1, "adapt_min_gain": 0.0}
    how = replace_options(device="cuda", batch=2, short_read=6, expert_cache=quarter, **rules, **changes)
    tiered = CudaRunner(pack, how, driver=any_card())
    tiered.warm()
    assert tiered.short == ShortReads(6, 8), "a start does not read the file to time reads"
    placement = tiered._resident.store.placement
    assert placement.in_cache == quarter and placement.filed.any() and placement.in_ram.any() == (where == "half")
    assert tiered.info()["arena_mib"] == placement.locked_bytes // MIB
    done = same_as_host(tiered, host, pack.spec, 5)
    assert done.file_blobs > 0 == done.offloaded or where == "half"
    assert 0 < done.lookups - done.hits <= done.ram_blobs + done.file_blobs, "pieces of prompts count as well"
    assert done.file_mb == pytest.approx(done.file_blobs * size / pack.spec.experts / 1e6)
    assert where == "half" or done.ram_blobs == 0
    figures = tiered.figures()
    assert figures["expert_filed"] >= done.file_blobs and figures["expert_swaps"] > 0
    assert " in the file, " in tiered.costs
    tiered.close()


def test_float_experts_that_fit_no_ram_are_refused_with_what_helps(emulated_card, packs):
    how = replace_options(device="cuda", expert_cache=2, mmap_experts=True)
    with pytest.raises(Refused, match=r"experts of float weights are computed on the card only.*or leave out --mmap"):
        CudaRunner(open_pack(packs["odd-f32"]), how, driver=emulated_card.driver())


@pytest.mark.parametrize(("prompt", "max_new"), [(3, 1), (12, 3)], ids=["before-its-first-token", "while-it-decodes"])
def test_a_processor_that_does_not_answer_ends_the_request_with_a_reason(
    emulated_card, pack, monkeypatch, prompt, max_new
):
    monkeypatch.setattr(helpers, "LIMIT_S", 1.0)
    with emulated_card.plugged_in() as card:
        how = replace_options(device="cuda", expert_cache=1, pcie_frac=0.5)
        runner = CudaRunner(pack, how, driver=card.driver(rehearses=False))
        runner.warm()
        runner._resident.store.helpers._server.stop()
        with pytest.raises(DeviceError, match=r"has not computed experts of layer 0 within 1 s; .*pcie-frac 1"):
            run(runner, [Request(ids(prompt), max_new, Sampling())])


def test_what_windows_pick_is_counted_and_kept_for_the_next_start(any_card, pack, host, tmp_path, monkeypatch):
    """Without rounds the cache stays as it is, so of picks of one row those that are no hits are reads."""
    monkeypatch.setattr(learned, "LEAST_WINDOWS", 4)
    monkeypatch.setattr(tier, "LOOK_EVERY", 1)
    spec, path = pack.spec, tmp_path / "hot.strp"
    quarter = spec.layers * spec.experts // 4
    names = {"expert_profile": str(path), "expert_profile_save": str(path), "expert_profile_save_every": 2}
    how = replace_options(device="cuda", expert_cache=quarter, adapt_every=0, **names)
    requests = [Request(ids(4, seed), 5, Sampling()) for seed in (1, 2, 3)]

    def answered(runner: CudaRunner) -> int:
        """How many experts the requests have read."""
        runner.warm()
        for number, request in enumerate(requests, 1):
            assert run(runner, [request]) == run(host, [request])
            runner.request_over()
            assert path.exists() or number < 2, "the file is written behind the second request"
        runner.close()
        figures, rows = runner.figures(), len(requests) * (4 + 4)
        assert figures["expert_picks"] == rows * spec.layers * spec.experts_used, "of the prompts' windows as well"
        (size,) = set(runner._resident.store.placement.sizes)
        assert figures["expert_read_mib"] == figures["expert_reads"] * size.n_bytes // MIB
        assert 0 < figures["expert_reads"] <= figures["expert_picks"] - runner.solo_hits().hits
        assert figures["expert_rounds"] == figures["expert_swaps"] == figures["expert_streamed_mib"] == 0
        return figures["expert_reads"]

    before = answered(CudaRunner(pack, how, driver=any_card()))
    profile = read_profile(path, spec.layers, spec.experts)
    assert len(profile.pairs) == spec.layers * spec.experts and profile.slots == quarter
    after = answered(CudaRunner(pack, how, driver=any_card()))
    assert after < 0.9 * before


@pytest.mark.parametrize(
    ("total", "changes", "message"),
    [
        (
            1 * MIB,
            {},
            r"the weights take 2.84 MiB .* are free; what every token reads lies there: use a smaller file",
        ),
        (
            0,
            {"vram_limit_mib": 4, "max_context": 4096},
            r"the state take .* within --vram-limit-mib 4; use a smaller",
        ),
        (
            RESERVE,
            {},
            r"no prompt can be read: 0.48 GiB are left beside weights and state, .*; use a smaller --max-context",
        ),
    ],
    ids=["weights", "state", "workspace"],
)
def test_a_card_that_is_too_small_says_what_is_missing_and_what_helps(emulated_card, pack, total, changes, message):
    with emulated_card.plugged_in() as card, pytest.raises(Refused, match="^--device cuda: " + message):
        CudaRunner(pack, replace_options(device="cuda", **changes), driver=card.driver(total or 4 << 30))


def test_an_n_gram_table_that_ram_does_not_hold_is_refused_before_it_is_locked(emulated_card, pack, monkeypatch):
    monkeypatch.setattr(resident, "ram", lambda: Memory(1 << 10, 1 << 10))
    message = r"the n-gram table takes .* of page-locked RAM, 0.00 MiB are free; .*--ple-io vram"
    with emulated_card.plugged_in() as card, pytest.raises(Refused, match=message):
        CudaRunner(pack, replace_options(device="cuda", ple_io="ram"), driver=card.driver())


def test_automatic_chunks_are_as_long_as_the_context_allows(emulated_card, pack):
    with emulated_card.plugged_in() as card:
        how = replace_options(device="cuda", prefill=0, max_context=40)
        small = CudaRunner(pack, how, driver=card.driver(rehearses=False))
    assert small.chunk == 40


def test_the_longest_chunk_leaves_room_for_the_draw_behind_it(any_card, trunk):
    """Its residuals fill the workspace, since it is what windows need less of."""
    n = 72
    made = CudaRunner(trunk, replace_options(device="cuda", max_context=n + 8, prefill=n), driver=any_card())
    logits = made.feed(SOLO, 0, ids(n), True)
    assert made.sample(logits, ids(20, 3), PENALISED, n) >= 0


def test_a_request_that_begins_with_little_free_memory_is_said_with_how_much(runner, monkeypatch, caplog):
    """Other programs of the desktop take some behind the start."""
    for free, said in ((1024 * MIB, []), (1024 * MIB - 1, ["request: 1023 MiB of VRAM are free, less than 1024"])):
        monkeypatch.setattr(runner._device, "memory", lambda free=free: Memory(8 << 30, free))
        with caplog.at_level(logging.INFO, "strata.engine"):
            runner.request_begins()
        assert caplog.messages == said

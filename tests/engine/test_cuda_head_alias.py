"""Prompts that have the head's memory: texts and states as without, few loads, a head that is proved."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path as FilePath
from unittest import mock

import msgspec
import numpy as np
import pytest

from strata.engine.cuda_runner import CudaRunner
from strata.engine.device.arena import MIB
from strata.engine.memory.loan import LoanPlan, LoanRoom, Piece, Planner
from strata.engine.model.head_loan import HeadLost
from strata.engine.model.resident import Resident
from strata.engine.options import Options
from strata.engine.pack import open_pack
from strata.engine.schedule.live import Path
from strata.engine.schedule.ports import SOLO, Rules
from strata.engine.schedule.solo import Request
from strata.engine.state.checkpoints import CacheRules
from strata.engine.state.conversations import Conversations
from strata.kernels.ops import Sampling
from strata.protocol.lines import Done, Token

ENGINE = FilePath(__file__).with_name("device") / "lending_engine.py"
CONTEXT, CHUNK, STAYS = 80, 22, 10
OPTIONS = Options(
    pack="", max_context=CONTEXT, prefill=CHUNK, device="cuda", short_read=0, expert_cache=1, pcie_frac=1.0,
    verify_accounts=True,
)  # fmt: skip
DRAWN = Sampling(temperature=1.0, top_k=40, seed=5)


def lending(*in_head: str, chunk: int = CHUNK) -> Planner:
    """A plan with just these pieces in the head, and a ring of two experts; the packs' heads are too small for more."""

    def plan(room: LoanRoom, price) -> LoanPlan:
        whole, work = price.parts(chunk)
        own = end = -(-(whole + room.beside) // 256) * 256
        pieces, at = [], 0
        for name, size in (("work", work), ("ring", room.ring_step)):
            lent = name in in_head
            begin = at if lent else end
            pieces.append(Piece(lent, begin, begin + size))
            at, end = (at + size, end) if lent else (at, end + size)
        assert at <= room.head, f"{in_head} take {at} bytes, the head has {room.head}"
        return LoanPlan(chunk, 0, STAYS, Piece(False, 0, own), *pieces, max(end, 4 * price(STAYS)), room.beside)

    return plan


@pytest.fixture(scope="module")
def pack(packs):
    return open_pack(packs["odd-q8_0"])


@pytest.fixture(scope="module")
def streaming():
    """Chunks that have the head's memory stream their experts."""
    with mock.patch.dict(Resident.__init__.__kwdefaults__, stream_min=STAYS + 1):
        yield


def made(driver, pack, *in_head: str, chunk: int = CHUNK, draft=None, **changes: object) -> CudaRunner:
    """A runner that lends these pieces; without any it has no alias."""
    changes = {"prefill_head_alias": bool(in_head), "prefill": chunk, **changes}
    runner = CudaRunner(
        pack, msgspec.structs.replace(OPTIONS, **changes), draft, driver, loan=lending(*in_head, chunk=chunk)
    )
    runner.warm()
    return runner


def ids(n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 900, n).astype(np.int32)


def path_of(runner: CudaRunner) -> Path:
    for slot in range(runner.state.n_slots + runner.state.n_checkpoints):
        runner.state.drop(slot)
    sessions = Conversations(runner.state, 0, CacheRules(1, every=0, root=0), None, turn_token=10**6, verify=True)
    return Path(runner, sessions, Rules(chunk=runner.chunk, max_context=CONTEXT, end_ids=(), verify=True))


def answered(path: Path, request: Request, chunks: int = 1000) -> list[int]:
    """The tokens of a request, which is stopped behind so many units of work."""
    events = path.start(request)
    for unit in range(CONTEXT):
        if not path.busy:
            break
        events += path.step(unit >= chunks)
    assert isinstance(events[-1], Done)
    return [event.id for event in events if isinstance(event, Token)]


LENGTHS = (3, STAYS, STAYS + 1, CHUNK + 1, 2 * CHUNK + 9)
"""A window, the longest read that leaves the head, one that does not, and chunks with tails of a window and of more."""


def texts(runner: CudaRunner) -> list[tuple]:
    """Per request its tokens, and the digest of the state that it leaves."""
    found = []
    for seed, n in enumerate(LENGTHS):
        path = path_of(runner)
        found.append((answered(path, Request(ids(n, seed), 4, DRAWN)), runner.state.digest(SOLO)))
    return found


FOLLOWING = (Request(ids(5, 4), 3, DRAWN), Request(ids(9, 5), 3, DRAWN))


@pytest.fixture(scope="module")
def wanted(any_card, pack, streaming):
    """Texts and states without the alias, and the tokens of two requests that follow each other."""
    runner = made(any_card(), pack)
    assert runner.info()["head_alias"] == 0
    path = path_of(runner)
    return texts(runner), [answered(path, each) for each in FOLLOWING]


@pytest.mark.parametrize(
    ("in_head", "chunk", "eager"),
    [
        (("work",), 11, True),
        pytest.param(("ring",), CHUNK, True, marks=pytest.mark.soak),
        pytest.param(("ring",), 11, False, marks=pytest.mark.soak),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, tuple) else str(value),
)
def test_texts_and_states_are_those_without_the_alias(any_card, pack, wanted, streaming, in_head, chunk, eager):
    driver = any_card()
    driver.eager = eager
    runner = made(driver, pack, *in_head, chunk=chunk)
    info, plan = runner.info(), runner._resident.loan.plan
    assert (runner.chunk, info["head_alias"], info["prefill_memory"]) == (chunk, 1, "head")
    assert info["prefill_mib"] == (plan.own_bytes + plan.lent_bytes) // MIB
    assert texts(runner) == wanted[0]


def test_short_reads_whose_experts_lie_in_the_file_have_the_heads_memory_too(any_card, pack, wanted, streaming):
    """Their ring lies in it: were it not lent, the head would be overwritten."""
    driver = any_card()
    driver.eager = True
    runner = made(driver, pack, "ring", chunk=11, mmap_experts=True)
    assert texts(runner) == wanted[0]
    before = runner.figures()["head_loads"]
    answered(path_of(runner), Request(ids(STAYS, 1), 2, DRAWN))
    assert runner.figures()["head_loads"] == before + 1


def test_a_short_read_loads_no_head_and_a_long_one_loads_it_once(any_card, pack, streaming):
    """Behind a whole chunk experts of the next one are on their way to the ring; none of them reaches the head."""
    runner = made(any_card(), pack, "ring")
    loads = []
    for n in LENGTHS:
        before = runner.figures()["head_loads"]
        answered(path_of(runner), Request(ids(n, 1), 2, DRAWN))
        loads.append(runner.figures()["head_loads"] - before)
    assert loads == [int(n > STAYS) for n in LENGTHS]
    runner._resident.store._ring._copies.finish()
    head = runner._device.read(runner._resident.loan._bound.data)
    np.testing.assert_array_equal(head, pack.weight("output.weight").data)


def test_a_read_that_is_given_up_leaves_the_head_lent_and_the_next_request_brings_it_back(
    any_card, pack, wanted, streaming
):
    runner = made(any_card(), pack, "work", chunk=11)
    loan, head, path = runner._resident.loan, pack.weight("output.weight").data, path_of(runner)
    for times, order in enumerate((1, -1)):  # a window comes first, or a chunk that would leave the head
        assert not answered(path, Request(ids(40, 3), 3, DRAWN), chunks=2)
        assert loan.lent and loan.loads == times
        assert (runner._device.read(loan._bound.data) != head).any(), "a read has written to it"
        assert [answered(path, each) for each in FOLLOWING[::order]] == wanted[1][::order]
        assert not loan.lent and loan.loads == times + 1
        np.testing.assert_array_equal(runner._device.read(loan._bound.data), head)


@pytest.mark.soak  # the emulated card takes a minute for it
def test_a_draft_layer_reads_long_prompts_beside_the_head(any_card, trunk, draft, streaming):
    """Its passes lie in the same parts, and windows with drafts read the head."""
    found = []
    for in_head in ((), ("nothing",)):  # of this pack the head is too small for any piece
        runner = made(any_card(), trunk, *in_head, draft=draft, mtp="", spec=3)
        path = path_of(runner)
        runner.feed(SOLO, 0, ids(CHUNK, 1), False)
        runner.feed(SOLO, CHUNK, ids(STAYS, 2), True)
        states = [runner.drafter.book.state.digest(0), runner.state.digest(SOLO)]
        runner.state.reset(SOLO)
        found.append((states, [answered(path, Request(ids(n, 7), 4, Sampling())) for n in (CHUNK + 9, 5)]))
    assert found[0] == found[1]
    assert runner.figures()["head_loads"] == 2


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("--serve --mtp m --short-read 0 --batch 4", "excludes --batch 4"),
        ("--serve --mtp m", "excludes --short-read 64"),
        ("--mtp m --short-read 0", "needs --serve"),
    ],
)
def test_a_line_that_would_lose_the_head_ends_the_start_with_code_2_and_the_reason(packs, tmp_path, line, reason):
    options = f"--pack {packs['tiny-q8_0']} --device cuda --prefill-head-alias {line}".split()
    command = [sys.executable, str(ENGINE), str(tmp_path), *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, cwd=tmp_path)
    assert ended.returncode == 2 and f"--prefill-head-alias: {reason}" in ended.stderr
    assert ended.stdout.startswith("ERR --prefill-head-alias") == ("--serve" in line)


@pytest.mark.parametrize("how", ["moved", "changed"])
def test_a_head_that_moved_or_changed_ends_the_engine_before_it_says_a_token(
    any_card, pack, streaming, monkeypatch, how
):
    monkeypatch.setenv("STRATA_TEST_HEAD_MOVE", str(int(how == "moved")))
    runner = made(any_card(), pack, "ring")
    path = path_of(runner)
    short = answered(path, Request(ids(5, 1), 3, DRAWN))
    assert len(short) == 3
    if how == "changed":
        runner._resident.loan._kept[-1] ^= 1
    path.start(Request(ids(CHUNK + 3, 2), 3, DRAWN))
    events: list[object] = []
    with pytest.raises(HeadLost, match="moved" if how == "moved" else "is not what it was"):
        for _ in range(4):
            events += path.step()
    assert not any(isinstance(event, Token) for event in events)


def test_the_head_stays_where_the_plan_gains_nothing(any_card, pack, streaming):
    options = msgspec.structs.replace(OPTIONS, prefill_head_alias=True)
    for planner, changes in ((lambda room, price: None, {}), (lending("ring"), {"expert_cache": 0})):
        runner = CudaRunner(pack, msgspec.structs.replace(options, **changes), None, any_card(), loan=planner)
        assert runner._resident.loan is None and runner.info()["head_alias"] == 0
        assert "head_loads" not in runner.figures()

"""A card or a machine that has no memory when it is asked for the n-th time: a reason in one line, or the same texts.

In this process every eighth n, and every n as a soak; through the engine's own process, and below a server, a few: each
starts an emulated card.
"""

from __future__ import annotations

import importlib.util
import json
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import msgspec
import numpy as np
import pytest

from strata.engine.cuda_runner import CudaRunner
from strata.engine.device.arena import padded
from strata.engine.experts.placement import by_number
from strata.engine.memory.loan import LoanPlan, LoanRoom, Piece, Priced
from strata.engine.memory.profile import Profile, write_profile
from strata.engine.model.head_loan import HeadLoan
from strata.engine.model.resident import Resident
from strata.engine.model.slot_loan import SlotLoan
from strata.engine.options import Options, Refused
from strata.engine.pack import open_pack
from strata.engine.schedule.solo import Request
from strata.kernels.ops import Sampling

CONTEXT, CHUNK, STAYS = 52, 18, 10
FOREVER = 1 << 30
WHOLE = Options(pack="", device="cuda", max_context=CONTEXT, prefill=CHUNK, short_read=0)
QUARTER = msgspec.structs.replace(WHOLE, expert_cache=36)
REQUEST = Request(np.arange(5, 5 + CHUNK + 3, dtype=np.int32), 3, Sampling(temperature=1.0, seed=3))


def _load(name: str, path: Path) -> object:
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


failing_card = _load("strata_test_failing_card", Path(__file__).with_name("device") / "failing_card.py")


@pytest.fixture(scope="module")
def pack(packs):
    return open_pack(packs["odd-q8_0"])


def lent(room: LoanRoom, price: Priced) -> LoanPlan:
    """The ring of two experts in the head, whatever that gains."""
    whole, work = map(padded, price.parts(CHUNK))
    own = max(whole + work, 4 * price(STAYS))
    pieces = Piece(False, 0, whole), Piece(False, whole, whole + work), Piece(True, 0, room.ring_step)
    return LoanPlan(CHUNK, 0, STAYS, *pieces, own)


def started(emulated_card, pack, options: Options, first: int = 0, last: int = 0) -> tuple[CudaRunner, object]:
    # A rehearsal asks for what it asks for whether its kernels run or not; those of other modules run.
    driver = failing_card.FailingDriver(emulated_card.driver(rehearses=False), first, last)
    runner = CudaRunner(pack, options, driver=driver, loan=lent)
    runner.warm()
    return runner, driver


@pytest.fixture(scope="module")
def order(pack, tmp_path_factory):
    """A profile, with which prompts borrow slots."""
    layers, experts = pack.spec.layers, pack.spec.experts
    path = tmp_path_factory.mktemp("profile") / "order.strp"
    write_profile(path, Profile(layers, experts, 36, by_number(layers, experts)))
    return str(path)


SOAKED = [pytest.param(name, marks=pytest.mark.soak) for name in ("borrowed", "lent")]


@pytest.fixture(scope="module", params=["whole", "quarter", *SOAKED])
def plain(request, emulated_card, pack, order, answer):
    """Options, what a start asks for, what the request answers."""
    options = WHOLE if request.param == "whole" else QUARTER
    if request.param == "borrowed":
        options = msgspec.structs.replace(QUARTER, expert_profile=order)
    if request.param == "lent":
        options = msgspec.structs.replace(WHOLE, expert_cache=1, prefill_head_alias=True)
    with (
        emulated_card.plugged_in() as card,
        mock.patch("strata.engine.memory.prompt.KEPT_SLOTS", 1),
        mock.patch("strata.engine.memory.card.RING", 4),
        mock.patch("strata.engine.experts.plan.STAYS", STAYS),
        mock.patch.dict(Resident.__init__.__kwdefaults__, stream_min=STAYS + 1),
    ):
        runner, driver = started(card, pack, options)
        wanted = {"borrowed": SlotLoan, "lent": HeadLoan}.get(request.param, type(None))
        assert isinstance(runner._resident.loan, wanted)
        asked = list(driver.asked)
        tokens = answer(runner, REQUEST, CONTEXT)
        assert "a graph" in asked and len(driver.asked) >= len(asked)
        yield options, asked, tokens


@pytest.fixture(scope="module")
def outcome(answer) -> Callable[..., str]:
    """outcome(card, pack, options, first, last, tokens): what became of a start: its refusal, or "" if it answers."""

    def of(card, pack, options: Options, first: int, last: int, tokens: list[int]) -> str:
        before = threading.active_count()
        try:
            runner, _ = started(card, pack, options, first, last)
        except Refused as error:
            text = str(error)  # a reason is one line that says what happened
            assert text.startswith("--device cuda: ") and "\n" not in text, text
            assert "locked RAM" in text or "; " in text, f"no remedy: {text}"
            assert threading.active_count() <= before, "threads that load weights or compute experts go on"
            return text
        assert answer(runner, REQUEST, CONTEXT) == tokens
        return ""

    return of


every = pytest.mark.parametrize("step", [8, pytest.param(1, marks=pytest.mark.soak)])


@every
def test_a_start_that_gets_no_memory_for_the_nth_piece_says_so_or_serves_the_same_text(
    emulated_card, pack, plain, outcome, step
):
    options, asked, tokens = plain
    said = {}
    with emulated_card.plugged_in() as card:
        for n in range(1, len(asked) + 1, step):
            said[n] = outcome(card, pack, options, n, n, tokens)
    refused = {n for n, text in said.items() if text}
    assert refused and all(re.search(f"{failing_card.WORD}|the workspace .* does not fit", said[n]) for n in refused)
    assert not refused & {n for n, what in enumerate(asked, 1) if what == "a graph"}, "it runs without that graph"


@every
def test_memory_that_stays_away_from_the_nth_piece_on_ends_a_start_with_a_reason(
    emulated_card, pack, plain, outcome, step
):
    options, asked, tokens = plain
    first_graph = asked.index("a graph") + 1
    with emulated_card.plugged_in() as card:
        for n in range(1, first_graph, step):
            assert outcome(card, pack, options, n, FOREVER, tokens)
        assert outcome(card, pack, options, first_graph, FOREVER, tokens) == ""


def test_requests_that_get_no_memory_for_a_new_graph_give_the_same_text(emulated_card, pack, plain, answer):
    options, asked, tokens = plain
    with emulated_card.plugged_in() as card:
        runner, driver = started(card, pack, options, len(asked) + 1, FOREVER)
        assert answer(runner, REQUEST, CONTEXT) == tokens == answer(runner, REQUEST, CONTEXT)
        assert len(driver.asked) > len(asked), "the request asks for a graph of its own"


EMULATED = Path(__file__).with_name("device") / "emulated_engine.py"
ARGS = ("--device", "cuda", "--max-context", "300", "--prefill", "18", "--expert-cache", "36", "--eos-ids", "none")


@pytest.fixture(scope="module")
def kernels(request, tmp_path_factory) -> Path:
    """Where an emulated card keeps its kernels."""
    cache = getattr(request.config, "cache", None)
    return Path(cache.mkdir("emulated")) if cache else tmp_path_factory.mktemp("emulated")


@pytest.mark.parametrize("n", [1, 20, 45])
def test_an_engine_that_gets_no_memory_ends_with_a_line_and_code_2(start_engine, packs, kernels, n):
    engine = start_engine(
        str(EMULATED), str(kernels), "--serve", "--pack", str(packs["odd-q8_0"]), *ARGS, program=sys.executable,
        env={"FAIL_FROM": str(n)},
    )  # fmt: skip
    (error,) = engine.rest()
    assert error.text.startswith("--device cuda: ") and f"number {n} " in error.text
    assert engine.exit_code() == 2
    assert "Traceback" not in engine.log.read_text()


@pytest.fixture
def served(packs, kernels, tmp_path, monkeypatch):
    """The address of a server whose engine runs on an emulated card, and the file that asks for a fault."""
    program, fault, config = tmp_path / "engine", tmp_path / "fault", tmp_path / "strata-tiny.json"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{EMULATED}" "{kernels}" "$@"\n')
    program.chmod(0o755)
    args = ["--pack", str(packs["odd-q8_0"]), *ARGS]
    keys = {"exe": str(program), "args": args, "model_name": "tiny", "log": str(tmp_path / "engine.log")}
    config.write_text(json.dumps({**keys, "wait_for_engine": True}))
    monkeypatch.setenv("FAULT", str(fault))
    command = [sys.executable, "-m", "strata.server", "--config", str(config), "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    found = next(found for line in server.stdout if (found := re.search(r"http://127\.0\.0\.1:[0-9]+", line)))
    yield found.group(), fault, tmp_path / "engine.log"
    server.send_signal(signal.SIGINT)
    said, _ = server.communicate(timeout=60)
    assert server.returncode == 0, said


def complete(url: str) -> dict:
    body = json.dumps({"model": "tiny", "prompt": list(range(5, 30)), "max_tokens": 2, "temperature": 0}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.loads(answer.read())


@pytest.mark.soak
def test_a_card_that_fails_under_a_request_costs_that_request_and_the_server_starts_another_engine(served):
    url, fault, log = served
    before = complete(url)["choices"][0]["text"]
    fault.touch()
    with pytest.raises(urllib.error.HTTPError) as lost:
        complete(url)
    assert lost.value.code >= 500 and "error" in json.loads(lost.value.read())
    assert not fault.exists()
    assert complete(url)["choices"][0]["text"] == before
    said = log.read_text()
    assert "fatal: DeviceError: work on the card failed" in said and "Traceback" not in said

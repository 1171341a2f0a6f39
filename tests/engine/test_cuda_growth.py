"""Windows take no memory, neither the card's nor the host's, whoever decodes: with drafts, and slots together."""

from __future__ import annotations

import gc
import os
import sys
from itertools import count
from pathlib import Path

import msgspec
import numpy as np
import pytest

from strata.engine.cuda_runner import CudaRunner
from strata.engine.device.arena import MIB
from strata.engine.device.driver import CupyDriver
from strata.engine.options import Options
from strata.engine.schedule.live import Path as Schedule
from strata.engine.schedule.ports import DraftRules, Rules
from strata.engine.schedule.solo import Request
from strata.engine.state.checkpoints import CacheRules
from strata.engine.state.conversations import Conversations
from strata.kernels.ops import PAGE, Sampling
from strata.protocol.lines import SlotToken, Token

CONTEXT, CHUNK, SLOTS, PROMPT = 2 * PAGE, 18, 4, 7
SAID = PAGE
"""Tokens of an answer: it begins a page."""
OPTIONS = Options(
    pack="", device="cuda", max_context=CONTEXT, prefill=CHUNK, short_read=0, batch=SLOTS, spec=4, mtp="",
    batch_mtp=True,
)  # fmt: skip
DRAWN = Sampling(temperature=1.0, top_k=40, seed=3)
ROUNDS = 20
"""Times that a window of a new kind may end the count."""
GROWN, OBJECTS = 2 * MIB, 100
"""Of the host's memory, which the allocators take in pieces; objects of Python that come and go by themselves."""


@pytest.fixture(scope="module")
def runner(any_card, trunk, draft) -> CudaRunner:
    driver = any_card()
    # a graph takes long on the emulated card
    few = {} if isinstance(driver, CupyDriver) else {"spec": 2, "suffix_draft": 1, "batch": 2}
    made = CudaRunner(trunk, msgspec.structs.replace(OPTIONS, **few), draft, driver)
    made.warm()
    return made


def vram(runner: CudaRunner) -> int:
    """Free bytes, as the driver says it, not as it is shared among tests."""
    driver = runner._device.driver
    return CupyDriver.memory(driver)[0] if isinstance(driver, CupyDriver) else driver.memory()[0]


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def objects() -> int:
    """Pieces of memory that Python has given to objects which are in use."""
    gc.collect()
    return sys.getallocatedblocks()


class Talk:
    """The same requests again and again, through one schedule. `windows`: those that gave tokens."""

    def __init__(self, runner: CudaRunner, together: bool, drafts: DraftRules, said: int) -> None:
        for slot in range(runner.state.n_slots + runner.state.n_checkpoints):
            runner.state.drop(slot)
        sessions = Conversations(runner.state, runner.n_slots, CacheRules(1, every=0, root=0), None, 10**6, verify=True)
        rules = Rules(chunk=CHUNK, max_context=CONTEXT, end_ids=(), n_slots=runner.n_slots, verify=True, drafts=drafts)
        ticks = count()
        self._path = Schedule(runner, sessions, rules, clock=lambda: float(next(ticks)))  # drafts seem to pay
        self._n_slots, self._together, self._said = runner.n_slots, together, said
        self.windows = 0

    def once(self) -> None:
        rng = np.random.default_rng(1)
        prompts = [rng.integers(0, 900, PROMPT).astype(np.int32) for _ in range(1 + self._n_slots)]
        requests = [Request(prompt, self._said, DRAWN) for prompt in prompts]
        for slot in range(self._n_slots if self._together else 0):
            self._path.admit(slot, requests[slot])
            while self._path.busy:
                self._step()
        if not self._together:
            self._path.start(requests[-1])
        while self._path.busy or self._path.decoding:
            self._step()

    def _step(self) -> None:
        self.windows += any(isinstance(event, (Token, SlotToken)) for event in self._path.step())


@pytest.mark.whole_card
@pytest.mark.parametrize(
    ("together", "drafts"),
    [(False, True), (True, False), pytest.param(True, True, marks=pytest.mark.soak)],
    ids=["drafts", "slots", "slots-with-drafts"],
)
def test_windows_take_no_memory_of_card_and_host(runner, together, drafts):
    """A thousand on a card, some on the emulated one, once every kind of window that comes has its graph."""
    on_card, cost = isinstance(runner._device.driver, CupyDriver), runner.cost
    spec, suffix = (OPTIONS.spec, OPTIONS.suffix_draft) if on_card else (2, 1)
    rules = DraftRules(spec, 0.0, suffix, slots=together) if drafts else DraftRules()
    talk = Talk(runner, together, rules, SAID if on_card else 8)
    for _ in range(3 if on_card else 0):
        talk.once()
    for _ in range(ROUNDS):
        talk.once()
        graphs, begun, drafted = runner._windows.n_graphs, talk.windows, cost.rounds + cost.verified
        before = vram(runner), resident(), objects()
        while talk.windows - begun < (1000 if on_card else 8) and runner._windows.n_graphs == graphs:
            talk.once()
        if runner._windows.n_graphs == graphs:
            break
    else:
        pytest.fail(f"after {talk.windows} windows there are still new kinds of them")
    after, n = (vram(runner), resident(), objects()), talk.windows - begun
    assert (cost.rounds + cost.verified > drafted) == drafts
    assert after[0] == before[0]
    assert after[1] - before[1] <= GROWN
    assert after[2] - before[2] <= OBJECTS + n // 4, "something is kept of every window"
    runner.state.check()

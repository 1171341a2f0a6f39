"""--ple-io: wherever the n-gram table lies texts and states are the same; a file that is not read in time is said."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from strata.engine.cuda_runner import CudaRunner
from strata.engine.device import mapped_table
from strata.engine.options import Options
from strata.engine.pack import open_pack
from strata.engine.schedule.ports import SOLO, Row
from strata.kernels.cuda.compile import DeviceError
from strata.kernels.ops import Sampling
from strata.kernels.row_desk import ASKED

CONTEXT, CHUNK, STEPS = 64, 18, 5
OPTIONS = Options(pack="", device="cuda", max_context=CONTEXT, prefill=CHUNK, short_read=0, batch=2, pcie_frac=1.0)
DRAWN = Sampling(temperature=1.0, seed=5)


@pytest.fixture(scope="module")
def pack(packs):
    found = open_pack(packs["odd-q8_0"])
    assert found.spec.ple is not None
    return found


def made(card, pack, place: str) -> CudaRunner:
    runner = CudaRunner(pack, msgspec.structs.replace(OPTIONS, ple_io=place), driver=card)
    runner.warm()
    return runner


def answer(runner) -> tuple[bytes, list[tuple[int, ...]], list[str]]:
    """A prompt of two chunks and a window, tokens of it alone and beside another: the logits behind the prompt, the ids
    of windows, the digests of states."""
    ids = np.random.default_rng(3).integers(0, 900, 2 * CHUNK + 3).astype(np.int32)
    for slot in (SOLO, 1):
        runner.state.reset(slot)
    for begin in range(0, len(ids), CHUNK):
        part = ids[begin : begin + CHUNK]
        logits = runner.feed(SOLO, begin, part, begin + len(part) == len(ids))
    found = runner._device.read(logits).tobytes()
    nothing = np.empty(0, np.int32)
    texts = [[*ids, runner.sample(logits, nothing, DRAWN, len(ids))]]
    logits = runner.feed(1, 0, ids[:9], True)
    texts.append([*ids[:9], runner.sample(logits, nothing, DRAWN, 9)])
    drawn = []
    for step in range(STEPS):
        slots = (SOLO, 1)[: 1 + (step > 1)]
        rows = [Row(slot, np.array(texts[slot], np.int32), DRAWN, 0) for slot in slots]
        drawn.append(tuple(runner.window(rows, step < STEPS - 1)))
        for slot, token in zip(slots, drawn[-1], strict=True):
            texts[slot].append(token)
    return found, drawn, [runner.state.digest(slot) for slot in (SOLO, 1)]


def test_the_text_is_the_same_wherever_the_n_gram_table_lies(any_card, pack):
    answers = [answer(made(any_card(), pack, place)) for place in ("vram", "ram", "mmap")]
    assert answers[0] == answers[1] == answers[2]


def test_every_pass_of_a_mapped_table_asks_the_processor_and_no_byte_of_it_is_on_the_card(any_card, pack):
    runner = made(any_card(), pack, "mmap")
    mapped = runner._device._mapped
    asked, read = int(mapped._desk.words[ASKED]), mapped.read
    answer(runner)
    assert mapped._desk.words[ASKED] > asked and mapped.read - read >= (2 * CHUNK + 3 + STEPS) * pack.spec.ple.heads
    in_vram = made(any_card(), pack, "vram")
    spared = in_vram._device.account.held - runner._device.account.held
    assert spared > 0


def test_rows_that_the_processor_does_not_read_in_time_end_the_request_with_the_reason(any_card, pack, monkeypatch):
    monkeypatch.setattr(mapped_table, "LIMIT_S", 0.2)
    runner = made(any_card(), pack, "mmap")
    runner._device._mapped.close()
    with pytest.raises(DeviceError, match=r"n-gram table from the file within .* --ple-io ram or vram"):
        answer(runner)

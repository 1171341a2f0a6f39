"""A model's file that is cut while the engine has it mapped: the engine's last line says so, and nothing hangs."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from strata.protocol.lines import Done, Err, Info

EMULATED = Path(__file__).with_name("device") / "emulated_engine.py"


@pytest.fixture
def pack(packs, tmp_path) -> Path:
    """A copy that may be cut."""
    return Path(shutil.copyfile(packs["odd-q8_0"], tmp_path / "cut.gguf"))


def ends_with_a_fatal_line(engine, pack: Path) -> None:
    os.truncate(pack, pack.stat().st_size // 4096 * 2048)
    engine.send("GEN 4 5 6 7 8 9")
    error = engine.rest()[-1]
    assert isinstance(error, Err) and "cut.gguf: a mapped file cannot be read any more" in error.text, error
    assert error.text.startswith("fatal: ") and engine.exit_code() == 1
    assert error.text in engine.log.read_text()


def test_an_engine_whose_file_is_cut_ends_with_a_fatal_line_and_code_1(start_engine, pack):
    engine = start_engine("--serve", "--pack", str(pack), "--threads", "1", "--max-context", "256")
    assert isinstance(engine.next(300), Info)
    engine.next()
    ends_with_a_fatal_line(engine, pack)


@pytest.mark.soak
def test_a_card_whose_experts_lie_in_a_file_that_is_cut_ends_so_too(request, start_engine, pack, tmp_path):
    """The thread that computes them is no thread of Python's."""
    cache = getattr(request.config, "cache", None)
    kernels = Path(cache.mkdir("emulated")) if cache else tmp_path
    options = (
        "--device cuda --max-context 300 --prefill 18 --expert-cache 36 --mmap-experts --eos-ids none --serve --pack"
    )
    engine = start_engine(str(EMULATED), str(kernels), *options.split(), str(pack), program=sys.executable)
    info = engine.next(300)
    assert isinstance(info, Info) and info.values["arena_mib"] in (0, "0"), engine.log.read_text()
    engine.next()
    done = engine.ask("GEN 4 5 6 7 8 9")[-1]
    assert isinstance(done, Done) and done.file_blobs > 0
    ends_with_a_fatal_line(engine, pack)

"""A model's file that is cut while the engine has it mapped: the engine's last line says so, and nothing hangs."""

from __future__ import annotations

import os
import shutil

from strata.protocol.lines import Err, Info


def test_an_engine_whose_file_is_cut_ends_with_a_fatal_line_and_code_1(start_engine, packs, tmp_path):
    pack = tmp_path / "cut.gguf"
    shutil.copyfile(packs["odd-q8_0"], pack)
    engine = start_engine("--serve", "--pack", str(pack), "--threads", "1", "--max-context", "256")
    assert isinstance(engine.next(300), Info)
    engine.next()
    os.truncate(pack, pack.stat().st_size // 4096 * 2048)
    engine.send("GEN 4 5 6 7 8 9")
    error = engine.rest()[-1]
    assert isinstance(error, Err) and "cut.gguf: a mapped file cannot be read any more" in error.text, error
    assert error.text.startswith("fatal: ") and engine.exit_code() == 1
    assert error.text in engine.log.read_text()

"""Machine code of the sources: kept once, never half, and never with flushed subnormals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strata.kernels.cuda import machine_code as codes
from strata.kernels.cuda.compile import OPTIONS
from strata.kernels.cuda.route import route


class Compiler:
    """`cupy.cuda.nvrtc` without a compiler: the code is the source and its options."""

    class NVRTCError(Exception):
        pass

    def __init__(self) -> None:
        self.runs: list[tuple[str, ...]] = []
        self.destroyed = 0

    def getVersion(self) -> tuple[int, int]:
        return 13, 0

    def createProgram(self, text: str, *_: Any) -> str:
        return text

    def compileProgram(self, program: str, options: tuple[str, ...]) -> None:
        self.runs.append(tuple(options))
        if "wrong" in program:
            raise self.NVRTCError("NVRTC_ERROR_COMPILATION")

    def getProgramLog(self, program: str) -> str:
        return f"error in {program}"

    def getCUBIN(self, program: str) -> bytes:
        return program.encode()

    def destroyProgram(self, _: str) -> None:
        self.destroyed += 1


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(codes, "directory", lambda: tmp_path)
    return tmp_path


def test_a_source_is_compiled_once_for_each_card_and_keeps_subnormals(folder: Path):
    compiler = Compiler()
    paths = [codes.machine_code(compiler, "text", arch, OPTIONS) for arch in (90, 90, 89)]
    assert paths[0] == paths[1] != paths[2] and paths[0].read_bytes() == b"text"
    assert len(compiler.runs) == compiler.destroyed == 2
    assert all("--ftz=false" in options and not any("ftz=true" in o for o in options) for options in compiler.runs)
    assert sorted(folder.iterdir()) == sorted({paths[0], paths[2]})


def test_a_source_that_is_refused_leaves_nothing_and_says_why(folder: Path):
    compiler = Compiler()
    with pytest.raises(codes.CompileError, match="error in wrong"):
        codes.machine_code(compiler, "wrong", 90, OPTIONS)
    assert compiler.destroyed == 1 and not list(folder.iterdir())


def test_subnormal_numbers_stay_on_a_card(target):
    logits = np.array([[0.0, 0.0, -87.0]], np.float32)
    _, weights = route(target.workspace(), target.put(logits), 3)
    assert 0 < target.host(weights)[0, 2] < np.finfo(np.float32).tiny

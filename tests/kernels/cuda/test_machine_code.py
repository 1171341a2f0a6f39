"""Machine code of the sources: kept once, never half, and never with flushed subnormals."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strata.kernels.cuda import launch, precompile
from strata.kernels.cuda import machine_code as codes
from strata.kernels.cuda.compile import OPTIONS, collecting, source_text
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


def test_the_kernel_cache_lies_where_the_environment_says():
    assert codes.wanted_directory({codes.CACHE: "/a", "CUPY_CACHE_DIR": "/b", "XDG_CACHE_HOME": "/c"}) == Path("/a")
    assert codes.wanted_directory({"CUPY_CACHE_DIR": "/b", "XDG_CACHE_HOME": "/c"}) == Path("/b/strata")
    assert codes.wanted_directory({"XDG_CACHE_HOME": "/c"}) == Path("/c/strata/cuda")


def test_a_collected_pass_launches_nothing_and_names_each_source_once():
    with collecting() as jobs:
        for n in (1, 1, 2):
            launch.launch("norm.cu", "rms_norm", (n,), (128,), None)
        launch.launch("route.cu", "route", (1,), (128,), PER_LANE=16)
    assert jobs == {("norm.cu", ()), ("route.cu", (("PER_LANE", 16),))}


def test_only_what_is_not_on_disk_is_compiled_ahead(folder: Path):
    compiler = Compiler()
    jobs = [("norm.cu", ()), ("route.cu", (("PER_LANE", 16),)), ("route.cu", (("PER_LANE", 1),))]
    codes.machine_code(compiler, source_text("route.cu", PER_LANE=16), 90, OPTIONS)
    assert precompile.missing(compiler, jobs, 90) == [jobs[0], jobs[2]]
    assert precompile.missing(compiler, jobs, 89) == jobs


FAKE = """
from types import ModuleType
class NVRTCError(Exception): pass
nvrtc = ModuleType("nvrtc")
nvrtc.NVRTCError = NVRTCError
nvrtc.getVersion = lambda: (13, 0)
nvrtc.createProgram = lambda text, *_: text
nvrtc.compileProgram = lambda *_: None
nvrtc.getCUBIN = lambda text: text[-16:].encode()
nvrtc.destroyProgram = lambda _: None
"""
"""A package cupy.cuda whose compiler answers with the end of the source."""


def test_processes_compile_their_shares_into_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog):
    package, cache = tmp_path / "path" / "cupy", tmp_path / "cache"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from cupy import cuda\n")
    (package / "cuda.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", str(package.parent), prepend=os.pathsep)
    monkeypatch.setenv(codes.CACHE, str(cache))
    jobs = [("norm.cu", ()), ("route.cu", (("PER_LANE", 16),)), ("window.cu", ())]
    precompile._work([jobs[:2], jobs[2:], [("no_such_source.cu", ())]], 90)
    ends = {source_text(source, **dict(constants))[-16:].encode() for source, constants in jobs}
    assert {path.read_bytes() for path in cache.iterdir()} == ends
    assert [r for r in caplog.records if "no_such_source" in r.getMessage()], (
        "a failed process leaves no line in the log"
    )

"""The short list of kernel tests leaves out no source, no type, and names no test that is not there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from strata.bench.gpu_tests import COVERING, KERNELS, covered, main, parts
from strata.kernels.cuda.compile import SOURCES
from strata.kernels.formats import BY_NAME

ROOT = Path(__file__).resolve().parents[2]
PRODUCTS = f"{KERNELS}/products/test_covering.py"
EVERYWHERE = ("windows_and_rows", "prompts", "experts_of_windows", "experts_of_prompts")
"""Tests of products that there is one of for each type."""


@pytest.fixture(scope="module")
def listed() -> dict[str, list[str]]:
    return covered((ROOT / COVERING).read_text())


@pytest.fixture(scope="module")
def collected(listed) -> list[str]:
    """Tests on a card that pytest finds for the list; an id that is not there is an error of pytest's."""
    words = ("-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib")
    found = subprocess.run(
        [sys.executable, *words, "--collect-only", *listed], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert not found.returncode, found.stdout[-800:] + found.stderr[-800:]
    return [line for line in found.stdout.splitlines() if "::" in line]


def test_a_new_source_is_checked_for_its_memory_accesses_too(listed):
    named = {name.partition(":")[0] for names in listed.values() for name in names}
    sources = {path.stem for path in SOURCES.glob("*.cu")}
    assert not sources - named, f"{COVERING}: add a small test that launches each of these"
    assert not named - sources, f"{COVERING}: no such source"


def test_every_listed_test_is_there_and_products_are_tested_with_every_type(listed, collected):
    assert set(listed) - {PRODUCTS} <= set(collected)
    for name in BY_NAME:
        mine = [test for test in collected if test.startswith(PRODUCTS) and test.endswith(f"[{name}-card]")]
        assert all(any(f"test_{what}" in test for test in mine) for what in EVERYWHERE)


def test_the_short_list_is_a_choice_of_its_own(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    (part,) = parts((), workers=2, sanitize=False, covering=True)
    assert PRODUCTS in part.paths and not part.may_be_empty and part.words == ("-n", "2", "--dist", "loadgroup")
    with pytest.raises(SystemExit):
        main(["--covering", "--every", "2"])
    assert "--every" in capsys.readouterr().err


RECORDER = """
import json, sys
import pytest
found, now = {}, [None]

@pytest.hookimpl(hookwrapper=True)
def pytest_fixture_setup(fixturedef):
    yield
    cls = getattr(sys.modules.get("strata_test_emulator"), "Emulator", None)
    if cls and not hasattr(cls, "noted"):
        real, cls.noted = cls.load_kernel, True
        def load_kernel(self, source, name, **constants):
            kind = constants.get("TYPE")
            found.setdefault(now[0], []).append(source[:-3] + (":" + kind if kind else ""))
            return real(self, source, name, **constants)
        cls.load_kernel = load_kernel

@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item):
    now[0] = item.nodeid
    yield

def pytest_sessionfinish():
    open("found.json", "w").write(json.dumps(found))
"""


NOT_EMULATED = {"prompt_wide", "prompt_wide_inputs", "prompt_wide_weights"}
"""Sources of an architecture that the emulated card of these tests is not; test_wide.py has one that is."""


@pytest.mark.soak  # every listed test on the emulator
def test_listed_tests_launch_what_they_are_listed_for(listed, tmp_path):
    (tmp_path / "noting_launches.py").write_text(RECORDER.replace("found.json", str(tmp_path / "found.json")))
    twins = {test: test.replace("[card", "[emulated") for test in listed}
    words = ("-m", "pytest", "-q", "-m", "not gpu", "-p", "noting_launches")
    subprocess.run(
        [sys.executable, *words, *twins.values()], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(tmp_path)}, check=True
    )
    found = json.loads((tmp_path / "found.json").read_text())
    for test, names in listed.items():
        mine = {name for each, some in found.items() if each.startswith(twins[test]) for name in some}
        known = mine | {name.partition(":")[0] for name in mine}
        assert set(names) - NOT_EMULATED <= known, test

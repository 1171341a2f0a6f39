"""Where compiled kernels are kept."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import numba
import pytest

from strata.kernels.cpu import cache


@pytest.fixture
def directory():
    """numba's cache directory as it was before."""
    before = numba.config.CACHE_DIR
    yield
    numba.config.CACHE_DIR = before


def test_a_changed_source_gets_a_directory_of_its_own(tmp_path: Path, monkeypatch):
    kernels = tmp_path / "kernels"
    shutil.copytree(Path(cache.__file__).parents[1], kernels, ignore=shutil.ignore_patterns("cuda", "__pycache__"))
    monkeypatch.setattr(cache, "__file__", str(kernels / "cpu" / "cache.py"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = cache.directory()
    assert cache.directory() == before and before.parent == tmp_path / "strata"
    seen = {before}
    for name in ("cpu/simd.py", "ops.py", "reference/quant.py"):
        source = kernels / name
        source.write_text(source.read_text() + "\n")
        seen.add(cache.directory())
    assert len(seen) == 4


def test_a_directory_that_can_be_written_is_used(tmp_path: Path, directory):
    wanted = tmp_path / "a" / "b"
    assert cache.use(wanted) == wanted and wanted.is_dir() and str(wanted) == numba.config.CACHE_DIR


def test_a_directory_that_cannot_be_written_is_replaced_and_named_in_the_log(tmp_path: Path, directory, caplog):
    (tmp_path / "file").write_text("not a directory")
    with caplog.at_level(logging.WARNING):
        used = cache.use(tmp_path / "file" / "cache")
    assert used.is_dir() and str(used) == numba.config.CACHE_DIR
    assert str(tmp_path / "file" / "cache") in caplog.text and str(used) in caplog.text
    used.rmdir()

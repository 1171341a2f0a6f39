"""The host device: which kernels, how many threads, how much memory."""

from __future__ import annotations

import os

import pytest

from strata.engine.device.host import HostDevice, Memory, read_meminfo
from strata.kernels import reference


def test_the_named_backend_computes_and_its_threads_are_bounded():
    device = HostDevice("reference", threads=2)
    assert device.kernels is reference
    assert device.threads == 2


@pytest.mark.parametrize(
    ("kernels", "threads", "message"), [("cuda", 1, "cpu, reference"), ("reference", 0, "threads")]
)
def test_an_unknown_backend_and_no_threads_are_refused(kernels, threads, message):
    with pytest.raises(ValueError, match=message):
        HostDevice(kernels, threads)


def test_memory_is_what_the_machine_has():
    memory = HostDevice("reference", 1).memory()
    assert 0 < memory.free <= memory.total
    assert abs(memory.total - os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")) < memory.total / 10


def test_free_memory_counts_what_the_page_cache_would_give_up(tmp_path):
    file = tmp_path / "meminfo"
    file.write_text("MemTotal:       1000 kB\nMemFree:         100 kB\nMemAvailable:    700 kB\nHugePages_Total:  0\n")
    assert read_meminfo(file) == Memory(total=1_024_000, free=716_800)


@pytest.mark.parametrize("text", [None, "MemTotal: 1000 kB\n", ""])
def test_a_system_without_these_figures_is_asked_another_way(tmp_path, monkeypatch, text):
    file = tmp_path / "meminfo"
    if text is not None:
        file.write_text(text)
    assert read_meminfo(file) is None
    monkeypatch.setattr("strata.engine.device.host.MEMINFO", file)
    memory = HostDevice("reference", 1).memory()
    assert 0 < memory.free <= memory.total

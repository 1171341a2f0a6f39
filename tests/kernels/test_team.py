"""The team of threads: every task once, an end to every operation, whoever is asleep, busy or late."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from numba import njit, types

from strata.kernels.cpu import team
from strata.kernels.cpu.math import JIT
from strata.kernels.cpu.tasks import kernel, pack, threads_for, unpack
from strata.kernels.cpu.team import spread

_ARGUMENTS = types.Tuple([types.int64[::1], types.int64, types.int64])


@kernel
def _count(task, arguments):
    """Count the task, after some work."""
    counts, work, _ = unpack(arguments, _ARGUMENTS)
    total = task
    for i in range(work * (task % 7)):
        total = (total * 1103515245 + i) % 2147483648
    counts[task] += 1 if total >= 0 else 2


@kernel
def _nested(task, arguments):
    """An operation within a task of another."""
    counts, work, inner = unpack(arguments, _ARGUMENTS)
    part = counts[task * 4 : task * 4 + 4]
    spread(inner, pack((part, work, np.int64(0))), 4, 4)


@njit(types.void(types.int64, *_ARGUMENTS, types.int64, types.int64), **{**JIT, "cache": False})
def _run(address, counts, work, inner, tasks, threads):
    spread(address, pack((counts, work, inner)), tasks, threads)


@pytest.fixture
def many(monkeypatch):
    """More threads than this machine may have processors."""
    monkeypatch.setattr(team._THREADS, "limit", 5)


def test_every_task_is_done_once_in_many_operations_of_changing_size(many):
    rng = np.random.default_rng(0)
    for _ in range(3000):
        tasks, threads = int(rng.integers(0, 40)), int(rng.integers(1, 6))
        counts = np.zeros(tasks, np.int64)
        _run(_count.address, counts, int(rng.integers(0, 300)), 0, tasks, team.wake(threads))
        assert (counts == 1).all()


def test_an_operation_ends_when_all_others_are_asleep(many):
    team.wake(5)
    for _ in range(1000):
        if not team._STATE[team.AWAKE + 1 : team.AWAKE + 5].any():
            break
        threading.Event().wait(0.01)
    assert not team._STATE[team.AWAKE + 1 : team.AWAKE + 5].any()
    counts = np.zeros(9, np.int64)
    _run(_count.address, counts, 10, 0, 9, 5)
    assert (counts == 1).all()


def test_an_operation_within_a_task_is_done_by_the_task(many):
    counts = np.zeros(80, np.int64)
    _run(_nested.address, counts, 10, _count.address, 20, team.wake(5))
    assert (counts == 1).all()


def test_calls_from_two_threads_do_not_mix(many):
    failures = []

    def call() -> None:
        for _ in range(400):
            counts = np.zeros(11, np.int64)
            _run(_count.address, counts, 50, 0, 11, team.wake(3))
            if not (counts == 1).all():
                failures.append(counts)

    callers = [threading.Thread(target=call) for _ in range(2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert not failures
    assert not any(caller.is_alive() for caller in callers)


def test_the_limit_bounds_every_operation(threads):
    threads(1)
    assert (team.threads(), team.wake(8), threads_for(8)) == (1, 1, 1)
    threads(10_000)
    assert team.threads() <= team.MOST_THREADS
    assert threads_for(1) == 1
    assert threads_for(8, floats=10) == 1
    with pytest.raises(ValueError, match="threads must be at least 1, got 0"):
        threads(0)
    assert team.threads() >= 1


LAST = """
import ctypes, os, sys
from strata.kernels.cpu import team

class Last:
    def __del__(self, at=team._STATE.ctypes.data, read=ctypes._string_at, write=os.write):
        write(1, read(at, 2 * 8))

team._STATE[:2] = 0x1234, 0x5678
sys.last = Last()  # modules end before what belongs to sys
"""


def test_what_threads_still_read_and_write_while_the_interpreter_ends_is_not_freed_under_them():
    """A thread that fell asleep then wrote into memory of the heap: "corrupted double-linked list" at the exit."""
    env = {**os.environ, "MALLOC_PERTURB_": "165"}
    ended = subprocess.run([sys.executable, "-c", LAST], env=env, capture_output=True, timeout=60, check=True)
    assert np.frombuffer(ended.stdout, np.int64).tolist() == [0x1234, 0x5678], ended.stderr

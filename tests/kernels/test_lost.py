"""A mapped file that is cut ends the process with its last words, whatever thread reads it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import mmap, os, sys, threading
import numpy as np
from strata.kernels.lost import tell_of_lost_files

tell_of_lost_files([(2, b"log: lost\\n"), (1, b"ERR lost\\n")], 7)
with open(sys.argv[1], "r+b") as file:
    mapped = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    file.truncate(1 << 12)
assert mapped[: 1 << 12].sum() >= 0
work = mapped.sum if sys.argv[2] == "main" else threading.Thread(target=mapped.sum).start
work()
threading.Event().wait(60)
"""


@pytest.mark.parametrize("thread", ["main", "other"])
def test_a_read_behind_the_end_of_a_cut_file_says_so_and_leaves_with_the_code(tmp_path: Path, thread):
    file = tmp_path / "file"
    file.write_bytes(bytes(1 << 20))
    command = [sys.executable, "-c", PROGRAM, str(file), thread]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (7, "ERR lost\n", "log: lost\n")


def test_there_is_room_for_so_many_lines():
    program = "from strata.kernels.lost import tell_of_lost_files; tell_of_lost_files([(2, b'x')] * 5, 1)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and "at most 4 lines, got 5" in done.stderr

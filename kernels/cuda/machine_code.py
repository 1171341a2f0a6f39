"""Machine code of CUDA sources for the card in use: compiled once, kept in the user's cache directory.

    path = machine_code(text, arch, options)      # a file that CuPy loads

CuPy's own compilation adds -ftz=true behind the options it is given, and a number below 1.2e-38 would be zero on a card
and a number on the host. So its binding of the compiler is used directly. A file is named by a hash of all that its
contents depend on and appears whole or not at all.

Errors   CompileError with the compiler's log. A directory that cannot be written is replaced by a temporary one, with a
         line in the log
Cost     a second or so a source when it is first seen, then a look for a file
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


class CompileError(RuntimeError):
    """The compiler refused a source; the message is its log."""


def machine_code(nvrtc: Any, text: str, arch: int, options: Sequence[str]) -> Path:
    """The file with the machine code of `text` for sm_<arch>. `nvrtc`: the compiler, `cupy.cuda.nvrtc`."""
    options = (*options, "--ftz=false", f"--gpu-architecture=sm_{arch}")
    parts = (text, *options, *map(str, nvrtc.getVersion()))
    path = directory() / (hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32] + ".cubin")
    if not path.exists():
        made = path.with_suffix(f".{os.getpid()}.part")
        made.write_bytes(_compile(nvrtc, text, options))
        made.replace(path)
    return path


def _compile(nvrtc: Any, text: str, options: Sequence[str]) -> bytes:
    program = nvrtc.createProgram(text, "kernel.cu", (), ())
    try:
        try:
            nvrtc.compileProgram(program, options)
        except nvrtc.NVRTCError as error:
            raise CompileError(f"{error}: {nvrtc.getProgramLog(program)}") from error
        return bytes(nvrtc.getCUBIN(program))
    finally:
        nvrtc.destroyProgram(program)


@cache
def directory() -> Path:
    """Where the files lie, with room to write."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    path = Path(base) / "strata" / "cuda"
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        fallback = Path(tempfile.mkdtemp(prefix="strata-cuda-"))
        log.warning("kernel cache %s cannot be written (%s); kernels are compiled into %s", path, error, fallback)
        return fallback
    return path

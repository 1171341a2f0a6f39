"""Machine code of CUDA sources for the card in use: compiled once, kept in the user's cache directory.

    path = machine_code(nvrtc, text, arch, options)      # a file that CuPy loads; arch "90", "90a"

The directory is STRATA_KERNEL_CACHE, or `strata` in CUPY_CACHE_DIR, or strata/cuda in the user's cache directory.

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
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

CACHE: Final = "STRATA_KERNEL_CACHE"

log = logging.getLogger(__name__)


class CompileError(RuntimeError):
    """The compiler refused a source; the message is its log."""


def place(nvrtc: Any, text: str, arch: str, options: Sequence[str]) -> Path:
    """Where the machine code of `text` for sm_<arch> is kept. `nvrtc`: the compiler, `cupy.cuda.nvrtc`."""
    parts = (text, *_options(arch, options), *map(str, nvrtc.getVersion()))
    return directory() / (hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32] + ".cubin")


def machine_code(nvrtc: Any, text: str, arch: str, options: Sequence[str]) -> Path:
    """The file with the machine code of `text` for sm_<arch>."""
    path = place(nvrtc, text, arch, options)
    if not path.exists():
        made = path.with_suffix(f".{os.getpid()}.part")
        made.write_bytes(_compile(nvrtc, text, _options(arch, options)))
        made.replace(path)
    return path


def _options(arch: str, options: Sequence[str]) -> tuple[str, ...]:
    return (*options, "--ftz=false", f"--gpu-architecture=sm_{arch}")


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


def wanted_directory(environ: Mapping[str, str]) -> Path:
    """Where the files should lie."""
    if environ.get(CACHE):
        return Path(environ[CACHE])
    if environ.get("CUPY_CACHE_DIR"):
        return Path(environ["CUPY_CACHE_DIR"]) / "strata"
    return Path(environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")) / "strata" / "cuda"


@cache
def directory() -> Path:
    """Where they lie: there is room to write."""
    path = wanted_directory(os.environ)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        fallback = Path(tempfile.mkdtemp(prefix="strata-cuda-"))
        log.warning("kernel cache %s cannot be written (%s); kernels are compiled into %s", path, error, fallback)
        return fallback
    return path

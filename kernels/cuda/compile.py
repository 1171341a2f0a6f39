"""Sources of the CUDA kernels: put together, compiled for the card in use, kept.

source_text(source, **constants)         the text of src/<source> with its includes in place and the constants as
                                         macros; TYPE names a format of formats.cuh and brings its table
architecture(source, arch)               what a source is compiled for: "90", "90a"
load_kernel(source, name, **constants)   the compiled function `name` (kernel.py), one for each set of constants. The
                                         machine code stays on disk (machine_code.py): a second start does not compile

Errors   DeviceError with one line when CuPy is missing or the compiler refuses a source
Cost     a second or so a source when it is first seen, then milliseconds
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any, Final

from strata.kernels.cuda import tables
from strata.kernels.cuda.kernel import DeviceError as DeviceError
from strata.kernels.cuda.kernel import Kernel, overlaps
from strata.kernels.cuda.machine_code import CompileError, machine_code

SOURCES: Final = Path(__file__).resolve().parent / "src"

OPTIONS: Final = ("-std=c++17", "--fmad=false", "-default-device")
"""No fast-math: subnormals stay, division and square root are correctly rounded, only fmaf() fuses."""

Constants = dict[str, int | str]

OF_ONE_CARD: Final = {"prompt_wide.cu": 90}
"""Sources with instructions that only cards of one architecture have."""

_INCLUDE: Final = re.compile(r'^#include "([a-z_0-9]+\.cuh)"\n', re.MULTILINE)


@cache
def _text(name: str) -> str:
    return (SOURCES / name).read_text(encoding="utf-8")


def source_text(source: str, **constants: int | str) -> str:
    """The whole text of a source: constants, the type's table, includes in place (once, if they say so), kernels."""
    seen: set[str] = set()

    def expand(name: str) -> str:
        text = _text(name)

        def include(match: re.Match[str]) -> str:
            file = match.group(1)
            if file in seen and "#pragma once\n" in _text(file):
                return "\n"
            seen.add(file)
            return f'{expand(file)}\n#line {text[: match.end()].count(chr(10)) + 1} "{name}"\n'

        return f'#line 1 "{name}"\n' + _INCLUDE.sub(include, text).replace("#pragma once\n", "\n")

    defines = "".join(f"#define {key} {value}\n" for key, value in sorted(constants.items()))
    return defines + tables.source(str(constants.get("TYPE", ""))) + expand(source)


def architecture(source: str, arch: int) -> str:
    """What src/<source> is compiled for on a card of sm_<arch>."""
    return f"{arch}a" if OF_ONE_CARD.get(source) == arch else str(arch)


@cache
def _module(source: str, constants: tuple[tuple[str, int | str], ...]) -> Any:
    try:
        import cupy as cp
    except ImportError as error:
        raise DeviceError(f"a card needs CuPy: pip install 'strata[cuda13]' or 'strata[cuda12]' ({error})") from error
    text, arch = source_text(source, **dict(constants)), int(cp.cuda.Device().compute_capability)
    try:
        return cp.RawModule(path=str(machine_code(cp.cuda.nvrtc, text, architecture(source, arch), OPTIONS)))
    except CompileError as error:
        raise DeviceError(f"{source} {dict(constants)} does not compile: {error}") from error


def load_kernel(source: str, name: str, **constants: int | str) -> Any:
    """The function `name` of src/<source> compiled with these constants."""
    collected = _collected.get()
    if collected is None:
        return _kernel(source, name, tuple(constants.items()))
    collected.add((source, tuple(sorted(constants.items()))))
    return _launch_nothing


@contextmanager
def collecting() -> Iterator[set[tuple[str, tuple[tuple[str, int | str], ...]]]]:
    """Inside, kernels are noted (source, constants) and not compiled, and their launches do nothing."""
    found: set[tuple[str, tuple[tuple[str, int | str], ...]]] = set()
    token = _collected.set(found)
    try:
        yield found
    finally:
        _collected.reset(token)


_collected: ContextVar[set[tuple[str, tuple[tuple[str, int | str], ...]]] | None] = ContextVar(
    "collected", default=None
)


def _launch_nothing(*_: Any, **__: Any) -> None:
    """A kernel that is only noted."""


@cache
def _kernel(source: str, name: str, constants: tuple[tuple[str, int | str], ...]) -> Kernel:
    module = _module(source, tuple(sorted(constants)))
    import cupy as cp

    arch, driver = int(cp.cuda.Device().compute_capability), int(cp.cuda.runtime.driverGetVersion())
    function = module.get_function(name)
    return Kernel(function, name, lambda: int(cp.cuda.get_current_stream().ptr), overlaps(arch, driver))

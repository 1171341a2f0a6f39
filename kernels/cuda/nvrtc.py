"""NVRTC through ctypes, from the wheel nvidia-cuda-nvrtc: compiles for any card without one, and without CuPy.

compile_cubin(text, arch)              bytes of machine code for sm_<arch>, and what compiler and assembler say of each
                                       kernel
usage(arch, source, constants)         the same of a source of kernels/cuda, as rows of a report

Errors   CompileError with the compiler's log; ImportError when the wheel is not installed
Cost     half a second to a few seconds a source and architecture
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from strata.kernels.cuda.compile import OPTIONS, Constants, architecture, source_text
from strata.kernels.cuda.machine_code import CompileError


@dataclass(frozen=True, slots=True)
class Usage:
    """Resources of one kernel: registers a thread, static shared bytes, bytes spilled to memory, bytes of stack.

    waits, releases: whether it waits for the kernel before it, and lets the next one begin before it ends
    """

    entry: str
    registers: int
    shared: int
    spill: int
    stack: int
    waits: bool
    releases: bool


@cache
def library() -> ctypes.CDLL:
    """libnvrtc of the newest installed wheel."""
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(p) for p in spec.submodule_search_locations or ()] if spec else []
    found = sorted(f for folder in folders for f in folder.glob("*/lib/libnvrtc.so.*") if "alt" not in f.name)
    if not found:
        raise ImportError("libnvrtc is not installed: pip install nvidia-cuda-nvrtc")
    return ctypes.CDLL(str(found[-1]))


def _text(program: ctypes.c_void_p, what: str) -> str:
    lib, size = library(), ctypes.c_size_t()
    getattr(lib, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    getattr(lib, f"nvrtcGet{what}")(program, buffer)
    return buffer.value.decode(errors="replace")


def compile_cubin(text: str, arch: str) -> tuple[int, list[Usage]]:
    """Compile for one architecture: (bytes of machine code, what each kernel uses). Raises CompileError."""
    with _compiled(text, f"sm_{arch}", "--ptxas-options=-v") as program:
        size = ctypes.c_size_t()
        library().nvrtcGetCUBINSize(program, ctypes.byref(size))
        return size.value, _usages(_text(program, "ProgramLog"), _text(program, "PTX"))


@contextmanager
def _compiled(text: str, target: str, *more: str) -> Iterator[ctypes.c_void_p]:
    lib, program = library(), ctypes.c_void_p()
    options = [o.encode() for o in (*OPTIONS, f"--gpu-architecture={target}", *more)]
    lib.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None)
    try:
        if lib.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options)):
            raise CompileError(f"{target}: {_text(program, 'ProgramLog')}")
        yield program
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(program))


def usage(arch: int, source: str, constants: Constants) -> list[dict[str, Any]]:
    """A row for each kernel of a source. Raises CompileError."""
    size, usages = compile_cubin(source_text(source, **constants), architecture(source, arch))
    common = {"arch": arch, "source": source, "constants": constants, "code_bytes": size}
    return [
        common
        | {
            "kernel": u.entry,
            "registers": u.registers,
            "spill_bytes": u.spill,
            "stack_bytes": u.stack,
            "shared_bytes": u.shared,
            "waits": u.waits,
            "releases": u.releases,
        }
        for u in usages
    ]


_ENTRY = re.compile(r"Compiling entry function '(\w+)'(.*?)Used (\d+) registers([^\n]*)", re.DOTALL)
_BODY = re.compile(r"\.entry (\w+)\((.*?)(?=\.entry|\Z)", re.DOTALL)


def _usages(log: str, ptx: str) -> list[Usage]:
    """The assembler's report, one entry a kernel, and what the compiler's text has of each."""
    bodies = dict(_BODY.findall(ptx))

    def number(pattern: str, text: str) -> int:
        found = re.search(pattern, text)
        return int(found.group(1)) if found else 0

    return [
        Usage(
            entry,
            int(registers),
            number(r"(\d+) bytes smem", tail),
            number(r"(\d+) bytes spill stores", body) + number(r"(\d+) bytes spill loads", body),
            number(r"(\d+) bytes stack frame", body),
            "griddepcontrol.wait" in bodies[entry],
            "griddepcontrol.launch_dependents" in bodies[entry],
        )
        for entry, body, registers, tail in _ENTRY.findall(log)
    ]

"""Runs the kernels of kernels/cuda/src without a card: compiled as C++, every device thread a fibre.

    emulator = Emulator(folder_for_libraries)
    kernel = emulator.load_kernel("norm.cu", "rms_norm")        # as `kernels.cuda.compile.load_kernel`
    kernel((rows,), (128,), (x, w, y, np.int32(n), ...), shared_mem=0)

Arrays are NumPy arrays; one without dimensions is passed by value (a struct). `order` seeds the order of threads and
blocks, 0 for the natural one; with an odd one asynchronous copies land as early as they can, otherwise as late. A
kernel that would hang or shuffle across diverged lanes ends the process with a line that names the block.

Cost   one g++ run of 0.3 s a source and set of constants, kept in the folder; some 20 ns a thread and barrier
       (one core of an AMD EPYC, 2026-11-30)
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import mmap
import re
import subprocess
import threading
from collections.abc import Callable, Iterator
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from strata.kernels.cuda.compile import source_text

HERE = Path(__file__).resolve().parent
HEADERS = tuple(HERE / name for name in ("cuda_on_host.h", "fibres.h"))
FLAGS = (
    "-std=c++17",
    "-fPIC",
    "-shared",
    "-nodefaultlibs",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-asynchronous-unwind-tables",
    "-mfma",
    "-mf16c",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-fvisibility=hidden",
    "-fno-gnu-unique",
    "-fno-gcse",  # with the next three -O2 compiles in nine tenths of the time, and no kernel runs longer
    "-fno-schedule-insns2",
    "-fno-tree-pre",
    "-fno-tree-vectorize",
    "-w",
)
STACKS = 1024 * ((1 << 16) + 13 * 64)
"""Bytes of the stacks of a block, MOST_THREADS * STACK of fibres.h."""
KERNEL = re.compile(r'extern\s+"C"\s+__attribute__\(\(visibility\("default"\)\)\)\s+void\s+(\w+)\s*\(')
SHARED = re.compile(r"(extern\s+)?SHARED_MEMORY\s+(?:__attribute__\(\(aligned\(\d+\)\)\)\s*)?([^;]+);")
REGISTERS = re.compile(r"^\{\s*(?:\.reg[^;]*;\s*)+")
DOUBLE_COLON = re.compile(r'"[^"]*"|::')
DECLARATOR = re.compile(r"(.*?)(\w+)\s*((?:\[.*\])?)$", re.DOTALL)


def _split(text: str, at: str, brackets: str = "()[]") -> list[str]:
    """Cut at a character outside of brackets (opening and closing in turn) and strings."""
    parts, depth, quoted = [""], 0, False
    for c in text:
        quoted ^= c == '"'
        depth += 0 if quoted else (c in brackets[::2]) - (c in brackets[1::2])
        if c == at and not depth and not quoted:
            parts.append("")
        else:
            parts[-1] += c
    return [part.strip() for part in parts]


def _called_instructions(text: str) -> str:
    """asm("name ..." : outputs : inputs) as ptx_name(outputs, inputs)."""
    done = ""
    while (found := re.search(r"\basm\s*(?:volatile)?\s*\((?=\s*\")", text)) is not None:
        depth, end = 1, found.end()
        while depth:
            depth += (text[end] == "(") - (text[end] == ")")
            end += 1
        inside = DOUBLE_COLON.sub(lambda m: m[0] if m[0].startswith('"') else ": :", text[found.end() : end - 1])
        template, *operands = _split(inside, ":")
        words = REGISTERS.sub("", template.strip('"')).split()
        name = re.sub(r"\W", "_", words[0].rstrip(";")) if words else "nothing"
        values = [operand[operand.index("(") :] for part in operands[:2] if part for operand in _split(part, ",")]
        done += f"{text[: found.start()]}ptx_{name}({', '.join(values)})"
        text = text[end:]
    return done + text


def _shared_variables(found: re.Match[str], sites: Iterator[int]) -> str:
    """`__shared__ T a[2], b;` as references to memory that the emulator knows; extern arrays as the dynamic memory."""
    kind, made = "", []
    for text in _split(found[2], ",", "()[]<>"):
        declared = DECLARATOR.match(text)
        if declared is None:
            raise ValueError(f"shared memory that the emulator cannot read: {found[0]}")
        kind, name, sizes = declared[1].strip() or kind, declared[2], declared[3]
        if found[1]:
            made.append(f"{kind}* {name} = reinterpret_cast<{kind}*>(emulated::dynamic_shared);")
        else:
            made.append(f"auto& {name} = emulated::shared<{kind} {sizes}, {next(sites)}>();")
    return " ".join(made)


@cache
def _emulator_text() -> bytes:
    """All that a library depends on beside the source."""
    return b"".join(path.read_bytes() for path in (Path(__file__), *HEADERS))


class _Stacks(threading.local):
    """Stacks for the blocks of all kernels that a thread runs: what one has used is in the cache for the next."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, STACKS)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))


_stacks = _Stacks()


class Kernel:
    """One kernel of a compiled source."""

    max_dynamic_shared_size_bytes = 227 << 10

    def __init__(self, compiled: Callable[[], Any], emulator: Emulator) -> None:
        self._compiled = compiled
        self._function: Any = None
        self._emulator = emulator

    def __call__(
        self, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...], shared_mem: int = 0
    ) -> None:
        if self._emulator.recorded is not None:
            self._emulator.recorded.append((self, grid, block, args, shared_mem))
        kept, pointers = [], (ctypes.c_void_p * len(args))()
        for i, argument in enumerate(args):
            if isinstance(argument, np.ndarray) and argument.ndim == 0:
                value = argument.reshape(1)
            elif isinstance(argument, np.ndarray):
                if not argument.flags.c_contiguous:
                    raise ValueError(f"argument {i} is not contiguous: {argument.shape} {argument.strides}")
                value = np.array([argument.ctypes.data], np.uint64)
            elif argument is None:
                value = np.zeros(1, np.uint64)
            elif isinstance(argument, np.generic):
                value = np.array([argument])
            elif isinstance(argument, int | float):
                value = np.array([argument], np.int32 if isinstance(argument, int) else np.float32)
            else:
                raise TypeError(f"argument {i} is no array and no number: {argument!r}")
            kept.append(value)
            pointers[i] = value.ctypes.data
        sizes = (*grid, *(1,) * (3 - len(grid)), *block, *(1,) * (3 - len(block)))
        if not all(0 < n < 1 << 31 for n in sizes) or any(n > 65535 for n in sizes[1:3]):
            raise ValueError(f"a grid of {grid} blocks of {block} threads cannot be launched")
        order = ctypes.c_uint64(self._emulator.order)
        if self._function is None:  # at the first launch: engines load many kernels that a test does not run
            self._function = self._compiled()
        self._function(pointers, len(args), (ctypes.c_uint * 6)(*sizes), shared_mem, order, _stacks.address)


class Emulator:
    """Compiles sources on demand. `folder` keeps the libraries between runs. `level`: -Og where most kernels run a few
    times, since it compiles in two thirds of the time; they run half as long again.

    While `recorded` is a list, launches are also written down there: (kernel, its arguments), to be called again as a
    captured graph is replayed.
    """

    def __init__(self, folder: Path, level: str = "-O1") -> None:
        self.order = 0
        self._level = level
        self.recorded: list[tuple[Any, ...]] | None = None
        self._folder = folder
        self._libraries: dict[Path, ctypes.CDLL] = {}
        self._kernels: dict[tuple[Any, ...], Kernel] = {}

    def load_kernel(self, source: str, name: str, **constants: int | str) -> Kernel:
        """The kernel `name` of a source with these constants."""
        key = (source, name, *sorted(constants.items()))
        if key not in self._kernels:
            self._kernels[key] = Kernel(lambda: self._function(source, name, source_text(source, **constants)), self)
        return self._kernels[key]

    def _function(self, source: str, name: str, text: str) -> Any:
        function = getattr(self._library(source, text), f"emulated_{name}")
        function.restype = None
        function.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]
        function.argtypes += [ctypes.c_uint64, ctypes.c_void_p]
        return function

    def _library(self, source: str, text: str) -> ctypes.CDLL:
        digest = hashlib.sha256(_emulator_text() + self._level.encode() + text.encode()).hexdigest()[:16]
        library = self._folder / f"{source}-{digest}.so"
        if library not in self._libraries:
            if not library.exists():
                self._folder.mkdir(parents=True, exist_ok=True)
                with library.with_suffix(".lock").open("w") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX)  # one of the processes that want it compiles
                    if not library.exists():
                        made = library.with_suffix(".part")
                        _compile(source, text, made, self._level)
                        made.rename(library)
            self._libraries[library] = ctypes.CDLL(str(library))
        return self._libraries[library]


def _compile(source: str, text: str, library: Path, level: str) -> None:
    """The kernels of a source as functions `emulated_<name>` of a library."""
    command = ["g++", "-E", "-P", "-x", "c++", "-std=c++17", "-include", str(HEADERS[0]), "-"]
    text = subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout
    text = _called_instructions(text)
    sites = count()
    text = SHARED.sub(lambda found: _shared_variables(found, sites), text)
    known = set(re.findall(r"void (ptx_\w+)\(", text))
    unknown = sorted(set(re.findall(r"\b(ptx_\w+)\(", text)) - known)
    text = "".join(f"template <class... A> void {call}(A&&...) {{ __builtin_trap(); }}\n" for call in unknown) + text
    text += "".join(
        f'\nextern "C" __attribute__((visibility("default"))) '
        f"void emulated_{name}(void** a, int n, const unsigned* s, size_t m, uint64_t o, char* f) "
        f"{{ emulated::launch({name}, a, n, s, m, o, f); }}"
        for name in KERNEL.findall(text)
    )
    command = ["g++", "-x", "c++", level, *FLAGS, "-o", str(library), "-", "-lm", "-lc"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{source} does not compile for the emulator:\n{done.stderr[:4000]}")

"""The unpacking of `formats.cuh`, compiled by the host's C++ compiler, against the NumPy reference: no card needed."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from strata.kernels.cuda import compile as cuda_compile
from strata.kernels.cuda.tables import GRID_OF, table
from strata.kernels.formats import BY_NAME, TensorType
from strata.kernels.reference.quant import unpack

QUANTISED = [t for t in BY_NAME.values() if not t.is_float]
HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="session")
def formats(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    assert compiler, "this test compiles formats.cuh for the host: install a C++ compiler"
    library = tmp_path_factory.mktemp("formats") / "formats.so"
    source = HERE / "host_formats.cpp"
    flags = ["-std=c++17", "-O1", "-fno-strict-aliasing", "-shared", "-fPIC", f"-I{cuda_compile.SOURCES}"]
    subprocess.run([compiler, *flags, str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def unpack_chunk(library: ctypes.CDLL, kind: TensorType, chunk: np.ndarray, shift: int) -> tuple[np.ndarray, ...]:
    """A chunk through formats.cuh, its first byte `shift` past a multiple of 16; the padding holds other bytes."""
    spans = len(chunk) // kind.block_bytes * kind.block // 32
    room = np.full(len(chunk) + 64, 0xA5, np.uint8)
    start = -room.ctypes.data % 16 + shift
    room[start : start + len(chunk)] = chunk
    codes = np.zeros(32 * spans, np.int8)
    scales, offsets = np.zeros((2, 32 * spans // kind.group), np.float32)
    info = np.zeros(7, np.int32)
    grid = table(kind.name) if kind.name in GRID_OF else np.zeros(2, np.uint32)
    pointers = [ctypes.c_void_p(a.ctypes.data) for a in (grid, codes, scales, offsets, info)]
    data = ctypes.c_void_p(room.ctypes.data + start)
    getattr(library, f"unpack_{kind.name}")(data, pointers[0], ctypes.c_int(spans), *pointers[1:])
    return codes, scales, offsets, info


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda t: t.name)
def test_device_unpacking_gives_the_codes_and_scales_of_the_reference(
    formats: ctypes.CDLL, kind: TensorType, random_weight: Callable
):
    chunks = 24
    data = random_weight(kind.name, chunks, 256, seed=11).data
    want_codes, want_scales, want_offsets = unpack(kind, data)
    for i, chunk in enumerate(data):
        align = 4 if kind.block_bytes % 4 == 0 else 2 if kind.block_bytes % 2 == 0 else 1
        codes, scales, offsets, info = unpack_chunk(formats, kind, chunk, i * align % 16)
        factor = int(info[5])
        assert info.tolist()[:4] == [kind.block, kind.block_bytes, kind.group, kind.has_offset]
        assert info[6] == align and info[4] == (len(table(kind.name)) if kind.name in GRID_OF else 0)
        np.testing.assert_array_equal(codes.astype(int), want_codes[i].astype(int) * factor)
        np.testing.assert_array_equal(scales * np.float32(factor), want_scales[i])
        np.testing.assert_array_equal(offsets, 0 if want_offsets is None else want_offsets[i])


@pytest.mark.parametrize("kind", [t for t in QUANTISED if t.block < 256], ids=lambda t: t.name)
def test_a_short_last_chunk_is_read_to_its_end_and_no_further(
    formats: ctypes.CDLL, kind: TensorType, random_weight: Callable
):
    data = random_weight(kind.name, 1, max(64, kind.block), seed=3).data
    want_codes, want_scales, _ = unpack(kind, data)
    codes, scales, _, info = unpack_chunk(formats, kind, data[0], 0)
    np.testing.assert_array_equal(codes.astype(int), want_codes[0].astype(int) * int(info[5]))
    np.testing.assert_array_equal(scales * np.float32(info[5]), want_scales[0])


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda t: t.name)
def test_no_sum_of_a_group_leaves_the_range_that_reads_as_a_float(kind: TensorType, formats: ctypes.CDLL):
    """|sum of codes * q| < 2^22 for every block: what the accumulator's start value allows."""
    rng = np.random.default_rng(5)
    data = rng.integers(0, 256, (64, kind.row_bytes(256)), dtype=np.uint8)
    codes, _, _ = unpack(kind, data)
    factor = int(unpack_chunk(formats, kind, data[0], 0)[3][5])
    limits = {"Q8_0": 128, "Q6_K": 32, "Q6_K_CARD": 32, "Q5_0": 16, "Q4_0": 8, "Q3_K": 4}
    largest = limits.get(kind.name, int(np.abs(codes.astype(int)).max()))
    assert largest * factor <= 128 and largest * factor * 127 * kind.group < 2**22

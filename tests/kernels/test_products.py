"""The host products against the written order of `ops.py`, bit for bit."""

from __future__ import annotations

import ctypes
import mmap
from itertools import pairwise

import numpy as np
import pytest

from strata.kernels.cpu import jobs, linear, product, quantize, simd, unpack
from strata.kernels.cpu.linear import dequantize
from strata.kernels.cpu.team import set_threads
from strata.kernels.formats import BY_ID, TensorType, Weight
from strata.kernels.reference.linear import dequantize as plain_rows
from strata.kernels.reference.linear import ordered_linear
from strata.kernels.reference.quant import unpack as plain_unpack

TYPES = list(BY_ID.values())
QUANTISED = [t for t in TYPES if not t.is_float]
PLAIN = [(t, "") for t in QUANTISED if t.name.startswith(("IQ", "MX"))]
NARROW = [(BY_ID[20], "avx2"), (BY_ID[20], "ssse3")]
SHAPES = [(1, 96), (3, 192), (17, 320), (33, 640), (17, 256), (3, 768), (20, 1024)]


def by_name(kind: TensorType) -> str:
    return kind.name


def activations(n: int, cols: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, n, cols]).standard_normal((n, cols)).astype(np.float32)


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("kind", TYPES, ids=by_name)
def test_every_type_and_odd_size_gives_the_bits_of_the_written_order(kind: TensorType, random_weight):
    for rows, cols in SHAPES:
        if cols % kind.block:
            continue
        w = random_weight(kind.name, rows, cols)
        for n in (1, 2, 7, 33):
            x = activations(n, cols)
            (got,), (want,) = linear([w], x), ordered_linear([w], x)
            assert same(got, want), (rows, cols, n)


def test_rows_beyond_a_panel_and_weights_beyond_a_piece_give_the_same_bits(random_weight):
    n = product.PANEL + 5
    w, x = random_weight("Q5_K", 50, 512), activations(n, 512)
    assert same(linear([w], x)[0], ordered_linear([w], x)[0])
    wide = random_weight("Q8_0", 700, 1024)
    assert wide.data.nbytes > 2 * product.PIECE_BYTES
    assert same(linear([wide], x := activations(1, 1024))[0], ordered_linear([wide], x)[0])


@pytest.mark.parametrize("kind", TYPES, ids=by_name)
def test_dequantised_rows_have_the_bits_of_the_reference(kind: TensorType, random_weight):
    w = random_weight(kind.name, 21, 768)
    rows = np.array([20, 0, 7, 7, *range(20), 3])
    assert same(dequantize(w, rows), plain_rows(w, rows))
    assert dequantize(w, rows[:0]).shape == (0, 768)


@pytest.mark.parametrize("kind, only", PLAIN + NARROW, ids=lambda v: v.name if isinstance(v, TensorType) else v)
def test_code_for_other_processors_unpacks_the_same_bytes(kind: TensorType, only: str, random_weight):
    if not set(only.split(",")) <= simd.features() | {""}:
        only = ""  # this processor cannot run it
    w = random_weight(kind.name, 16, 256)
    table = w.data.ctypes.data + np.arange(16) * w.data.shape[1]
    chunks = []
    for allowed in (None, only):
        function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, *[ctypes.c_int64] * 4)(unpack.unpacker(kind, allowed))
        chunk = np.zeros(unpack.CHUNK_BYTES, np.uint8)
        function(None, table.ctypes.data, 0, 8, chunk.ctypes.data)
        chunks.append(chunk)
    assert same(*chunks)
    codes = chunks[1][: unpack.SCALES].reshape(8, 8, 16, 4).transpose(2, 0, 1, 3).reshape(16, 256)
    np.testing.assert_array_equal((codes ^ 0x80).view(np.int8), plain_unpack(kind, w.data)[0])


@pytest.mark.parametrize("only", ["", "avxvnni"])
def test_code_for_other_processors_gives_the_same_sums(only: str, random_weight):
    if "avx512vl" not in simd.features():
        only = ""  # this processor may not have the narrow instruction
    w, x = random_weight("Q8_0", 37, 640), activations(6, 640)
    records, out = quantize.quantized(x, [w]), np.empty((6, 37), np.float32)
    inputs = product.Inputs(0, jobs.address(records))
    row = product.product_job(w, inputs, 0, 6, jobs.address(out))
    row[jobs.FUNCTION] = jobs.function(product._blocks_entry, group=32, offset=False, only=only)
    jobs.run([row], out.size)
    assert same(out, linear([w], x)[0])


@pytest.fixture
def guarded():
    """Put bytes at the very end of readable memory: the page behind them faults when it is touched."""
    held = []

    def place(data: np.ndarray) -> np.ndarray:
        page = mmap.PAGESIZE
        size = -(-data.size // page) * page
        memory = mmap.mmap(-1, size + page)
        view = np.frombuffer(memory, np.uint8)
        held.append((memory, view))
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.mprotect(ctypes.c_void_p(view.ctypes.data + size), ctypes.c_size_t(page), 0) == 0
        target = view[size - data.size : size].reshape(data.shape)
        target[:] = data
        return target

    yield place


@pytest.mark.parametrize("kind", QUANTISED, ids=by_name)
def test_no_byte_behind_the_last_weight_is_read(kind: TensorType, random_weight, guarded):
    for rows in (1, 16, 19):
        w = random_weight(kind.name, rows, 256)
        last = Weight(kind, w.shape, guarded(w.data))
        x = activations(3, 256)
        assert same(linear([last], x)[0], linear([w], x)[0])
        assert same(dequantize(last, np.arange(rows)), dequantize(w, np.arange(rows)))


@pytest.mark.parametrize("name", ["Q8_0", "Q4_1", "Q6_K", "IQ3_S", "F16"])
@pytest.mark.parametrize("scale", [0.0, 1e-38, 9e-31, 3e-29, 1e-20, 1e25])
def test_zero_tiny_and_huge_inputs_keep_the_written_order(name: str, scale: float, random_weight):
    w = random_weight(name, 18, 256, scale=6e-8 if scale < 1e-25 else 0.02)
    x = activations(3, 256) * np.float32(scale)
    x[1, :64] = 0
    assert same(linear([w], x)[0], ordered_linear([w], x)[0])


def test_extreme_codes_do_not_overflow_the_integer_sums():
    kind = BY_ID[8]
    data = np.zeros((16, 4 * kind.block_bytes), np.uint8).reshape(16, 4, -1)
    data[:, :, :2] = np.frombuffer(np.float16(1).tobytes(), np.uint8)
    data[:8, :, 2:], data[8:, :, 2:] = 0x80, 0x7F  # all codes -128, all 127
    w = Weight(kind, (16, 128), data.reshape(16, -1))
    x = np.full((3, 128), -1, np.float32)
    x[0], x[2, ::2] = 1, 1
    (got,) = linear([w], x)
    assert same(got, ordered_linear([w], x)[0])
    np.testing.assert_allclose(got[:2, 0], [-128 * 128, 128 * 128], rtol=1e-6)


def test_a_row_that_is_no_number_spoils_no_other_row(random_weight):
    w, x = random_weight("Q4_K", 20, 512), activations(6, 512)
    clean = linear([w], x)[0]
    x[3, 100] = np.nan
    (got,) = linear([w], x)
    assert np.isnan(got[3]).all() and same(np.delete(got, 3, 0), np.delete(clean, 3, 0))


def test_a_row_has_the_same_bits_whatever_rows_and_matrices_are_beside_it(random_weight):
    names = ("Q8_0", "BF16", "IQ4_XS", "Q2_K", "F32", "Q5_0")
    weights = [random_weight(name, 5 + 13 * i, 256) for i, name in enumerate(names)]
    x = activations(41, 256)
    whole = linear(weights, x)
    for cut in ((0, 1, 41), (0, 2, 9, 41), (0, 17, 33, 34, 41)):
        parts = [linear(weights, x[a:b]) for a, b in pairwise(cut)]
        for i, want in enumerate(whole):
            assert same(np.concatenate([p[i] for p in parts]), want)
    for i, w in enumerate(weights):
        assert same(linear([w], x)[0], whole[i])


def test_the_number_of_threads_changes_no_bit(random_weight):
    weights, x = [random_weight("Q6_K", 300, 512), random_weight("F32", 70, 512)], activations(9, 512)
    results = []
    for threads in (1, 2, 64):
        set_threads(threads)
        results.append(linear(weights, x))
    assert all(same(a, b) for r in results[1:] for a, b in zip(results[0], r, strict=True))
    with pytest.raises(ValueError, match="at least 1, got 0"):
        set_threads(0)


def test_no_rows_give_empty_results(random_weight):
    assert linear([random_weight("Q8_0", 5, 64)], np.empty((0, 64), np.float32))[0].shape == (0, 5)


def test_arguments_that_do_not_fit_are_refused_by_name(random_weight):
    w = random_weight("Q8_0", 8, 64)
    with pytest.raises(ValueError, match=r"must be \(rows, 96\), got \(8, 64\)"):
        linear([w], activations(2, 96))
    with pytest.raises(ValueError, match="x must be float32"):
        linear([w], activations(2, 64).astype(np.float64))
    with pytest.raises(ValueError, match="x must be C-contiguous"):
        linear([w], activations(64, 2).T)
    with pytest.raises(ValueError, match=r"must be \(rows, 64\), got \(3, 8, 64\)"):
        linear([random_weight("Q8_0", 8, 64, experts=3)], activations(2, 64))
    with pytest.raises(ValueError, match="rows must be in 0 to 7, got 0 to 8"):
        dequantize(w, np.array([0, 8]))
    with pytest.raises(ValueError, match="w must be a matrix"):
        dequantize(random_weight("Q8_0", 8, 64, experts=3), np.array([0]))

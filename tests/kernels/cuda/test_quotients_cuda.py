"""Quotients on a card: the bits of the host's sigmoid, silu and scales, also at the ends of what they divide."""

from __future__ import annotations

import numpy as np
import pytest

from strata.kernels.cpu.math import sigmoid_f32, silu_f32
from strata.kernels.cuda import compile
from strata.kernels.cuda.forms import NOTHING
from strata.kernels.cuda.launch import F32, I64, launch
from strata.kernels.cuda.machine_code import machine_code
from strata.kernels.cuda.product import quantize
from strata.kernels.formats import BY_NAME


@pytest.fixture(scope="module")
def values():
    """Ordinary ones, every float around the largest divisors, and what is further out."""
    rng = np.random.default_rng(1)
    near = (int(np.float32(-88.3).view(np.uint32)) + np.arange(-40, 40)).astype(np.uint32)
    found = [
        rng.standard_normal(3000) * 8, rng.uniform(-89, -86, 4000), rng.uniform(86, 89, 500), near.view(np.float32),
        [0.0, -0.0, 1e-40, -1e-40, -69.4, -100.0, -3e38, 3e38, -np.inf, np.inf],
    ]  # fmt: skip
    return np.concatenate(found).astype(np.float32)


def test_silu_has_the_bits_of_the_host(target, same_bits, values):
    gate, up = target.put(values), target.put(np.ones_like(values))
    launch("gate_times_up.cu", "gate_times_up", (-(-values.size // 256),), (256,), gate, up, I64(values.size))
    same_bits(target.host(gate), np.array([silu_f32(x) for x in values], np.float32))


def test_sigmoid_has_the_bits_of_the_host(target, same_bits, values):
    beta = target.put(np.empty_like(values))
    launch(
        "hyper.cu", "hyper_gate", (-(-values.size // 256),), (256,),
        None, I64(0), target.put(values), beta, I64(values.size), F32(1), PER_THREAD=2, STREAMS=4,
    )  # fmt: skip
    same_bits(target.host(beta), np.array([np.float32(2) * sigmoid_f32(x) for x in values], np.float32))


def test_gates_of_a_mean_have_the_bits_of_the_host(target, same_bits, values):
    """Of four in a thread some are ordinary and some are not, or none, or all; and all that is not a number."""
    gates = np.concatenate([values, [np.nan] * (-values.size % 4)]).astype(np.float32)
    u, ones = target.put(np.empty_like(gates)), target.put(np.ones_like(gates))
    launch(
        "hyper.cu", "hyper_mean", (-(-gates.size // 512), 1), (128,),
        target.put(gates), ones, u, None, None, gates.size // 4, F32(1), NOTHING, STREAMS=1,
    )  # fmt: skip
    same_bits(target.host(u)[: values.size], np.array([sigmoid_f32(x) for x in values], np.float32))
    assert np.isnan(target.host(u)[values.size :]).all()


def test_scales_of_a_block_have_the_bits_of_the_host(target, same_bits):
    rng = np.random.default_rng(2)
    sizes = np.concatenate([2.0 ** rng.uniform(-101, 127.9, 900), [0.0, 9e-31, 1e-30, 1.1e-30, 2.0**64, 3.4e38]])
    x = (rng.uniform(-1, 1, (sizes.size, 32)) * sizes[:, None]).astype(np.float32)
    x[:, 7] = sizes
    made = quantize(target.workspace(), target.put(x), BY_NAME["Q8_0"])
    amax = x[:, 7]
    with np.errstate(divide="ignore"):
        inv = np.where(amax < np.float32(1e-30), np.float32(0), np.float32(127) / amax)
    same_bits(
        target.host(made.d).reshape(-1), np.where(amax < np.float32(1e-30), np.float32(0), amax / np.float32(127))
    )
    whole = target.host(made.q).view(np.int8).reshape(x.shape)
    wanted = np.rint(x * inv[:, None]).astype(np.int8)
    assert (np.sort(whole, axis=1) == np.sort(wanted, axis=1)).all()


_EVERY = """
__device__ float sigmoid_of(float x) { return 1.0f / (1.0f + exp_f32(-x)); }
__device__ float silu_of(float x) { return x / (1.0f + exp_f32(-x)); }
__device__ float scale_of(float x) { return x < 1e-30f ? 0.0f : x / 127.0f; }
__device__ float inverse_of(float x) { return x < 1e-30f ? 0.0f : 127.0f / x; }
__device__ bool differ(float a, float b) { return __float_as_uint(a) != __float_as_uint(b) && !(isnan(a) && isnan(b)); }

extern "C" __global__ void every(unsigned* wrong) {
    const unsigned first = blockIdx.x * blockDim.x + threadIdx.x, all = gridDim.x * blockDim.x;
    for (unsigned long long bits = first; bits < 1ull << 32; bits += all) {
        const float x = __uint_as_float((unsigned)bits);
        if (isnan(x)) continue;
        if (differ(sigmoid_f32(x), sigmoid_of(x))) atomicAdd(wrong, 1u);
        if (differ(silu_f32(x), silu_of(x))) atomicAdd(wrong + 1, 1u);
        const BlockScale scale(fabsf(x));
        if (differ(scale.d, scale_of(fabsf(x)))) atomicAdd(wrong + 2, 1u);
        if (differ(scale.inv, inverse_of(fabsf(x)))) atomicAdd(wrong + 3, 1u);
    }
}
"""


@pytest.mark.gpu
def test_every_float_has_the_quotients_of_the_compiler_s_division():
    import cupy

    text, arch = compile.source_text("device.cuh") + _EVERY, int(cupy.cuda.Device().compute_capability)
    module = cupy.RawModule(path=str(machine_code(cupy.cuda.nvrtc, text, arch, compile.OPTIONS)))
    wrong = cupy.zeros(4, cupy.uint32)
    module.get_function("every")((1024,), (256,), (wrong,))
    assert wrong.tolist() == [0, 0, 0, 0]

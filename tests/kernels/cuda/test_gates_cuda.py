"""Gates on a card: the bits of the host's sigmoid and silu, also where they are saturated and divided in another way."""

from __future__ import annotations

import numpy as np
import pytest

from strata.kernels.cpu.math import sigmoid_f32, silu_f32
from strata.kernels.cuda.launch import F32, I64, launch


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

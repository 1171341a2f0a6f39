"""The backend as the model sees it: every name of the contract, the mixture of experts, embeddings."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from strata.kernels import cpu
from strata.kernels.cuda.backend import CudaKernels
from strata.kernels.formats import Weight
from strata.kernels.ops import AttentionPages, Gdn, Kernels, Moe, Norms, Rope

NAMES = [name for name in vars(Kernels) if not name.startswith("_")]


def moe_of(random_weight: Callable[..., Weight], h: int, i: int, experts: int, kind: str) -> Moe:
    return Moe(
        router=random_weight("F32", experts, h, scale=1.0),
        gate=random_weight(kind, i, h, experts=experts),
        up=random_weight(kind, i, h, experts=experts, seed=1),
        down=random_weight("Q8_0", h, i, experts=experts),
        shared_router=random_weight("F32", 1, h, scale=1.0),
        shared_gate=random_weight("Q8_0", i, h),
        shared_up=random_weight("Q8_0", i, h, seed=1),
        shared_down=random_weight("Q8_0", h, i),
    )


def test_the_backend_has_every_operation_of_the_contract(target):
    kernels = CudaKernels(target.workspace())
    assert [name for name in NAMES if not callable(getattr(kernels, name, None))] == []


@pytest.mark.parametrize("n", [1, 5, 19])
def test_a_mixture_of_experts_gives_the_bits_of_the_host(target, same_bits, random_weight, n):
    w, used = moe_of(random_weight, 64, 32, 6, "Q4_0"), 3
    x = np.random.default_rng(n).standard_normal((n, 64)).astype(np.float32)
    kernels = CudaKernels(target.workspace(16))
    same_bits(target.host(kernels.moe(target.put(w), target.put(x), used)), cpu.moe(w, x, used))


def test_a_row_of_a_mixture_does_not_know_the_rows_beside_it(target, same_bits, random_weight):
    w = target.put(moe_of(random_weight, 64, 32, 6, "Q4_0"))
    x = np.random.default_rng(2).standard_normal((20, 64)).astype(np.float32)
    kernels = CudaKernels(target.workspace(16))
    prompt = target.host(kernels.moe(w, target.put(x), 2))
    for part in (slice(0, 1), slice(3, 8)):
        same_bits(target.host(kernels.moe(w, target.put(x[part].copy()), 2)), prompt[part])


@pytest.mark.parametrize("kind", ["F32", "BF16"])
@pytest.mark.parametrize(("h", "ends"), [(96, [1]), (2592, [1, 2, 3]), (160, [3, 4]), (96, [20])])
def test_a_delta_net_that_makes_its_gates_itself_has_the_bits_of_its_products(
    target, same_bits, random_weight, kind, h, ends
):
    """Windows of one sequence and of several, and a prompt, which does not."""
    rng, d, v, channels = np.random.default_rng(h), 64, 3, 5 * 64
    f = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    w = Gdn(f(channels, 4), -np.exp(f(v)), f(v), 1 + 0.1 * f(d))
    project = [random_weight("Q8_0", channels, h), random_weight("Q8_0", v * d, h, seed=1)]
    project += [random_weight(kind, v, h, seed=seed) for seed in (2, 3)]
    begins = [0, *ends[:-1]]
    segments = np.array([[slot, *edges] for slot, edges in enumerate(zip(begins, ends, strict=True))], np.int32)
    u, conv, state = f(ends[-1], h), f(len(ends), 3, channels), 0.1 * f(len(ends), v, d, d)
    kernels, arrays = CudaKernels(target.workspace(16)), [target.put(a) for a in (segments, conv, state)]
    y = target.host(kernels.delta_net([target.put(p) for p in project], target.put(w), target.put(u), *arrays, 1e-6))
    want = cpu.gdn(w, *cpu.linear(project, u), segments, conv, state, 1e-6)
    for got, wanted in zip((y, *map(target.host, arrays[1:])), (want, conv, state), strict=True):
        same_bits(got, wanted)


@pytest.mark.parametrize("kind", ["BF16", "Q8_0"])
@pytest.mark.parametrize(("n", "bound"), [(1, 32), (3, 32), (3, None), (20, None)])
def test_attention_with_its_products_has_the_bits_of_one_after_the_other(
    target, same_bits, random_weight, kind, n, bound
):
    """The indexer's keys made beside the scores, and before them: blocks compete, weights are no floats, a prompt."""
    rng, h, heads, kv_heads, d, index_heads, index_d = np.random.default_rng(n), 96, 4, 2, 64, 2, 32
    f = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    project = [random_weight("Q8_0", rows, h, seed=rows) for rows in (2 * heads * d, kv_heads * d, kv_heads * d)]
    project += [random_weight(kind, rows, h, seed=rows) for rows in (index_heads * index_d, index_d)]
    norms, angles = Norms(f(d), f(d), f(index_d), f(index_d)), f(128, 8)
    rope = Rope(np.cos(angles), np.sin(angles))
    pages = AttentionPages(f(3, 64, kv_heads, d), f(3, 64, kv_heads, d), f(3, 64, index_d), f(3, 16, index_d))
    where = np.array([[2, 0]], np.int32), np.zeros(n, np.int32), np.arange(9, 9 + n, dtype=np.int32)
    u, budget = f(n, h), 32
    kernels, on_device = CudaKernels(target.workspace(16)), target.put(pages)
    kernels.bound = bound
    got = kernels.attention(
        [target.put(p) for p in project], target.put(u), on_device, tuple(map(target.put, where)),
        (heads, kv_heads, index_heads), target.put(norms), target.put(rope), budget, 1e-6,
    )  # fmt: skip
    q_gate, k, v, index_q, index_k = cpu.linear(project, u)
    kv = (n, kv_heads, d)
    cpu.qsa_store(pages, *where, k.reshape(kv), v.reshape(kv), index_k, norms, rope, 1e-6)
    queries = q_gate.reshape(n, heads, 2, d), index_q.reshape(n, index_heads, index_d)
    same_bits(target.host(got), cpu.qsa_attend(pages, *where, *queries, norms, rope, budget, 1e-6))
    for name in ("k", "v", "raw", "block"):
        same_bits(target.host(getattr(on_device, name)), getattr(pages, name))


@pytest.mark.parametrize("kind", ["Q8_0", "F16"])
def test_embeddings_are_the_rows_of_the_table_in_every_stream(target, same_bits, random_weight, kind):
    table, tokens = random_weight(kind, 50, 96), np.array([3, 49, 0, 3], np.int32)
    got = target.host(CudaKernels(target.workspace()).embed(target.put(table), target.put(tokens), 3))
    want = np.repeat(cpu.dequantize(table, tokens.astype(np.int64))[:, None], 3, axis=1)
    same_bits(got, want)


def test_the_workspace_holds_the_same_after_a_call_whose_results_are_released(target, random_weight):
    kernels, w = CudaKernels(target.workspace(16)), target.put(moe_of(random_weight, 64, 32, 6, "Q4_0"))
    x = target.put(np.ones((3, 64), np.float32))
    mark, used = kernels.workspace.mark(), kernels.workspace.used
    kernels.moe(w, x, 2)
    kernels.workspace.release(mark)
    assert kernels.workspace.used == used


def test_a_bound_below_one_token_is_refused(target):
    kernels = CudaKernels(target.workspace())
    with pytest.raises(ValueError, match="bound must be at least 1, got 0"):
        kernels.bound = 0

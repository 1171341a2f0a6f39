"""Mixture of experts: router, the picked experts, the shared expert. Contract: `ops.Kernels.moe`.

Rows are taken `ROWS_AT_ONCE` at a time. Their picks are sorted by expert, so that an expert's matrices are read once
for all of its rows; a *pick* is one (row, rank), and the arrays between the products are in the order of the picks.
The shared expert's rows follow the picks: the same work, and its jobs fill the threads.

Cost   picks * I * 3 * 4 bytes and picks * H * 4 bytes between the products, 75 MiB for 512 rows of 10 experts
"""

from __future__ import annotations

from typing import Final

import numpy as np

from strata.kernels.check import check, require
from strata.kernels.cpu.jobs import ARGUMENTS, address, function, job, run
from strata.kernels.cpu.math import fma, sigmoid_f32, silu_f32
from strata.kernels.cpu.memory import float_at, int32_at, put_float, word
from strata.kernels.cpu.product import RECORD, Inputs, expert_jobs, product_job
from strata.kernels.cpu.quantize import quantize_block, quantized
from strata.kernels.cpu.route import route
from strata.kernels.formats import Weight
from strata.kernels.ops import ACT_BLOCK, F32, I32, Moe

ROWS_AT_ONCE: Final = 512

A_GATE, A_UP, A_WIDTH, A_RECORDS = range(ARGUMENTS, ARGUMENTS + 4)
J_PICKS, J_RANKS, J_WEIGHTS, J_SHARED, J_LOGITS, J_USED, J_WIDTH, J_OUT = range(ARGUMENTS, ARGUMENTS + 8)


def _gate_entry(variant, job, begin, end, scratch):
    """gate = silu(gate) * up in place, rows [begin, end), and their records where `down` wants them."""
    width, gate, up = word(job, A_WIDTH), word(job, A_GATE), word(job, A_UP)
    for i in range(begin * width, end * width):
        put_float(gate, i, silu_f32(float_at(gate, i)) * float_at(up, i))
    if word(job, A_RECORDS) != 0:
        for b in range(begin * width // ACT_BLOCK, end * width // ACT_BLOCK):
            quantize_block(gate + 4 * ACT_BLOCK * b, word(job, A_RECORDS) + RECORD * b)


def _join_entry(variant, job, begin, end, scratch):
    """The weighted sums of rows [begin, end): picked experts in rank order, then the shared expert."""
    used, width, out = word(job, J_USED), word(job, J_WIDTH), word(job, J_OUT)
    for row in range(begin, end):
        target = out + 4 * width * row
        for rank in range(used):
            weight = float_at(word(job, J_WEIGHTS), row * used + rank)
            source = word(job, J_PICKS) + 4 * width * int32_at(word(job, J_RANKS), row * used + rank)
            for i in range(width):
                put_float(target, i, fma(weight, float_at(source, i), float_at(target, i)))
        weight = sigmoid_f32(float_at(word(job, J_LOGITS), row))
        source = word(job, J_SHARED) + 4 * width * row
        for i in range(width):
            put_float(target, i, fma(weight, float_at(source, i), float_at(target, i)))


def _check(w: Moe, x: F32) -> None:
    """Raise ValueError unless the weights fit each other and x (n, H)."""
    hidden = check(x=(x, "n H", np.float32))["H"]
    experts, inner, shared = w.gate.experts, w.gate.rows, w.shared_gate.rows
    wanted = {
        "router": (experts, hidden),
        "gate": (experts, inner, hidden),
        "up": (experts, inner, hidden),
        "down": (experts, hidden, inner),
        "shared_router": (1, hidden),
        "shared_gate": (shared, hidden),
        "shared_up": (shared, hidden),
        "shared_down": (hidden, shared),
    }
    for name, shape in wanted.items():
        given = getattr(w, name).shape
        require(given == shape, f"{name} must be {shape} for x {x.shape}, got {given}")


def moe(w: Moe, x: F32, used: int) -> F32:
    """x (n, H) -> (n, H): the weighted sum of the picked experts, plus the shared expert behind its own gate."""
    _check(w, x)
    out = np.zeros_like(x)
    for begin in range(0, len(x), ROWS_AT_ONCE):
        _rows(w, x[begin : begin + ROWS_AT_ONCE], used, out[begin : begin + ROWS_AT_ONCE])
    return out


def _rows(w: Moe, x: F32, used: int, out: F32) -> None:
    n, picks = len(x), len(x) * used
    records = quantized(x, [w.gate, w.up, w.shared_gate, w.shared_up])
    inputs = Inputs(address(x), address(records))

    logits, shared_logits = np.empty((n, w.router.rows), np.float32), np.empty((n, 1), np.float32)
    shared_gate, shared_up = (np.empty((n, w.shared_gate.rows), np.float32) for _ in range(2))
    first = [
        product_job(w.router, inputs, 0, n, address(logits)),
        product_job(w.shared_gate, inputs, 0, n, address(shared_gate)),
        product_job(w.shared_up, inputs, 0, n, address(shared_up)),
        product_job(w.shared_router, inputs, 0, n, address(shared_logits)),
    ]
    run(first, n * x.shape[1] * (w.router.rows + 2 * w.shared_gate.rows))

    picked, weights = route(logits, used)
    order = np.argsort(picked.ravel(), kind="stable")
    experts, counts = np.unique(picked.astype(np.int64), return_counts=True)
    rows = (order // used).astype(np.int32)
    ranks = np.empty(picks, np.int32)
    ranks[order] = np.arange(picks, dtype=np.int32)

    gate, up = (np.empty((picks, w.gate.rows), np.float32) for _ in range(2))
    second = [
        expert_jobs(m, inputs, address(rows), experts, counts, address(a)) for m, a in ((w.gate, gate), (w.up, up))
    ]
    run(np.concatenate(second), 2 * picks * w.gate.rows * w.gate.cols)

    wanted = [(gate, up, w.down), (shared_gate, shared_up, w.shared_down)]
    inner = [np.empty((len(a), a.shape[1] // ACT_BLOCK, RECORD), np.uint8) for a, _, _ in wanted]
    run([_gate_job(a, b, m, r) for (a, b, m), r in zip(wanted, inner, strict=True)], 8 * (gate.size + shared_gate.size))

    down, shared = np.empty((picks, x.shape[1]), np.float32), np.empty_like(x)
    third = [
        expert_jobs(w.down, Inputs(address(gate), address(inner[0])), 0, experts, counts, address(down)),
        np.array([product_job(w.shared_down, Inputs(address(shared_gate), address(inner[1])), 0, n, address(shared))]),
    ]
    run(np.concatenate(third), x.shape[1] * (picks * w.down.cols + n * w.shared_down.cols))
    run([_join_job(down, ranks, weights, shared, shared_logits, out)], down.size)


def _gate_job(gate: F32, up: F32, down: Weight, records: np.ndarray) -> list[int]:
    wanted = 0 if down.type.is_float else address(records)
    return job(function(_gate_entry), len(gate), 4, address(gate), address(up), gate.shape[1], wanted)


def _join_job(down: F32, ranks: I32, weights: F32, shared: F32, logits: F32, out: F32) -> list[int]:
    arrays = (address(a) for a in (down, ranks, weights, shared, logits))
    return job(function(_join_entry), len(out), 4, *arrays, weights.shape[1], out.shape[1], address(out))

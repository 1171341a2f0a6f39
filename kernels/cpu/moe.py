"""Mixture of experts: router, the picked experts, the shared expert. Contract: `ops.Kernels.moe`.

Rows are taken `ROWS_AT_ONCE` at a time. Their picks are sorted by expert, so that an expert's matrices are read once
for all of its rows; a *pick* is one (row, rank), and the arrays between the products are in the order of the picks.
The shared expert's rows follow the picks: the same work, and its jobs fill the threads.

Cost   picks * (I * 10 + H * 4) bytes between the products: 83 MiB for 512 rows, 10 experts, I = 640, H = 2560
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numba import njit

from strata.kernels.check import check, require
from strata.kernels.cpu.jobs import ARGUMENTS, JOB_WORDS, address, function, job, run
from strata.kernels.cpu.math import JIT, fma, sigmoid_f32, silu_f32
from strata.kernels.cpu.memory import float_at, int32_at, put_float, word
from strata.kernels.cpu.product import RECORD, Inputs, expert_jobs, product_job
from strata.kernels.cpu.quantize import quantize_block, quantized
from strata.kernels.cpu.route import route
from strata.kernels.formats import Weight
from strata.kernels.ops import ACT_BLOCK, F32, Moe

ROWS_AT_ONCE: Final = 512

GATE_COST: Final = 8
"""Cost of one silu and its quantisation, in multiplications."""

A_GATE, A_UP, A_WIDTH, A_RECORDS = range(ARGUMENTS, ARGUMENTS + 4)
J_PICKS, J_RANKS, J_WEIGHTS, J_SHARED, J_LOGITS, J_USED, J_WIDTH, J_OUT = range(ARGUMENTS, ARGUMENTS + 8)


def gate_entry(variant, job, begin, end, scratch):
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


@njit("int64(int32[::1], int64, int32[::1], int32[::1], int64[::1], int64[::1])", **JIT)
def _sort(picked, used, rows, ranks, experts, counts):
    """Picks in the order of their experts: the row of every place, the place of every pick, the experts that occur.

    experts, counts: room for every expert; written in front, as many as the result says.
    """
    place = np.empty(len(counts), np.int64)
    for e in range(len(counts)):
        counts[e] = 0
    for i in range(len(picked)):
        counts[picked[i]] += 1
    before, found = 0, 0
    for e in range(len(counts)):
        count = counts[e]
        place[e] = before
        before += count
        if count:
            experts[found], counts[found] = e, count
            found += 1
    for i in range(len(picked)):
        e = picked[i]
        rows[place[e]], ranks[i] = i // used, place[e]
        place[e] += 1
    return found


class _Inner:
    """What lies between an expert's two products: gate and up float32 [rows][width], then records of the first.

    One expert's after another's for the picks, plain rows for the shared expert. The gate becomes the input of `down`.
    """

    def __init__(self, rows: int, gate: Weight, down: Weight) -> None:
        self.rows, self.width, self._quantised = rows, gate.rows, not down.type.is_float
        floats = 4 * rows * gate.rows
        self._memory = np.empty(2 * floats + rows * gate.rows // ACT_BLOCK * RECORD, np.uint8)
        self.gate = address(self._memory)
        self.up, self._records = self.gate + floats, self.gate + 2 * floats

    @property
    def inputs(self) -> Inputs:
        return Inputs(self.gate, self._records)

    def job(self) -> list[int]:
        records = self._records if self._quantised else 0
        return job(function(gate_entry), self.rows, 4, self.gate, self.up, self.width, records)


def _rows(w: Moe, x: F32, used: int, out: F32) -> None:
    """Some rows: router and the first products of the shared expert, those of the picked ones, `down`, the sums."""
    n, hidden, picks = len(x), x.shape[1], len(x) * used
    inner, shared = _Inner(picks, w.gate, w.down), _Inner(n, w.shared_gate, w.shared_down)
    records = quantized(x, [w.gate, w.up, w.shared_gate, w.shared_up])
    inputs = Inputs(address(x), address(records))
    logits, shared_logits = np.empty((n, w.router.rows), np.float32), np.empty(n, np.float32)
    outputs = np.empty((picks + n, hidden), np.float32)
    picks_at = address(outputs)
    shared_at, logits_at = picks_at + 4 * picks * hidden, address(shared_logits)
    first = [
        product_job(w.router, inputs, 0, n, address(logits)),
        product_job(w.shared_gate, inputs, 0, n, shared.gate),
        product_job(w.shared_up, inputs, 0, n, shared.up),
        product_job(w.shared_router, inputs, 0, n, logits_at),
    ]
    run(first, n * hidden * (w.router.rows + 2 * shared.width))

    picked, weights = route(logits, used)
    order, ranks = np.empty(picks, np.int32), np.empty(picks, np.int32)
    experts, counts = np.empty(w.gate.experts, np.int64), np.empty(w.gate.experts, np.int64)
    found = _sort(picked.reshape(-1), used, order, ranks, experts, counts)
    experts, counts, order_at = experts[:found], counts[:found], address(order)
    second = np.empty((2 * found, JOB_WORDS), np.int64)
    expert_jobs(second[:found], w.gate, inputs, order_at, experts, counts, inner.gate)
    expert_jobs(second[found:], w.up, inputs, order_at, experts, counts, inner.up)
    run(second, 2 * picks * inner.width * hidden)

    run([inner.job(), shared.job()], GATE_COST * (picks * inner.width + n * shared.width))

    third = np.empty((found + 1, JOB_WORDS), np.int64)
    expert_jobs(third[:found], w.down, inner.inputs, 0, experts, counts, picks_at)
    third[found] = product_job(w.shared_down, shared.inputs, 0, n, shared_at)
    run(third, hidden * (picks * inner.width + n * shared.width))

    parts = (picks_at, address(ranks), address(weights), shared_at, logits_at)
    run([job(function(_join_entry), n, 4, *parts, used, hidden, address(out))], outputs.size)

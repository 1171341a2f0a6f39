"""Every kernel compiles for every architecture, without a card, and waits for its inputs where launches overlap.

What each uses is written to build/cuda-report.json.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from strata.kernels.cuda import wide_plans
from strata.kernels.cuda.card import OWN_SHARED
from strata.kernels.cuda.compile import SOURCES, Constants
from strata.kernels.cuda.hyper import rows_of_a_team, teams_of_a_block
from strata.kernels.cuda.kernel import overlaps
from strata.kernels.cuda.nvrtc import usage
from strata.kernels.cuda.plans import DENSE, GATE_UP
from strata.kernels.cuda.product_variants import CARDS, FLOATS, QUANTISED, REPRESENTATIVE, products
from strata.kernels.cuda.qsa import TILE_BLOCKS, TILE_KEYS
from strata.kernels.cuda.variants import operations
from strata.kernels.ops import LANES

REPORT = Path(__file__).resolve().parents[3] / "build" / "cuda-report.json"

SPILLS = {
    "product_prompt": "64 x 64 sums a warp at 255 registers: addresses that are used once a step of 128 columns",
    "prompt_wide": "groups of 32: a word of 168 registers, an address, once a step of 64 columns",
    "prompt_few": "a few words of tables' addresses and of codes with offsets, used once a chunk of 256 columns",
    "product_row": "the registers that 16 or 24 warps leave: addresses that are used once a turn",
    "product_row_beside": "as product_row",
    "product_window": "16 groups of 16 rows and columns at 128 registers: addresses that are used once a chunk",
    "gdn_window": "sm_120 only: a few words of 128 registers, queries and keys of eight tokens that are loaded early",
    "gdn_slots": "a few words at the 80 registers that let three blocks in: addresses, kept over the gates' products",
    "hyper_down": "a few words at the 64 to 80 registers that leave room for hyper_window: addresses, used once a turn",
    "lanes_window": "sm_120 only: addresses of 8 activation rows, used once a weight row",
    "qsa_values": "sm_120 only: a few words at the 80 registers that its shared memory leaves, once a part",
    "qsa_keys": "a few words at the registers that its block leaves, outside the loop over tokens",
    "gdn_inputs": "heads of 32 on sm_90 only: two words of 32 registers, once a run of rows",
    "qsa_prompt_keys": "sm_120 only: a few words of 168 registers for codes, which are fetched slices ahead",
    "qsa_prompt_values": "96 sums and four tokens of values under way at 168 registers: a few words outside the loop",
    "route_window": "sm_75 only: two words of 128 registers, 512 threads share the rows",
}
"""Kernels that keep registers in memory, and why they may."""

NOT_FOR = {(75, "prompt_few.cu")} | {
    (arch, f"prompt_wide{of}.cu") for arch in CARDS if arch != wide_plans.ARCH for of in ("", "_inputs", "_weights")
}
"""Sources that an architecture does not run: it has no copies that run beside the work, no steps of four warps."""

OVERLAPPING_DRIVER = 12030

Job = tuple[int, str, Constants]

STATIC = 48 << 10
"""Bytes of shared memory that a block has without asking, on every card."""

UNPACKING = ("dequantize.cu", "repack.cu")
"""Sources that show whether a type's table and fields compile."""
USUAL = ("Q4_K", "Q5_K", "Q8_0", "IQ3_S", "IQ4_NL", "IQ3_S_CARD", "IQ4_NL_CARD")
"""Types of which windows show it as well: those of the model's usual files."""


def compile_all(jobs: Iterable[Job], report: Path) -> list[dict[str, Any]]:
    """Compile every job, in two processes since the compiler works on one at a time, and write what the kernels use."""
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        found = pool.map(usage, *zip(*jobs, strict=True), chunksize=4)
        rows = [row for rows in found for row in rows]
    report.parent.mkdir(exist_ok=True)
    report.write_text(json.dumps(rows, indent=1) + "\n")
    return rows


def unexplained(rows: list[dict[str, Any]]) -> list[str]:
    """Kernels that spill and are not in SPILLS."""
    return [
        f"{r['kernel']} {r['constants']} for sm_{r['arch']}: {r['spill_bytes']} bytes"
        for r in rows
        if r["spill_bytes"] and r["kernel"] not in SPILLS
    ]


def unordered(rows: list[dict[str, Any]]) -> list[str]:
    """Kernels of cards whose launches overlap that may start before their inputs are there, or hold up the next one."""
    return [
        f"{r['kernel']} {r['constants']} for sm_{r['arch']}"
        for r in rows
        if overlaps(r["arch"], OVERLAPPING_DRIVER, {}) and not (r["waits"] and r["releases"])
    ]


def once_each(jobs: Iterable[tuple[str, Constants]]) -> Iterable[tuple[str, Constants]]:
    """Each set of constants once."""
    return {(source, tuple(sorted(constants.items()))): (source, constants) for source, constants in jobs}.values()


def few_of_each(jobs: Iterable[tuple[str, Constants]], most: int) -> Iterable[tuple[str, Constants]]:
    """At most so many sets of constants of a source, the first among them, and of several the last."""
    by_source: dict[str, list[Constants]] = {}
    for source, constants in jobs:
        by_source.setdefault(source, []).append(constants)
    for source, sets in by_source.items():
        few = min(most, len(sets))
        for i in sorted({k * (len(sets) - 1) // max(1, few - 1) for k in range(few)}):
            yield source, sets[i]


def one_of_each_mode(jobs: Iterable[tuple[str, Constants]]) -> Iterable[tuple[str, Constants]]:
    """Of each source, type and mode the last set of constants: of the most rows."""
    return {(source, c.get("TYPE"), c.get("MODE")): (source, c) for source, c in jobs}.values()


def test_every_kernel_compiles_waits_for_its_inputs_and_spills_only_where_it_says_why():
    """Every source for every architecture, products of the representative types; for sm_90 with a set of constants of
    each mode and with two of other operations, and the unpacking of every other type. The soak has every set."""
    jobs: list[Job] = [(90, *job) for job in one_of_each_mode(products(CARDS[90], REPRESENTATIVE))]
    for arch in CARDS:
        if arch != 90:
            of = once_each(products(CARDS[arch], REPRESENTATIVE, (DENSE, GATE_UP)))
            jobs += [(arch, *job) for job in few_of_each(of, 1)]
        jobs += [(arch, *job) for job in few_of_each(once_each(operations(arch)), 2 if arch == 90 else 1)]
    for name in QUANTISED:
        if name not in REPRESENTATIVE:
            of = once_each(products(CARDS[90], (name,), (DENSE,), (2,)))
            shown = (*UNPACKING, "product_row.cu") if name in USUAL else UNPACKING
            jobs += [(90, source, constants) for source, constants in of if source in shown]
    rows = compile_all(jobs, REPORT)
    every = {(arch, f.name) for arch in CARDS for f in SOURCES.glob("*.cu")} - NOT_FOR
    assert {(r["arch"], r["source"]) for r in rows} == every
    assert not unexplained(rows)
    assert not unordered(rows)


@pytest.mark.parametrize("arch", CARDS)
def test_tiles_of_scores_fit_a_multiprocessor_as_often_as_they_are_compiled_for(arch: int):
    """Cards with less shared memory have no cut of their own: a block that does not fit would wait for the others."""
    (row,) = usage(arch, "qsa_score_tile.cu", {"TILE_KEYS": TILE_KEYS, "BLOCKS": TILE_BLOCKS})
    assert TILE_BLOCKS * (row["shared_bytes"] + OWN_SHARED) <= CARDS[arch].shared_multiprocessor
    assert not row["spill_bytes"]


@pytest.mark.parametrize("arch", CARDS)
def test_no_card_is_asked_for_more_shared_memory_by_a_mix_than_a_block_may_have(arch: int):
    for width in (256, 2560):
        teams, shared = teams_of_a_block(CARDS[arch], 8192, 4, width, injects=True)
        constants: Constants = {"STREAMS": 4, "PER_THREAD": width // LANES, "INPUT_ORDER": "NATIVE", "SUMS": 16}
        constants |= {"INJECTS": 1, "TEAMS": teams, "ROWS": rows_of_a_team(teams)}
        (row,) = usage(arch, "hyper_rows.cu", constants)
        assert row["shared_bytes"] <= STATIC and row["shared_bytes"] + shared <= CARDS[arch].shared_block


@pytest.mark.soak
def test_kernels_of_windows_compile_with_records_of_their_blocks():
    marked = [f.name for f in SOURCES.glob("*.cu") if "TRACES_" in f.read_text()]
    jobs = few_of_each(once_each([*products(CARDS[90], REPRESENTATIVE), *operations(90)]), 2)
    traced = [(90, source, constants | {"TRACED": 1}) for source, constants in jobs if source in marked]
    rows = compile_all(traced, REPORT.with_name("cuda-report-traced.json"))
    assert {r["source"] for r in rows} == set(marked)
    assert not unordered(rows)


@pytest.mark.soak
@pytest.mark.parametrize("arch", CARDS)
def test_every_kernel_of_every_type_compiles(arch: int):
    jobs = once_each([*products(CARDS[arch], (*QUANTISED, *FLOATS)), *operations(arch)])
    rows = compile_all([(arch, *job) for job in jobs], REPORT.with_name(f"cuda-report-sm_{arch}.json"))
    assert not unexplained(rows)
    assert not unordered(rows)

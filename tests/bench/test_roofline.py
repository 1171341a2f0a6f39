"""The rooflines of the targets: every weight that is read is counted, once, and at its own ceiling."""

from __future__ import annotations

import pytest

from strata.bench import ceilings, roofline
from strata.bench.ceilings import Ceilings
from strata.bench.report import Record, Report
from strata.bench.roofline import Aim, products, rate, weight_bytes
from strata.engine.pack import open_pack
from strata.engine.pack.spec import NGRAM_TABLE, TOKEN_EMBD

CEILINGS = Ceilings(gb_s=1000.0, steps={16: 100.0, 32: 200.0}, floats=10.0)


@pytest.fixture(scope="module")
def pack(packs):
    return open_pack(packs["odd-q8_0"])


def test_a_pass_of_many_rows_reads_the_whole_file_but_the_tables(pack):
    tables = sum(pack[name].data.nbytes for name in (TOKEN_EMBD, NGRAM_TABLE) if name in pack)
    whole = sum(pack[name].data.nbytes for name in pack) - tables
    many, rows = weight_bytes(pack, 10_000), 10_000
    s = pack.spec
    looked_up = rows * pack[TOKEN_EMBD].data.nbytes / s.vocab
    if s.ple is not None:
        looked_up += rows * s.ple.heads * pack[NGRAM_TABLE].data.nbytes / s.ple.table_rows
    assert many == pytest.approx(whole + looked_up)
    assert weight_bytes(pack, 1) < weight_bytes(pack, 2) < 2 * weight_bytes(pack, 1)


def test_products_of_a_prompt_leave_all_rows_but_the_last_from_the_head(pack):
    one, two, three = (products(pack, n, CEILINGS) for n in (1, 2, 3))
    head = sum(
        pack[name].shape[0] * pack[name].shape[1]
        for name in pack
        if name.startswith("output") and len(pack[name].shape) == 2
    )
    assert two.macs - one.macs == pytest.approx(three.macs - two.macs)
    assert one.macs - (two.macs - one.macs) == pytest.approx(head)


def test_a_deeper_context_costs_decode_and_prompts_more(pack):
    aims = [Aim("", "", rows, depth, rows == 1) for rows in (1, 64) for depth in (0, 4000)]
    near, far, read, read_far = (rate(pack, CEILINGS, aim)[0] for aim in aims)
    assert near > far > 0 and read > read_far > 0


def test_the_tool_names_targets_and_says_which_ceiling_is_missing(packs, pack, tmp_path, capsys):
    measured, out = tmp_path / "ceilings.json", tmp_path / "out.json"
    argv = ["--pack", str(packs["odd-q8_0"]), "--ceilings", str(measured), "--json", str(out)]
    Report(tool="t", records=ceilings.records(CEILINGS)[1:], flags={}).write(measured)
    assert roofline.main(argv) == 2 and "memory" in capsys.readouterr().out
    Report(tool="t", records=ceilings.records(CEILINGS), flags={}).write(measured)
    assert roofline.main(argv) == 0 and out.exists()
    targets = [r.target for r in roofline.records(pack, CEILINGS)]
    assert targets == ["P1", "P2", "P3", "P4", "P5", "P6", "P6"]


def test_a_limit_stands_beside_what_was_measured_for_the_same_work(pack):
    of_six = [Record.of(work, "tok/s", [rate], "P6") for work, rate in (("pp 32768", 7.0), ("pp 2048 @ 131072", 5.0))]
    found = roofline.records(pack, CEILINGS, measured=[*of_six, Record.of("windows of 8", "tok/s", [3.0], "P3")])
    assert [r.peer["median"] for r in found if r.peer] == [3.0, 7.0, 5.0]

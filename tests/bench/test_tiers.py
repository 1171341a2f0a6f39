"""`strata-bench tiers`: which starts it makes, what it draws, and that a start with another text is a failure."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.bench.__main__ import main
from strata.bench.chart import Line, chart, ticks
from strata.bench.tiers import Measured, Start, drawn, report_of, starts

EMULATED = Path(__file__).resolve().parents[1] / "engine" / "device" / "emulated_engine.py"


def test_every_share_is_started_once_a_way_and_all_experts_once():
    found = starts([0.5, 1.0, 0.0], ["--pcie-frac 1", "--pcie-frac 0"], 144)
    assert [(start.share, start.way, start.cache) for start in found] == [
        (1.0, "", 0),
        (0.5, "--pcie-frac 1", 72),
        (0.5, "--pcie-frac 0", 72),
        (0.0, "--pcie-frac 1", 1),
        (0.0, "--pcie-frac 0", 1),
    ]
    assert found[0].options == [] and found[1].options[-2:] == ["--pcie-frac", "1"]


def test_a_start_that_says_something_else_fails_the_report(tmp_path):
    pack = tmp_path / "x.gguf"
    pack.write_bytes(b"GGUF")
    args = type("Args", (), {"generate": 2, "device": "cuda", "threads": None, "prompt": 1, "extra": [], "pack": pack})
    one, other = Start(1.0, "", 0), Start(0.0, "--pcie-frac 1", 1)
    found = {one: Measured([9.0], [100.0], [[1, 2]], 0.0), other: Measured([3.0], [0.0], [[1, 3]], 1.0)}
    assert [check.ok for check in report_of(args, found).checks] == [False]
    found[other] = Measured([3.0], [0.0], [[1, 2]], 1.0)
    assert [check.ok for check in report_of(args, found).checks] == [True]
    assert "--pcie-frac 1" in drawn(found, 2)


@given(st.floats(1e-3, 1e6))
def test_ticks_are_few_and_reach_the_largest_value(most):
    found = ticks(most)
    assert found[0] == 0 and found[-1] >= most * (1 - 1e-9) and 2 <= len(found) <= 8


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 500)), min_size=1, max_size=6))
def test_a_chart_is_well_formed_and_its_points_lie_inside(points):
    root = ElementTree.fromstring(chart([Line("<a & b>", sorted(points)), Line("c", [])], "title", "below"))
    circles = [each for each in root.iter() if each.tag.endswith("circle")]
    assert len(circles) == len(points)
    assert all(0 <= float(each.get("cx")) <= 720 and 0 <= float(each.get("cy")) <= 400 for each in circles)
    assert any(each.text == "<a & b>" for each in root.iter())


@pytest.mark.parametrize("share", ["1.5", "-0.1"])
def test_a_share_that_is_none_is_refused(share):
    assert main(["tiers", "--pack", "x.gguf", f"--shares={share}"]) == 2


@pytest.mark.soak  # it starts an emulated card for each share
def test_engines_on_an_emulated_card_say_the_same_with_all_and_no_experts_in_vram(packs, request, tmp_path):
    cache = getattr(request.config, "cache", None)
    kernels = cache.mkdir("emulated") if cache else tmp_path / "kernels"
    program, figures, picture = tmp_path / "engine", tmp_path / "tiers.json", tmp_path / "tiers.svg"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{EMULATED}" "{kernels}" "$@"\n')
    program.chmod(0o755)
    line = f"tiers --pack {packs['odd-q8_0']} --exe {program} --threads 1 --shares 1 0 -p 3 -n 4 -r 1"
    ways = ["--way=--pcie-frac 1", "--way=--pcie-frac 0"]
    files = ["--json", str(figures), "--chart", str(picture)]
    assert main([*line.split(), *ways, *files, "--extra", "--prefill", "18"]) == 0
    report = json.loads(figures.read_text())
    assert [check["ok"] for check in report["checks"]] == [True, True]
    rates = {record["work"]: record["median"] for record in report["records"] if record["unit"] == "tok/s"}
    assert len(rates) == 3 and min(rates.values()) > 0
    assert "<svg" in picture.read_text()

"""`strata-bench tiers`: which starts it makes, what it draws, and that a start with another text is a failure."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec
import pytest

from strata.bench import marks
from strata.bench.__main__ import main
from strata.bench.report import Record, Report
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


def swept(tmp_path: Path, name: str = "a.json", **changes) -> Path:
    """A file of a sweep: all, a quarter and none of the experts in VRAM, two ways."""
    work = {"tg 8, 100% in VRAM": 90.0}
    work |= {f"tg 8, {s}% in VRAM, {way}": 9.0 + s for s in (25, 0) for way in ("--pcie-frac 1", "--pcie-frac auto")}
    records = [Record.of(name, "tok/s", [rate - 1, rate, rate + 3]) for name, rate in work.items()]
    records += [Record.of("25% in VRAM, --pcie-frac 1: experts in VRAM", "%", [25.0])]
    fields = {
        "tool": "strata-bench tiers",
        "records": records,
        "flags": {},
        "date": "2026-11-30T01:02:03+00:00",
        "pack": {"name": "x"},
    }
    fields |= {"machine": {"cpu": "c", "cores": 2, "gpu": "NVIDIA H200, 580; NVIDIA H200, 580"}}
    Report(**(fields | changes)).write(tmp_path / name)
    return tmp_path / name


def read(path: Path) -> Report:
    return msgspec.json.decode(path.read_bytes(), type=Report)


def test_a_chart_drawn_later_has_every_rate_with_its_spread_and_says_of_what_and_when(tmp_path):
    found = drawn([read(swept(tmp_path))])
    assert [line.name for line in found.lines] == ["--pcie-frac 1", "--pcie-frac auto"]
    for line in found.lines:
        assert [(p.x, p.low, p.y, p.high) for p in line.points] == [(0, 8, 9, 12), (25, 33, 34, 37), (100, 89, 90, 93)]
    assert found.title == "x: decoding 8 tokens by where experts lie\nNVIDIA H200, 2026-11-30"
    assert found.levels == []
    assert [level.name for level in drawn([read(swept(tmp_path))], [marks.Peer("all on the host", 15.2)]).levels] == [
        "all on the host"
    ]


def test_peers_become_level_lines_and_stay_in_the_file_for_the_next_chart(tmp_path, capsys):
    once, again = tmp_path / "once.png", tmp_path / "again.png"
    marks = ["--target", "P7=tg 8, 0%*", "--peer", "P7=15.2", "tg 8, 100% in VRAM=101.6", "--peer-source", "elsewhere"]
    line = ["tiers", "--from", str(swept(tmp_path))]
    assert main([*line, *marks, "--chart", str(once), "--json", str(tmp_path / "b.json")]) == 0
    assert main(["tiers", "--from", str(tmp_path / "b.json"), "--chart", str(again)]) == 0
    assert once.read_bytes() == again.read_bytes() and once.read_bytes().startswith(b"\x89PNG")
    assert {(level.name, level.y) for level in drawn([read(tmp_path / "b.json")]).levels} == {
        ("llama.cpp, elsewhere, 100 % of experts in VRAM", 101.6),
        ("llama.cpp, elsewhere, 0 % of experts in VRAM", 15.2),
    }
    assert read(tmp_path / "b.json").date == "2026-11-30T01:02:03+00:00"


@pytest.mark.parametrize("changes", [{"pack": {"name": "y"}}, {"machine": {"cpu": "c", "cores": 2}}, {"records": []}])
def test_rates_of_several_cards_or_packs_are_not_one_chart(tmp_path, capsys, changes):
    paths = [str(swept(tmp_path)), str(swept(tmp_path, "b.json", **changes))]
    if "records" in changes:
        paths = paths[1:]
    assert main(["tiers", "--from", *paths, "--chart", str(tmp_path / "x.svg")]) == 2
    assert "one length, card and pack" in capsys.readouterr().out
    assert not (tmp_path / "x.svg").exists()


def test_a_chart_that_cannot_be_drawn_is_refused_before_anything_is_measured(tmp_path, capsys, monkeypatch):
    assert main(["tiers", "--pack", "none.gguf", "--chart", "x.pdf"]) == 2
    assert "one of .png, .svg" in capsys.readouterr().out
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["tiers", "--pack", "none.gguf", "--chart", "x.png"]) == 2
    assert "strata[chart]" in capsys.readouterr().out
    path = tmp_path / "no.json"
    path.write_text("[]")
    assert main(["tiers", "--from", str(path)]) == 2
    assert "--from: " in capsys.readouterr().out
    assert main(["tiers", "--from", str(path), str(path), "--json", "x.json"]) == 2


@pytest.mark.parametrize("share", ["1.5", "-0.1"])
def test_a_share_that_is_none_is_refused(share):
    assert main(["tiers", "--pack", "x.gguf", f"--shares={share}"]) == 2


@pytest.mark.soak  # it starts an emulated card for each share
def test_engines_on_an_emulated_card_say_the_same_with_all_and_no_experts_in_vram(packs, request, tmp_path):
    cache = getattr(request.config, "cache", None)
    kernels = cache.mkdir("emulated") if cache else tmp_path / "kernels"
    program, figures, picture = tmp_path / "engine", tmp_path / "tiers.json", tmp_path / "tiers.png"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{EMULATED}" "{kernels}" "$@"\n')
    program.chmod(0o755)
    line = f"tiers --pack {packs['odd-q8_0']} --exe {program} --threads 1 --shares 1 0 -p 3 -n 4 -r 1"
    ways = ["--way=--pcie-frac 1", "--way=--pcie-frac 0"]
    files = ["--json", str(figures), "--chart", str(picture), "--target", "P7=tg 4, 0%*"]
    assert main([*line.split(), *ways, *files, "--extra", "--prefill", "18"]) == 0
    report = json.loads(figures.read_text())
    assert [check["ok"] for check in report["checks"]] == [True, True]
    rates = {record["work"]: record["median"] for record in report["records"] if record["unit"] == "tok/s"}
    assert len(rates) == 3 and min(rates.values()) > 0
    assert [record["work"] for record in report["records"] if "target" in record] == [
        "tg 4, 0% in VRAM, --pcie-frac 1",
        "tg 4, 0% in VRAM, --pcie-frac 0",
    ]
    assert picture.read_bytes().startswith(b"\x89PNG")

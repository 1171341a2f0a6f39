"""`strata-bench quality`: its perplexity is the formula's, its budgets reach the engine, its table has every figure."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from strata.bench.__main__ import main
from strata.bench.demo_pack.rendering import Rendered
from strata.bench.engine_process import EngineFailed
from strata.bench.quality import conversations, losses, matrix, pack_with_budget, reader
from strata.bench.report import Record
from strata.engine.pack import open_pack

DEMO = Path(__file__).parents[2] / "demo/strata-demo-q4_0.gguf"


def test_losses_are_those_of_the_answers_tokens_alone():
    logits = np.log(np.array([[1, 1, 2], [1, 3, 4], [5, 1, 4], [1, 1, 1]], np.float32))
    found = losses(logits, Rendered([0, 2, 1, 0], [False, True, False, True]))
    np.testing.assert_allclose(found, [math.log(4 / 2), math.log(10 / 5)], rtol=1e-6)


def test_a_budget_is_written_into_a_copy_and_the_pack_stays(tmp_path):
    before = DEMO.read_bytes()
    with pack_with_budget(DEMO, 512, 128) as copy:
        assert copy != DEMO
        assert open_pack(copy).spec.index_budget == 128
    assert not copy.exists()
    assert DEMO.read_bytes() == before
    other = tmp_path / "other.gguf"
    other.write_bytes(b"GGUF nothing")
    with pytest.raises(EngineFailed, match=r"top_k"), pack_with_budget(other, 512, 128):
        pass


def test_a_budget_changes_long_conversations_only():
    long, short = (max(conversations(3, size, 1), key=lambda sample: len(sample.ids)) for size in (1000, 150))
    assert len(short.ids) < 256 < len(long.ids)
    found = {}
    for budget in (512, 256):
        with pack_with_budget(DEMO, 512, budget) as pack, reader(pack, "host", "fp32", 4096) as read:
            found[budget] = [read(sample.ids) for sample in (short, long)]
    np.testing.assert_array_equal(found[512][0], found[256][0])
    assert not np.array_equal(found[512][1], found[256][1])


def test_figures_of_every_setting_are_written_and_make_a_table(tmp_path, capsys):
    out = tmp_path / "quality.json"
    few = ["--conversations", "2", "--longest", "400", "--n", "1", "--tasks", "about", "--max-new", "20"]
    words = ["--budget", "64", "--batch", "0", *few]
    assert main(["quality", "--pack", str(DEMO), *words, "--json", str(out)]) == 0
    records = json.loads(out.read_bytes())["records"]
    settings = {record["work"].split(":")[0] for record in records}
    assert settings == {"K/V fp32, budget 512", "K/V fp32, budget 64"}
    assert all(1 < record["median"] < 3 for record in records if "perplexity" in record["work"])
    capsys.readouterr()


def test_a_table_has_a_row_a_setting_and_a_column_a_figure():
    records = [
        Record.of(f"K/V {kv}: {what}", unit, [x])
        for kv, x in (("a", 1), ("b", 2))
        for what, unit in (("p", ""), ("t", "%"))
    ]
    assert matrix(records[:-1]) == [
        "| setting | p | t, % |",
        "| --- | --- | --- |",
        "| K/V a | 1 | 1 |",
        "| K/V b | 2 |  |",
    ]


def test_a_host_refuses_formats_that_it_does_not_keep(capsys):
    assert main(["quality", "--pack", str(DEMO), "--kv", "int8"]) == 2
    assert "--device cuda" in capsys.readouterr().out

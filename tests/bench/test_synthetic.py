"""Packs of random blocks: weights of the size they should have, files that the engine reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from strata.bench.__main__ import main
from strata.bench.demo_pack.config import SMOKE
from strata.bench.engine_process import EngineProcess, engine_command, pack_argument
from strata.bench.synthetic import FULL, TYPES, Pools, Types, blocks, deviation, tensors, write
from strata.kernels.formats import BY_NAME
from strata.kernels.reference.quant import unpack


@pytest.mark.parametrize("name", [name for name in TYPES if not BY_NAME[name].is_float])
def test_random_blocks_have_the_mean_and_the_spread_that_were_asked_for(name):
    kind = BY_NAME[name]
    codes, scales, offsets = unpack(kind, blocks(kind, 4096, 0.02, np.random.default_rng(3)))
    values = codes.reshape(*scales.shape, kind.group) * scales[..., None].astype(np.float64)
    values = values if offsets is None else values + offsets[..., None]
    assert np.isfinite(values).all()
    assert values.std() == pytest.approx(0.02, rel=0.08)
    assert abs(values.mean()) < 0.003


def test_the_full_pack_has_the_size_and_the_types_that_the_figures_are_about():
    held = {t.name: t for t in tensors(FULL, Types())}
    assert sum(t.n_bytes for t in held.values()) == pytest.approx(61.78e9, rel=0.001)
    kinds = {
        name: held[f"blk.0.{name}.weight"].type.name
        for name in ("attn_qkv", "ffn_up_exps", "ffn_down_exps", "hc_attn_up")
    }
    assert kinds == {"attn_qkv": "Q6_K", "ffn_up_exps": "IQ3_S", "ffn_down_exps": "IQ4_NL", "hc_attn_up": "Q8_0"}
    assert held["blk.3.ffn_gate_inp.weight"].type.name == "F32" and held["blk.0.ssm_alpha.weight"].type.name == "Q6_K"
    assert deviation("blk.0.hc_ffn_down.weight", (320, 10240)) == pytest.approx(
        10 * deviation("blk.0.ffn_down", (1, 10240))
    )


def test_the_engine_reads_a_pack_and_its_draft(tmp_path: Path):
    console, types = (
        Console(quiet=True),
        Types(dense="Q8_0", hyper="Q8_0", experts="IQ4_NL", head="Q8_0", embedding="Q8_0"),
    )
    write(tmp_path / "a.gguf", SMOKE, types, Pools(), console)
    write(tmp_path / "d.gguf", SMOKE, types, Pools(), console, draft=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.gguf", "d.gguf"]
    with EngineProcess([*engine_command(None), *pack_argument(tmp_path / "a.gguf"), "--max-context", "128"]) as engine:
        assert len(set(engine.generate(range(40, 60), 12).tokens)) > 3


def test_a_geometry_that_no_model_has_is_refused_by_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for words, option in (
        (["--layers", "6"], "--layers"),
        (["--used", "9", "--experts", "8"], "--used"),
        (["--vocab", "10"], "--vocab"),
    ):
        assert main(["synth", str(tmp_path / "x.gguf"), *words]) == 2
        assert option in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_a_folder_without_room_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1_000_000})())
    assert main(["synth", str(tmp_path / "x.gguf")]) == 1
    assert "61.8 GB" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())

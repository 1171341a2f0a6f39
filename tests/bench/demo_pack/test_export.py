"""Exported files: what the engine computes from them is what was trained, and their headers are a converter's."""

from __future__ import annotations

import math

import gguf
import numpy as np
import pytest

from strata.bench.demo_pack.checkpoint import Checkpoint
from strata.bench.demo_pack.config import FILES, SMOKE, Geometry, tensor_bytes, tensor_type
from strata.bench.demo_pack.export import (
    as_in_file,
    as_in_training,
    check_vocabulary,
    export,
    read,
    tokenizer_metadata,
    write,
)
from strata.engine.device.host import HostDevice
from strata.engine.model import Model, Rows
from strata.engine.pack import open_pack
from strata.engine.pack.tensors import wanted_tensors

LIMIT_BYTES = 16_000_000


def random_weights(g: Geometry, seed: int = 0) -> dict[str, np.ndarray]:
    """As training keeps them; no block score is zero, so that no choice of blocks is one between equals."""
    rng, weights = np.random.default_rng(seed), {}
    for name, shape in (g.shapes() | g.draft_shapes()).items():
        x = rng.standard_normal(shape) * shape[-1] ** -0.5
        if "norm" in name:
            x = 1 + 0.1 * x
        if "indexer.q_proj" in name:
            x[-g.index_dim :] = -x[: g.index_dim]
        weights[name] = x.astype(np.float32)
    return weights


def engine_logits(path, ids: list[int], backend: str) -> np.ndarray:
    pack = open_pack(path)
    device = HostDevice(backend)
    model = Model(pack, device, max_context=len(ids))
    return model.forward(Rows.of([(0, 0, ids)]), model.new_state(1), range(len(ids)))


@pytest.fixture(scope="module")
def weights() -> dict[str, np.ndarray]:
    return random_weights(SMOKE)


@pytest.fixture
def files(weights, tmp_path):
    """{("F32", draft): path}"""
    found = {}
    for file in FILES:
        for draft in (False, True):
            found[file, draft] = tmp_path / f"{file}-{draft}.gguf"
            write(found[file, draft], SMOKE, as_in_file(weights), file, tokenizer_metadata(), draft=draft)
    return found


@pytest.mark.parametrize("file", FILES)
def test_engine_computes_what_was_trained(files, file):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: only training the demo pack needs it")
    from strata.bench.demo_pack.model import DemoModel, round_q4_0, rows_of

    ids = np.random.default_rng(1).integers(0, 4000, 128)
    model = DemoModel(SMOKE)
    held = as_in_training(read(files[file, False]) | read(files[file, True]))
    with torch.no_grad():
        for name, p in model.tensors().items():
            p.copy_(torch.from_numpy(held[name]))
        out = model(torch.from_numpy(ids)[None], rows_of(torch.zeros(1, 128, dtype=torch.int32), SMOKE, 4), sparse=True)
        assert np.abs(engine_logits(files[file, False], ids.tolist(), "reference") - out.logits[0].numpy()).max() < 1e-3
        for name, p in model.tensors().items():  # rounded in training is rounded for good
            assert tensor_type(name, file) != "Q4_0" or torch.equal(round_q4_0(p), p), name


def test_host_kernels_run_every_file(files):
    ids = np.random.default_rng(1).integers(0, 4000, 70).tolist()
    for file in FILES:
        fast, slow = (engine_logits(files[file, False], ids, backend) for backend in ("cpu", "reference"))
        # random experts: where rounded activations take another one, a row differs as a whole
        assert np.median(np.abs(fast - slow)) < 0.02 * slow.std(), file
        assert (fast.argmax(1) == slow.argmax(1)).mean() > 0.8, file


def test_header_has_the_keys_and_types_of_the_converter(files, packs):
    for draft, recorded in ((False, "tiny-f32"), (True, "mtp-tiny-q8_0")):
        ours, theirs = (gguf.GGUFReader(path) for path in (files["F32", draft], packs[recorded]))
        kinds = [{k: [t.name for t in f.types] for k, f in r.fields.items()} for r in (ours, theirs)]
        assert {k: kinds[0].get(k) for k in kinds[1]} == kinds[1]
        assert set(kinds[0]) - set(kinds[1]) <= {"general.license"}
        block = SMOKE.layers if draft else 0
        names = [
            {t.name for t in r.tensors if t.name.startswith(f"blk.{b}.")}
            for r, b in ((ours, block), (theirs, 8 * draft))
        ]
        assert {n.split(".", 2)[2] for n in names[0]} == {n.split(".", 2)[2] for n in names[1]}


def test_hash_constants_are_the_converters(packs):
    fields = gguf.GGUFReader(packs["tiny-f32"]).fields
    g = Geometry(vocab=1024, ngram_base=509)
    for key, ours in (
        ("layer_multipliers", g.multipliers),
        ("head_offsets", g.table_offsets),
        ("head_vocab_sizes", g.table_sizes),
    ):
        assert list(ours) == fields[f"qwen4exp.ple.{key}"].contents()


def test_every_tensor_is_one_that_the_engine_reads(files):
    spec = open_pack(files["F32", False]).spec
    assert {name: tensor.shape for name, tensor in wanted_tensors(spec).items()} == SMOKE.shapes()


def test_demo_pack_fits_the_repository():
    g = Geometry()
    four_bits = sum(tensor_bytes(shapes, "Q4_0") for shapes in (g.shapes(), g.draft_shapes()))
    vocabulary = 250_000
    assert four_bits + vocabulary < LIMIT_BYTES


@pytest.mark.parametrize("file", FILES)
def test_every_row_is_whole_blocks_of_its_type(file):
    for g in (Geometry(), SMOKE):
        for name, shape in (g.shapes() | g.draft_shapes()).items():
            assert tensor_type(name, file) == "F32" or shape[-1] % 32 == 0, name
            assert len(shape) > 1 or tensor_type(name, file) == "F32", name


def test_checkpoint_comes_back_in_shards_and_rounded_only(weights, tmp_path, monkeypatch):
    monkeypatch.setattr("strata.bench.demo_pack.checkpoint.SHARD_BYTES", 100_000)
    Checkpoint(SMOKE, weights, {"step": 7}).save(tmp_path)
    assert max(path.stat().st_size for path in tmp_path.glob("weights-*")) <= 100_000
    again = Checkpoint.load(tmp_path)
    assert (again.geometry, again.state) == (SMOKE, {"step": 7})
    for name, w in weights.items():
        assert np.abs(again.weights[name] - w).max() <= 2**-8 * np.abs(w).max(), name
    (tmp_path / "weights-1.bin").unlink()
    with pytest.raises(ValueError, match=f"the geometry has {sum(math.prod(w.shape) for w in weights.values())}"):
        Checkpoint.load(tmp_path)


def test_export_refuses_weights_and_words_of_another_model(weights, tmp_path):
    with pytest.raises(ValueError, match=r"output\.weight must have shape"):
        write(tmp_path / "x.gguf", SMOKE, {**weights, "output.weight": weights["token_embd.weight"][:5]}, "F32", [])
    with pytest.raises(ValueError, match=r"the geometry wants 512 and 1"):
        check_vocabulary(Geometry(vocab=512, ngram_eos=1), tokenizer_metadata())


def test_export_writes_model_and_draft_of_each_type(weights, tmp_path):
    paths = export(Checkpoint(SMOKE, weights), tmp_path, ("Q4_0",))
    assert [path.name for path in paths] == ["strata-demo-q4_0.gguf", "strata-demo-mtp-q4_0.gguf"]
    spec = open_pack(paths[0]).spec
    assert (spec.index_budget, spec.layers, spec.warnings) == (SMOKE.budget, SMOKE.layers, ())

"""The draft layer of a model: a file beside it, a block of its own file, or what is wrong with it."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from strata.engine.pack import PackError, open_draft, open_pack

TRUNK, DRAFT = "tiny-f32", "mtp-tiny-q8_0"


def copy_keys(writer: gguf.GGUFWriter, reader: gguf.GGUFReader, changed: dict[str, object]) -> None:
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        value = changed.get(key.removeprefix("qwen4exp."), field.contents())
        kind, *inner = field.types
        writer.add_key_value(key, value, kind, sub_type=inner[0] if inner else None)


def write(path: Path, keys: Path, tensors: list[Path], drop: str = "", **changed: object) -> Path:
    """A file with the keys of one and the tensors of several."""
    writer = gguf.GGUFWriter(str(path), "qwen4exp")
    copy_keys(writer, gguf.GGUFReader(keys), changed)
    for source in tensors:
        for tensor in gguf.GGUFReader(source).tensors:
            if tensor.name != drop:
                writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_draft_layer_in_the_file_of_the_model_is_found_there(packs, tmp_path):
    whole = open_pack(write(tmp_path / "whole.gguf", packs[DRAFT], [packs[TRUNK], packs[DRAFT]]))
    beside = open_draft(open_pack(packs[TRUNK]), packs[DRAFT])
    assert whole.spec == open_pack(packs[TRUNK]).spec
    inside = open_draft(whole)
    assert inside.spec == beside.spec
    for name in beside.pack:
        assert inside.pack[name].shape == beside.pack[name].shape
        assert np.array_equal(inside.pack[name].data, beside.pack[name].data)


def test_a_model_without_a_draft_layer_says_so(packs):
    with pytest.raises(PackError, match=r"nextn_predict_layers: there is no draft layer"):
        open_draft(open_pack(packs[TRUNK]))


def test_the_draft_layer_of_another_model_is_refused(packs):
    with pytest.raises(PackError, match=r"block_count: is 8 for the draft layer, the model has 6"):
        open_draft(open_pack(packs["odd-f32"]), packs[DRAFT])


@pytest.mark.parametrize(
    ("key", "value"),
    [("attention.indexer.top_k", 32), ("expert_used_count", 2), ("attention.head_count", 8), ("embedding_length", 128)],
)
def test_a_draft_layer_of_another_geometry_is_refused_by_key(packs, tmp_path, key, value):
    path = write(tmp_path / "draft.gguf", packs[DRAFT], [packs[DRAFT]], **{key: value})
    with pytest.raises(PackError, match=key):
        open_draft(open_pack(packs[TRUNK]), path)


def test_a_draft_layer_without_one_of_its_tensors_is_refused(packs, tmp_path):
    path = write(tmp_path / "draft.gguf", packs[DRAFT], [packs[DRAFT]], drop="blk.8.nextn.hnorm.weight")
    with pytest.raises(PackError, match=r"blk.8.nextn.hnorm.weight: the tensor is missing"):
        open_draft(open_pack(packs[TRUNK]), path)

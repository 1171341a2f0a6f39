"""Split packs: the shards are found, agree, and give what the single file gives."""

from __future__ import annotations

import shutil

import pytest

from strata.engine.pack import open_pack

FIRST, SECOND = "tiny-q2_0-split-00001-of-00002.gguf", "tiny-q2_0-split-00002-of-00002.gguf"


def test_a_split_pack_equals_the_single_file(packs):
    split, single = open_pack(packs["tiny-q2_0-split"]), open_pack(packs["tiny-q2_0"])
    assert split.spec == single.spec
    assert [p.name for p in split.paths] == [FIRST, SECOND]
    assert split["per_layer_token_embd.weight"].path.name == SECOND
    assert split.keys() == single.keys() and len(split) == 214
    for name, tensor in single.items():
        assert (split[name].type, split[name].shape) == (tensor.type, tensor.shape)
        assert split[name].data.tobytes() == tensor.data.tobytes(), name


@pytest.fixture
def shards(header, new_header, tmp_path):
    """Two headers over a pack that is cut in two, and a function that writes them."""
    table = header.entry("per_layer_token_embd.weight")
    header.tensors.remove(table)
    second = new_header()
    second.set("general.architecture", "string", "qwen4exp")
    second.add("per_layer_token_embd.weight", tuple(table.dims[::-1]), "F16")
    for number, part in enumerate((header, second)):
        part.set("split.no", "u16", number)
        part.set("split.count", "u16", 2)
        part.set("split.tensors.count", "i32", len(header.tensors) + 1)

    def write():
        second.write(tmp_path / "m-00002-of-00002.gguf")
        return header.write(tmp_path / "m-00001-of-00002.gguf")

    return header, second, write


def test_shards_are_found_from_the_first(shards):
    header, _, write = shards
    pack = open_pack(write())
    assert len(pack) == len(header.tensors) + 1
    assert pack.array("per_layer_token_embd.weight").shape == (2560, 32)


def test_a_missing_shard_is_named(packs, refused, tmp_path):
    shutil.copy(packs["tiny-q2_0-split"], tmp_path / FIRST)
    refused(tmp_path / SECOND, "cannot be opened", "No such file")
    with pytest.raises(Exception, match=rf"^{tmp_path / SECOND}: is missing: shard 2 of 2 of {FIRST}$"):
        open_pack(tmp_path / FIRST)


def test_a_later_shard_given_as_the_pack_is_refused(shards, refused):
    refused(shards[2]().with_name("m-00002-of-00002.gguf"), "split.no", "this is shard 2 of 2; give the first one")


def test_a_renamed_first_shard_is_refused(shards, refused, tmp_path):
    path = shards[2]()
    refused(path.rename(tmp_path / "model.gguf"), "split.count", "must be named NAME-00001-of-00002.gguf")


@pytest.mark.parametrize(
    ("shard", "key", "content", "reason"),
    [
        (0, "split.tensors.count", 165, "is 165, but the 2 shards hold 164 tensors"),
        (0, "split.tensors.count", -1, "is -1, outside 0"),
        (0, "split.count", 3, "must be named NAME-00001-of-00003"),
        (0, "split.count", 65_535, "is 65535, outside 0 to 4096"),
        (1, "split.count", 3, "is 3, but the first shard says 2"),
        (1, "split.no", 0, "is 0 in shard 2 of 2; it must be 1"),
    ],
)
def test_shards_that_disagree_are_refused(shard, key, content, reason, shards, tmp_path):
    *parts, write = shards
    parts[shard].set(key, "i32", content)
    path = write()
    with pytest.raises(Exception, match=f": {key}: .*{reason}") as caught:
        open_pack(path)
    assert caught.value.path.name == f"m-0000{shard + 1}-of-00002.gguf"


def test_a_shard_of_another_pack_is_refused(shards, tmp_path):
    _, second, write = shards
    second.metadata.pop("split.no")
    with pytest.raises(Exception, match=r"m-00002-of-00002.gguf: split.no: the key is missing"):
        open_pack(write())


def test_a_tensor_in_two_shards_is_refused(shards):
    header, second, write = shards
    second.add("output.weight", (8, 8), "F32")
    header.set("split.tensors.count", "i32", 165)
    with pytest.raises(Exception, match=r"00002.gguf: output.weight: the tensor is also in m-00001-of-00002.gguf"):
        open_pack(write())
